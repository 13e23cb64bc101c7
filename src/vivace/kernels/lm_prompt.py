"""Triton kernels of the speech LM for a prompt, and those that take commands and give results.

A prompt is many new positions of one row; ``place`` int32 ``[2]`` holds its slot and how many positions are no padding.
"""
# ruff: noqa: ANN001, ANN201, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from vivace.kernels.lm_rows import LOG2E, turned


@triton.jit
def embed_prompt_kernel(text, speech, ids, x, TEXT_ROWS, H: tl.constexpr, BLOCK: tl.constexpr):
    """``x[i]``, float32, is the text row ``ids[i]``, or from ``TEXT_ROWS`` on a speech row; grid ``(positions,)``."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    at = tl.load(ids + row).to(tl.int64)
    if at < TEXT_ROWS:
        value = tl.load(text + at * H + k, k < H).to(tl.float32)
    else:
        value = tl.load(speech + (at - TEXT_ROWS) * H + k, k < H).to(tl.float32)
    tl.store(x + row * H + k, value, k < H)


@triton.jit
def prompt_write_kernel(
    qkv,
    bias,
    cos,
    sin,
    pool,
    table,
    place,
    length,
    queries,
    plane,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_PAD: tl.constexpr,
):
    """Bias and rotary positions of many new positions of one row, whose keys and values enter the pool.

    ``place`` int32 ``[2]``: row slot and number of positions; those from there on are padding. Grid ``(positions,)``.
    """
    i = tl.program_id(0)
    HALF: tl.constexpr = D // 2
    slot = tl.load(place).to(tl.int64)
    ok = i < tl.load(place + 1)
    at = tl.load(length + slot) + tl.where(ok, i, 0)
    h = tl.arange(0, HALF)
    cosine = tl.load(cos + at * HALF + h)
    sine = tl.load(sin + at * HALF + h)
    mine = qkv + i.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D)
    head = tl.arange(0, HEADS_PAD)
    turning = tl.minimum(head, HEADS + KV_HEADS - 1)
    first, second = turned(mine, bias, (turning * D)[:, None], cosine[None, :], sine[None, :], HALF)
    to_query = queries + i.to(tl.int64) * HEADS * D + (head * D)[:, None] + h[None, :]
    tl.store(to_query, first.to(queries.dtype.element_ty), (head < HEADS)[:, None])
    tl.store(to_query + HALF, second.to(queries.dtype.element_ty), (head < HEADS)[:, None])

    page = tl.load(table + slot * table_stride + at // PAGE, ok, other=0).to(tl.int64)
    kv_head = head - HEADS
    is_key = ok & (kv_head >= 0) & (kv_head < KV_HEADS)
    to_key = pool + ((page * KV_HEADS + kv_head) * PAGE + at % PAGE)[:, None] * D + h[None, :]
    kind = pool.dtype.element_ty
    tl.store(to_key, first.to(kind), is_key[:, None])
    tl.store(to_key + HALF, second.to(kind), is_key[:, None])
    d = tl.arange(0, D)
    column = (HEADS + KV_HEADS) * D + tl.arange(0, 16)[:, None] * D + d[None, :]
    own = tl.arange(0, 16)
    valid = (own < KV_HEADS)[:, None] & ok
    value = tl.load(mine + column, valid, other=0.0).to(tl.float32)
    value += tl.load(bias + column, valid, other=0.0).to(tl.float32)
    to_value = pool + plane + ((page * KV_HEADS + own) * PAGE + at % PAGE)[:, None] * D + d[None, :]
    tl.store(to_value, value.to(kind), valid)


@triton.jit
def prompt_attend_kernel(
    queries,
    pool,
    table,
    place,
    length,
    out,
    plane,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Causal attention of many new positions of one row to its past and to themselves, all of them in the pool.

    ``queries``, ``out [positions, HEADS, D]``; grid ``(cdiv(positions, BLOCK_M), HEADS)``.
    """
    head = tl.program_id(1)
    slot = tl.load(place).to(tl.int64)
    count = tl.load(place + 1)
    past = tl.load(length + slot)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    at = (i.to(tl.int64)[:, None] * HEADS + head) * D + d[None, :]
    q = tl.load(queries + at, (i < count)[:, None], other=0.0)
    in_log2 = scale * LOG2E
    most = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    end = past + tl.minimum((tl.program_id(0) + 1) * BLOCK_M, count)
    for first in tl.range(0, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        page = tl.load(table + slot * table_stride + t // PAGE, t < end, other=0).to(tl.int64)
        start = ((page * KV_HEADS + kv_head) * PAGE + t % PAGE) * D
        keys = tl.load(pool + start[None, :] + d[:, None], (t < end)[None, :], other=0.0)
        values = tl.load(pool + plane + start[:, None] + d[None, :], (t < end)[:, None], other=0.0)
        scores = tl.dot(q, keys, input_precision="ieee") * in_log2
        # Padding sees the first position, so that it stays finite.
        seen = (t[None, :] <= (past + i)[:, None]) & (t < end)[None, :]
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        fade = tl.exp2(most - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        most = higher
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), (i < count)[:, None])


@triton.jit
def begin_kernel(commands, slots, remaining, kind, min_place, out_count):
    """What the host asks of each row for this launch; grid ``(rows,)``.

    ``commands`` int64 ``[rows, 4]``: slot or -1, tokens to make at most, kind, least place.
    """
    row = tl.program_id(0)
    slot = tl.load(commands + row * 4)
    tl.store(slots + row, slot.to(tl.int32))
    if slot >= 0:
        tl.store(remaining + slot, tl.load(commands + row * 4 + 1).to(tl.int32))
        tl.store(kind + slot, tl.load(commands + row * 4 + 2).to(tl.int32))
        tl.store(min_place + slot, tl.load(commands + row * 4 + 3))
        tl.store(out_count + slot, 0)


@triton.jit
def report_kernel(
    slots, stop, out, out_count, launches, results, out_capacity, ROWS, DEPTH, WIDTH: tl.constexpr
):
    """Stop reason, count and ids of each row into ``results [DEPTH, ROWS, 2 + out_capacity]``; grid ``(rows,)``.

    ``launches`` int64 ``[1]`` says which of the ``DEPTH``, so that the copy of an earlier launch may still run.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    turn = tl.load(launches) % DEPTH
    to = results + (turn * ROWS + row) * (2 + out_capacity)
    if slot >= 0:
        made = tl.load(out_count + slot)
        tl.store(to, tl.load(stop + slot))
        tl.store(to + 1, made)
        i = tl.arange(0, WIDTH)
        ok = (i < made) & (i < out_capacity)
        tl.store(to + 2 + i, tl.load(out + slot.to(tl.int64) * out_capacity + i, ok, other=0), ok)
    else:
        tl.store(to + 1, 0)


@triton.jit
def prompt_begin_kernel(
    header,
    place_of_prompt,
    slots,
    token,
    length,
    place,
    min_place,
    kind,
    seed,
    top_p,
    top_k,
    win_size,
    tau_r,
    temperature,
    recent,
    decoded,
    stop,
    remaining,
    out_count,
    RING: tl.constexpr,
):
    """A row's whole state from the host's ``header`` (see ``RowPrompt.packet``); grid ``(1,)``."""
    slot = tl.load(header)
    tl.store(slots, slot.to(tl.int32))
    tl.store(place_of_prompt, tl.maximum(slot, 0).to(tl.int32))
    tl.store(place_of_prompt + 1, tl.where(slot >= 0, tl.load(header + 1), 0).to(tl.int32))
    if slot >= 0:
        tl.store(length + slot, tl.load(header + 2).to(tl.int32))
        tl.store(place + slot, tl.load(header + 3))
        tl.store(min_place + slot, tl.load(header + 4))
        tl.store(kind + slot, tl.load(header + 5).to(tl.int32))
        tl.store(seed + slot, tl.load(header + 6))
        tl.store(top_p + slot, tl.load(header + 7).to(tl.float64, bitcast=True).to(tl.float32))
        tl.store(top_k + slot, tl.load(header + 8).to(tl.int32))
        tl.store(win_size + slot, tl.load(header + 9).to(tl.int32))
        tl.store(tau_r + slot, tl.load(header + 10).to(tl.float64, bitcast=True))
        tl.store(temperature + slot, tl.load(header + 11).to(tl.float64, bitcast=True).to(tl.float32))
        tl.store(decoded + slot, tl.load(header + 12).to(tl.int32))
        tl.store(remaining + slot, tl.load(header + 13).to(tl.int32))
        tl.store(stop + slot, 0)
        tl.store(out_count + slot, 0)
        tl.store(token + slot, 0)
        i = tl.arange(0, RING)
        tl.store(recent + slot * RING + i, tl.load(header + 14 + i).to(tl.int32))


@triton.jit
def prompt_end_kernel(place_of_prompt, length):
    """Counts all but the last of the new positions; drawing a token counts that one. Grid ``(1,)``."""
    slot = tl.load(place_of_prompt)
    count = tl.load(place_of_prompt + 1)
    tl.store(length + slot, tl.load(length + slot) + count - 1, count > 0)
