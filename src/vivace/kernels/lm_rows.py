"""Triton kernels of the speech LM for a batch of rows with a paged key-value cache.

Plain versions, which are the definition: ``vivace.kernels.reference``. Every kernel works on *graph rows*
``0 … rows - 1`` and finds the row slot of each in ``slots`` (int32, -1 = empty), so that one captured graph serves any
choice of slots. A row that is empty, has stopped or has no tokens left makes no progress and stores nothing.

The residual stream is float32 whatever the weights' dtype: its rounding would otherwise be the largest error.

``PDL`` (Hopper and later): a kernel starts while the one before still runs, loads its weights, and only then waits for
the other's results.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def is_live(slots, stop, remaining, row):
    """The row's slot (0 where there is none) and whether the row makes progress."""
    slot = tl.load(slots + row)
    safe = tl.maximum(slot, 0)
    live = (slot >= 0) & (tl.load(stop + safe) == 0) & (tl.load(remaining + safe) > 0)
    return safe.to(tl.int64), live


@triton.jit
def embed_kernel(table, token, slots, x, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``x[row] = table[token[slots[row]]]`` in float32; grid ``(rows,)``."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.maximum(tl.load(slots + row), 0)
    k = tl.arange(0, BLOCK)
    value = tl.load(table + tl.load(token + slot).to(tl.int64) * H + k, k < H)
    tl.store(x + row * H + k, value.to(tl.float32), k < H)


@triton.jit
def add_norm_kernel(
    x,
    delta,
    weight,
    out,
    eps,
    part_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``x += delta`` (float32, in place); ``out = x / sqrt(mean(x²) + eps) * weight``; grid ``(rows,)``.

    ``delta`` comes in ``PARTS`` (0: there is none) that are added in order.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    gain = tl.load(weight + k, k < H, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * H + k, k < H, other=0.0)
    for part in tl.static_range(PARTS):
        value += tl.load(delta + part * part_stride + row * H + k, k < H, other=0.0).to(tl.float32)
    if PARTS > 0:
        tl.store(x + row * H + k, value, k < H)
    scale = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    tl.store(out + row * H + k, (value * scale * gain).to(out.dtype.element_ty), k < H)


@triton.jit
def silu_mul_kernel(x, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``out[r] = silu(x[r, :size]) * x[r, size:]``; grid ``(rows, cdiv(size, BLOCK))``."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(x + row * 2 * size + k, k < size, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + k, k < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + k, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), k < size)


@triton.jit
def _turned(qkv, bias, column, cos, sin, HALF: tl.constexpr):
    """Two halves of heads whose first columns are ``column [n, 1]`` (or ``[1]``), with bias, turned by the angles."""
    h = tl.arange(0, HALF)
    if len(column.shape) == 2:
        at = column + h[None, :]
    else:
        at = column + h
    first = tl.load(qkv + at).to(tl.float32) + tl.load(bias + at).to(tl.float32)
    second = tl.load(qkv + at + HALF).to(tl.float32) + tl.load(bias + at + HALF).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def attend_kernel(
    qkv,
    bias,
    cos,
    sin,
    pool,
    table,
    slots,
    length,
    stop,
    remaining,
    out,
    meta,
    plane,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Bias, rotary positions, key-value write and attention of one new position per row.

    ``qkv [rows, (HEADS + 2 KV_HEADS) D]`` without bias; ``pool`` points at one layer ``[2, pages, KV_HEADS, PAGE, D]``
    with ``plane`` elements between keys and values; ``cos``, ``sin`` float32 ``[positions, D / 2]``. Grid
    ``(rows, KV_HEADS, SPLITS)``: each program takes the query heads of one key-value head and one part of the past;
    the first part also takes the new position. One part: ``out [rows, HEADS, D]``. Several: float32
    ``out [rows, SPLITS, HEADS, D]`` not normalised, and ``meta [rows, SPLITS, HEADS, 2]`` (maximum in log2, sum).
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP_PAD: tl.constexpr = 16
    HALF: tl.constexpr = D // 2
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot, live = is_live(slots, stop, remaining, row)
    past = tl.where(live, tl.load(length + slot), 0)
    h = tl.arange(0, HALF)
    cosine = tl.load(cos + past * HALF + h)
    sine = tl.load(sin + past * HALF + h)
    mine = qkv + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D)

    g = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + tl.minimum(g, GROUP - 1)
    q1, q2 = _turned(mine, bias, (head * D)[:, None], cosine[None, :], sine[None, :], HALF)
    kind = pool.dtype.element_ty
    q = tl.reshape(tl.permute(tl.join(q1, q2), (0, 2, 1)), (GROUP_PAD, D)).to(kind)
    d = tl.arange(0, D)
    key_column = (HEADS + kv_head) * D + tl.zeros((1,), tl.int32)
    k1, k2 = _turned(mine, bias, key_column, cosine, sine, HALF)
    value_column = (HEADS + KV_HEADS + kv_head) * D + d
    v_new = tl.load(mine + value_column).to(tl.float32) + tl.load(bias + value_column).to(tl.float32)
    k1, k2, v_new = k1.to(kind), k2.to(kind), v_new.to(kind)
    if split == 0:
        page = tl.load(table + slot * table_stride + past // PAGE, live, other=0).to(tl.int64)
        here = pool + ((page * KV_HEADS + kv_head) * PAGE + past % PAGE) * D
        tl.store(here + h, k1, live)
        tl.store(here + HALF + h, k2, live)
        tl.store(here + plane + d, v_new, live)

    in_log2 = scale * _LOG2E
    q1, q2 = q1.to(kind).to(tl.float32), q2.to(kind).to(tl.float32)
    own = tl.sum(q1 * k1.to(tl.float32)[None, :] + q2 * k2.to(tl.float32)[None, :], 1) * in_log2
    most = tl.where(split == 0, own, -float("inf"))
    total = tl.where(split == 0, 1.0, 0.0) + tl.zeros((GROUP_PAD,), tl.float32)
    acc = total[:, None] * v_new.to(tl.float32)[None, :]
    blocks = tl.cdiv(past, BLOCK_T)
    share = tl.cdiv(blocks, SPLITS)
    for block in tl.range(split * share, tl.minimum(blocks, (split + 1) * share)):
        t = block * BLOCK_T + tl.arange(0, BLOCK_T)
        page = tl.load(table + slot * table_stride + t // PAGE, t < past, other=0).to(tl.int64)
        start = ((page * KV_HEADS + kv_head) * PAGE + t % PAGE) * D
        keys = tl.load(pool + start[None, :] + d[:, None], (t < past)[None, :], other=0.0)
        values = tl.load(pool + plane + start[:, None] + d[None, :], (t < past)[:, None], other=0.0)
        scores = tl.dot(q, keys, input_precision="ieee") * in_log2
        scores = tl.where((t < past)[None, :], scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        fade = tl.exp2(most - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(kind), values, input_precision="ieee")
        most = higher

    real = g < GROUP
    if SPLITS == 1:
        at = (row.to(tl.int64) * HEADS + head) * D
        acc = acc / total[:, None]
        tl.store(out + at[:, None] + d[None, :], acc.to(out.dtype.element_ty), real[:, None])
    else:
        part = (row.to(tl.int64) * SPLITS + split) * HEADS + head
        tl.store(out + part[:, None] * D + d[None, :], acc, real[:, None])
        tl.store(meta + part * 2, most, real)
        tl.store(meta + part * 2 + 1, total, real)


@triton.jit
def _combined(part, meta, row, k, ok, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    """Columns ``k`` of the attention's result, float32, from the parts that ``attend_kernel`` left."""
    first = row.to(tl.int64) * SPLITS * HEADS
    most = tl.full(k.shape, -float("inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        most = tl.maximum(most, tl.load(meta + (first + split * HEADS + k // D) * 2, ok, other=0.0))
    acc = tl.zeros(k.shape, tl.float32)
    total = tl.zeros(k.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        at = first + split * HEADS
        weight = tl.exp2(tl.load(meta + (at + k // D) * 2, ok, other=0.0) - most)
        total += weight * tl.load(meta + (at + k // D) * 2 + 1, ok, other=1.0)
        acc += weight * tl.load(part + at * D + k, ok, other=0.0)
    return acc / total


@triton.jit
def combine_kernel(
    part,
    meta,
    out,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Joins the parts of ``attend_kernel`` into ``out [rows, HEADS, D]``; grid ``(rows,)``."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    joined = _combined(part, meta, row, k, k < HEADS * D, HEADS, D, SPLITS)
    tl.store(out + row.to(tl.int64) * HEADS * D + k, joined.to(out.dtype.element_ty), k < HEADS * D)


@triton.jit
def norm_linear_kernel(
    x,
    gain,
    weight,
    out,
    N,
    K,
    eps,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out = norm(x) @ weight.T`` for few rows, the norm computed anew by each program.

    Grid ``(cdiv(N, BLOCK_N), rows / ROWS)``; ``x`` float32 ``[rows, K]``, ``weight [N, K]``. ``GATED``: the weight
    ``[2 N, K]`` holds gate and up, and ``out`` is ``silu(gate) * up``. The whole width of a weight row is in flight at
    once: at one row nothing else matters.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] & (k < K)[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    tile = tl.load(weight + at, inside, other=0.0)
    if GATED:
        up_tile = tl.load(weight + N.to(tl.int64) * K + at, inside, other=0.0)
    g = tl.load(gain + k, k < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(1) * ROWS
    for index in tl.static_range(ROWS):
        row = first + index
        value = tl.load(x + row * K + k, k < K, other=0.0)
        scale = tl.rsqrt(tl.sum(value * value, 0) / K + eps)
        value = value * g * scale
        acc = tl.sum(tile.to(tl.float32) * value[None, :], 1)
        if GATED:
            acc = acc * tl.sigmoid(acc) * tl.sum(up_tile.to(tl.float32) * value[None, :], 1)
        tl.store(out + row * N + n, acc.to(out.dtype.element_ty), n < N)


@triton.jit
def linear_add_kernel(
    x,
    meta,
    weight,
    residual,
    N,
    K,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """``residual += x @ weight.T`` for few rows; grid ``(cdiv(N, BLOCK_N), rows / ROWS)``.

    ``weight [N, K]``, ``residual`` float32 ``[rows, N]``. ``SPLITS`` 0: ``x [rows, K]``. Otherwise ``x`` and ``meta``
    are the parts that ``attend_kernel`` left, joined here by each program.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] & (k < K)[None, :]
    tile = tl.load(weight + n.to(tl.int64)[:, None] * K + k[None, :], inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(1) * ROWS
    for index in tl.static_range(ROWS):
        row = first + index
        if SPLITS > 0:
            value = _combined(x, meta, row, k, k < K, HEADS, D, SPLITS)
        else:
            value = tl.load(x + row * K + k, k < K, other=0.0).to(tl.float32)
        value = tl.where(k < K, value, 0.0)
        acc = tl.sum(tile.to(tl.float32) * value[None, :], 1)
        old = tl.load(residual + row * N + n, n < N, other=0.0)
        tl.store(residual + row * N + n, old + acc, n < N)


@triton.jit
def dot_kernel(
    x,
    weight,
    out,
    rows,
    N,
    K,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out[part] = x @ weight.T`` over one part of the columns, on the matrix units.

    ``x [rows, K]``, ``weight [N, K]``, ``out [parts, rows, N]``; a part is ``STEPS * BLOCK_K`` columns. Grid
    ``(cdiv(N, BLOCK_N), cdiv(rows, M), parts)``. ``GATED``: the weight ``[2 N, K]`` holds gate and up, ``out`` is
    ``silu(gate) * up``, and there is one part.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * M + tl.arange(0, M)
    first = tl.program_id(2) * STEPS * BLOCK_K
    acc = tl.zeros((M, BLOCK_N), tl.float32)
    up = tl.zeros((M, BLOCK_N), tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for step in tl.range(0, STEPS):
        k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
        value = tl.load(x + m[:, None] * K + k[None, :], (m < rows)[:, None] & (k < K)[None, :], other=0.0)
        at = n.to(tl.int64)[None, :] * K + k[:, None]
        inside = (n < N)[None, :] & (k < K)[:, None]
        acc += tl.dot(value, tl.load(weight + at, inside, other=0.0), input_precision="ieee")
        if GATED:
            tile = tl.load(weight + N.to(tl.int64) * K + at, inside, other=0.0)
            up += tl.dot(value, tile, input_precision="ieee")
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
    to = out + (tl.program_id(2).to(tl.int64) * rows + m)[:, None] * N + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), (m < rows)[:, None] & (n < N)[None, :])


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
    first, second = _turned(mine, bias, (turning * D)[:, None], cosine[None, :], sine[None, :], HALF)
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
    in_log2 = scale * _LOG2E
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
    """A row's whole state from the host's ``header`` (see ``vivace.models.lm_paged``); grid ``(1,)``."""
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
