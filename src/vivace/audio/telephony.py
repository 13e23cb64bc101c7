"""What telephone lines carry: G.711."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vivace.audio.encoders import PcmEncoder
from vivace.audio.pcm import pcm16

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

_ULAW_BIAS = 0x84
_ULAW_CLIP = 32_635


class UlawEncoder(PcmEncoder):
    """G.711 mu-law, one byte a sample."""

    def encode(self, samples: Float32) -> bytes:
        return ulaw(np.frombuffer(pcm16(samples), "<i2"))


class AlawEncoder(PcmEncoder):
    """G.711 A-law, one byte a sample."""

    def encode(self, samples: Float32) -> bytes:
        return alaw(np.frombuffer(pcm16(samples), "<i2"))


def ulaw(pcm: NDArray[np.int16]) -> bytes:
    """16-bit samples to mu-law bytes: sign, 3 bits of exponent, 4 of mantissa, all inverted."""
    wide = pcm.astype(np.int32)
    sign = np.where(wide < 0, 0x80, 0)
    magnitude = np.minimum(np.abs(wide), _ULAW_CLIP) + _ULAW_BIAS
    exponent = np.floor(np.log2(magnitude)).astype(np.int32) - 7
    mantissa = magnitude >> (exponent + 3) & 0x0F
    codes: NDArray[np.uint8] = (~(sign | exponent << 4 | mantissa) & 0xFF).astype(np.uint8)
    return codes.tobytes()


def alaw(pcm: NDArray[np.int16]) -> bytes:
    """16-bit samples to A-law bytes: as mu-law, but linear near zero and with every other bit inverted."""
    wide = pcm.astype(np.int32)
    sign = np.where(wide >= 0, 0x80, 0)
    magnitude = np.minimum(np.abs(wide) >> 4, 2047)
    exponent = np.maximum(np.floor(np.log2(np.maximum(magnitude, 1))).astype(np.int32) - 3, 0)
    mantissa = magnitude >> np.maximum(exponent - 1, 0) & 0x0F
    codes: NDArray[np.uint8] = ((sign | exponent << 4 | mantissa) ^ 0x55).astype(np.uint8)
    return codes.tobytes()
