"""The causal U-Net chunk by chunk: what its plain forward pass computes under the chunk mask, each frame once.

With one level, causal convolutions of kernel 3 and chunked attention, a finished frame never changes. So a stream
keeps, per Euler step and guidance branch, two past inputs of every convolution and the keys and values of every
attention; a chunk then runs its own frames only. It sees all that is kept and itself, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.models.dit_stream import BRANCHES, DiTState
from vivace.models.unet import ConvBlock, ResnetBlock, TransformerBlock, UNet

CONTEXT = 2
"""Past inputs of a convolution of kernel 3."""

Weights = tuple[Tensor, Tensor]


class Conv(NamedTuple):
    """A causal convolution and its place in the contexts' channels."""

    weights: Weights
    start: int
    stop: int


class ConvBlockWeights(NamedTuple):
    """A convolution and the norm behind it."""

    conv: Conv
    norm: Weights
    eps: float


class Block(NamedTuple):
    """An attention block, with the three input projections joined."""

    norm1: Weights
    qkv: Tensor
    out: Weights
    norm3: Weights
    ff_in: Weights
    ff_out: Weights
    eps: float


class Level(NamedTuple):
    """One level: residual block, attention blocks, and the convolution behind them (none in the middle).

    ``shifts`` is what the time adds between the two convolution blocks, one ``[channels, 1]`` per Euler step.
    """

    first: ConvBlockWeights
    second: ConvBlockWeights
    residual: Weights
    shifts: list[Tensor]
    blocks: list[Block]
    after: Conv | None


class PreparedUNet:
    """A causal U-Net made ready for a fixed grid of times.

    Args:
        unet: the model; its weights are used as they are now, later changes are not seen.
        times: ``t`` of each Euler step.
    """

    def __init__(self, unet: UNet, times: Sequence[float]) -> None:
        config = unet.config
        assert unet.causal, "only a causal U-Net streams"
        assert len(config.channels) == 1, "only a U-Net of one level streams"
        self.heads, self.dim_head = config.heads, config.dim_head
        self.num_channels = 0
        weight = unet.final_proj.weight
        with torch.no_grad():
            self._time = unet.time_mlp(torch.tensor(times, device=weight.device, dtype=torch.float32))
            self.down = self._level(unet.down_blocks[0])
            self.middle = [self._level(level) for level in unet.mid_blocks]
            self.up = self._level(unet.up_blocks[0])
            self.final = self._conv_block(unet.final_block)
        self.proj = _weights(unet.final_proj)
        self.num_blocks = sum(len(level.blocks) for level in (self.down, *self.middle, self.up))

    def join_condition(self, mu: Tensor, spks: Tensor, cond: Tensor) -> Tensor:
        """The inputs that no Euler step changes, both branches ``[2, 240, T]``.

        Args:
            mu: ``[80, T]``; ``cond`` alike; ``spks`` ``[80]``. The unconditional branch has zeros instead.
        """
        joined = torch.cat((mu, spks[:, None].expand(-1, mu.shape[1]), cond))
        return torch.stack((joined, torch.zeros_like(joined)))

    def velocity(self, x: Tensor, condition: Tensor, step: int, state: DiTState, end: int) -> Tensor:
        """Velocity of the new frames ``x`` ``[80, T]``, which end at frame ``end``, both branches ``[2, 80, T]``.

        Stores the frames in ``state``, whose ``length`` the caller moves after the last Euler step.
        """
        contexts, caches = state.contexts[step], iter(state.caches[step].unbind(0))
        hidden = torch.cat((x.to(condition.dtype).expand(BRANCHES, -1, -1), condition), dim=1)
        skip, hidden = self._run(self.down, hidden, step, contexts, caches, end)
        for level in self.middle:
            _, hidden = self._run(level, hidden, step, contexts, caches, end)
        _, hidden = self._run(self.up, torch.cat((hidden, skip), dim=1), step, contexts, caches, end)
        return F.conv1d(_conv_block(self.final, hidden, contexts), *self.proj)

    def _run(
        self, level: Level, x: Tensor, step: int, contexts: Tensor, caches: Iterator[Tensor], end: int
    ) -> tuple[Tensor, Tensor]:
        """Output of the level's blocks ``[2, C, T]``, and of the convolution behind them."""
        hidden = _conv_block(
            level.second, _conv_block(level.first, x, contexts) + level.shifts[step], contexts
        )
        hidden = (hidden + F.conv1d(x, *level.residual)).transpose(1, 2)
        for block in level.blocks:
            hidden = self._attend(block, hidden, next(caches), end)
        hidden = hidden.transpose(1, 2)
        return hidden, hidden if level.after is None else _convolve(level.after, hidden, contexts)

    def _attend(self, block: Block, hidden: Tensor, cache: Tensor, end: int) -> Tensor:
        """One attention block; ``cache`` ``[2, 2, heads, capacity, dim_head]`` is its keys and values."""
        frames, size = hidden.shape[1], hidden.shape[2:]
        normed = F.layer_norm(hidden, size, *block.norm1, block.eps)
        qkv = F.linear(normed, block.qkv).view(BRANCHES, frames, 3, self.heads, self.dim_head)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        cache[:, :, :, end - frames : end] = qkv[1:]
        keys, values = cache[:, :, :, :end].unbind(0)
        mixed = F.scaled_dot_product_attention(qkv[0], keys, values)
        hidden = hidden + F.linear(mixed.transpose(1, 2).reshape(BRANCHES, frames, -1), *block.out)
        normed = F.layer_norm(hidden, size, *block.norm3, block.eps)
        return hidden + F.linear(F.gelu(F.linear(normed, *block.ff_in)), *block.ff_out)

    def _level(self, level: nn.Module) -> Level:
        assert isinstance(level, nn.ModuleList)
        resnet, blocks = level[0], level[1]
        assert isinstance(resnet, ResnetBlock)
        assert isinstance(blocks, nn.ModuleList)
        return Level(
            first=self._conv_block(resnet.block1),
            second=self._conv_block(resnet.block2),
            residual=_weights(resnet.res_conv),
            shifts=list(resnet.mlp(self._time)[..., None].unbind(0)),
            blocks=[_block(block) for block in blocks if isinstance(block, TransformerBlock)],
            after=self._conv(level[2]) if len(level) == 3 else None,
        )

    def _conv_block(self, block: ConvBlock) -> ConvBlockWeights:
        norm = block.block[2]
        assert isinstance(norm, nn.LayerNorm)
        return ConvBlockWeights(self._conv(block.block[0]), _weights(norm), norm.eps)

    def _conv(self, layer: nn.Module) -> Conv:
        assert isinstance(layer, nn.Conv1d)
        start, self.num_channels = self.num_channels, self.num_channels + layer.in_channels
        return Conv(_weights(layer), start, self.num_channels)


