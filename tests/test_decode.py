"""Untrusted prompt audio. Ids A1 … are rows of the table of bad inputs, C31 … of the users' reports."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile

from vivace.audio import containers, decode_child
from vivace.audio.decode import check_prompt_audio, decode_audio
from vivace.config import Limits
from vivace.errors import InvalidAudioError, VivaceError

LIMITS = Limits()
RATE = 16_000


def speech_like(seconds: float, rate_hz: int = RATE, channels: int = 1) -> np.ndarray:
    """A tone that swells: ``[frames]`` or ``[frames, channels]``."""
    time = np.arange(round(seconds * rate_hz)) / rate_hz
    tone = 0.4 * np.sin(2 * np.pi * 220 * time) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * time))
    return tone if channels == 1 else np.repeat(tone[:, None], channels, axis=1)


def encode(samples: np.ndarray, container: str, encoding: str, rate_hz: int = RATE) -> bytes:
    """A file in memory, written in blocks (long Vorbis in one call crashes libsndfile)."""
    buffer = io.BytesIO()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(
        buffer, "w", samplerate=rate_hz, channels=channels, format=container, subtype=encoding
    ) as file:
        for start in range(0, len(samples), 8_000):
            file.write(samples[start : start + 8_000])
    return buffer.getvalue()


def wav(
    data: bytes,
    *,
    rate_hz: int = RATE,
    channels: int = 1,
    bits: int = 16,
    tag: int = 1,
    block_align: int | None = None,
    data_size: int | None = None,
    before_data: bytes = b"",
) -> bytes:
    """A WAV file with any header."""
    align = channels * bits // 8 if block_align is None else block_align
    form = struct.pack("<HHIIHH", tag, channels, rate_hz, 0, align % 65_536, bits)
    size = len(data) if data_size is None else data_size
    return (
        b"RIFF\0\0\0\0WAVEfmt "
        + struct.pack("<I", len(form))
        + form
        + before_data
        + b"data"
        + struct.pack("<I", size)
        + data
    )


def pcm(samples: np.ndarray) -> bytes:
    return (samples * 32767).astype("<i2").tobytes()


def decode_here(data: bytes, limits: Limits = LIMITS) -> tuple[np.ndarray, int]:
    """``decode_audio`` without the child process: quick, for files that decoders are known to survive."""
    container = containers.sniff(data)
    bounds = decode_child.Bounds(
        {
            "seconds_max": limits.prompt_seconds_max,
            "rate_hz_min": limits.prompt_rate_hz_min,
            "rate_hz_max": limits.prompt_rate_hz_max,
        }
    )
    samples, rate_hz = decode_child.decode(data, container, bounds)
    return check_prompt_audio(samples, rate_hz, limits), rate_hz


def outcome(data: bytes) -> int | str:
    """Number of samples or code of the error, through the child: for files that may crash a decoder."""
    try:
        return len(decode_audio(data, LIMITS)[0])
    except InvalidAudioError as error:
        return error.code


def code_of(data: bytes) -> str:
    with pytest.raises(InvalidAudioError) as caught:
        decode_here(data)
    return caught.value.code


# --- what is accepted ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "tolerance"),
    [
        ("PCM_U8", 1 / 128),
        ("PCM_16", 1 / 32768),
        ("PCM_24", 2**-23),
        ("PCM_32", 1e-7),
        ("FLOAT", 1e-7),
        ("DOUBLE", 1e-7),
    ],
)
@pytest.mark.parametrize("container", ["WAV", "WAVEX"])
def test_wav_encodings(container, encoding, tolerance):
    expected = speech_like(1.5)
    samples, rate_hz = decode_here(encode(expected, container, encoding))
    assert (samples.dtype, rate_hz) == (np.float32, RATE)
    np.testing.assert_allclose(samples, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("container", "encoding", "rate_hz"),
    [
        ("FLAC", "PCM_16", 32_000),
        ("FLAC", "PCM_24", 96_000),
        ("OGG", "VORBIS", 44_100),
        ("OGG", "OPUS", 48_000),
        ("MP3", "MPEG_LAYER_III", 22_050),
    ],
)
def test_C31_common_containers_and_rates(container, encoding, rate_hz):
    data = encode(speech_like(3.0, rate_hz), container, encoding, rate_hz)
    samples, found_rate_hz = decode_here(data)
    whole, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    assert found_rate_hz == rate_hz
    # Block by block equals at once; MP3's synthesis differs in the last bit.
    np.testing.assert_allclose(samples, whole, rtol=0, atol=1e-6)


def test_blocks_of_an_mp3_join_exactly(monkeypatch):
    """soundfile's seek after each block changes what an MP3 decoder gives next; reading forward must not."""
    data = encode(speech_like(5.0, 24_000), "MP3", "MPEG_LAYER_III", 24_000)
    whole, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    monkeypatch.setattr(decode_child, "BLOCK_VALUES", 10_007)
    samples, _ = decode_here(data)
    np.testing.assert_allclose(samples, whole, rtol=0, atol=1e-6)


