"""Samples as 16-bit PCM, the header of a WAV file, and what every format says of its origin."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from vivace.errors import SynthesisError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

WAV_HEADER_BYTES = 44
UNKNOWN_SIZE = 0xFFFFFFFF
"""What a WAV header says while its size cannot be known; players read to the end of the stream."""
BLOCK_SECONDS = 0.25
"""libsndfile crashes when it encodes a whole minute of Vorbis in one call; short blocks are safe."""

PROVENANCE = "Synthetic speech, made by a machine"
"""The comment in every file that has a place for one."""
SOFTWARE = "Vivace"

_OPUS_RATES_HZ = (8_000, 12_000, 16_000, 24_000, 48_000)


def opus_rate_hz(rate_hz: int) -> int:
    """The lowest rate of Opus that loses nothing: 24,000 for the 22,050 of CosyVoice-300M."""
    return next((known for known in _OPUS_RATES_HZ if known >= rate_hz), _OPUS_RATES_HZ[-1])


def pcm16(samples: Float32) -> bytes:
    """float32 in -1 … 1 to little-endian 16-bit PCM, rounded; louder samples are clipped, never wrapped.

    Raises:
        SynthesisError: a sample is NaN or infinite. It must not reach a listener as a click.
    """
    if not np.isfinite(samples).all():
        raise SynthesisError("The audio holds NaN or infinite samples.")
    pcm: NDArray[np.int16] = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2")
    return pcm.tobytes()


def wav_header(rate_hz: int, data_bytes: int) -> bytes:
    """The 44 bytes before mono 16-bit samples; ``UNKNOWN_SIZE`` for a size not known or above 4 GiB."""
    known = data_bytes <= UNKNOWN_SIZE - WAV_HEADER_BYTES
    riff_size = data_bytes + WAV_HEADER_BYTES - 8 if known else UNKNOWN_SIZE
    form = struct.pack("<HHIIHH", 1, 1, rate_hz, 2 * rate_hz, 2, 16)
    data_size = struct.pack("<I", data_bytes if known else UNKNOWN_SIZE)
    return b"RIFF" + struct.pack("<I", riff_size) + b"WAVEfmt \x10\0\0\0" + form + b"data" + data_size


def description_chunk() -> bytes:
    """What a WAV file says of its origin; stands behind the samples."""
    info = b"INFO" + _info_entry(b"ISFT", SOFTWARE) + _info_entry(b"ICMT", PROVENANCE)
    return b"LIST" + struct.pack("<I", len(info)) + info


def _info_entry(name: bytes, text: str) -> bytes:
    data = text.encode("ascii") + b"\0"
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write every byte: an unbuffered file may take fewer at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
