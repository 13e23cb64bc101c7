"""Triton kernels of the streaming DiT for launches of many chunks: wide tiles, operands fetched by tensor copies.

``dit_wide`` launches them; ``dit_kernels`` has those for one chunk, and what both share.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, N803, D103
from __future__ import annotations

import triton
import triton.language as tl

from vivace.kernels.dit_kernels import (
    _let_next_start,
    _load_folded,
    _load_step,
    _store_normed,
    _unfold,
    _wait,
)


@triton.jit
def _product(
    a,
    w,
    row,
    column,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of ``a`` ``[M, K]`` times columns of ``w`` ``[N, K]``, both given as descriptors of their tiles."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        total = tl.dot(a.load([row, first]), w.load([column, first]).T, total, input_precision="ieee")
    return total


@triton.jit
def _load_sums(stats_ptr, rows, padded, tiles, MOST: tl.constexpr):
    """Sums and sums of squares of each row's tiles. How many there are is no constant: one kernel serves all."""
    tile = tl.arange(0, MOST)
    at = rows[:, None] * tiles + tile[None, :]
    mask = (tile < tiles)[None, :]
    sums = tl.load(stats_ptr + at, mask=mask, other=0.0)
    return sums, tl.load(stats_ptr + padded * tiles + at, mask=mask, other=0.0)