def test_C31_mp3_after_an_id3_tag():
    tag = b"ID3\x04\0\0" + bytes([0, 0, 1, 0]) + b"\0" * 128
    data = tag + encode(speech_like(2.0), "MP3", "MPEG_LAYER_III")
    assert containers.sniff(data) == "mp3"
    assert len(decode_here(data)[0]) >= 2 * RATE


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 192_000])
def test_C35_low_and_high_rates_stay_as_they_are(rate_hz):
    samples, found = decode_here(encode(speech_like(1.0, rate_hz), "WAV", "PCM_16", rate_hz))
    assert (len(samples), found) == (rate_hz, rate_hz)


@pytest.mark.parametrize("container", ["WAV", "FLAC"])
def test_C35_channels_are_averaged(container):
    stereo = np.stack([speech_like(1.0), 0.25 * speech_like(1.0)], axis=1)
    samples, _ = decode_here(encode(stereo, container, "PCM_24"))
    np.testing.assert_allclose(samples, stereo.mean(axis=1), rtol=0, atol=2**-22)


def test_decode_audio_through_the_child_from_bytes_and_path(tmp_path):
    expected = speech_like(2.0, 24_000)
    data = encode(expected, "FLAC", "PCM_16", 24_000)
    (tmp_path / "any name.bin").write_bytes(data)
    for source in (data, tmp_path / "any name.bin"):
        samples, rate_hz = decode_audio(source, LIMITS)
        assert rate_hz == 24_000
        np.testing.assert_allclose(samples, expected, rtol=0, atol=1 / 32768)
    assert samples.flags.writeable


# --- what is refused, by content -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        wav(b"")[:43],
        wav(b""),
        b"fLaC",
        b"OggS" + b"\0" * 20,
        b"RIFF\0\0\0\0WAVEfmt ",
        wav(pcm(speech_like(2)))[:20],
    ],
    ids=["empty", "wav43", "wav-no-samples", "flac-magic", "ogg-magic", "wav-magic", "wav-cut-in-fmt"],
)
def test_A1_empty_and_cut_files(data):
    if data[:4] in (b"fLaC", b"OggS"):  # only the child may meet what libsndfile refuses
        with pytest.raises(InvalidAudioError) as caught:
            decode_audio(data, LIMITS)
        assert caught.value.code == "invalid_audio"
    else:
        assert code_of(data) == "invalid_audio"


def zip_file() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("speech.wav", b"RIFF")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"Hello, this is text. " * 100,
        b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
        b"\x7fELF" + b"\0" * 100,
        zip_file(),
        encode(speech_like(2.0), "AIFF", "PCM_16"),
        encode(speech_like(2.0), "CAF", "PCM_16"),
        encode(speech_like(2.0), "AU", "PCM_16"),
        encode(speech_like(2.0), "W64", "PCM_16"),
        encode(speech_like(2.0), "MAT5", "PCM_16"),
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"1\n00:00:00,000 --> 00:00:01,000\nhttp://example.com/\n",
        b"\xff" * 5_000,
        b"\0" * 5_000,
        bytes(range(256)) * 100,
    ],
    ids=[
        "text",
        "png",
        "elf",
        "zip",
        "aiff",
        "caf",
        "au",
        "w64",
        "mat5",
        "hls",
        "concat",
        "srt",
        "ff",
        "zero",
        "all",
    ],
)
def test_A2_A3_C32_other_content_is_refused_by_its_bytes(data):
    assert code_of(data) == "unsupported_media_type"


