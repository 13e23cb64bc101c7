"""Triton kernels of the vocoder; ``hift`` launches them, ``hift_reference`` is the definition.

``arena`` holds a row's intermediate results, ``numbers`` its parameters (``hift_plan.Param``). The last grid axis is
the row. A program whose rows lie behind the piece's true length ends at once. Where buffers lie is no constant: the
same code serves layouts of any length.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803, C901
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vivace.kernels.hift_plan import Param

_WIDTH = tl.constexpr(len(Param))
_SLOT = tl.constexpr(int(Param.SLOT))
_FRAMES = tl.constexpr(int(Param.FRAMES))
_MEL_ROWS = tl.constexpr(int(Param.MEL_ROWS))
_START = tl.constexpr(int(Param.START))
_IS_FIRST = tl.constexpr(int(Param.IS_FIRST))
_HALF_LIMIT = tl.constexpr(65504.0)


@triton.jit
def _wait(PDL: tl.constexpr):
    """Lets the next launch start, and waits for the one before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _pick(group, values, count: tl.constexpr):
    """``values[group]``."""
    chosen = group * 0 + values[0]
    for i in tl.static_range(1, count):
        chosen = tl.where(group == i, values[i], chosen)
    return chosen


@triton.jit
def _small_sine(x):
    """Sine within a quarter turn, by a polynomial as good as float32 is."""
    z = x * x
    y = z * (z * 2.60005477e-06 - 0.0001980661520218) + 0.008333017291565
    return x + x * z * (z * y - 0.16666657096504)


@triton.jit
def _within_half_turn(angle):
    """How many half turns, and what is left of the angle: at most a quarter turn."""
    half_turns = tl.floor(angle * 0.3183098861837907 + 0.5)
    return half_turns, angle - half_turns * 3.140625 - half_turns * 0.0009676535846665502


@triton.jit
def _snake(x, alpha, inverse):
    """``x + sin²(alpha x) * inverse``."""
    _, angle = _within_half_turn(x * alpha)
    sine = _small_sine(angle)
    return x + sine * sine * inverse


@triton.jit
def _to_tf32(x):
    """Rounded to the 10 bits that the matrix units keep, which would cut the others off."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _operand(x, ROUNDING: tl.constexpr):
    """As products take it: as it is (0), rounded to TF32 (1), float16 (2)."""
    if ROUNDING == 2:
        y = tl.clamp(x, -_HALF_LIMIT, _HALF_LIMIT, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    elif ROUNDING == 1:
        y = _to_tf32(x)
    else:
        y = x
    return y


@triton.jit
def conv_kernel(
    arena,
    operands,
    arena_stride,
    numbers,
    weight,
    scale,
    bias,
    alpha,
    x_starts,
    tap_strides,
    weight_starts,
    residual_starts,
    raw_starts,
    activated_starts,
    TAPS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RAW: tl.constexpr,
    ACTIVATED: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    KC: tl.constexpr,
    N: tl.constexpr,
    FIELD: tl.constexpr,
    RATE: tl.constexpr,
    EXTRA: tl.constexpr,
    MEL_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDING: tl.constexpr,
    SCALED: tl.constexpr,
    TAPS_INSIDE: tl.constexpr,
    SWAPPED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of one group: taps, bias, residual, activation. Grid (tiles, groups, rows).

    ``operands`` is the arena as the type of the products' operands. ``SWAPPED``: channels are the rows of the product,
    which suits the matrix units where there are few channels.
    """
    row = tl.program_id(2).to(tl.int64)
    numbers += row * _WIDTH
    frames = tl.load(numbers + FIELD).to(tl.int32)
    count = frames * RATE + EXTRA
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    m0 = tl.program_id(0) // n_tiles * BM
    n0 = tl.program_id(0) % n_tiles * BN
    if (frames == 0) | (m0 >= count):
        if PDL:
            gdc_wait()  # a launch must not seem to be over before the one ahead of it is
        return
    group = tl.program_id(1)
    taps = _pick(group, TAPS, GROUPS)
    x_start = tl.multiple_of(_pick(group, x_starts, GROUPS), ALIGN)
    tap_stride = tl.multiple_of(_pick(group, tap_strides, GROUPS), ALIGN)
    arena += row * arena_stride
    operands += row * arena_stride * (2 if ROUNDING == 2 else 1)
    m = m0 + tl.arange(0, BM)
    n = n0 + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x = operands + x_start
    if MEL_ROW >= 0:  # zeros stand before and behind the mel
        x = arena + x_start
        first = tl.load(numbers + MEL_ROW).to(tl.int32)
        valid = tl.load(numbers + _MEL_ROWS).to(tl.int32) - first
        x += first * KC
    row_offsets = m[:, None] * ROW_STRIDE
    w = weight + tl.multiple_of(_pick(group, weight_starts, GROUPS), ALIGN)
    w_rows = n[:, None] * (taps * KC)
    k_tiles: tl.constexpr = (KC + BK - 1) // BK
    total = tl.zeros((BN, BM) if SWAPPED else (BM, BN), dtype=tl.float32)
    if PDL:
        gdc_wait()
    tap, first_channel = taps * 0, taps * 0
    for step in range(taps * k_tiles):
        if TAPS_INSIDE:  # neighbouring taps read almost the same rows, which wait in the first cache
            channel = first_channel + k
        else:
            tap = step // k_tiles
            channel = (step % k_tiles) * BK + k
        inside = channel < KC
        x_tile = x + tap * tap_stride + row_offsets + channel[None, :]
        w_tile = w + w_rows + tap * KC + channel[None, :]
        if MEL_ROW >= 0:
            a = tl.load(x_tile, mask=inside[None, :] & (m[:, None] + tap < valid), other=0.0)
            a = _operand(a, ROUNDING)
        elif KC % BK == 0:
            if TAPS_INSIDE:
                a = tl.load(x_tile, cache_modifier=".ca")
            else:
                a = tl.load(x_tile)
        else:
            a = tl.load(x_tile, mask=inside[None, :], other=0.0)
        if (KC % BK == 0) and (N % BN == 0):
            b = tl.load(w_tile)
        else:
            b = tl.load(w_tile, mask=inside[None, :] & (n[:, None] < N), other=0.0)
        if SWAPPED:
            total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        if TAPS_INSIDE:
            tap += 1
            first_channel = tl.where(tap == taps, first_channel + BK, first_channel)
            tap = tl.where(tap == taps, 0, tap)
    if PDL:
        gdc_launch_dependents()
    keep_n = n < N
    if SWAPPED:
        total = tl.trans(total)
    if SCALED:
        total *= tl.load(scale + group * N + n, mask=keep_n, other=0.0)[None, :]
    y = total + tl.load(bias + group * N + n, mask=keep_n, other=0.0)[None, :]
    keep = (m[:, None] < count) & keep_n[None, :]
    place = m[:, None] * N + n[None, :]
    if RESIDUAL:
        start = tl.multiple_of(_pick(group, residual_starts, GROUPS), ALIGN)
        y += tl.load(arena + start + place, mask=keep, other=0.0)
    if RAW:
        start = tl.multiple_of(_pick(group, raw_starts, GROUPS), ALIGN)
        tl.store(arena + start + place, y, mask=keep)
    if ACTIVATED:
        if ACTIVATION == 1:
            factor = tl.load(alpha + group * N + n, mask=keep_n, other=1.0)
            inverse = tl.load(alpha + (GROUPS + group) * N + n, mask=keep_n, other=1.0)
            y = _snake(y, factor[None, :], inverse[None, :])
        elif ACTIVATION == 2:
            y = tl.where(y > 0, y, tl.exp(y) - 1.0)
        elif ACTIVATION == 3:
            y = tl.where(y > 0, y, y * SLOPE)
        start = tl.multiple_of(_pick(group, activated_starts, GROUPS), ALIGN)
        tl.store(operands + start + place, _operand(y, ROUNDING), mask=keep)


