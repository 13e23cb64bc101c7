"""Launches the Triton kernels of CosyVoice-300M's U-Net; the same methods as ``unet_reference.PlainUNetOps``."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vivace.kernels.relative_rows import add_layer_norm_kernel
from vivace.kernels.unet_reference import Norm, PlainUNetOps
from vivace.kernels.unet_rows import group_norm_mish_kernel, masked_add_kernel

_MOST_VALUES = 32_768  # of a group that one program holds at once


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

    def add_layer_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        gain, offset, eps = norm
        out, width = torch.empty(x.shape, dtype=gain.dtype, device=x.device), x.shape[-1]
        add_layer_norm_kernel[(x.numel() // width,)](
            x,
            x if delta is None else delta,
            gain,
            offset,
            out,
            eps,
            H=width,
            BLOCK=triton.next_power_of_2(width),
            ADD=delta is not None,
            PDL=False,
            num_warps=1 if width <= 512 else 4,
        )
        return out

    def masked_add(
        self, x: Tensor, counts: Tensor, delta: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        rows, frames, channels = x.shape
        counts, out, block = counts.contiguous(), torch.empty_like(x), 1024
        masked_add_kernel[(triton.cdiv(frames * channels, block), rows)](
            x,
            x if delta is None else delta,
            x if bias is None else bias,
            counts,
            out,
            frames,
            C=channels,
            BLOCK=block,
            ADDS=delta is not None,
            BIAS=bias is not None,
            num_warps=4,
        )
        return out