@pytest.mark.parametrize("start", [b"\0\0\0\x20ftypM4A ", b"\x1a\x45\xdf\xa3"], ids=["m4a", "webm"])
def test_A2_mp4_and_webm_need_pyav_and_say_so(start):
    if decode_child.importlib.util.find_spec("av") is not None:
        pytest.skip("PyAV is installed")
    with pytest.raises(InvalidAudioError, match="PyAV") as caught:
        decode_audio(start + b"\0" * 100, LIMITS)
    assert caught.value.code == "unsupported_media_type"


@pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("mp4", "alac"), ("webm", "libopus")])
def test_C31_mp4_and_webm_where_pyav_is_installed(container, codec):
    av = pytest.importorskip("av")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=48_000, layout="stereo")
        tone = speech_like(2.0, 48_000).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(np.stack([tone, tone]), format="fltp", layout="stereo")
        frame.sample_rate = 48_000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            file.mux(packet)
    samples, rate_hz = decode_audio(buffer.getvalue(), LIMITS)
    assert rate_hz == 48_000
    assert 2.0 <= len(samples) / rate_hz < 2.1  # AAC pads its ends
    assert 0.3 < np.abs(samples).max() < 0.5


@pytest.mark.parametrize("claimed", [0, 2**31, 2**32 - 1, 2**32 - 2])
def test_A4_claimed_sizes_are_only_upper_bounds(claimed):
    expected = speech_like(1.5)
    samples, _ = decode_here(wav(pcm(expected) + b"x", data_size=claimed))  # and an odd byte at the end
    assert len(samples) == len(expected)


@pytest.mark.parametrize("rate_hz", [0, 1, 7_999, 192_001, 2**31 - 1, 2**32 - 1])
def test_A5_rates_out_of_bounds(rate_hz):
    assert code_of(wav(pcm(speech_like(2.0)), rate_hz=rate_hz)) == "unsupported_sample_rate"


@pytest.mark.parametrize("rate_hz", [16_001, 22_049, 47_999, 191_999])
def test_A6_odd_rates_are_read(rate_hz):
    assert decode_here(wav(pcm(speech_like(1.0, rate_hz)), rate_hz=rate_hz))[1] == rate_hz


@pytest.mark.parametrize("channels", [0, 9, 1_024, 65_535])
def test_A7_channel_counts(channels):
    assert code_of(wav(pcm(speech_like(2.0)), channels=channels)) == "unsupported_channels"


def test_A7_nine_channels_of_another_container():
    with pytest.raises(InvalidAudioError) as caught:
        decode_here(encode(speech_like(1.0, channels=9), "OGG", "VORBIS"))
    assert caught.value.code == "unsupported_channels"


@pytest.mark.parametrize(
    "header", [{"bits": 0}, {"bits": 1}, {"bits": 12}, {"bits": 64}, {"tag": 0xFFFF}, {"tag": 0}]
)
def test_A8_unknown_sample_formats(header):
    assert code_of(wav(pcm(speech_like(2.0)), **header)) == "unsupported_media_type"


@pytest.mark.parametrize("align", [0, 1, 3, 65_535])
def test_A8_contradicting_block_align(align):
    assert code_of(wav(pcm(speech_like(2.0)), block_align=align)) == "invalid_audio"


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_A9_one_value_that_is_not_finite(bits, value):
    samples = speech_like(2.0)
    samples[12_345] = value
    assert code_of(wav(samples.astype(f"<f{bits // 8}").tobytes(), bits=bits, tag=3)) == "non_finite_samples"


def test_A9_values_beyond_float32():
    samples = speech_like(2.0) * 1e300
    assert code_of(wav(samples.astype("<f8").tobytes(), bits=64, tag=3)) == "non_finite_samples"


def test_A9_opposite_infinities_in_two_channels():
    stereo = np.tile(np.array([np.inf, -np.inf], "<f4"), RATE * 2)
    assert code_of(wav(stereo.tobytes(), bits=32, tag=3, channels=2)) == "non_finite_samples"


