"""Triton kernels of CosyVoice-300M's speech LM for a batch of rows with a paged cache: attention over distances, norms.

As in ``lm_rows``: every kernel works on graph rows and finds the row slot of each in ``slots``; the residual stream is
float32. Plain versions, which are the definition: ``relative_reference``.
"""
# ruff: noqa: ANN001, ANN201, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vivace.kernels.lm_rows import LOG2E, is_live


@triton.jit
def add_layer_norm_kernel(
    x,
    delta,
    gain,
    offset,
    out,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """``x += delta`` (float32, in place); ``out`` is its layer norm; grid ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < H
    g = tl.load(gain + k, inside, other=0.0).to(tl.float32)
    b = tl.load(offset + k, inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * H + k, inside, other=0.0)
    if ADD:
        value += tl.load(delta + row * H + k, inside, other=0.0).to(tl.float32)
        tl.store(x + row * H + k, value, inside)
    centred = tl.where(inside, value - tl.sum(value, 0) / H, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / H + eps)
    tl.store(out + row * H + k, (centred * scale * g + b).to(out.dtype.element_ty), inside)


@triton.jit
def attend_distances_kernel(
    qkv,
    bias,
    u,
    v,
    distances,
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
    distance_stride,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Bias, key-value write and attention of one new position per row.

    The score of a key ``n`` positions back is ``(q + u) · k + (q + v) · distances[head, n]``. ``qkv [rows, 3 HEADS D]``
    without bias; ``u``, ``v [HEADS, D]``; ``pool``, ``out`` and ``meta`` as in ``lm_rows.attend_kernel``. Grid
    ``(rows, HEADS, SPLITS)``: each program takes one head and one part of the past; the first part also takes the new
    position.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, D)
    column = head * D + d
    q_bias = tl.load(bias + column).to(tl.float32)
    k_bias = tl.load(bias + HEADS * D + column).to(tl.float32)
    v_bias = tl.load(bias + 2 * HEADS * D + column).to(tl.float32)
    content_bias = tl.load(u + column).to(tl.float32)
    distance_bias = tl.load(v + column).to(tl.float32)
    distances += head.to(tl.int64) * distance_stride
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot, live = is_live(slots, stop, remaining, row)
    past = tl.where(live, tl.load(length + slot), 0)
    mine = qkv + row.to(tl.int64) * (3 * HEADS * D) + column
    kind = pool.dtype.element_ty
    query = tl.load(mine).to(tl.float32) + q_bias
    key = (tl.load(mine + HEADS * D).to(tl.float32) + k_bias).to(kind)
    value = (tl.load(mine + 2 * HEADS * D).to(tl.float32) + v_bias).to(kind)
    if split == 0:
        page = tl.load(table + slot * table_stride + past // PAGE, live, other=0).to(tl.int64)
        here = pool + ((page * HEADS + head) * PAGE + past % PAGE) * D + d
        tl.store(here, key, live)
        tl.store(here + plane, value, live)

    in_log2 = scale * LOG2E
    for_keys = (query + content_bias) * in_log2
    for_distances = (query + distance_bias) * in_log2
    at_zero = tl.load(distances + d).to(tl.float32)
    own = tl.sum(for_keys * key.to(tl.float32) + for_distances * at_zero, 0)
    most = tl.where(split == 0, own, -float("inf"))
    total = tl.where(split == 0, 1.0, 0.0)
    acc = total * value.to(tl.float32)
    blocks = tl.cdiv(past, BLOCK_T)
    share = tl.cdiv(blocks, SPLITS)
    for block in tl.range(split * share, tl.minimum(blocks, (split + 1) * share)):
        t = block * BLOCK_T + tl.arange(0, BLOCK_T)
        known = t < past
        page = tl.load(table + slot * table_stride + t // PAGE, known, other=0).to(tl.int64)
        start = ((page * HEADS + head) * PAGE + t % PAGE) * D
        keys = tl.load(pool + start[:, None] + d[None, :], known[:, None], other=0.0).to(tl.float32)
        values = tl.load(pool + plane + start[:, None] + d[None, :], known[:, None], other=0.0).to(tl.float32)
        back = tl.where(known, past - t, 0)
        places = tl.load(distances + back[:, None] * D + d[None, :]).to(tl.float32)
        scores = tl.sum(keys * for_keys[None, :] + places * for_distances[None, :], 1)
        scores = tl.where(known, scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 0))
        fade = tl.exp2(most - higher)
        weights = tl.exp2(scores - higher)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade + tl.sum(weights[:, None] * values, 0)
        most = higher

    if SPLITS == 1:
        at = (row.to(tl.int64) * HEADS + head) * D
        tl.store(out + at + d, (acc / total).to(out.dtype.element_ty))
    else:
        part = (row.to(tl.int64) * SPLITS + split) * HEADS + head
        tl.store(out + part * D + d, acc)
        tl.store(meta + part * 2, most)
        tl.store(meta + part * 2 + 1, total)
