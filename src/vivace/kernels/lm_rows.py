"""Triton kernels of the speech LM for a batch of rows with a paged key-value cache.

Plain versions, which are the definition: ``vivace.kernels.reference``. Every kernel works on *graph rows*
``0 … rows - 1`` and finds the row slot of each in ``slots`` (int32, -1 = empty), so that one captured graph serves any
choice of slots. A row that is empty, has stopped or has no tokens left makes no progress and stores nothing.

The residual stream is float32 whatever the weights' dtype: its rounding would otherwise be the largest error.

``PDL`` (Hopper and later): a kernel starts while the one before still runs, loads its weights, and only then waits for
the other's results.
"""
# ruff: noqa: ANN001, ANN201, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


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
    x, delta, weight, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    """``x += delta`` (float32, in place); ``out = x / sqrt(mean(x²) + eps) * weight``; grid ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    gain = tl.load(weight + k, k < H, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * H + k, k < H, other=0.0)
    if ADD:
        value += tl.load(delta + row * H + k, k < H, other=0.0).to(tl.float32)
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
def turned(qkv, bias, column, cos, sin, HALF: tl.constexpr):
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
    q1, q2 = turned(mine, bias, (head * D)[:, None], cosine[None, :], sine[None, :], HALF)
    kind = pool.dtype.element_ty
    q = tl.reshape(tl.permute(tl.join(q1, q2), (0, 2, 1)), (GROUP_PAD, D)).to(kind)
    d = tl.arange(0, D)
    key_column = (HEADS + kv_head) * D + tl.zeros((1,), tl.int32)
    k1, k2 = turned(mine, bias, key_column, cosine, sine, HALF)
    value_column = (HEADS + KV_HEADS + kv_head) * D + d
    v_new = tl.load(mine + value_column).to(tl.float32) + tl.load(bias + value_column).to(tl.float32)
    k1, k2, v_new = k1.to(kind), k2.to(kind), v_new.to(kind)
    if split == 0:
        page = tl.load(table + slot * table_stride + past // PAGE, live, other=0).to(tl.int64)
        here = pool + ((page * KV_HEADS + kv_head) * PAGE + past % PAGE) * D
        tl.store(here + h, k1, live)
        tl.store(here + HALF + h, k2, live)
        tl.store(here + plane + d, v_new, live)

    in_log2 = scale * LOG2E
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
def combined(part, meta, row, k, ok, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
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
    """Joins the parts of ``attend_kernel`` into ``out [rows, HEADS, D]``; grid ``(rows, cdiv(HEADS D, BLOCK))``."""
    row = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    joined = combined(part, meta, row, k, k < HEADS * D, HEADS, D, SPLITS)
    tl.store(out + row.to(tl.int64) * HEADS * D + k, joined.to(out.dtype.element_ty), k < HEADS * D)
