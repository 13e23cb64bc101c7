"""Triton kernels of CosyVoice-300M's U-Net: group norm with what surrounds it, sums that end where a row ends.

Frames lie behind each other, channels last; a row of the batch counts as far as ``counts`` says, and what is behind it
comes out as zero. Plain versions, which are the definition: ``unet_reference``.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mish(x):
    """``x * tanh(log(1 + exp(x)))``."""
    e = tl.exp(tl.minimum(x, 20.0))
    ratio = e * (e + 2.0)
    return tl.where(x > 20.0, x, x * (ratio / (ratio + 2.0)))


@triton.jit
def _tile(y, bias, base, t0, count, c, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK_T: tl.constexpr):
    """Frames ``t0 …`` of a group with their bias, zero behind the row's end; places and what is inside."""
    t = t0 + tl.arange(0, BLOCK_T)
    place = base + t.to(tl.int64)[:, None] * C + c[None, :]
    inside = (t < count)[:, None] & (tl.arange(0, c.shape[0]) < WIDTH)[None, :]
    x = tl.load(y + place, inside, other=0.0).to(tl.float32) + bias[None, :]
    return tl.where(inside, x, 0.0), place, inside


@triton.jit
def _store_tile(z, residual, out, place, inside, t0, frames, own, BLOCK_T: tl.constexpr, ADDS: tl.constexpr):
    """Frames ``t0 …`` of a group with their residual, zero behind the row's end."""
    if ADDS:
        z += tl.load(residual + place, inside, other=0.0).to(tl.float32)
    t = t0 + tl.arange(0, BLOCK_T)
    z = tl.where(inside, z, 0.0)
    tl.store(out + place, z.to(out.dtype.element_ty), (t < frames)[:, None] & own[None, :])


@triton.jit
def group_norm_mish_kernel(
    y,
    bias,
    gain,
    offset,
    counts,
    shift,
    step,
    residual,
    out,
    frames,
    eps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHIFTS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """``mish(group_norm(y + bias))`` of ``[rows, frames, C]``, then ``shift[step]`` and ``residual``; grid
    ``(groups, rows)``.

    ``WIDTH`` channels a group, ``PAD`` the power of two above; ``BLOCKS`` blocks of ``BLOCK_T`` frames.
    """
    group, row = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + row)
    channel = tl.arange(0, PAD)
    c = group * WIDTH + channel
    own = channel < WIDTH
    base = row.to(tl.int64) * frames * C
    b = tl.load(bias + c, own, other=0.0).to(tl.float32)
    g = tl.load(gain + c, own, other=0.0).to(tl.float32)
    o = tl.load(offset + c, own, other=0.0).to(tl.float32)
    added = tl.zeros((PAD,), tl.float32)
    if SHIFTS:
        added = tl.load(shift + tl.load(step) * C + c, own, other=0.0).to(tl.float32)
    size = (tl.maximum(count, 1) * WIDTH).to(tl.float32)
    # Blocks behind the first are read anew each time. Unrolled, four of them took minutes to compile.
    first, place, inside = _tile(y, b, base, 0, count, c, WIDTH, C, BLOCK_T)
    total = tl.sum(tl.sum(first, 1), 0)
    for block in tl.range(1, BLOCKS):
        x, _, _ = _tile(y, b, base, block * BLOCK_T, count, c, WIDTH, C, BLOCK_T)
        total += tl.sum(tl.sum(x, 1), 0)
    mean = total / size
    centred = tl.where(inside, first - mean, 0.0)
    squares = tl.sum(tl.sum(centred * centred, 1), 0)
    for block in tl.range(1, BLOCKS):
        x, _, other = _tile(y, b, base, block * BLOCK_T, count, c, WIDTH, C, BLOCK_T)
        x = tl.where(other, x - mean, 0.0)
        squares += tl.sum(tl.sum(x * x, 1), 0)
    scale = tl.rsqrt(squares / size + eps)
    z = mish(centred * scale * g[None, :] + o[None, :]) + added[None, :]
    _store_tile(z, residual, out, place, inside, 0, frames, own, BLOCK_T, ADDS)
    for block in tl.range(1, BLOCKS):
        t0 = block * BLOCK_T
        x, place_here, inside_here = _tile(y, b, base, t0, count, c, WIDTH, C, BLOCK_T)
        z = mish((x - mean) * scale * g[None, :] + o[None, :]) + added[None, :]
        _store_tile(z, residual, out, place_here, inside_here, t0, frames, own, BLOCK_T, ADDS)


@triton.jit
def masked_add_kernel(
    x,
    bias,
    counts,
    out,
    frames,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):
    """``out = x + bias`` of ``[rows, frames, C]``, zero behind each row's end; grid ``(blocks, rows)``."""
    row = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base = row.to(tl.int64) * frames * C
    inside = i < frames * C
    valid = inside & (i // C < tl.load(counts + row))
    value = tl.load(x + base + i, valid, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + i % C, valid, other=0.0).to(tl.float32)
    tl.store(out + base + i, tl.where(valid, value, 0.0).to(out.dtype.element_ty), inside)
