"""Triton kernels behind the library's products; ``dit_library`` launches them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, N803, D103
from __future__ import annotations

import triton
import triton.language as tl

from vivace.kernels.dit_kernels import _let_next_start, _load_folded, _load_step, _unfold, _wait
from vivace.kernels.dit_wide_kernels import _load_sums


@triton.jit(do_not_specialize=["M", "tiles"])
def library_qkv_kernel(
    total_ptr, stats_ptr, folded_ptr, rope_ptr, q_ptr, arena_ptr, starts_ptr, counts_ptr, steps_ptr, here_ptr,
    M, padded, tiles, steps_n, positions, layer_offset, step_stride,
    K: tl.constexpr, HEADS: tl.constexpr, DIM_HEAD: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr,
    EPS: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One head of queries, keys or values."""
    INNER: tl.constexpr = HEADS * DIM_HEAD
    part = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, DIM_HEAD)
    first = tl.program_id(1) * DIM_HEAD
    keep = rows < M
    group = tl.where(keep, rows // CHUNK, 0)
    frame = rows - group * CHUNK
    _wait(PDL)
    step = _load_step(steps_ptr)
    weighted, shift = _load_folded(folded_ptr, step, first + channel, steps_n, 3 * INNER)
    sums, squares = _load_sums(stats_ptr, tl.where(keep, rows, 0), padded, tiles, MOST)
    row_at = total_ptr + rows[:, None] * (3 * INNER) + first
    total = tl.load(row_at + channel[None, :], mask=keep[:, None], other=0.0).to(tl.float32)
    x = _unfold(total, sums, squares, weighted, shift, K, EPS)
    if (part < 2) & (head == 0):
        neighbour = channel ^ 1
        weighted, shift = _load_folded(folded_ptr, step, first + neighbour, steps_n, 3 * INNER)
        total = tl.load(row_at + neighbour[None, :], mask=keep[:, None], other=0.0).to(tl.float32)
        y = _unfold(total, sums, squares, weighted, shift, K, EPS)
        position = tl.minimum(tl.load(starts_ptr + group) + frame, positions - 1)
        at = rope_ptr + position[:, None] * (DIM_HEAD // 2) + channel[None, :] // 2
        sine = tl.load(at + positions * (DIM_HEAD // 2))
        x = x * tl.load(at) + y * tl.where(channel[None, :] % 2 == 0, -sine, sine)
    _let_next_start(PDL)
    if part == 0:
        to = q_ptr + rows[:, None] * INNER + first + channel[None, :]
        tl.store(to, x.to(q_ptr.dtype.element_ty), mask=keep[:, None])
    else:
        keep = keep & (frame < tl.load(counts_ptr + group))
        page = tl.load(here_ptr + group) + step.to(tl.int64) * step_stride + layer_offset
        page += ((part - 1) * HEADS + head) * (CHUNK * DIM_HEAD)
        at = tl.multiple_of(page + frame * DIM_HEAD, 16)
        tl.store(
            arena_ptr + at[:, None] + channel[None, :], x.to(arena_ptr.dtype.element_ty), mask=keep[:, None]
        )


@triton.jit(do_not_specialize=["M"])
def library_add_kernel(
    total_ptr, bias_ptr, gate_ptr, scale_ptr, hidden_ptr, scaled_ptr, stats_ptr, steps_ptr, M, padded,
    N: tl.constexpr, EPS: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, N)
    keep = rows < M
    at = rows[:, None] * N + columns[None, :]
    bias = tl.load(bias_ptr + columns)
    _wait(PDL)
    step = _load_step(steps_ptr)
    gate = tl.load(gate_ptr + step[:, None] * N + columns[None, :])
    scale = tl.load(scale_ptr + step[:, None] * N + columns[None, :])
    x = tl.load(hidden_ptr + at, mask=keep[:, None], other=0.0)
    total = tl.load(total_ptr + at, mask=keep[:, None], other=0.0).to(tl.float32)
    _let_next_start(PDL)
    x += gate * (total + bias[None, :])
    tl.store(hidden_ptr + at, x, mask=keep[:, None])
    x -= (tl.sum(x, 1) / N)[:, None]
    inverse = tl.rsqrt(tl.sum(x * x, 1) / N + EPS)
    x = x * inverse[:, None] * scale
    tl.store(scaled_ptr + at, x.to(scaled_ptr.dtype.element_ty), mask=keep[:, None])
    # Whoever ends the norm finds mean 0 and deviation 1.
    nothing = tl.zeros((BLOCK_M,), tl.float32)
    tl.store(stats_ptr + rows, nothing, mask=keep)
    tl.store(stats_ptr + padded + rows, nothing + N * (1.0 - EPS), mask=keep)
