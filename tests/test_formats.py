"""Audio files while they grow."""

from __future__ import annotations

import io
import os
import struct
import threading
import wave

import numpy as np
import pytest
import soundfile

from vivace.audio.decode import decode_audio
from vivace.audio.formats import EncodedWriter, StreamWriter, WavWriter, check_target, open_writer
from vivace.audio.pcm import PROVENANCE, UNKNOWN_SIZE, pcm16, wav_header
from vivace.config import Limits
from vivace.errors import InvalidRequestError, SynthesisError

RATE = 24_000


def tone(num_samples: int) -> np.ndarray:
    return (0.5 * np.sin(np.arange(num_samples) / 20)).astype(np.float32)


def test_pcm16_rounds_clips_and_never_wraps():
    samples = np.array([0, 1, -1, 1.5, -9, 0.5, 1 / 32767, 0.4 / 32767], np.float32)
    assert np.frombuffer(pcm16(samples), "<i2").tolist() == [0, 32767, -32767, 32767, -32767, 16384, 1, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_pcm16_refuses_what_is_not_finite(value):
    with pytest.raises(SynthesisError):
        pcm16(np.array([0, value], np.float32))


@pytest.mark.parametrize("lengths", [[1], [480, 0, 7, 24_000], [100] * 20])
def test_wav_is_readable_at_every_point_while_it_grows(tmp_path, lengths):
    path = tmp_path / "a.wav"
    samples = tone(sum(lengths))
    written = 0
    writer = WavWriter(path, RATE)
    for length in [0, *lengths]:
        writer.write(samples[written : written + length])
        written += length
        assert writer.num_samples == written
        with wave.open(str(path)) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
            assert file.getnframes() == written
            assert file.readframes(written) == pcm16(samples[:written])
        assert len(soundfile.read(path)[0]) == written
        assert path.stat().st_size == 44 + 2 * written
    writer.close()
    writer.close()
    assert path.read_bytes().count(b"RIFF") == 1


def test_wav_header_never_promises_samples_that_are_not_there(tmp_path):
    """The samples are written before the sizes: a reader between the two writes finds the shorter, whole file."""
    path = tmp_path / "a.wav"
    seen = []

    class Spy(io.FileIO):
        def write(self, data):
            count = super().write(data)
            content = path.read_bytes()
            if len(content) >= 44:
                seen.append((int.from_bytes(content[40:44], "little"), len(content) - 44))
            return count

    with Spy(path, "w") as file, WavWriter(file, RATE) as writer:
        writer.write(tone(100))
        writer.write(tone(50))
    assert seen == [(0, 0), (0, 200), (200, 200), (200, 300), (300, 300)]


def test_wav_into_a_file_object_that_starts_later_and_stays_open():
    buffer = io.BytesIO(b"before")
    buffer.seek(6)
    with WavWriter(buffer, RATE) as writer:
        writer.write(tone(10))
        writer.write(tone(5))
    content = buffer.getvalue()
    assert content[:6] == b"before"
    with wave.open(io.BytesIO(content[6:])) as file:
        assert file.getnframes() == 15
    with pytest.raises(ValueError, match="closed"):
        writer.write(tone(1))


def test_wav_into_a_pipe_has_one_header_of_unknown_size():
    reading, writing = os.pipe()
    received = []

    def read() -> None:
        with open(reading, "rb") as source:
            received.append(source.read())

    reader = threading.Thread(target=read)
    reader.start()
    with open(writing, "wb") as sink, WavWriter(sink, RATE) as writer:
        for _ in range(3):
            writer.write(tone(1_000))
    reader.join(10)
    (content,) = received
    assert content[:44] == wav_header(RATE, UNKNOWN_SIZE)
    assert struct.unpack("<I", content[4:8]) == struct.unpack("<I", content[40:44]) == (UNKNOWN_SIZE,)
    assert content[44:] == 3 * pcm16(tone(1_000))
    samples, _ = soundfile.read(io.BytesIO(content))
    assert len(samples) == 3_000


def test_wav_header_beyond_4_gib_says_unknown():
    assert wav_header(RATE, 2**32 - 44)[40:44] == b"\xff" * 4
    assert wav_header(RATE, 2**32 - 46)[40:44] == struct.pack("<I", 2**32 - 46)


@pytest.mark.parametrize(
    ("suffix", "container"),
    [(".flac", "FLAC"), (".mp3", "MP3"), (".ogg", "OGG"), (".opus", "OGG"), (".WAV", "WAV")],
)
def test_encoded_files_hold_all_samples(tmp_path, suffix, container):
    path = tmp_path / f"a{suffix}"
    samples = tone(3 * RATE)
    with open_writer(path, RATE) as writer:
        writer.write(samples[:RATE])
        writer.write(samples[RATE:])
        writer.write(samples[:0])
    decoded, rate_hz = soundfile.read(path, dtype="float32")
    assert soundfile.info(path).format == container
    # Opus and MP3 may pad, and ring where the tone is cut off; inside, lossy codecs keep a tone within percents.
    assert len(decoded) / rate_hz == pytest.approx(3.0, abs=0.1)
    inner = decoded[rate_hz // 2 : 5 * rate_hz // 2]
    assert np.abs(inner).max() == pytest.approx(0.5, abs=0.05)


def test_long_vorbis_is_written_in_blocks(tmp_path, monkeypatch):
    """libsndfile 1.2.2 crashes the process when it gets 180 s of Vorbis at once (finding 3)."""
    lengths = []
    real = soundfile.SoundFile.write
    monkeypatch.setattr(
        soundfile.SoundFile, "write", lambda self, data: lengths.append(len(data)) or real(self, data)
    )
    with open_writer(tmp_path / "a.ogg", 8_000) as writer:
        writer.write(tone(180 * 8_000))
    assert max(lengths) <= 2_000
    assert sum(lengths) == 180 * 8_000


def test_encoded_writer_refuses_what_is_not_finite(tmp_path):
    path = tmp_path / "a.flac"
    with pytest.raises(SynthesisError), EncodedWriter(path, RATE) as writer:
        writer.write(np.array([np.nan], np.float32))
    assert not path.exists()


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".mp3"])
def test_a_failed_stream_leaves_no_file_that_looks_complete(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"

    def stream_that_fails() -> None:
        with open_writer(path, RATE) as writer:
            writer.write(tone(RATE))
            raise RuntimeError("stage")

    with pytest.raises(RuntimeError, match="stage"):
        stream_that_fails()
    assert not path.exists()


@pytest.mark.parametrize("name", ["a", "a.exe", "a.wav.txt"])
def test_unknown_suffix(tmp_path, name):
    with pytest.raises(InvalidRequestError) as caught:
        open_writer(tmp_path / name, RATE)
    assert caught.value.code == "unsupported_value"
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".mp3", ".ogg", ".opus"])
def test_a_finished_file_says_that_it_is_synthetic(tmp_path, suffix):
    path = tmp_path / f"speech{suffix}"
    with open_writer(path, RATE) as writer:
        writer.write(tone(6_000))
        writer.write(tone(1_001))
    data = path.read_bytes()
    assert PROVENANCE.encode() in data
    with soundfile.SoundFile(path) as file:
        assert file.comment == PROVENANCE
        assert suffix == ".mp3" or file.frames == 7_001
    if suffix == ".wav":
        assert struct.unpack("<I", data[4:8])[0] == len(data) - 8
        assert struct.unpack("<I", data[40:44])[0] == 2 * 7_001
        with wave.open(str(path)) as read:
            assert read.readframes(10_000) == data[44 : 44 + 2 * 7_001]


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".mp3", ".ogg", ".opus"])
def test_every_file_takes_the_rate_of_cosyvoice_300m(tmp_path, suffix):
    """Opus has no 22,050 Hz: it gets 24,000."""
    path = tmp_path / f"a{suffix}"
    with open_writer(path, 22_050) as writer:
        for _ in range(2):
            writer.write(0.5 * np.sin(np.arange(22_050, dtype=np.float32) / 10))
    decoded, rate_hz = soundfile.read(path, dtype="float32")
    assert len(decoded) / rate_hz == pytest.approx(2.0, abs=0.1)
    assert np.abs(decoded[rate_hz // 4 : rate_hz]).max() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", ["wav", "pcm", "flac", "mp3", "opus"])
def test_a_stream_of_bytes_into_a_pipe(tmp_path, name):
    """What went out is never taken back: the pipe's reader has it before the end, and the end adds the rest."""
    reading, writing = os.pipe()
    with open(reading, "rb") as source, open(writing, "wb") as sink, StreamWriter(sink, name, RATE) as writer:
        writer.write(tone(9_600))
        first = os.read(reading, 60_000)
        assert first
        writer.write(tone(2_400))
        writer.close()
        sink.close()
        content = first + source.read()
    if name == "pcm":
        assert content == pcm16(tone(9_600)) + pcm16(tone(2_400))
    else:
        decoded, rate_hz = decode_audio(content, Limits(prompt_seconds_min=0.1))
        assert len(decoded) / rate_hz == pytest.approx(0.5, abs=0.1)


def test_raw_samples_in_a_file(tmp_path):
    path = tmp_path / "a.pcm"
    with open_writer(path, RATE) as writer:
        writer.write(tone(100))
    assert path.read_bytes() == pcm16(tone(100))
    writer = open_writer(path, RATE)
    writer.write(tone(100))
    writer.abort()
    assert not path.exists()


def test_aac_without_pyav_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("vivace.audio.encoders.find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match="PyAV") as caught:
        check_target(tmp_path / "a.aac")
    assert caught.value.code == "unsupported_value"


def test_aac_in_a_file(tmp_path):
    av = pytest.importorskip("av")
    with open_writer(tmp_path / "a.aac", RATE) as writer:
        writer.write(tone(RATE))
    with av.open(str(tmp_path / "a.aac")) as container:
        samples = sum(frame.samples for frame in container.decode(audio=0))
    assert samples / RATE == pytest.approx(1.0, abs=0.1)
