"""Audio formats as byte streams."""

import io
import struct
from importlib.util import find_spec

import numpy as np
import pytest
import soundfile

from vivace.audio.decode import decode_audio
from vivace.audio.encoders import MEDIA_TYPES, PROVENANCE, STREAM_FORMATS, encode_whole, open_encoder
from vivace.audio.pcm import pcm16
from vivace.config import Limits
from vivace.errors import InvalidRequestError, SynthesisError

RATE = 24_000
LIMITS = Limits(prompt_seconds_min=0.1)
HAS_AV = find_spec("av") is not None
FORMATS = [
    pytest.param(name, marks=pytest.mark.skipif(name == "aac" and not HAS_AV, reason="PyAV is missing"))
    for name in STREAM_FORMATS
]
FILES = ("mp3", "opus", "flac", "wav")


def _tone(seconds: float, hz: float = 220.0) -> np.ndarray:
    time = np.arange(int(seconds * RATE)) / RATE
    return (0.4 * np.sin(2 * np.pi * hz * time)).astype(np.float32)


def _streamed(name: str, samples: np.ndarray, block: int) -> list[bytes]:
    encoder = open_encoder(name, RATE)
    parts = [encoder.encode(samples[at : at + block]) for at in range(0, len(samples), block)]
    return [*parts, encoder.finish()]


def _decode(name: str, data: bytes) -> np.ndarray:
    if name == "pcm":
        return np.frombuffer(data, "<i2").astype(np.float32) / 32767
    if name == "aac":
        av = pytest.importorskip("av")
        with av.open(io.BytesIO(data), format="aac") as container:
            frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
        return np.concatenate(frames)
    samples, rate = decode_audio(data, LIMITS)
    assert rate == RATE
    return samples


def _same_sound(got: np.ndarray, wanted: np.ndarray) -> float:
    """Correlation at the best shift of up to 100 ms: lossy formats begin a little late."""
    best = 0.0
    for shift in range(0, 2400, 1):
        part = got[shift : shift + len(wanted)]
        if len(part) < len(wanted) * 0.9:
            break
        best = max(best, float(np.corrcoef(part, wanted[: len(part)])[0, 1]))
    return best


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block", [1_000, 7_919])
def test_a_stream_decodes_to_what_went_in(name, block):
    samples = _tone(1.5)
    got = _decode(name, b"".join(_streamed(name, samples, block)))
    assert abs(len(got) - len(samples)) <= (0 if name in ("wav", "pcm", "flac") else 4_000)
    assert _same_sound(got, samples) > 0.99


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_come_with_the_first_half_second(name):
    parts = _streamed(name, _tone(3.0), RATE // 10)
    first = next(index for index, part in enumerate(parts) if part)
    assert first <= 5
    longest_gap = max(np.diff([index for index, part in enumerate(parts) if part]))
    assert longest_gap <= 3, "players must not wait"


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_file_knows_its_length(name):
    samples = _tone(1.0)
    data = encode_whole(name, RATE, samples)
    assert _same_sound(_decode(name, data), samples) > 0.99
    if name in FILES:
        assert abs(soundfile.info(io.BytesIO(data)).frames - len(samples)) <= 2_000


@pytest.mark.parametrize("name", FILES)
def test_files_say_that_they_are_synthetic(name):
    assert PROVENANCE.encode() in encode_whole(name, RATE, _tone(0.3))
    if name != "wav":  # a list before the samples would be heard by clients that skip 44 bytes
        assert PROVENANCE.encode() in b"".join(_streamed(name, _tone(0.3), 2_400))


def test_streamed_wav_has_a_plain_header_of_unknown_length():
    samples = _tone(0.2)
    data = b"".join(_streamed("wav", samples, 1_000))
    assert struct.unpack("<I", data[4:8]) == struct.unpack("<I", data[40:44]) == (0xFFFFFFFF,)
    assert data[44:] == pcm16(samples)


def test_whole_wav_samples_begin_at_byte_44():
    samples = _tone(0.2)
    data = encode_whole("wav", RATE, samples)
    assert data[44 : 44 + 2 * len(samples)] == pcm16(samples)
    assert struct.unpack("<I", data[4:8])[0] == len(data) - 8
    assert struct.unpack("<I", data[40:44])[0] == 2 * len(samples)


@pytest.mark.parametrize("name", FORMATS)
def test_no_samples_at_all(name):
    encoder = open_encoder(name, RATE)
    assert isinstance(encoder.encode(np.zeros(0, np.float32)) + encoder.finish(), bytes)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_samples_are_an_error(name, value):
    encoder = open_encoder(name, RATE)
    with pytest.raises(SynthesisError):
        encoder.encode(np.array([0.0, value], np.float32))
    encoder.finish()


def test_louder_than_full_scale_is_clipped():
    got, _ = soundfile.read(io.BytesIO(encode_whole("flac", RATE, np.full(500, 3.0, np.float32))))
    assert got.min() > 0.99


@pytest.mark.parametrize("name", ["exe", "WAV", "", "wav\r\nX: y", "ogg"])
def test_unknown_formats_are_refused(name):
    with pytest.raises(InvalidRequestError) as caught:
        open_encoder(name, RATE)
    assert caught.value.code == "unsupported_value"
    assert "X: y" not in caught.value.message


@pytest.mark.skipif(HAS_AV, reason="PyAV is there")
def test_aac_without_pyav_says_what_to_do():
    with pytest.raises(InvalidRequestError) as caught:
        open_encoder("aac", RATE)
    assert caught.value.code == "unsupported_value"
    assert "containers" in caught.value.message


def test_every_format_has_a_media_type():
    assert set(MEDIA_TYPES) == set(STREAM_FORMATS)


def test_a_long_stream_keeps_no_bytes():
    """What was handed out is gone: memory does not grow with the length of a stream."""
    encoder = open_encoder("mp3", RATE)
    for _ in range(40):
        encoder.encode(_tone(0.5))
    assert len(encoder._sink._bytes) == 0
    encoder.finish()


@pytest.mark.parametrize("name", FILES)
def test_every_format_takes_the_rate_of_cosyvoice_300m(name):
    """Opus has no 22,050 Hz: it gets 24,000, and the tone keeps its pitch."""
    time = np.arange(22_050) / 22_050
    tone = (0.4 * np.sin(2 * np.pi * 441.0 * time)).astype(np.float32)
    encoder = open_encoder(name, 22_050)
    streamed = encoder.encode(tone[:10_001]) + encoder.encode(tone[10_001:]) + encoder.finish()
    for data in (streamed, encode_whole(name, 22_050, tone)):
        samples, rate_hz = decode_audio(data, LIMITS)
        assert rate_hz == (24_000 if name == "opus" else 22_050)
        inner = samples[rate_hz // 4 : 3 * rate_hz // 4]
        assert np.argmax(np.abs(np.fft.rfft(inner))) * rate_hz / len(inner) == pytest.approx(441.0, abs=2.5)


def test_another_rate_out_is_the_same_in_pieces_and_whole():
    tone = _tone(1.0)
    encoder = open_encoder("pcm", RATE, 16_000)
    pieces = b"".join(encoder.encode(tone[at : at + 777]) for at in range(0, RATE, 777)) + encoder.finish()
    assert pieces == encode_whole("pcm", RATE, tone, 16_000)
    assert len(pieces) == 2 * 16_000
