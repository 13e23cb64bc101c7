"""Triton kernels of the streaming DiT; ``dit`` launches them and says what they are for.

Rows of all tensors are padded to whole tiles, so that products need no masks; only valid rows are written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, N803, D103
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _wait(PDL: tl.constexpr) -> None:
    """With programmatic launches: waits for the kernel before. Each kernel calls it ahead of all that it reads."""
    if PDL:
        gdc_wait()


@triton.jit
def _let_next_start(PDL: tl.constexpr) -> None:
    """With programmatic launches: the next kernel may take free multiprocessors. Sooner it would be in the way."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _matmul(
    a_ptr,
    w_ptr,
    rows,
    columns,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of ``a`` ``[M, K]`` times columns of ``w`` ``[N, K]``; both are padded to whole tiles."""
    depth = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * K + depth[None, :]
    w_ptrs = w_ptr + columns[None, :] * K + depth[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        total = tl.dot(tl.load(a_ptrs), tl.load(w_ptrs), total, input_precision="ieee")
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    return total


@triton.jit
def _load_sums(stats_ptr, rows, padded, TILES: tl.constexpr):
    """Sums and sums of squares of each row's tiles."""
    tile = tl.arange(0, triton.next_power_of_2(TILES))
    at = rows[:, None] * TILES + tile[None, :]
    mask = tile[None, :] < TILES
    sums = tl.load(stats_ptr + at, mask=mask, other=0.0)
    return sums, tl.load(stats_ptr + padded * TILES + at, mask=mask, other=0.0)


@triton.jit
def _row_norm(sums, squares, K: tl.constexpr, EPS: tl.constexpr):
    """Mean and inverse deviation of each row."""
    mean = tl.sum(sums, 1) / K
    return mean, tl.rsqrt(tl.maximum(tl.sum(squares, 1) / K - mean * mean, 0.0) + EPS)


@triton.jit
def _load_step(steps_ptr):
    """Euler step of all rows, ``[1]``."""
    return tl.load(steps_ptr + tl.zeros((1,), tl.int32))


@triton.jit
def _load_folded(folded_ptr, step, columns, steps_n, N: tl.constexpr):
    """``s W`` and ``b W``."""
    at = step[:, None] * N + columns[None, :]
    return tl.load(folded_ptr + at), tl.load(folded_ptr + steps_n + at)


@triton.jit
def _unfold(total, sums, squares, weighted, shift, K: tl.constexpr, EPS: tl.constexpr):
    """Finishes a projection of normed rows: ``r (x s) W - r m (s W) + (b W)``."""
    mean, inverse = _row_norm(sums, squares, K, EPS)
    return inverse[:, None] * (total - mean[:, None] * weighted) + shift


@triton.jit
def _store_normed(
    x, scale, rows, columns, keep, scaled_ptr, stats_ptr, padded, tile, N: tl.constexpr, TILES: tl.constexpr
) -> None:
    """Writes ``x s`` for the next norm, and this tile's sums."""
    at = rows[:, None] * N + columns[None, :]
    tl.store(scaled_ptr + at, (x * scale).to(scaled_ptr.dtype.element_ty), mask=keep[:, None])
    tl.store(stats_ptr + rows * TILES + tile, tl.sum(x, 1), mask=keep)
    tl.store(stats_ptr + (padded + rows) * TILES + tile, tl.sum(x * x, 1), mask=keep)


