"""The two-way U-Net made ready for a fixed grid of times: channels last, rows of their own lengths, few kernels.

``UNet.forward`` with ``lengths`` is the definition. The time enters by tables that are computed once; group norm, what
is added around it, layer norm and the zeros behind each row's end are one operation each (``unet_reference``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.kernels.unet_reference import Linear, Norm, PlainUNetOps
from vivace.models.unet import GROUPS, ResnetBlock, TransformerBlock, UNet
from vivace.models.unet_conv import FrameConv


class Scale(NamedTuple):
    """One rate of frames: valid frames of each row, int32 ``[rows]``, and 0 or -inf by key ``[rows, heads, T, T]``."""

    counts: Tensor
    keys: Tensor


class _Conv(NamedTuple):
    """A convolution and its bias."""

    frames: FrameConv
    bias: Tensor

    def run(self, x: Tensor) -> Tensor:
        """``[rows, T, in] → [rows, T', out]``, without the bias."""
        return self.frames.run(x, padding=1)


@dataclass(frozen=True, slots=True)
class _Block:
    """A transformer block, its three input projections joined."""

    norm1: Norm
    qkv: Tensor
    out: Linear
    norm3: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Level:
    """A residual block, transformer blocks, and the convolution behind them; ``rate`` divides that of the mel."""

    first: _Conv
    norm1: Norm
    shifts: Tensor
    second: _Conv
    norm2: Norm
    residual: Linear
    blocks: list[_Block]
    after: _Conv | None
    rate: int


class PackedUNet:
    """See the module's docstring.

    Args:
        unet: whose weights are used as they are now.
        times: ``t`` of each Euler step.
        ops: kernels, or their plain versions.
    """

    def __init__(self, unet: UNet, times: Sequence[float], ops: PlainUNetOps) -> None:
        assert not unet.causal, "a causal U-Net has a way of its own"
        self.heads, self.num_scales, self._ops = unet.config.heads, len(unet.config.channels), ops
        weight = unet.final_proj.weight
        with torch.no_grad():
            self._time = unet.time_mlp(torch.tensor(times, device=weight.device))
            deepest = self.num_scales - 1
            self._down = [self._level(level, index) for index, level in enumerate(unet.down_blocks)]
            self._middle = [self._level(level, deepest) for level in unet.mid_blocks]
            self._up = [self._level(level, deepest - index) for index, level in enumerate(unet.up_blocks)]
            final = unet.final_block.block
            self._final, self._final_norm = _conv(final[0]), _norm(final[1])
            self._proj = weight.squeeze(2).detach(), cast(Tensor, unet.final_proj.bias).detach()

    def new_scales(self, rows: int, frames: int, weight: Tensor) -> list[Scale]:
        """Each rate of ``rows`` of ``frames``, a multiple of the lowest rate, on the device and in the dtype of
        ``weight``; ``set_scales`` fills them."""
        found = []
        for _ in range(self.num_scales):
            counts = torch.zeros(rows, dtype=torch.int32, device=weight.device)
            found.append(
                Scale(counts, weight.new_zeros(rows, 1, 1, frames).expand(-1, self.heads, frames, -1))
            )
            frames //= 2
        return found

    @staticmethod
    def set_scales(scales: Sequence[Scale], counts: Tensor) -> None:
        """Valid frames of each row at the mel rate, ``[rows]``; a row without any sees its first one."""
        for scale in scales:
            scale.counts.copy_(counts)
            keys = scale.keys[:, 0, 0]
            hidden = torch.arange(keys.shape[1], device=keys.device) >= counts.clamp(min=1)[:, None]
            keys.copy_(torch.zeros_like(keys).masked_fill(hidden, float("-inf")))
            counts = (counts + 1) // 2

    def velocity(self, x: Tensor, step: Tensor, scales: Sequence[Scale]) -> Tensor:
        """Velocity ``[rows, T, 80]``; what is behind a row's end has no meaning.

        Args:
            x: mel, mu, speaker and condition side by side, ``[rows, T, 320]``, zero behind each row's end.
            step: number of the Euler step, int64 ``[1]``.
        """
        skips = []
        for level in self._down:
            x = self._run(level, x, step, scales[level.rate])
            skips.append(x)
            x = self._after(level, x, scales)
        for level in self._middle:
            x = self._run(level, x, step, scales[level.rate])
        for level in self._up:
            x = self._run(level, torch.cat((x, skips.pop()), dim=2), step, scales[level.rate])
            x = self._after(level, x, scales)
        y = self._final.run(x)
        y = self._ops.group_norm_mish(y, self._final.bias, self._final_norm, GROUPS, scales[0].counts)
        return F.linear(y, *self._proj)

    def _run(self, level: _Level, x: Tensor, step: Tensor, scale: Scale) -> Tensor:
        ops, counts = self._ops, scale.counts
        y, shift = level.first.run(x), (level.shifts, step)
        y = ops.group_norm_mish(y, level.first.bias, level.norm1, GROUPS, counts, shift=shift)
        y, residual = level.second.run(y), F.linear(x, *level.residual)
        x = ops.group_norm_mish(y, level.second.bias, level.norm2, GROUPS, counts, residual=residual)
        for block in level.blocks:
            ops.linear_add(x, self._attend(ops.norm_linear(x, block.norm1, block.qkv), scale), block.out)
            ops.linear_add(x, ops.norm_linear(x, block.norm3, *block.up, gelu=True), block.down)
        return ops.masked_add(x, counts) if level.blocks else x

    def _attend(self, qkv: Tensor, scale: Scale) -> Tensor:
        rows, frames, _ = qkv.shape
        parts = qkv.view(rows, frames, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=scale.keys)
        return mixed.transpose(1, 2).reshape(rows, frames, -1)

    def _after(self, level: _Level, x: Tensor, scales: Sequence[Scale]) -> Tensor:
        conv = level.after
        if conv is None:
            return x
        frames = conv.frames
        rate = level.rate + (0 if frames.stride == 1 else -1 if frames.is_up else 1)
        return self._ops.masked_add(conv.run(x), scales[rate].counts, bias=conv.bias)

    def _level(self, level: nn.Module, rate: int) -> _Level:
        parts = cast(nn.ModuleList, level)
        resnet, blocks = cast(ResnetBlock, parts[0]), cast(nn.ModuleList, parts[1])
        first, second = resnet.block1.block, resnet.block2.block
        residual = resnet.res_conv
        after = None if len(parts) < 3 else _conv(getattr(parts[2], "conv", parts[2]))
        return _Level(
            first=_conv(first[0]),
            norm1=_norm(first[1]),
            shifts=resnet.mlp(self._time).contiguous(),
            second=_conv(second[0]),
            norm2=_norm(second[1]),
            residual=(residual.weight.squeeze(2).detach(), cast(Tensor, residual.bias).detach()),
            blocks=[_block(block) for block in blocks if isinstance(block, TransformerBlock)],
            after=after,
            rate=rate,
        )


def _conv(layer: nn.Module) -> _Conv:
    assert isinstance(layer, nn.Conv1d | nn.ConvTranspose1d)
    is_up = isinstance(layer, nn.ConvTranspose1d)
    frames = FrameConv.of(layer.weight, stride=layer.stride[0], is_up=is_up)
    return _Conv(frames, cast(Tensor, layer.bias).detach())


def _norm(layer: nn.Module) -> Norm:
    assert isinstance(layer, nn.GroupNorm | nn.LayerNorm)
    return layer.weight.detach(), layer.bias.detach(), layer.eps


def _linear(layer: nn.Module) -> Linear:
    assert isinstance(layer, nn.Linear)
    return layer.weight.detach(), layer.bias.detach()


def _block(block: TransformerBlock) -> _Block:
    attention, net = block.attn1, block.ff.net
    projections = (attention.to_q, attention.to_k, attention.to_v)
    return _Block(
        norm1=_norm(block.norm1),
        qkv=torch.cat([projection.weight.detach() for projection in projections]),
        out=_linear(attention.to_out[0]),
        norm3=_norm(block.norm3),
        up=_linear(cast(nn.Linear, net[0].proj)),
        down=_linear(net[2]),
    )
