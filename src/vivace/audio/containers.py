"""What kind of file some bytes are, and a WAV reader. Plain Python and NumPy: nothing can overrun memory.

Accepted: WAV (PCM 8/16/24/32, float 32/64), FLAC, OGG (Vorbis, Opus, FLAC), MP3, and MP4/M4A/WebM where
PyAV is installed. The kind is decided by content, never by name, and the list is fixed: what is not on it
is refused, however many formats the decoders underneath would open.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from vivace.errors import InvalidAudioError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Container = Literal["wav", "flac", "ogg", "mp3", "mp4", "webm"]

MAX_CHANNELS = 8
MAX_WAV_CHUNKS = 4096
MP3_SCAN_BYTES = 4096
"""How much padding may stand before the first MP3 frame."""

_PCM, _FLOAT, _EXTENSIBLE = 0x0001, 0x0003, 0xFFFE
_WAV_ENCODINGS = {(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)}
_ADVICE = "Send WAV (PCM or float), FLAC, OGG (Vorbis or Opus) or MP3"


def unsupported(what: str) -> InvalidAudioError:
    """The error for a file of a kind that we do not read."""
    return InvalidAudioError(f"{what}. {_ADVICE}.", code="unsupported_media_type", param="prompt_audio")


def invalid(what: str) -> InvalidAudioError:
    """The error for a file of a known kind that is damaged."""
    return InvalidAudioError(f"{what}. Export the audio again.", code="invalid_audio", param="prompt_audio")


def sniff(data: bytes) -> Container:
    """The container by its first bytes.

    Raises:
        InvalidAudioError: ``invalid_audio`` for no data, ``unsupported_media_type`` for any other content.
    """
    if not data:
        raise invalid("The audio file is empty")
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] == b"fLaC":
        return "flac"
    if data[:4] == b"OggS":
        return "ogg"
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "webm"
    if _starts_like_mp3(data):
        return "mp3"
    raise unsupported("This is not an audio file of a kind that can be read here")


# --- MP3 --------------------------------------------------------------------------------------------------

_BITRATES_KBPS = {
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}


def _starts_like_mp3(data: bytes) -> bool:
    """Two MPEG audio frames in a row (or one that ends the file), after tags and a little padding."""
    start = 0
    while data[start : start + 3] == b"ID3" and len(data) >= start + 10:
        b = data[start + 6 : start + 10]
        start += 10 + (b[0] << 21 | b[1] << 14 | b[2] << 7 | b[3])
    for position in range(start, min(len(data) - 4, start + MP3_SCAN_BYTES)):
        if data[position] != 0xFF:
            continue
        length = _mpeg_frame_bytes(data[position : position + 4])
        following = data[position + length : position + length + 4]
        if length and (len(following) < 4 or _mpeg_frame_bytes(following)):
            return True
    return False


def _mpeg_frame_bytes(header: bytes) -> int:
    """Length of the frame that four header bytes announce; 0 if they announce none, or one of free rate."""
    word = int.from_bytes(header, "big")
    version_bits, layer_bits = word >> 19 & 3, word >> 17 & 3
    bitrate_index, rate_index = word >> 12 & 15, word >> 10 & 3
    if (
        word >> 21 != 0x7FF
        or version_bits == 1
        or layer_bits == 0
        or rate_index == 3
        or bitrate_index in (0, 15)
    ):
        return 0
    layer = 4 - layer_bits
    bitrate = 1000 * _BITRATES_KBPS[1 if version_bits == 3 else 2, layer][bitrate_index - 1]
    rate = (44_100, 48_000, 32_000)[rate_index] // {3: 1, 2: 2, 0: 4}[version_bits]
    padding = word >> 9 & 1
    if layer == 1:
        return 4 * (12 * bitrate // rate + padding)
    return (72 if layer == 3 and version_bits != 3 else 144) * bitrate // rate + padding


# --- WAV --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WavLayout:
    """Where the samples of a WAV file lie and how they are written. Every field has been checked."""

    is_float: bool
    bits: int
    channels: int
    rate_hz: int
    data_start: int
    num_frames: int


def parse_wav(data: bytes) -> WavLayout:
    """Read the chunk list. Sizes in headers are upper bounds only: what counts is the bytes that are there.

    Raises:
        InvalidAudioError: ``invalid_audio``, ``unsupported_media_type`` (encoding), ``unsupported_channels``.
    """
    position, layout = 12, None
    for _ in range(MAX_WAV_CHUNKS):
        header = data[position : position + 8]
        if len(header) < 8:
            raise invalid("The WAV file has no audio data")
        name, size = header[:4], int.from_bytes(header[4:], "little")
        position += 8
        if name == b"fmt ":
            layout = _parse_wav_format(data[position : position + min(size, 40)])
        elif name == b"data":
            if layout is None:
                raise invalid("The WAV file does not say how its samples are written")
            there = len(data) - position
            # 0 and 2**32 - 1 are what writers leave when they could not go back to fill the size in.
            claimed = there if size in (0, 0xFFFFFFFF) else min(size, there)
            encoding, bits, channels, rate_hz = layout
            num_frames = claimed // (bits // 8 * channels)
            return WavLayout(encoding == _FLOAT, bits, channels, rate_hz, position, num_frames)
        position += size + (size & 1)
    raise invalid(f"The WAV file has more than {MAX_WAV_CHUNKS} chunks before its audio data")


def _parse_wav_format(chunk: bytes) -> tuple[int, int, int, int]:
    """(encoding, bits, channels, rate in Hz) of a ``fmt`` chunk."""
    if len(chunk) < 16:
        raise invalid("The WAV file's format chunk is cut off")
    encoding, channels, rate_hz, _, block_align, bits = struct.unpack("<HHIIHH", chunk[:16])
    if encoding == _EXTENSIBLE and len(chunk) >= 40:
        encoding = int.from_bytes(chunk[24:26], "little")
    if (encoding, bits) not in _WAV_ENCODINGS:
        raise unsupported("The WAV file's encoding is not PCM (8, 16, 24, 32 bit) or float (32, 64 bit)")
    if not 1 <= channels <= MAX_CHANNELS:
        raise unsupported_channels()
    if block_align != channels * (bits // 8):
        raise invalid("The WAV file's format chunk contradicts itself")
    return encoding, bits, channels, rate_hz


def unsupported_channels() -> InvalidAudioError:
    """The error for a channel count outside 1 … 8."""
    return InvalidAudioError(
        f"Audio must have 1 to {MAX_CHANNELS} channels. Mix it down to mono or stereo.",
        code="unsupported_channels",
        param="prompt_audio",
    )


def read_wav(data: bytes, layout: WavLayout, max_frames: int) -> NDArray[np.float32]:
    """At most ``max_frames`` frames, channels averaged: ``[frames]`` in -1 … 1 (float files: as they are)."""
    frames = min(layout.num_frames, max_frames)
    width = layout.bits // 8
    raw = np.frombuffer(data, np.uint8, frames * layout.channels * width, layout.data_start)
    values: NDArray[np.floating]
    if layout.is_float:
        values = raw.view("<f4" if width == 4 else "<f8")
    elif width == 1:
        values = (raw.astype(np.float32) - 128.0) / 128.0  # the only unsigned width
    elif width == 3:
        # Three bytes become the upper three of a 32-bit integer.
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = raw.reshape(-1, 3)
        values = wide.reshape(-1).view("<i4").astype(np.float32) / 2.0**31
    else:
        values = raw.view("<i2" if width == 2 else "<i4").astype(np.float32) / 2.0 ** (8 * width - 1)
    return downmix(values.reshape(frames, layout.channels))


def downmix(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """``[frames, channels]`` to a new array ``[frames]``, the mean of the channels.

    Summed in float64, so that values near float32's largest do not overflow. Values beyond float32 and
    contradicting infinities become infinite or NaN, which the caller refuses.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if values.shape[1] == 1:
            return values[:, 0].astype(np.float32)
        return np.asarray(values.mean(axis=1, dtype=np.float64), np.float32)