def test_A9_huge_values_count_as_clipped_and_a_few_are_clamped():
    huge = np.full((RATE * 2, 2), 3e38, "<f4") * np.sign(speech_like(2.0, channels=2) + 1e-9).astype("<f4")
    assert code_of(wav(huge.tobytes(), bits=32, tag=3, channels=2)) == "audio_clipped"
    samples = speech_like(2.0)
    samples[100:110] = 3e38
    decoded, _ = decode_here(wav(samples.astype("<f4").tobytes(), bits=32, tag=3))
    assert decoded.max() == 1.0


@pytest.mark.parametrize(
    ("samples", "code"),
    [
        (np.zeros(5 * RATE), "audio_silent"),
        (np.full(5 * RATE, 0.5), "audio_silent"),
        (np.full(5 * RATE, 1.0), "audio_silent"),
        (np.random.default_rng(0).integers(-1, 2, 5 * RATE) / 32768, "audio_silent"),
        (np.sign(speech_like(5.0) + 1e-9), "audio_clipped"),
        (np.clip(20 * speech_like(5.0), -1, 1), "audio_clipped"),
    ],
    ids=["zeros", "constant", "constant-full", "one-lsb", "square", "overdriven"],
)
def test_A10_silent_and_clipped(samples, code):
    with pytest.raises(InvalidAudioError) as caught:
        check_prompt_audio(samples.astype(np.float32), RATE, LIMITS)
    assert caught.value.code == code


def test_A10_quiet_speech_between_pauses_and_a_full_scale_sine_pass():
    quiet = np.zeros(5 * RATE, np.float32)
    quiet[RATE : 2 * RATE] = 0.01 * speech_like(1.0)
    check_prompt_audio(quiet, RATE, LIMITS)
    check_prompt_audio(np.sin(np.arange(5 * RATE) / 9).astype(np.float32), RATE, LIMITS)


@pytest.mark.parametrize(
    ("seconds", "code"),
    [
        (0.05, "audio_too_short"),
        (0.99, "audio_too_short"),
        (1.0, None),
        (29.99, None),
        (30.0, None),
        (30.01, "audio_too_long"),
    ],
)
@pytest.mark.parametrize("container", ["WAV", "FLAC"])
def test_A11_exact_bounds_of_length(seconds, code, container):
    data = encode(speech_like(seconds), container, "PCM_16")
    if code is None:
        assert len(decode_here(data)[0]) == round(seconds * RATE)
    else:
        assert code_of(data) == code


