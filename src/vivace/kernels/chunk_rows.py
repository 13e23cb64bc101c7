"""Triton kernels of CosyVoice 2's U-Net, chunks of many streams and successive ones of one: what they keep is in pages.

Rows are the two guidance branches of a chunk, one behind the other; ``packet`` int64 ``[chunks, width]`` holds of each
its first frame, its valid frames, its own page, the page before, how many chunks of its stream stand before it in this
launch, and from column ``TABLE`` on all pages. What those before it make is taken from where they are computed, since
their pages are written meanwhile. ``step`` int64 ``[1]`` is the Euler step. Plain versions, which are the definition:
``chunk_reference``.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vivace.kernels.lm_rows import LOG2E
from vivace.kernels.unet_rows import mish

_START, _COUNT, _HERE, _BEFORE, _BEHIND = (tl.constexpr(column) for column in range(5))


@triton.jit
def join_context_kernel(
    x,
    contexts,
    packet,
    step,
    out,
    width,
    page_stride,
    step_stride,
    branch_stride,
    channels,
    first,
    CHUNK: tl.constexpr,
    C: tl.constexpr,
    BRANCHES: tl.constexpr,
    CONTEXT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out [rows, CONTEXT + CHUNK, C]``: the last inputs of the chunk before, then ``x [rows, CHUNK, C]``, whose own
    last ones go into the chunk's page. Grid ``(blocks, rows)``.

    ``contexts`` has ``channels`` for all convolutions, of which this one's begin at ``first``.
    """
    row = tl.program_id(1)
    stream, branch = row // BRANCHES, row % BRANCHES
    numbers = packet + stream * width
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < (CONTEXT + CHUNK) * C
    t, c = i // C, i % C
    offset = tl.load(step) * step_stride + branch * branch_stride + first
    before = contexts + tl.load(numbers + _BEFORE) * page_stride + offset
    here = contexts + tl.load(numbers + _HERE) * page_stride + offset
    is_past = t < CONTEXT
    base = row.to(tl.int64) * CHUNK * C
    value = tl.load(x + base + i - CONTEXT * C, inside & (t >= CONTEXT), other=0.0)
    is_near = tl.load(numbers + _BEHIND) > 0
    past = tl.load(before + t * channels + c, inside & is_past & (is_near == 0), other=0.0)
    near = x + base - BRANCHES * CHUNK * C + (CHUNK - CONTEXT) * C
    past = tl.where(is_near, tl.load(near + i, inside & is_past & is_near, other=0.0), past)
    value = tl.where(is_past, past, value)
    tl.store(out + row.to(tl.int64) * (CONTEXT + CHUNK) * C + i, value, inside)
    tl.store(here + (t - CHUNK) * channels + c, value, inside & (t >= CHUNK))


@triton.jit
def layer_norm_mish_kernel(
    y,
    bias,
    gain,
    offset,
    shift,
    step,
    residual,
    out,
    eps,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFTS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """``mish(layer_norm(y + bias))``, then ``shift[step]`` and ``residual``; grid ``(frames of all rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < C
    x = tl.load(y + row * C + c, inside, other=0.0).to(tl.float32)
    x += tl.load(bias + c, inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, 0) / C, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / C + eps)
    g = tl.load(gain + c, inside, other=0.0).to(tl.float32)
    z = mish(centred * scale * g + tl.load(offset + c, inside, other=0.0).to(tl.float32))
    if SHIFTS:
        z += tl.load(shift + tl.load(step) * C + c, inside, other=0.0).to(tl.float32)
    if ADDS:
        z += tl.load(residual + row * C + c, inside, other=0.0).to(tl.float32)
    tl.store(out + row * C + c, z.to(out.dtype.element_ty), inside)


@triton.jit
def _attended(q, keys, values, seen, most, total, acc, in_log2):
    """One block of keys ``[D, T]`` and values ``[T, D]`` into the running maximum, sum and mean."""
    scores = tl.dot(q, keys, input_precision="ieee") * in_log2
    scores = tl.where(seen[None, :], scores, -float("inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    fade = tl.exp2(most - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return higher, total, acc


@triton.jit
def attend_pages_kernel(
    qkv,
    pool,
    packet,
    step,
    out,
    width,
    page_stride,
    step_stride,
    side_stride,
    branch_stride,
    first,
    scale,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BRANCHES: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of a chunk to all earlier ones and to its own valid frames; its keys and values enter its page.

    ``qkv [rows, CHUNK, 3 HEADS D]``, ``out [rows, CHUNK, HEADS D]``. In a page ``[…, 2, branches, HEADS, CHUNK, D]``
    keys and values lie ``side_stride`` apart; those of this attention begin at ``first``. Grid
    ``(query blocks, HEADS, rows)``.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    stream, branch = row // BRANCHES, row % BRANCHES
    numbers = packet + stream * width
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    t, d = tl.arange(0, BLOCK_T), tl.arange(0, D)
    mine = qkv + row.to(tl.int64) * CHUNK * (3 * HEADS * D) + head * D
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    is_query = (m < CHUNK)[:, None]
    place = m[:, None] * (3 * HEADS * D) + d[None, :]
    q = tl.load(mine + place, is_query, other=0.0)
    own = tl.load(step) * step_stride + first + branch * branch_stride + head * (CHUNK * D)
    here = pool + tl.load(numbers + _HERE) * page_stride + own + m[:, None] * D + d[None, :]
    tl.store(here, tl.load(mine + HEADS * D + place, is_query, other=0.0), is_query)
    tl.store(here + side_stride, tl.load(mine + 2 * HEADS * D + place, is_query, other=0.0), is_query)

    in_log2 = scale * LOG2E
    most = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    behind = tl.load(numbers + _BEHIND).to(tl.int32)
    past = (tl.load(numbers + _START) // CHUNK).to(tl.int32) - behind
    there = t < CHUNK
    for number in tl.range(0, past):
        base = pool + tl.load(numbers + TABLE + number) * page_stride + own
        keys = tl.load(base + t[None, :] * D + d[:, None], there[None, :], other=0.0)
        values = tl.load(base + side_stride + t[:, None] * D + d[None, :], there[:, None], other=0.0)
        most, total, acc = _attended(q, keys, values, there, most, total, acc, in_log2)
    # Chunks of this launch: those before it, which are whole, then itself.
    for back in tl.range(behind, -1, -1):
        seen = t < tl.where(back > 0, CHUNK, tl.maximum(tl.load(numbers + _COUNT), 1).to(tl.int32))
        base = mine - back * (BRANCHES * CHUNK * 3 * HEADS * D) + HEADS * D
        keys = tl.load(base + t[None, :] * (3 * HEADS * D) + d[:, None], seen[None, :], other=0.0)
        values = tl.load(
            base + HEADS * D + t[:, None] * (3 * HEADS * D) + d[None, :], seen[:, None], other=0.0
        )
        most, total, acc = _attended(q, keys, values, seen, most, total, acc, in_log2)
    to = out + row.to(tl.int64) * CHUNK * (HEADS * D) + m[:, None] * (HEADS * D) + head * D + d[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), is_query)