@triton.jit
def states_kernel(
    arena,
    arena_stride,
    numbers,
    pool,
    pool_stride,
    table,
    SAVE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copies one stretch between the arena and the slot. Grid (stretches, rows)."""
    row = tl.program_id(1).to(tl.int64)
    numbers += row * _WIDTH
    _wait(PDL)
    table += tl.program_id(0) * 5
    in_arena = tl.load(table)
    in_slot = tl.load(table + 1)
    count = tl.load(table + 2)
    slot = tl.load(numbers + _SLOT)
    i = tl.arange(0, BLOCK)
    work = arena + row * arena_stride + in_arena + i
    kept = pool + slot * pool_stride + in_slot + i
    inside = i < count
    if SAVE:
        moved = tl.load(numbers + tl.load(table + 3)) * tl.load(table + 4)
        tl.store(kept, tl.load(work + moved, mask=inside), mask=inside)
    else:
        known = tl.load(numbers + _IS_FIRST) == 0
        tl.store(work, tl.load(kept, mask=inside & known, other=0.0), mask=inside)


@triton.jit
def join_kernel(
    arena,
    operands,
    arena_stride,
    numbers,
    alpha,
    upsampled,
    source,
    raw,
    activated_starts,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    RATE: tl.constexpr,
    EXTRA: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Upsampled plus source, and its snakes. Grid (blocks, rows)."""
    row = tl.program_id(1).to(tl.int64)
    numbers += row * _WIDTH
    _wait(PDL)
    arena += row * arena_stride
    frames = tl.load(numbers + _FRAMES).to(tl.int32)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (i < (frames * RATE + EXTRA) * C) & (frames > 0)
    from_up = i - SHIFT * C
    if SHIFT > 0:
        mirrored = (i < C) & (tl.load(numbers + _START) == 0)
        from_up = tl.where(mirrored, i + C, from_up)
    x = tl.load(arena + upsampled + from_up, mask=inside, other=0.0)
    x += tl.load(arena + source + i, mask=inside, other=0.0)
    tl.store(arena + raw + i, x, mask=inside)
    operands += row * arena_stride * (2 if ROUNDING == 2 else 1)
    for g in tl.static_range(GROUPS):
        y = _snake(x, tl.load(alpha + g * C + i % C), tl.load(alpha + (GROUPS + g) * C + i % C))
        tl.store(operands + activated_starts[g] + i, _operand(y, ROUNDING), mask=inside)


@triton.jit
def mean_kernel(
    arena,
    operands,
    arena_stride,
    numbers,
    inputs,
    output,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    RATE: tl.constexpr,
    EXTRA: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Average of the blocks, leaky rectified. Grid (blocks, rows)."""
    row = tl.program_id(1).to(tl.int64)
    numbers += row * _WIDTH
    _wait(PDL)
    arena += row * arena_stride
    frames = tl.load(numbers + _FRAMES).to(tl.int32)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (i < (frames * RATE + EXTRA) * C) & (frames > 0)
    x = tl.load(arena + inputs[0] + i, mask=inside, other=0.0)
    for g in tl.static_range(1, GROUPS):
        x += tl.load(arena + inputs[g] + i, mask=inside, other=0.0)
    x = x / GROUPS
    x = tl.where(x > 0, x, x * SLOPE)
    operands += row * arena_stride * (2 if ROUNDING == 2 else 1)
    tl.store(operands + output + i, _operand(x, ROUNDING), mask=inside)