@triton.jit
def _rotate(
    x,
    position,
    columns,
    rope_ptr,
    POSITIONS,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIM_HEAD: tl.constexpr,
):
    """Turns neighbouring channels by the angle of the row's position."""
    even, odd = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_N // 2, 2)))
    pair = (tl.min(columns) % DIM_HEAD) // 2 + tl.arange(0, BLOCK_N // 2)
    at = position[:, None] * (DIM_HEAD // 2) + pair[None, :]
    cosine = tl.load(rope_ptr + at)
    sine = tl.load(rope_ptr + POSITIONS * (DIM_HEAD // 2) + at)
    turned = tl.join(even * cosine - odd * sine, odd * cosine + even * sine)
    return tl.reshape(turned, (BLOCK_M, BLOCK_N))


@triton.jit
def qkv_kernel(
    a_ptr, stats_ptr, w_ptr, folded_ptr, rope_ptr, q_ptr, arena_ptr, starts_ptr, counts_ptr, steps_ptr, here_ptr,
    M, padded, steps_n, positions, layer_offset, step_stride,
    K: tl.constexpr, HEADS: tl.constexpr, DIM_HEAD: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
    EPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    INNER: tl.constexpr = HEADS * DIM_HEAD
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    _wait(PDL)
    keep = rows < M
    group = tl.where(keep, rows // CHUNK, 0)
    frame = rows - group * CHUNK
    step = _load_step(steps_ptr)
    weighted, shift = _load_folded(folded_ptr, step, columns, steps_n, 3 * INNER)
    sums, squares = _load_sums(stats_ptr, rows, padded, TILES)
    total = _matmul(a_ptr, w_ptr, rows, columns, K, BLOCK_M, BLOCK_N, BLOCK_K)
    _let_next_start(PDL)
    x = _unfold(total, sums, squares, weighted, shift, K, EPS)
    first = tl.program_id(1) * BLOCK_N
    part = first // INNER
    channel = first % INNER
    if (part < 2) & (channel < DIM_HEAD):
        position = tl.minimum(tl.load(starts_ptr + group) + frame, positions - 1)
        x = _rotate(x, position, columns, rope_ptr, positions, BLOCK_M, BLOCK_N, DIM_HEAD)
    if part == 0:
        tl.store(
            q_ptr + rows[:, None] * INNER + columns[None, :], x.to(q_ptr.dtype.element_ty), mask=keep[:, None]
        )
    else:
        keep = keep & (frame < tl.load(counts_ptr + group))
        page = tl.load(here_ptr + group) + step.to(tl.int64) * step_stride + layer_offset
        page += ((part - 1) * HEADS + channel // DIM_HEAD) * (CHUNK * DIM_HEAD) + channel % DIM_HEAD
        at = tl.multiple_of(page + frame * DIM_HEAD, 16)
        inside = tl.arange(0, BLOCK_N)
        tl.store(
            arena_ptr + at[:, None] + inside[None, :], x.to(arena_ptr.dtype.element_ty), mask=keep[:, None]
        )


@triton.jit
def attention_kernel(
    q_ptr, out_ptr, arena_ptr, starts_ptr, counts_ptr, steps_ptr, table_ptr, pages, layer_offset, step_stride, scale,
    HEADS: tl.constexpr, DIM_HEAD: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    group = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    length = tl.load(starts_ptr + group) + tl.load(counts_ptr + group)
    inner = tl.load(steps_ptr + group).to(tl.int64) * step_stride + layer_offset + head * (CHUNK * DIM_HEAD)
    frame = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    keep = frame < CHUNK
    channel = tl.arange(0, DIM_HEAD)
    at = (group * CHUNK + frame)[:, None] * (HEADS * DIM_HEAD) + head * DIM_HEAD + channel[None, :]
    _wait(PDL)
    q = tl.load(q_ptr + at, mask=keep[:, None], other=0.0)
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, DIM_HEAD), tl.float32)
    for first in range(0, length, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        valid = key < length
        page = key // CHUNK
        row = (
            tl.load(table_ptr + group * pages + page, mask=valid, other=0)
            + inner
            + (key - page * CHUNK) * DIM_HEAD
        )
        row = tl.multiple_of(row, 16)
        k = tl.load(arena_ptr + row[None, :] + channel[:, None], mask=valid[None, :], other=0.0)
        values = arena_ptr + HEADS * CHUNK * DIM_HEAD
        v = tl.load(values + row[:, None] + channel[None, :], mask=valid[:, None], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where(valid[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        weight = weight * shrink + tl.sum(share, 1)
        mixed = tl.dot(share.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        top = higher
    _let_next_start(PDL)
    mixed = mixed / weight[:, None]
    tl.store(out_ptr + at, mixed.to(out_ptr.dtype.element_ty), mask=keep[:, None])


@triton.jit
def add_kernel(
    a_ptr, w_ptr, bias_ptr, gate_ptr, scale_ptr, hidden_ptr, scaled_ptr, stats_ptr, steps_ptr, M, padded,
    N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    _wait(PDL)
    keep = rows < M
    at = rows[:, None] * N + columns[None, :]
    step = _load_step(steps_ptr)
    gate = tl.load(gate_ptr + step[:, None] * N + columns[None, :])
    scale = tl.load(scale_ptr + step[:, None] * N + columns[None, :])
    bias = tl.load(bias_ptr + columns)
    old = tl.load(hidden_ptr + at, mask=keep[:, None], other=0.0)
    total = _matmul(a_ptr, w_ptr, rows, columns, K, BLOCK_M, BLOCK_N, BLOCK_K)
    _let_next_start(PDL)
    x = old + gate * (total + bias[None, :])
    tl.store(hidden_ptr + at, x, mask=keep[:, None])
    _store_normed(x, scale, rows, columns, keep, scaled_ptr, stats_ptr, padded, tl.program_id(1), N, TILES)


@triton.jit
def ff_in_kernel(
    a_ptr, stats_ptr, w_ptr, folded_ptr, out_ptr, steps_ptr, M, padded, steps_n,
    N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, EPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    _wait(PDL)
    keep = rows < M
    step = _load_step(steps_ptr)
    weighted, shift = _load_folded(folded_ptr, step, columns, steps_n, N)
    sums, squares = _load_sums(stats_ptr, rows, padded, TILES)
    total = _matmul(a_ptr, w_ptr, rows, columns, K, BLOCK_M, BLOCK_N, BLOCK_K)
    _let_next_start(PDL)
    x = _unfold(total, sums, squares, weighted, shift, K, EPS)
    # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), written so that nothing overflows
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    e = tl.exp(-2.0 * tl.abs(u))
    x = x * tl.where(u >= 0, 1.0, e) / (1.0 + e)
    tl.store(
        out_ptr + rows[:, None] * N + columns[None, :], x.to(out_ptr.dtype.element_ty), mask=keep[:, None]
    )


@triton.jit
def input_kernel(
    x_ptr, w_ptr, condition_ptr, first_ptr, second_ptr, arena_ptr, starts_ptr, steps_ptr, here_ptr, before_ptr,
    ahead_ptr, streams, context_offset, step_stride,
    N: tl.constexpr, MEL: tl.constexpr, CHUNK: tl.constexpr, LOOK_BACK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    group = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    frame = tl.arange(0, BLOCK_M)
    depth = tl.arange(0, BLOCK_K)
    JOINED: tl.constexpr = LOOK_BACK + CHUNK
    inner = tl.load(steps_ptr + group).to(tl.int64) * step_stride + context_offset
    w = tl.load(w_ptr + columns[None, :] * MEL + depth[:, None], mask=depth[:, None] < MEL, other=0.0)
    _wait(PDL)
    inside = frame[:, None] < CHUNK
    x_at = ((group % streams) * CHUNK + frame)[:, None] * MEL + depth[None, :]
    x = tl.load(x_ptr + x_at, mask=inside & (depth[None, :] < MEL), other=0.0)
    total = tl.dot(x.to(w.dtype), w, input_precision="ieee")
    _let_next_start(PDL)
    total += tl.load(
        condition_ptr + (group * CHUNK + frame)[:, None] * N + columns[None, :], mask=inside, other=0.0
    )
    total = total.to(arena_ptr.dtype.element_ty)
    joined = group * JOINED
    tl.store(first_ptr + (joined + LOOK_BACK + frame)[:, None] * N + columns[None, :], total, mask=inside)
    _hand_on(
        total, first_ptr, arena_ptr, steps_ptr, here_ptr, ahead_ptr, group, frame[:, None], columns[None, :],
        context_offset, step_stride, N, CHUNK, LOOK_BACK,
    )  # fmt: skip
    # What the two convolutions look back on, out of the page before the launch; groups ahead hand on the rest.
    ahead = tl.load(ahead_ptr + group)
    here = tl.multiple_of(tl.load(here_ptr + group) + inner, 16)
    before = tl.multiple_of(tl.load(before_ptr + group - ahead) + inner, 16)
    row = tl.arange(0, triton.next_power_of_2(LOOK_BACK))[:, None]
    old_row = row + ahead * CHUNK
    old_rows = old_row < LOOK_BACK
    known = old_rows & (tl.load(starts_ptr + group - ahead) > 0)
    for index in tl.static_range(2):
        section = index * LOOK_BACK * N + columns[None, :]
        old = tl.load(arena_ptr + before + section + old_row * N, mask=known, other=0.0)
        out_ptr = first_ptr if index == 0 else second_ptr
        tl.store(out_ptr + (joined + row) * N + columns[None, :], old, mask=old_rows)
        kept = row - CHUNK
        tl.store(arena_ptr + here + section + kept * N, old, mask=old_rows & (kept >= 0))


@triton.jit
def _hand_on(
    x, joined_ptr, arena_ptr, steps_ptr, here_ptr, ahead_ptr, group, frame, columns, section, step_stride,
    N: tl.constexpr, CHUNK: tl.constexpr, LOOK_BACK: tl.constexpr,
) -> None:  # fmt: skip
    """Frames of a group into its page, as far as the next chunk looks back on them, and into the input and the pages of
    groups behind it in the launch that are the stream's next chunks."""
    inside = frame < CHUNK
    for distance in tl.static_range((LOOK_BACK + CHUNK - 1) // CHUNK + 1):
        to = group + distance
        is_next = to < tl.num_programs(0)
        is_next = is_next & (tl.load(ahead_ptr + to, mask=is_next, other=-1) >= distance)
        if distance:
            row = LOOK_BACK - distance * CHUNK + frame
            at = (to * (LOOK_BACK + CHUNK) + row) * N + columns
            tl.store(joined_ptr + at, x, mask=inside & is_next & (row >= 0))
        if distance * CHUNK < LOOK_BACK:
            step = tl.load(steps_ptr + to, mask=is_next, other=0).to(tl.int64)
            page = tl.load(here_ptr + to, mask=is_next, other=0) + step * step_stride + section
            row = LOOK_BACK - (distance + 1) * CHUNK + frame
            at = tl.multiple_of(page, 16) + row * N + columns
            tl.store(arena_ptr + at, x, mask=inside & is_next & (row >= 0))


@triton.jit
def _position_matmul(
    joined_ptr, w_ptr, group, columns, N: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    LOOK_BACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, WIDTH)
    first = tl.min(columns) // WIDTH * WIDTH
    row = group * (LOOK_BACK + CHUNK) + tl.arange(0, BLOCK_M)
    a_ptrs = joined_ptr + row[:, None] * N + first + channel[None, :]
    w_ptrs = w_ptr + columns[None, :] * WIDTH + channel[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(LOOK_BACK + 1):
        total = tl.dot(tl.load(a_ptrs), tl.load(w_ptrs), total, input_precision="ieee")
        a_ptrs += N
        w_ptrs += N * WIDTH
    return total


@triton.jit
def _mish(x):
    """``x tanh(log(1 + exp(x)))``, written with ``e = exp(-|x|)`` so that nothing overflows."""
    e = tl.exp(-tl.abs(x))
    share = tl.where(
        x >= 0, (1.0 + 2.0 * e) / (1.0 + 2.0 * e + 2.0 * e * e), (e * e + 2.0 * e) / (e * e + 2.0 * e + 2.0)
    )
    return x * share


@triton.jit
def position_kernel(
    joined_ptr, w_ptr, bias_ptr, next_ptr, arena_ptr, steps_ptr, here_ptr, ahead_ptr, context_offset, step_stride,
    N: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, LOOK_BACK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """First position convolution: into the input of the second, and into the page."""
    group = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    _wait(PDL)
    total = _position_matmul(joined_ptr, w_ptr, group, columns, N, WIDTH, CHUNK, LOOK_BACK, BLOCK_M, BLOCK_N)
    _let_next_start(PDL)
    y = _mish(total + tl.load(bias_ptr + columns)[None, :]).to(next_ptr.dtype.element_ty)
    frame = tl.arange(0, BLOCK_M)[:, None]
    row = group * (LOOK_BACK + CHUNK) + LOOK_BACK + frame
    tl.store(next_ptr + row * N + columns[None, :], y, mask=frame < CHUNK)
    _hand_on(
        y, next_ptr, arena_ptr, steps_ptr, here_ptr, ahead_ptr, group, frame, columns[None, :],
        context_offset + LOOK_BACK * N, step_stride, N, CHUNK, LOOK_BACK,
    )  # fmt: skip


@triton.jit
def position_add_kernel(
    joined_ptr, w_ptr, bias_ptr, first_ptr, scale_ptr, hidden_ptr, scaled_ptr, stats_ptr, steps_ptr, padded,
    N: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, LOOK_BACK: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Second position convolution, added to the input of the first: the hidden state of the first block."""
    group = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    _wait(PDL)
    total = _position_matmul(joined_ptr, w_ptr, group, columns, N, WIDTH, CHUNK, LOOK_BACK, BLOCK_M, BLOCK_N)
    frame = tl.arange(0, BLOCK_M)
    keep = frame < CHUNK
    rows = group * CHUNK + frame
    base = (group * (LOOK_BACK + CHUNK) + LOOK_BACK + frame)[:, None] * N + columns[None, :]
    _let_next_start(PDL)
    x = _mish(total + tl.load(bias_ptr + columns)[None, :])
    x += tl.load(first_ptr + base, mask=keep[:, None], other=0.0).to(tl.float32)
    tl.store(hidden_ptr + rows[:, None] * N + columns[None, :], x, mask=keep[:, None])
    scale = tl.load(scale_ptr + tl.load(steps_ptr + group) * N + columns)[None, :]
    _store_normed(x, scale, rows, columns, keep, scaled_ptr, stats_ptr, padded, tl.program_id(1), N, TILES)


@triton.jit
def output_kernel(
    a_ptr, stats_ptr, w_ptr, folded_ptr, x_ptr, shared_ptr, fault_ptr, dt_ptr, starts_ptr, counts_ptr, steps_ptr,
    streams, padded, steps_n, guidance,
    N: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr, EPS: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    stream = tl.program_id(0)
    frame = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    keep = frame < CHUNK
    _wait(PDL)
    step = tl.load(steps_ptr + stream)
    weighted, shift = _load_folded(folded_ptr, step + tl.zeros((1,), tl.int32), columns, steps_n, N)
    rows = stream * CHUNK + frame
    sums, squares = _load_sums(stats_ptr, rows, padded, TILES)
    total = _matmul(a_ptr, w_ptr, rows, columns, K, BLOCK_M, BLOCK_N, BLOCK_K)
    _let_next_start(PDL)
    guided = _unfold(total, sums, squares, weighted, shift, K, EPS)
    place = (tl.load(starts_ptr + stream) + frame)[:, None] * N + columns[None, :]
    if SHARED == 2:  # the other branch at step 0 is known
        free = tl.load(shared_ptr + place, mask=keep[:, None], other=0.0)
    else:
        rows += streams * CHUNK
        sums, squares = _load_sums(stats_ptr, rows, padded, TILES)
        total = _matmul(a_ptr, w_ptr, rows, columns, K, BLOCK_M, BLOCK_N, BLOCK_K)
        free = _unfold(total, sums, squares, weighted, shift, K, EPS)
        if SHARED == 1:  # a whole chunk of it becomes known
            whole = tl.load(counts_ptr + stream) == CHUNK
            tl.store(shared_ptr + place, free, mask=keep[:, None] & whole)
    at = (stream * CHUNK + frame)[:, None] * N + columns[None, :]
    x = tl.load(x_ptr + at, mask=keep[:, None], other=0.0)
    x += tl.load(dt_ptr + step) * ((1.0 + guidance) * guided - guidance * free)
    tl.store(x_ptr + at, x, mask=keep[:, None])
    valid = keep & (frame < tl.load(counts_ptr + stream))
    wrong = tl.where(valid[:, None] & ~(tl.abs(x) < float("inf")), 1, 0)
    if tl.max(wrong) > 0:
        tl.store(fault_ptr + stream, 1)
