"""Triton kernels of the vocoder's harmonic source: F0, phase, samples, their spectrum. See ``hift_kernels``."""
# ruff: noqa: ANN001, ANN201, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from vivace.kernels.hift_kernels import (
    _FRAMES,
    _IS_FIRST,
    _SLOT,
    _START,
    _WIDTH,
    _operand,
    _wait,
)
from vivace.kernels.hift_plan import Param

_F0_FRAMES = tl.constexpr(int(Param.F0_FRAMES))
_F0_START = tl.constexpr(int(Param.F0_START))
_IS_LAST = tl.constexpr(int(Param.IS_LAST))
_NOISE_KEY = tl.constexpr(int(Param.NOISE_KEY))
_TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def readout_kernel(
    arena,
    arena_stride,
    numbers,
    weight,
    hidden,
    f0_values,
    C: tl.constexpr,
    BC: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """F0 of a few frames. Grid (blocks, rows)."""
    row = tl.program_id(1).to(tl.int64)
    numbers += row * _WIDTH
    arena += row * arena_stride
    channels = tl.arange(0, BC)
    w = tl.load(weight + channels, mask=channels < C, other=0.0)
    _wait(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    inside = t < tl.load(numbers + _F0_FRAMES)
    x = tl.load(
        arena + hidden + t[:, None] * C + channels[None, :],
        mask=inside[:, None] & (channels[None, :] < C),
        other=0.0,
    )
    f0 = tl.abs(tl.sum(x.to(tl.float64) * w[None, :], axis=1) + tl.load(weight + C))
    tl.store(arena + f0_values + t, f0.to(tl.float32), mask=inside)


@triton.jit
def phases_kernel(
    arena,
    arena_stride,
    numbers,
    phases,
    phases_stride,
    flags,
    flags_stride,
    f0_values,
    starts,
    HARMONICS: tl.constexpr,
    HOP: tl.constexpr,
    RATE_HZ: tl.constexpr,
    PER_SAMPLE: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Phases of all frames of a row. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    numbers += row * _WIDTH
    _wait(PDL)
    arena += row * arena_stride
    tl.store(flags + row * flags_stride, 0)
    frames = tl.load(numbers + _F0_FRAMES).to(tl.int32)
    slot = tl.load(numbers + _SLOT)
    h = tl.arange(0, 16)
    known = tl.load(numbers + _IS_FIRST) == 0
    carried = phases + slot * phases_stride + h
    phase = tl.load(carried, mask=(h < HARMONICS) & known, other=0.0)
    for t0 in range(0, frames, BT):
        t = t0 + tl.arange(0, BT)
        inside = t < frames
        f0 = tl.load(arena + f0_values + t, mask=inside, other=0.0)
        step = f0[:, None] * (h[None, :] + 1).to(tl.float32) / RATE_HZ
        step = tl.where(inside[:, None], step - tl.floor(step), 0.0)
        moved = step.to(tl.float64) * HOP
        ends = tl.cumsum(moved, axis=0) + phase[None, :]
        given = ends - moved if PER_SAMPLE else ends
        given = (given - tl.floor(given)).to(tl.float32)
        place = arena + starts + t[:, None] * 16 + h[None, :]
        tl.store(place, given, mask=inside[:, None] & (h < HARMONICS)[None, :])
        phase += tl.sum(moved, axis=0)
        phase -= tl.floor(phase)
    tl.debug_barrier()
    tl.store(carried, phase, mask=h < HARMONICS)


@triton.jit
def samples_kernel(
    arena,
    arena_stride,
    numbers,
    mix,
    f0_values,
    starts,
    samples,
    HARMONICS: tl.constexpr,
    HOP: tl.constexpr,
    RATE_HZ: tl.constexpr,
    AMPLITUDE: tl.constexpr,
    VOICED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    PER_SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of the source signal. Grid (blocks, rows)."""
    row = tl.program_id(1).to(tl.int64)
    numbers += row * _WIDTH
    _wait(PDL)
    arena += row * arena_stride
    count = tl.load(numbers + _F0_FRAMES).to(tl.int32) * HOP
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    start = tl.load(numbers + _F0_START)
    shift = ((start - tl.load(numbers + _START)) * HOP).to(tl.int32)
    # Noise hashes the index modulo 2**32, so that unsigned arithmetic wraps as it must.
    key = tl.load(numbers + _NOISE_KEY).to(tl.uint32)
    first_index = ((start * HOP) * HARMONICS).to(tl.uint32) + key
    frame = i // HOP
    f0 = tl.load(arena + f0_values + frame, mask=inside, other=0.0)
    voiced = (f0 > THRESHOLD).to(tl.float32)
    level = voiced * VOICED + (1.0 - voiced) * (AMPLITUDE / 3)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for h in tl.static_range(HARMONICS):
        cycles = tl.load(arena + starts + frame * 16 + h, mask=inside, other=0.0)
        if PER_SAMPLE:
            step = f0 * (h + 1.0) / RATE_HZ
            step -= tl.floor(step)
            cycles += step * (i % HOP + 1).to(tl.float32)
        wave = tl.sin(cycles * _TWO_PI) * AMPLITUDE
        value = first_index + (i * HARMONICS + h).to(tl.uint32)
        value = (value ^ (value >> 16)) * tl.full((), 0x21F0AAAD, tl.uint32)
        value = (value ^ (value >> 15)) * tl.full((), 0x735A2D97, tl.uint32)
        noise = ((value ^ (value >> 15)) >> 8).to(tl.float32) * (1.0 / 16777216.0)
        total += (wave * voiced + level * noise) * tl.load(mix + h)
    total += tl.load(mix + HARMONICS)
    # tanh; its argument stays far from where exp overflows into infinity over infinity
    bounded = tl.minimum(tl.maximum(total, -15.0), 15.0)
    e = tl.exp(2.0 * bounded)
    tanh = (e - 1.0) / (e + 1.0)
    tanh = tl.where(tl.abs(total) < 0.02, total * (1.0 - total * total * (1.0 / 3.0)), tanh)
    tanh = tl.where(total == total, tanh, total)
    tl.store(arena + samples + shift + i, tanh, mask=inside)


@triton.jit
def spectrum_kernel(
    arena,
    operands,
    arena_stride,
    numbers,
    basis,
    samples,
    output,
    BEFORE: tl.constexpr,
    N_FFT: tl.constexpr,
    HOP: tl.constexpr,
    HOP_FRAME: tl.constexpr,
    RATE: tl.constexpr,
    EXTRA: tl.constexpr,
    BINS: tl.constexpr,
    BM: tl.constexpr,
    ROUNDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of columns of the source spectrum. Grid (blocks, rows)."""
    row = tl.program_id(1).to(tl.int64)
    numbers += row * _WIDTH
    _wait(PDL)
    arena += row * arena_stride
    frames = tl.load(numbers + _FRAMES).to(tl.int32)
    column = tl.program_id(0) * BM + tl.arange(0, BM) - BEFORE
    keep = (column < frames * RATE + EXTRA) & (frames > 0)
    start = (tl.load(numbers + _START) * HOP_FRAME).to(tl.int32)
    end = tl.where(tl.load(numbers + _IS_LAST) != 0, start + frames * HOP_FRAME, 2147483647)
    real = keep & (column * HOP + start >= 0)
    b = tl.arange(0, 32)
    total = tl.zeros((BM, 32), dtype=tl.float32)
    for i in tl.static_range(N_FFT):
        # The signal is mirrored at its beginning and at its end.
        place = tl.abs(column * HOP + start + (i - N_FFT // 2))
        place = tl.where(place >= end, 2 * (end - 1) - place, place)
        value = tl.load(arena + samples + place - start, mask=real, other=0.0)
        total += value[:, None] * tl.load(basis + i * (2 * BINS) + b, mask=b < 2 * BINS, other=0.0)[None, :]
    place = (column[:, None] + BEFORE) * (2 * BINS) + b[None, :]
    operands += row * arena_stride * (2 if ROUNDING == 2 else 1)
    total = _operand(total, ROUNDING)
    tl.store(operands + output + place, total, mask=keep[:, None] & (b[None, :] < 2 * BINS))