@pytest.mark.parametrize("channels", [1, 8])
def test_A12_hour_of_silence_is_read_only_to_the_limit(channels, monkeypatch):
    data = encode(np.zeros((3_600 * 8_000 // channels, channels), np.int16), "FLAC", "PCM_16", 8_000)
    assert len(data) < 1_000_000
    read = []
    real = decode_child.downmix
    monkeypatch.setattr(decode_child, "downmix", lambda block: read.append(len(block)) or real(block))
    assert code_of(data) == "audio_too_long"
    assert sum(read) == 30 * 8_000 + 1
    with pytest.raises(InvalidAudioError) as caught:
        decode_audio(data, LIMITS)
    assert caught.value.code == "audio_too_long"


def test_A13_flac_whose_header_lies_about_its_length():
    data = bytearray(encode(speech_like(2.0), "FLAC", "PCM_16"))
    for total in (0, 1_000, 2**36 - 1):
        # total_samples: the low 36 bits of bytes 18 … 25 of the file.
        packed = int.from_bytes(data[18:26], "big") >> 36 << 36 | total
        data[18:26] = packed.to_bytes(8, "big")
        assert outcome(bytes(data)) in (2 * RATE, "invalid_audio", "audio_too_short")


def test_A14_mp3_that_never_begins_or_whose_tag_never_ends():
    endless_tag = b"ID3\x04\0\0" + bytes([0x7F, 0x7F, 0x7F, 0x7F])
    frames = encode(speech_like(2.0), "MP3", "MPEG_LAYER_III")
    assert code_of(endless_tag + frames) == "unsupported_media_type"
    assert code_of(b"\0" * (9 << 20) + frames) == "unsupported_media_type"
    free_format = bytes([0xFF, 0xFB, 0x00, 0x00]) * 1_000
    assert code_of(free_format) == "unsupported_media_type"


@pytest.mark.parametrize("damage", ["crc", "granule", "chained", "empty-pages"])
def test_A15_damaged_and_chained_ogg(damage):
    data = bytearray(encode(speech_like(2.0), "OGG", "VORBIS"))
    if damage == "crc":
        data[22] ^= 0xFF
    elif damage == "granule":
        last = data.rindex(b"OggS")
        data[last + 6 : last + 14] = b"\xff" * 8
    elif damage == "chained":
        data = data + data
    else:
        data += (b"OggS\0\0" + b"\0" * 20 + b"\0") * 100_000
    assert outcome(bytes(data)) in (2 * RATE, 4 * RATE, "invalid_audio", "audio_too_short")


@pytest.mark.parametrize("chunk", [b"JUNK\0\0\0\0", b"LIST\x04\0\0\0INFO", b"cue \x04\0\0\0\xff\xff\xff\x7f"])
def test_A16_chunk_floods(chunk):
    assert code_of(wav(pcm(speech_like(2.0)), before_data=chunk * 100_000)) == "invalid_audio"
    decode_here(wav(pcm(speech_like(2.0)), before_data=chunk * 10))


def test_A16_chunk_that_claims_more_than_there_is():
    assert code_of(wav(pcm(speech_like(2.0)), before_data=b"fact\xff\xff\xff\x7f")) == "invalid_audio"


@pytest.mark.parametrize(
    "encoding", ["IMA_ADPCM", "MS_ADPCM", "GSM610", "ALAW", "ULAW", "G721_32", "NMS_ADPCM_16"]
)
def test_A17_telephone_codecs_in_wav(encoding):
    assert code_of(encode(speech_like(2.0, 8_000), "WAV", encoding, 8_000)) == "unsupported_media_type"


def test_A18_too_many_bytes(tmp_path):
    big = wav(b"\0" * LIMITS.prompt_file_bytes)
    path = tmp_path / "big.wav"
    path.write_bytes(big)
    for source in (big, path):
        with pytest.raises(InvalidAudioError) as caught:
            decode_audio(source, LIMITS)
        assert caught.value.code == "payload_too_large"


def test_A24_polyglots_and_trailing_bytes():
    data = wav(pcm(speech_like(2.0)))
    samples, _ = decode_here(data + zip_file() + b"\0" * (9 << 20))
    assert len(samples) == 2 * RATE


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo"])
def test_paths_that_are_no_files(tmp_path, kind):
    path = tmp_path / "prompt.wav"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(InvalidAudioError) as caught:
        decode_audio(path, LIMITS)
    assert caught.value.code == "invalid_audio"
    assert str(tmp_path) not in caught.value.message


# --- the child process -----------------------------------------------------------------------------------

GOOD = wav(pcm(speech_like(2.0)))


def faulty_child(body: str) -> list[str]:
    """A child whose decoder runs ``body`` instead, under the real limits and protocol."""
    code = "import os, sys, time, socket\nimport numpy as np\nfrom vivace.audio import decode_child\n"
    code += "def decode(data, container, bounds):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    code += "\ndecode_child.decode = decode\ndecode_child.main()\n"
    return [sys.executable, "-P", "-c", code]


QUICK = Limits(decode_seconds=1.0)


@pytest.mark.parametrize(
    "body",
    ["time.sleep(600)", "while True: pass", "os.kill(os.getpid(), 11)", "os._exit(0)", "os.abort()"],
    ids=["hangs", "spins", "segfault", "exits", "aborts"],
)
def test_child_that_hangs_or_crashes_is_an_error_of_the_file(body):
    with pytest.raises(InvalidAudioError, match=r"took too long|failed") as caught:
        decode_audio(GOOD, QUICK, command=faulty_child(body))
    assert caught.value.code == "invalid_audio"


def test_child_that_hangs_is_gone_afterwards(tmp_path):
    mark = tmp_path / "pid"
    code = f"import os, pathlib, time, sys\npathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\n"
    code += "sys.stdout.write('ready\\n'); sys.stdout.flush(); time.sleep(600)"
    with pytest.raises(InvalidAudioError, match="took too long"):
        decode_audio(GOOD, QUICK, command=[sys.executable, "-c", code])
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


@pytest.mark.parametrize(
    "body",
    [
        "np.ones(1 << 30, np.uint8).sum()",
        "open('/etc/hostname')",
        "open('/tmp/vivace-test-must-not-exist', 'w')",
        "socket.socket()",
        "os.pipe()",
    ],
    ids=["memory", "read", "write", "socket", "pipe"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="these limits exist on Linux")
def test_child_cannot_take_memory_or_open_anything(body):
    body += "\nreturn np.full(32_000, 0.5 * np.sin(np.arange(32_000)), np.float32), 16_000"
    with pytest.raises(InvalidAudioError, match="damaged"):
        decode_audio(GOOD, Limits(), command=faulty_child(body))
    assert not Path("/tmp/vivace-test-must-not-exist").exists()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not json\n",
        b"[]\n",
        b'{"rate_hz": 16000}\n',
        b'{"rate_hz": 16000, "frames": 100}\nshort',
        b'{"rate_hz": 16000, "frames": 100000000000}\n',
        b'{"rate_hz": 16000, "frames": -1}\n',
        b"x" * 100_000,
    ],
    ids=["nothing", "no-json", "list", "no-frames", "short", "huge", "negative", "no-line"],
)
def test_answers_outside_the_protocol(answer):
    code = f"import os; os.write(1, b'ready\\n'); os.read(0, 1 << 20); os.write(1, {answer!r})"
    with pytest.raises(InvalidAudioError, match="failed"):
        decode_audio(GOOD, LIMITS, command=[sys.executable, "-S", "-c", code])


def test_child_that_cannot_start_is_our_fault():
    with pytest.raises(VivaceError, match="could not be started") as caught:
        decode_audio(GOOD, LIMITS, command=[sys.executable, "-S", "-c", "raise SystemExit(1)"])
    assert not isinstance(caught.value, InvalidAudioError)


def test_what_a_library_prints_does_not_reach_the_answer():
    samples, _ = decode_audio(
        GOOD,
        LIMITS,
        command=faulty_child(
            "os.write(1, b'noise'); return 0.5 * np.sin(np.arange(32_000)).astype(np.float32), 16_000"
        ),
    )
    assert len(samples) == 32_000


def test_child_imports_no_torch_and_inherits_no_secrets(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    body = """
    names = [name for name in ("torch", "soxr", "onnxruntime", "asyncio") if name in sys.modules]
    if names or "SECRET_KEY" in os.environ:
        raise decode_child.InvalidAudioError(str(names))
    return 0.5 * np.sin(np.arange(32_000)).astype(np.float32), 16_000
    """
    decode_audio(GOOD, LIMITS, command=faulty_child(body))


def test_no_descriptors_are_left_over():
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("needs /proc")
    decode_audio(GOOD, LIMITS)
    before = len(list(folder.iterdir()))
    decode_audio(GOOD, LIMITS)
    with pytest.raises(InvalidAudioError):
        decode_audio(GOOD, QUICK, command=faulty_child("os.abort()"))
    assert len(list(folder.iterdir())) == before


def test_messages_give_advice_and_hold_nothing_of_the_input():
    for data in (b"<script>secret</script>", wav(pcm(speech_like(0.2))), wav(b"", channels=0)):
        with pytest.raises(InvalidAudioError) as caught:
            decode_here(data)
        assert "secret" not in caught.value.message
        assert "\n" not in caught.value.message
        assert caught.value.param == "prompt_audio"


def test_settings_of_the_child_are_plain_json():
    """The child's command line is data; it is parsed, never evaluated."""
    result = subprocess.run(
        [sys.executable, "-P", "-m", "vivace.audio.decode_child", "__import__('os')"],
        input=b"",
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode != 0
    assert b"JSONDecodeError" in result.stderr


def test_a_child_that_cannot_be_started_is_an_error_of_ours():
    with pytest.raises(VivaceError, match="could not be started"):
        decode_audio(GOOD, LIMITS, command=["/nowhere/at/all"])


@pytest.mark.parametrize(
    "reply", ['{"rate_hz": 1.5, "frames": 1}', '{"rate_hz": 16000, "frames": "x"}', "[" * 900]
)
def test_replies_of_other_types_are_failures_of_the_child(reply):
    code = f"import sys; print('ready', flush=True); sys.stdin.buffer.read(); print({reply!r}, flush=True)"
    with pytest.raises(InvalidAudioError, match="failed"):
        decode_audio(GOOD, LIMITS, command=[sys.executable, "-S", "-c", code])
