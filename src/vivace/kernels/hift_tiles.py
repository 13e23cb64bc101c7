"""Block shapes of the vocoder's convolutions, by the size of a launch.

Measured on an H200 at 1, 4 and 16 rows of a second; a launch of few long rows is taken for one of many short ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vivace.kernels.hift_plan import Conv

_FRAMES = 50  # a second of audio
_MOST = 32  # seconds of a launch from which on block shapes stay
_FEW, _MANY = 64, 400  # programs of 64 × 64 values
_SPLIT_FEW, _SPLIT_MANY = 32, 100


@dataclass(frozen=True, slots=True)
class Tile:
    """Block shape of a convolution.

    Attributes:
        m: rows. n: channels out. k: channels in of one step.
        taps_inside: all taps of ``k`` channels, then the next channels.
        swapped: channels are the rows of the product.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    taps_inside: bool = True
    swapped: bool = False


def default_tile(op: Conv, precision: str, rows: int = 1, frames: int = _FRAMES) -> Tile:
    """Block shape that was the fastest, or near it, where it was measured.

    ``k``, which sets the order of summation, is the same for any number of frames and rows: a stream's samples are the
    same bits whatever its pieces and its company are.

    Args:
        frames: of a row.
    """
    rows = min(_MOST, rows * max(1, frames // _FRAMES))  # seconds of audio
    if precision == "ieee":
        return Tile(16, 16, 32 if op.channels_in % 32 == 0 else 16)
    if precision == "tf32x3":
        return _split_tile(op, rows)
    widest = 64 if precision == "half" else 32
    k = next((k for k in (widest, 32, 16) if op.channels_in % k == 0), 32)
    tile = _product_tile(op, k, rows)
    return replace(tile, n=min(tile.n, _power_of_two(op.channels_out)))


def _product_tile(op: Conv, k: int, rows: int) -> Tile:
    """The more programs a launch has, the larger its blocks: they load less for each sum."""
    programs = rows * _blocks(op, 64, 64) * len(op.groups)
    if programs <= _FEW:
        return Tile(64, 32, k)
    if programs < _MANY:
        return Tile(64, 64, k)
    if op.rows.most(_FRAMES) <= 64:
        return Tile(64, 128, k)
    if op.channels_out % 128 == 0 and op.channels_in % 64 == 0:
        return Tile(128, 128, k, warps=8)
    return Tile(128, 64, k)


def _split_tile(op: Conv, rows: int) -> Tile:
    """For sums of three products."""
    k = min(64, _power_of_two(op.channels_in))
    if _blocks(op, 64, 32) < _SPLIT_FEW:  # F0
        programs = rows * _blocks(op, 64, 64)
        if programs < _SPLIT_FEW:
            return Tile(16, 32, k)
        return Tile(16, 64, k) if programs < _SPLIT_MANY else Tile(64, 32, k)
    m = 64 if op.rows.rate > 1 else 16
    return Tile(m, 64 if op.channels_out % 64 == 0 else 32, min(k, 32), stages=4)


def _blocks(op: Conv, m: int, n: int) -> int:
    return -(-op.rows.most(_FRAMES) // m) * -(-op.channels_out // n)


def _power_of_two(count: int) -> int:
    """At least 16, as products need."""
    return max(16, 1 << (count - 1).bit_length())
