"""Launches the Triton kernels of CosyVoice-300M's U-Net, and of the transformer blocks of CosyVoice 2's.

The same methods as ``unet_reference.PlainUNetOps``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from vivace.kernels.block_rows import block_linear_add_kernel, block_norm_linear_kernel
from vivace.kernels.gpu import gpu_of
from vivace.kernels.unet_reference import Linear, Norm, PlainUNetOps
from vivace.kernels.unet_rows import group_norm_mish_kernel, masked_add_kernel

_MOST_VALUES = 32_768  # of a group that one program holds at once
_FLOAT32_ROWS = 256
_COLUMNS = 64  # of a product behind a norm that one program computes


class KernelUNetOps(PlainUNetOps):
    """See ``PlainUNetOps``; the same kernels whatever the batch."""

    def group_norm_mish(
        self,
        y: Tensor,
        bias: Tensor,
        norm: Norm,
        groups: int,
        counts: Tensor,
        shift: tuple[Tensor, Tensor] | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        gain, offset, eps = norm
        rows, frames, channels = y.shape
        counts = counts.contiguous()  # such as a column of a packet
        out, width = torch.empty_like(y), channels // groups
        pad = triton.next_power_of_2(width)
        block = min(triton.next_power_of_2(frames), _MOST_VALUES // pad)
        table, step = (y, counts) if shift is None else shift
        group_norm_mish_kernel[(groups, rows)](
            y,
            bias,
            gain,
            offset,
            counts,
            table,
            step,
            y if residual is None else residual,
            out,
            frames,
            eps,
            C=channels,
            WIDTH=width,
            PAD=pad,
            BLOCK_T=block,
            BLOCKS=triton.cdiv(frames, block),
            SHIFTS=shift is not None,
            ADDS=residual is not None,
            num_warps=8 if block * pad >= 8192 else 4,
        )
        return out

    def norm_linear(
        self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False
    ) -> Tensor:
        gain, offset, eps = norm
        width, size = x.shape[-1], len(weight)
        rows = x.numel() // width
        if _is_for_library(weight, rows):
            return super().norm_linear(x, norm, weight, bias, gelu=gelu)
        out = x.new_empty(*x.shape[:-1], size)
        block = _rows_of_block(rows)
        block_norm_linear_kernel[(triton.cdiv(size, _COLUMNS), triton.cdiv(rows, block))](
            x,
            gain,
            offset,
            weight,
            weight if bias is None else bias,
            out,
            rows,
            eps,
            N=size,
            K=width,
            BLOCK_M=block,
            BLOCK_N=_COLUMNS,
            BLOCK_K=max(16, triton.next_power_of_2(width)),
            BIAS=bias is not None,
            GELU=gelu,
            num_warps=4,
            **overlap(x.device),
        )
        return out

    def linear_add(self, x: Tensor, y: Tensor, linear: Linear) -> None:
        weight, bias = linear
        width, size = y.shape[-1], len(weight)
        rows = x.numel() // size
        if _is_for_library(weight, rows):
            super().linear_add(x, y, linear)
            return
        block, columns = _rows_of_block(rows), 32
        block_linear_add_kernel[(triton.cdiv(size, columns), triton.cdiv(rows, block))](
            y,
            weight,
            bias,
            x,
            rows,
            N=size,
            K=width,
            BLOCK_M=block,
            BLOCK_N=columns,
            BLOCK_K=math.gcd(width, 128),
            num_warps=4,
            num_stages=4,
            **overlap(x.device),
        )

    def masked_add(self, x: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, frames, channels = x.shape
        counts, out, block = counts.contiguous(), torch.empty_like(x), 1024
        masked_add_kernel[(triton.cdiv(frames * channels, block), rows)](
            x,
            x if bias is None else bias,
            counts,
            out,
            frames,
            C=channels,
            BLOCK=block,
            BIAS=bias is not None,
            num_warps=4,
        )
        return out


def _rows_of_block(rows: int) -> int:
    """Rows that one program computes: few where there are few, so that all multiprocessors have some."""
    return 16 if rows <= 128 else 32 if rows <= 1024 else 64


def _is_for_library(weight: Tensor, rows: int) -> bool:
    """In float32 Triton multiplies without tensor cores, or rounds: many rows are left to cuBLAS."""
    return weight.dtype == torch.float32 and rows > _FLOAT32_ROWS


def overlap(device: torch.device) -> dict[str, Any]:
    """Whether a kernel starts while the one before it ends."""
    gpu = gpu_of(device)
    return {"PDL": True, "launch_pdl": True} if gpu is not None and gpu.has_overlap else {"PDL": False}
