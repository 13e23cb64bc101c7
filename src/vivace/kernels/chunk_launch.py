"""Launches the Triton kernels of CosyVoice 2's U-Net; the same methods as ``chunk_reference.PlainChunkOps``."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vivace.kernels.chunk_reference import PlainChunkOps
from vivace.kernels.chunk_rows import attend_pages_kernel, join_context_kernel, layer_norm_mish_kernel
from vivace.kernels.unet_launch import KernelUNetOps, overlap
from vivace.kernels.unet_reference import Norm


class KernelChunkOps(KernelUNetOps, PlainChunkOps):
    """See ``PlainChunkOps``."""

    def join_context(self, x: Tensor, contexts: Tensor, first: int) -> Tensor:
        rows, chunk, channels = x.shape
        _, _, branches, length, all_channels = contexts.shape
        out, block = x.new_empty(rows, length + chunk, channels), 1024
        join_context_kernel[(triton.cdiv((length + chunk) * channels, block), rows)](
            x,
            contexts,
            self._packet,
            self._step,
            out,
            self._packet.stride(0),
            contexts.stride(0),
            contexts.stride(1),
            contexts.stride(2),
            all_channels,
            first,
            CHUNK=chunk,
            C=channels,
            BRANCHES=branches,
            CONTEXT=length,
            BLOCK=block,
            num_warps=4,
        )
        return out

    def layer_norm_mish(
        self,
        y: Tensor,
        bias: Tensor,
        norm: Norm,
        shift: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        gain, offset, eps = norm
        rows, chunk, channels = y.shape
        out = torch.empty_like(y)
        layer_norm_mish_kernel[(rows * chunk,)](
            y,
            bias,
            gain,
            offset,
            y if shift is None else shift,
            self._step,
            y if residual is None else residual,
            out,
            eps,
            C=channels,
            BLOCK=triton.next_power_of_2(channels),
            SHIFTS=shift is not None,
            ADDS=residual is not None,
            num_warps=1 if channels <= 512 else 4,
        )
        return out

    def attend_pages(self, qkv: Tensor, pool: Tensor, block: int) -> Tensor:
        rows = qkv.shape[0]
        _, _, _, _, branches, heads, chunk, size = pool.shape
        out, queries = qkv.new_empty(rows, chunk, heads * size), 16
        attend_pages_kernel[(triton.cdiv(chunk, queries), heads, rows)](
            qkv,
            pool,
            self._packet,
            self._step,
            out,
            self._packet.stride(0),
            pool.stride(0),
            pool.stride(1),
            pool.stride(3),
            pool.stride(4),
            block * pool.stride(2),
            size**-0.5,
            CHUNK=chunk,
            HEADS=heads,
            D=size,
            BRANCHES=branches,
            TABLE=self._table,
            BLOCK_M=queries,
            BLOCK_T=max(16, triton.next_power_of_2(chunk)),
            num_warps=2,
            num_stages=2,
            **overlap(qkv.device),
        )
        return out