@triton.jit
def _rotate_first_head(x, position, channels, rope_ptr, POSITIONS, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                       DIM_HEAD: tl.constexpr):  # fmt: skip
    """Turns neighbouring channels of head 0 by the angle of the row's position; the other heads stay."""
    even, odd = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_N // 2, 2)))
    pair = tl.min(channels) // 2 + tl.arange(0, BLOCK_N // 2)
    at = position[:, None] * (DIM_HEAD // 2) + pair[None, :]
    turns = (pair < DIM_HEAD // 2)[None, :]
    cosine = tl.load(rope_ptr + at, mask=turns, other=1.0)
    sine = tl.load(rope_ptr + POSITIONS * (DIM_HEAD // 2) + at, mask=turns, other=0.0)
    turned = tl.join(even * cosine - odd * sine, odd * cosine + even * sine)
    return tl.reshape(turned, (BLOCK_M, BLOCK_N))


@triton.jit(do_not_specialize=["M", "tiles"])
def wide_qkv_kernel(
    a, stats_ptr, w, folded_ptr, rope_ptr, q_ptr, arena_ptr, starts_ptr, counts_ptr, steps_ptr, here_ptr,
    M, padded, tiles, steps_n, positions, layer_offset, step_stride,
    K: tl.constexpr, HEADS: tl.constexpr, DIM_HEAD: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr,
    EPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    INNER: tl.constexpr = HEADS * DIM_HEAD
    first_row, first_column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    _wait(PDL)
    total = _product(a, w, first_row, first_column, K, BLOCK_M, BLOCK_N, BLOCK_K)
    _let_next_start(PDL)
    keep = rows < M
    group = tl.where(keep, rows // CHUNK, 0)
    frame = rows - group * CHUNK
    step = _load_step(steps_ptr)
    weighted, shift = _load_folded(folded_ptr, step, columns, steps_n, 3 * INNER)
    sums, squares = _load_sums(stats_ptr, rows, padded, tiles, MOST)
    x = _unfold(total, sums, squares, weighted, shift, K, EPS)
    part = first_column // INNER  # tiles do not cross the border of queries, keys and values
    PIECE: tl.constexpr = BLOCK_N if BLOCK_N < DIM_HEAD else DIM_HEAD  # neighbours in a page
    channels = tl.multiple_of(first_column % INNER, BLOCK_N) + tl.arange(0, BLOCK_N)
    if (part < 2) & (first_column % INNER < DIM_HEAD):
        position = tl.minimum(tl.load(starts_ptr + group) + frame, positions - 1)
        x = _rotate_first_head(x, position, channels, rope_ptr, positions, BLOCK_M, BLOCK_N, DIM_HEAD)
    if part == 0:
        tl.store(
            q_ptr + rows[:, None] * INNER + channels[None, :],
            x.to(q_ptr.dtype.element_ty),
            mask=keep[:, None],
        )
    else:
        keep = keep & (frame < tl.load(counts_ptr + group))
        page = tl.load(here_ptr + group) + step.to(tl.int64) * step_stride + layer_offset
        row_at = tl.multiple_of(page + (part - 1) * (HEADS * CHUNK * DIM_HEAD) + frame * DIM_HEAD, 16)
        inside = channels // DIM_HEAD * (CHUNK * DIM_HEAD) + channels % DIM_HEAD
        inside = tl.max_contiguous(tl.multiple_of(inside, PIECE), PIECE)
        tl.store(
            arena_ptr + row_at[:, None] + inside[None, :],
            x.to(arena_ptr.dtype.element_ty),
            mask=keep[:, None],
        )


@triton.jit(do_not_specialize=["M"])
def wide_add_kernel(
    a, w, bias_ptr, gate_ptr, scale_ptr, hidden_ptr, scaled_ptr, stats_ptr, steps_ptr, M, padded,
    N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    first_row, first_column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    _wait(PDL)
    total = _product(a, w, first_row, first_column, K, BLOCK_M, BLOCK_N, BLOCK_K)
    _let_next_start(PDL)
    keep = rows < M
    at = rows[:, None] * N + columns[None, :]
    step = _load_step(steps_ptr)
    gate = tl.load(gate_ptr + step[:, None] * N + columns[None, :])
    scale = tl.load(scale_ptr + step[:, None] * N + columns[None, :])
    bias = tl.load(bias_ptr + columns)
    x = tl.load(hidden_ptr + at, mask=keep[:, None], other=0.0) + gate * (total + bias[None, :])
    tl.store(hidden_ptr + at, x, mask=keep[:, None])
    _store_normed(x, scale, rows, columns, keep, scaled_ptr, stats_ptr, padded, tl.program_id(1), N, TILES)


@triton.jit
def wide_attention_kernel(
    q_ptr, out_ptr, arena_ptr, starts_ptr, counts_ptr, steps_ptr, table_ptr, pages, layer_offset, step_stride, scale,
    HEADS: tl.constexpr, DIM_HEAD: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, PAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """All frames of a chunk for one head; ``PAGES`` pages at once, each padded to ``BLOCK_N`` keys."""
    group = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    length = tl.load(starts_ptr + group) + tl.load(counts_ptr + group)
    inner = tl.load(steps_ptr + group).to(tl.int64) * step_stride + layer_offset + head * (CHUNK * DIM_HEAD)
    frame = tl.arange(0, BLOCK_Q)
    keep = frame < CHUNK
    channel = tl.arange(0, DIM_HEAD)
    at = (group * CHUNK + frame)[:, None] * (HEADS * DIM_HEAD) + head * DIM_HEAD + channel[None, :]
    number = tl.arange(0, PAGES * BLOCK_N)
    key = number % BLOCK_N
    page = number // BLOCK_N
    _wait(PDL)
    q = tl.load(q_ptr + at, mask=keep[:, None], other=0.0)
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, DIM_HEAD), tl.float32)
    for first in range(0, tl.cdiv(length, CHUNK), PAGES):
        valid = (key < CHUNK) & ((first + page) * CHUNK + key < length)
        row = tl.load(table_ptr + group * pages + first + page, mask=valid, other=0) + inner + key * DIM_HEAD
        row = tl.multiple_of(row, 16)
        k = tl.load(arena_ptr + row[:, None] + channel[None, :], mask=valid[:, None], other=0.0)
        values = arena_ptr + HEADS * CHUNK * DIM_HEAD
        v = tl.load(values + row[:, None] + channel[None, :], mask=valid[:, None], other=0.0)
        score = tl.dot(q, k.T, input_precision="ieee") * scale
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
