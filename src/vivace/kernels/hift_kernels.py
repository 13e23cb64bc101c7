"""Triton kernels of the vocoder; ``hift`` launches them, ``hift_reference`` is the definition.

``arena`` holds a row's intermediate results, ``numbers`` its parameters (``hift_plan.Param``). The last grid axis is
the row. A program whose rows lie behind the piece's true length ends at once.
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
_F0_FRAMES = tl.constexpr(int(Param.F0_FRAMES))
_FRAMES = tl.constexpr(int(Param.FRAMES))
_MEL_ROWS = tl.constexpr(int(Param.MEL_ROWS))
_F0_START = tl.constexpr(int(Param.F0_START))
_START = tl.constexpr(int(Param.START))
_IS_FIRST = tl.constexpr(int(Param.IS_FIRST))
_IS_LAST = tl.constexpr(int(Param.IS_LAST))
_NOISE_KEY = tl.constexpr(int(Param.NOISE_KEY))
_TWO_PI = tl.constexpr(6.283185307179586)
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
def readout_kernel(
    arena,
    arena_stride,
    numbers,
    weight,
    HIDDEN: tl.constexpr,
    F0: tl.constexpr,
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
        arena + HIDDEN + t[:, None] * C + channels[None, :],
        mask=inside[:, None] & (channels[None, :] < C),
        other=0.0,
    )
    f0 = tl.abs(tl.sum(x.to(tl.float64) * w[None, :], axis=1) + tl.load(weight + C))
    tl.store(arena + F0 + t, f0.to(tl.float32), mask=inside)


@triton.jit
def phases_kernel(
    arena,
    arena_stride,
    numbers,
    phases,
    phases_stride,
    flags,
    flags_stride,
    F0: tl.constexpr,
    STARTS: tl.constexpr,
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
        f0 = tl.load(arena + F0 + t, mask=inside, other=0.0)
        step = f0[:, None] * (h[None, :] + 1).to(tl.float32) / RATE_HZ
        step = tl.where(inside[:, None], step - tl.floor(step), 0.0)
        moved = step.to(tl.float64) * HOP
        ends = tl.cumsum(moved, axis=0) + phase[None, :]
        given = ends - moved if PER_SAMPLE else ends
        given = (given - tl.floor(given)).to(tl.float32)
        place = arena + STARTS + t[:, None] * 16 + h[None, :]
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
    F0: tl.constexpr,
    STARTS: tl.constexpr,
    SAMPLES: tl.constexpr,
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
    f0 = tl.load(arena + F0 + frame, mask=inside, other=0.0)
    voiced = (f0 > THRESHOLD).to(tl.float32)
    level = voiced * VOICED + (1.0 - voiced) * (AMPLITUDE / 3)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for h in tl.static_range(HARMONICS):
        cycles = tl.load(arena + STARTS + frame * 16 + h, mask=inside, other=0.0)
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
    tl.store(arena + SAMPLES + shift + i, tanh, mask=inside)


@triton.jit
def spectrum_kernel(
    arena,
    operands,
    arena_stride,
    numbers,
    basis,
    SAMPLES: tl.constexpr,
    OUTPUT: tl.constexpr,
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
        value = tl.load(arena + SAMPLES + place - start, mask=real, other=0.0)
        total += value[:, None] * tl.load(basis + i * (2 * BINS) + b, mask=b < 2 * BINS, other=0.0)[None, :]
    place = (column[:, None] + BEFORE) * (2 * BINS) + b[None, :]
    operands += row * arena_stride * (2 if ROUNDING == 2 else 1)
    total = _operand(total, ROUNDING)
    tl.store(operands + OUTPUT + place, total, mask=keep[:, None] & (b[None, :] < 2 * BINS))


@triton.jit
def join_kernel(
    arena,
    operands,
    arena_stride,
    numbers,
    alpha,
    UPSAMPLED: tl.constexpr,
    SOURCE: tl.constexpr,
    RAW: tl.constexpr,
    ACTIVATED: tl.constexpr,
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
    x = tl.load(arena + UPSAMPLED + from_up, mask=inside, other=0.0)
    x += tl.load(arena + SOURCE + i, mask=inside, other=0.0)
    tl.store(arena + RAW + i, x, mask=inside)
    operands += row * arena_stride * (2 if ROUNDING == 2 else 1)
    for g in tl.static_range(GROUPS):
        y = _snake(x, tl.load(alpha + g * C + i % C), tl.load(alpha + (GROUPS + g) * C + i % C))
        tl.store(operands + ACTIVATED[g] + i, _operand(y, ROUNDING), mask=inside)


@triton.jit
def mean_kernel(
    arena,
    operands,
    arena_stride,
    numbers,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    OUTPUT: tl.constexpr,
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
    x = tl.load(arena + INPUTS[0] + i, mask=inside, other=0.0)
    for g in tl.static_range(1, GROUPS):
        x += tl.load(arena + INPUTS[g] + i, mask=inside, other=0.0)
    x = x / GROUPS
    x = tl.where(x > 0, x, x * SLOPE)
    operands += row * arena_stride * (2 if ROUNDING == 2 else 1)
    tl.store(operands + OUTPUT + i, _operand(x, ROUNDING), mask=inside)


@triton.jit
def post_kernel(
    arena,
    arena_stride,
    numbers,
    weight,
    bias,
    basis,
    X: tl.constexpr,
    FRAMES: tl.constexpr,
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
        x = tl.load(arena + X + m[:, None] * C + k0 + k[None, :], mask=inside[None, :], other=0.0)
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
    place = arena + FRAMES + m[:, None] * N_FFT + i[None, :]
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
    FRAMES: tl.constexpr,
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
        total += tl.load(arena + FRAMES + column * N_FFT + tap, mask=real, other=0.0)
    y = total / tl.where(squares > 0, squares, 1.0)
    y = tl.where(y > LIMIT, LIMIT, tl.where(y < -LIMIT, -LIMIT, y))  # not a number stays what it is
    out += row * out_stride
    tl.store(out + HEADER + i, y, mask=inside & (sample + start * HOP >= 0))
    bad = tl.max(((y != y) & inside & (sample + start * HOP >= 0)).to(tl.int32), axis=0)
    if bad != 0:
        tl.atomic_max(flags + row * out_stride, 1)
