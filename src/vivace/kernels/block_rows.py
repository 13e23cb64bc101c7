"""Triton kernels of the U-Nets' transformer blocks: products with the norm before them, or the sum behind them, inside.

A launch works on some hundred to a thousand rows of 256 numbers, so that the time is that of starting kernels and of
waiting for memory: few kernels, and each asks for its weights before it waits for what it works on. Plain versions,
which are the definition: ``unet_reference``.
"""
# ruff: noqa: ANN001, ANN201, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def block_norm_linear_kernel(
    x,
    gain,
    offset,
    weight,
    bias,
    out,
    rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out = layer_norm(x) @ weight.T + bias``, then GELU; ``x [rows, K]``, ``weight [N, K]``.

    Grid ``(cdiv(N, BLOCK_N), cdiv(rows, BLOCK_M))``; ``BLOCK_K`` is the power of two above ``K``.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    own = k < K
    tile = tl.load(weight + n[None, :] * K + k[:, None], (n < N)[None, :] & own[:, None], other=0.0)
    g = tl.load(gain + k, own, other=0.0).to(tl.float32)
    b = tl.load(offset + k, own, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + m[:, None] * K + k[None, :], (m < rows)[:, None] & own[None, :], other=0.0).to(
        tl.float32
    )
    centred = tl.where(own[None, :], value - (tl.sum(value, 1) / K)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / K + eps)
    y = (centred * scale[:, None] * g[None, :] + b[None, :]).to(tile.dtype)
    acc = tl.dot(y, tile, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, n < N, other=0.0).to(tl.float32)[None, :]
    if GELU:
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    to = out + m[:, None] * N + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), (m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def block_linear_add_kernel(
    x,
    weight,
    bias,
    residual,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """``residual += x @ weight.T + bias``; ``x [rows, K]``, ``weight [N, K]``, ``residual [rows, N]``.

    Grid ``(cdiv(N, BLOCK_N), cdiv(rows, BLOCK_M))``; ``BLOCK_K`` divides ``K``.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    is_row, is_column = (m < rows)[:, None], (n < N)[None, :]
    added = tl.load(bias + n, n < N, other=0.0).to(tl.float32)[None, :]
    from_x = x + m[:, None] * K + k[None, :]
    from_weight = weight + n[None, :] * K + k[:, None]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, K, BLOCK_K):
        value = tl.load(from_x + first, is_row, other=0.0)
        tile = tl.load(from_weight + first, is_column, other=0.0)
        acc = tl.dot(value, tile, acc, input_precision="ieee")
    to = residual + m[:, None] * N + n[None, :]
    before = tl.load(to, is_row & is_column, other=0.0).to(tl.float32)
    tl.store(to, (before + acc + added).to(residual.dtype.element_ty), is_row & is_column)