def new_unet_state(prepared: PreparedUNet, num_steps: int, capacity: int) -> DiTState:
    """No frames yet; room for ``capacity`` before the buffers must grow.

    A step's contexts are one tensor ``[2 (branch), channels of all convolutions, 2]``.
    """
    weight = prepared.proj[0]
    shape = (prepared.num_blocks, 2, BRANCHES, prepared.heads, capacity, prepared.dim_head)
    return DiTState(
        caches=[weight.new_empty(shape) for _ in range(num_steps)],
        contexts=[weight.new_zeros(BRANCHES, prepared.num_channels, CONTEXT) for _ in range(num_steps)],
        length=0,
    )


def _convolve(conv: Conv, x: Tensor, contexts: Tensor) -> Tensor:
    """``[2, in, T] → [2, out, T]``; the convolution's part of ``contexts`` is updated."""
    context = contexts[:, conv.start : conv.stop]
    joined = torch.cat((context, x), dim=2)
    context.copy_(joined[..., -CONTEXT:])
    return F.conv1d(joined, *conv.weights)


def _conv_block(block: ConvBlockWeights, x: Tensor, contexts: Tensor) -> Tensor:
    y = _convolve(block.conv, x, contexts).transpose(1, 2)
    return F.mish(F.layer_norm(y, y.shape[2:], *block.norm, block.eps)).transpose(1, 2)


def _weights(layer: nn.Module) -> Weights:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    return weight.detach(), bias.detach()


def _block(block: TransformerBlock) -> Block:
    attention, net = block.attn1, block.ff.net
    projections = (attention.to_q, attention.to_k, attention.to_v)
    inner = net[0].proj
    assert isinstance(inner, nn.Linear)
    return Block(
        norm1=_weights(block.norm1),
        qkv=torch.cat([projection.weight.detach() for projection in projections]),
        out=_weights(attention.to_out[0]),
        norm3=_weights(block.norm3),
        ff_in=_weights(inner),
        ff_out=_weights(net[2]),
        eps=block.norm1.eps,
    )
