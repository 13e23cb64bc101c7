"""Triton kernels of the speech LM for one row: products with their norms, sums and gates inside.

At one row a product is a race to read its weights, and every kernel of its own costs as much as it reads in a
microsecond. Several rows are programs of their own, each with the same sums in the same order.
"""
# ruff: noqa: ANN001, ANN201, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vivace.kernels.lm_rows import combined


@triton.jit
def norm_linear_kernel(
    x,
    gain,
    offset,
    weight,
    bias,
    out,
    N,
    K,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out = norm(x) @ weight.T`` for few rows, the norm computed anew by each program.

    The norm is the root mean square's, or with ``LAYER`` the layer norm with ``offset``; ``BIAS`` is added behind the
    product, then ``RELU``.

    Grid ``(cdiv(N, BLOCK_N), rows)``; ``x`` float32 ``[rows, K]``, ``weight [N, K]``. ``GATED``: the weight
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
    if LAYER:
        shift = tl.load(offset + k, k < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    value = tl.load(x + row * K + k, k < K, other=0.0)
    if LAYER:
        value = tl.where(k < K, value - tl.sum(value, 0) / K, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / K + eps)
    value = value * g * scale
    if LAYER:
        value += shift
    acc = tl.sum(tile.to(tl.float32) * value[None, :], 1)
    if GATED:
        acc = acc * tl.sigmoid(acc) * tl.sum(up_tile.to(tl.float32) * value[None, :], 1)
    if BIAS:
        acc += tl.load(bias + n, n < N, other=0.0).to(tl.float32)
    if RELU:
        acc = tl.maximum(acc, 0.0)
    tl.store(out + row * N + n, acc.to(out.dtype.element_ty), n < N)


@triton.jit
def linear_add_kernel(
    x,
    meta,
    weight,
    bias,
    residual,
    N,
    K,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``residual += x @ weight.T`` for few rows, and a ``BIAS``; grid ``(cdiv(N, BLOCK_N), rows)``.

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
    row = tl.program_id(1)
    if SPLITS > 0:
        value = combined(x, meta, row, k, k < K, HEADS, D, SPLITS)
    else:
        value = tl.load(x + row * K + k, k < K, other=0.0).to(tl.float32)
    value = tl.where(k < K, value, 0.0)
    acc = tl.sum(tile.to(tl.float32) * value[None, :], 1)
    if BIAS:
        acc += tl.load(bias + n, n < N, other=0.0).to(tl.float32)
    old = tl.load(residual + row * N + n, n < N, other=0.0)
    tl.store(residual + row * N + n, old + acc, n < N)
