"""The causal U-Net for chunks of many streams, or several of one, channels last, in few kernels; what they keep lies in
pages.

``PreparedUNet.velocity`` is the definition for one stream. Number of the Euler step, pages and lengths are read on the
device, so that one CUDA graph serves every step and any number of pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.kernels.chunk_reference import PlainChunkOps
from vivace.kernels.unet_reference import Norm
from vivace.models.unet_conv import FrameConv
from vivace.models.unet_pages import UNetPages
from vivace.models.unet_stream import Block, Conv, ConvBlockWeights, Level, PreparedUNet, Weights


@dataclass(frozen=True, slots=True)
class _Conv:
    """``first``: where its inputs lie among those that are kept."""

    frames: FrameConv
    bias: Tensor
    first: int

    @classmethod
    def of(cls, conv: Conv) -> _Conv:
        return cls(FrameConv.of(conv.weights[0]), conv.weights[1], conv.start)


@dataclass(frozen=True, slots=True)
class _ConvBlock:
    conv: _Conv
    norm: Norm

    @classmethod
    def of(cls, block: ConvBlockWeights) -> _ConvBlock:
        return cls(_Conv.of(block.conv), (*block.norm, block.eps))


@dataclass(frozen=True, slots=True)
class _Level:
    """See ``unet_stream.Level``; ``shifts [steps, channels]``; ``blocks`` with the numbers of their attentions."""

    first: _ConvBlock
    second: _ConvBlock
    residual: Weights
    shifts: Tensor
    blocks: list[tuple[int, Block]]
    after: _Conv | None

    @classmethod
    def of(cls, level: Level, number: int) -> _Level:
        weight, bias = level.residual
        return cls(
            first=_ConvBlock.of(level.first),
            second=_ConvBlock.of(level.second),
            residual=(weight.squeeze(2), bias),
            shifts=torch.stack([shift.squeeze(1) for shift in level.shifts]),
            blocks=list(enumerate(level.blocks, number)),
            after=None if level.after is None else _Conv.of(level.after),
        )


class ChunkUNet:
    """See the module's docstring.

    Args:
        unet: whose weights are used.
        packet, step, table: see ``PlainChunkOps``; tensors that keep their place.
        use_kernels: Triton, or the plain versions.
    """

    def __init__(
        self,
        unet: PreparedUNet,
        pages: UNetPages,
        packet: Tensor,
        step: Tensor,
        table: int,
        use_kernels: bool,
    ) -> None:
        self._pages = pages
        self._ops = _ops(use_kernels)(packet, step, table)
        self._levels, number = [], 0
        for level in (unet.down, *unet.middle, unet.up):
            self._levels.append(_Level.of(level, number))
            number += len(level.blocks)
        self._final = _ConvBlock.of(unet.final)
        self._proj = unet.proj[0].squeeze(2), unet.proj[1]

    def velocity(self, x: Tensor) -> Tensor:
        """Velocity of both branches ``[S * 2, chunk, 80]`` of mel, mu, speaker and condition side by side."""
        down, *middle, up = self._levels
        skip = x = self._run(down, x)
        x = self._after(down, x)
        for level in middle:
            x = self._run(level, x)
        x = self._run(up, torch.cat((x, skip), dim=2))
        y = self._convolve(self._final.conv, self._after(up, x))
        return F.linear(self._ops.layer_norm_mish(y, self._final.conv.bias, self._final.norm), *self._proj)

    def _run(self, level: _Level, x: Tensor) -> Tensor:
        ops, first, second = self._ops, level.first, level.second
        y = self._convolve(first.conv, x)
        y = ops.layer_norm_mish(y, first.conv.bias, first.norm, shift=level.shifts)
        y, residual = self._convolve(second.conv, y), F.linear(x, *level.residual)
        x = ops.layer_norm_mish(y, second.conv.bias, second.norm, residual=residual)
        for number, block in level.blocks:
            qkv = ops.norm_linear(x, (*block.norm1, block.eps), block.qkv)
            ops.linear_add(x, ops.attend_pages(qkv, self._pages.attention, number), block.out)
            y = ops.norm_linear(x, (*block.norm3, block.eps), *block.ff_in, gelu=True)
            ops.linear_add(x, y, block.ff_out)
        return x

    def _after(self, level: _Level, x: Tensor) -> Tensor:
        conv = level.after
        return x if conv is None else self._convolve(conv, x) + conv.bias

    def _convolve(self, conv: _Conv, x: Tensor) -> Tensor:
        """Without the bias."""
        joined = self._ops.join_context(x, self._pages.contexts, conv.first)
        return conv.frames.run(joined, padding=0)


def _ops(use_kernels: bool) -> type[PlainChunkOps]:
    if not use_kernels:
        return PlainChunkOps
    from vivace.kernels.chunk_launch import KernelChunkOps

    return KernelChunkOps
