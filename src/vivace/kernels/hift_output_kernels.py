"""Triton kernels of the vocoder's end: last convolution, inverse transform. See ``hift_kernels``."""
# ruff: noqa: ANN001, ANN201, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from vivace.kernels.hift_kernels import (
    _FRAMES,
    _START,
    _WIDTH,
    _small_sine,
    _wait,
    _within_half_turn,
)
from vivace.kernels.hift_plan import Param

_IS_LAST = tl.constexpr(int(Param.IS_LAST))


@triton.jit
def post_kernel(
    arena,
    arena_stride,
    numbers,
    weight,
    bias,
    basis,
    x_start,
    frames_start,
    ALIGN: tl.constexpr,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    BINS: tl.constexpr,
    N_FFT: tl.constexpr,
    WIDE: tl.constexpr,
    MAX_LOG: tl.constexpr,
    RATE: tl.constexpr,
    EXTRA: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Windowed frames of a block of columns. Grid (blocks, rows)."""
    row = tl.program_id(1).to(tl.int64)
    numbers += row * _WIDTH
    _wait(PDL)
    arena += tl.multiple_of(row * arena_stride, ALIGN)
    frames = tl.load(numbers + _FRAMES).to(tl.int32)
    count = frames * RATE + EXTRA
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    if (frames == 0) | (tl.program_id(0) * BM >= count):
        return
    # Log magnitude and phase of a bin are neighbouring columns of one product, parted behind it.
    n = tl.arange(0, 32)
    w_rows = (n % 2 * BINS + n // 2) * (TAPS * C)
    real_n = n < 2 * BINS
    k = tl.arange(0, BK)
    total = tl.zeros((BM, 32), dtype=tl.float32)
    # A row's window is one stretch of memory, because the taps are neighbours.
    for k0 in range(0, TAPS * C, BK):
        inside = k0 + k < TAPS * C
        x = tl.load(arena + x_start + m[:, None] * C + k0 + k[None, :], mask=inside[None, :], other=0.0)
        w = tl.load(
            weight + w_rows[:, None] + k0 + k[None, :], mask=inside[None, :] & real_n[:, None], other=0.0
        )
        total = tl.dot(x, tl.trans(w), total, input_precision=PRECISION)
    total += tl.load(bias + n % 2 * BINS + n // 2, mask=real_n, other=0.0)[None, :]
    log_magnitude, phase = tl.split(tl.reshape(total, (BM, 16, 2)))
    bins = tl.arange(0, 16)
    magnitude = tl.exp(tl.where(log_magnitude > MAX_LOG, MAX_LOG, log_magnitude))
    half_turns, angle = _within_half_turn(phase)
    odd = half_turns - 2.0 * tl.floor(half_turns * 0.5)
    phase = _small_sine(angle) * (1.0 - 2.0 * odd)
    half = _small_sine(phase * 0.5)
    real, imaginary = magnitude * (1.0 - 2.0 * half * half), magnitude * _small_sine(phase)
    # Bins that do not exist meet rows of zeros.
    i = tl.arange(0, WIDE)
    place = basis + bins[:, None] * N_FFT + i[None, :]
    keep = (bins[:, None] < BINS) & (i[None, :] < N_FFT)
    frame = tl.dot(real, tl.load(place, mask=keep, other=0.0), input_precision=PRECISION)
    place += BINS * N_FFT
    frame = tl.dot(imaginary, tl.load(place, mask=keep, other=0.0), frame, input_precision=PRECISION)
    place = arena + frames_start + m[:, None] * N_FFT + i[None, :]
    tl.store(place, frame, mask=(m[:, None] < count) & (i[None, :] < N_FFT))


@triton.jit
def inverse_kernel(
    arena,
    arena_stride,
    numbers,
    window,
    out,
    flags,
    out_stride,
    frames_start,
    N_FFT: tl.constexpr,
    HOP: tl.constexpr,
    HOP_FRAME: tl.constexpr,
    LIMIT: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of samples by overlap-add. Grid (blocks, rows)."""
    row = tl.program_id(1).to(tl.int64)
    numbers += row * _WIDTH
    _wait(PDL)
    arena += row * arena_stride
    frames = tl.load(numbers + _FRAMES).to(tl.int32)
    is_last = (tl.load(numbers + _IS_LAST) != 0).to(tl.int32)
    behind: tl.constexpr = N_FFT // 2 - HOP  # samples that later columns still change
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (i < frames * HOP_FRAME + is_last * behind) & (frames > 0)
    sample = i - behind  # of this piece
    start = (tl.load(numbers + _START) * (HOP_FRAME // HOP)).to(tl.int32)
    last_column = frames * (HOP_FRAME // HOP)
    newest = (sample + N_FFT // 2) // HOP  # column that reaches the sample
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for back in tl.static_range(N_FFT // HOP):
        column = newest - back
        real = inside & (column + start >= 0) & (column <= last_column)
        tap = sample + N_FFT // 2 - column * HOP
        value = tl.load(window + tap, mask=real, other=0.0)
        squares += value * value
        total += tl.load(arena + frames_start + column * N_FFT + tap, mask=real, other=0.0)
    y = total / tl.where(squares > 0, squares, 1.0)
    y = tl.where(y > LIMIT, LIMIT, tl.where(y < -LIMIT, -LIMIT, y))  # not a number stays what it is
    out += row * out_stride
    tl.store(out + HEADER + i, y, mask=inside & (sample + start * HOP >= 0))
    bad = tl.max(((y != y) & inside & (sample + start * HOP >= 0)).to(tl.int32), axis=0)
    if bad != 0:
        tl.atomic_max(flags + row * out_stride, 1)
