"""U-Nets of CosyVoice 2 and CosyVoice-300M: estimate the velocity of the flow (``flow/decoder`` of the reference).

The plain forward pass here is the definition; ``unet_stream`` computes the causal one chunk by chunk. Parameter names
are those of the official checkpoints below ``decoder.estimator.``. Convolutions have kernel 3 throughout.

- CosyVoice 2: one level, so that the frame rate never changes; convolutions look back only, layer norm per frame,
  attention under a chunk mask while streaming.
- CosyVoice-300M: two levels at the full and the half rate, convolutions and attention look both ways, and group norm
  takes its mean over all frames: every frame depends on every other.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.config import UNetConfig
from vivace.layers.conv import CausalConv1d
from vivace.layers.relative import chunk_mask

GROUPS = 8
FF_MULT = 4


class TimestepEmbedding(nn.Module):
    """``t`` in 0 … 1, ``[B]`` → ``[B, 4 * channels]``."""

    def __init__(self, frequencies: int, size: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.linear_1 = nn.Linear(frequencies, size)
        self.linear_2 = nn.Linear(size, size)

    def forward(self, t: Tensor) -> Tensor:
        half = self.frequencies // 2
        steps = torch.arange(half, device=t.device, dtype=torch.float32)
        angles = 1000 * t.float()[:, None] * torch.exp(steps * -(math.log(10_000) / (half - 1)))
        waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
        result: Tensor = self.linear_2(F.silu(self.linear_1(waves.to(self.linear_1.weight.dtype))))
        return result


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of ``[B, C, T]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class ConvBlock(nn.Module):
    """Convolution, norm, Mish: ``[B, in, T] → [B, out, T]``."""

    def __init__(self, in_channels: int, out_channels: int, *, causal: bool) -> None:
        super().__init__()
        if causal:  # the identity keeps the official parameter names
            parts = (CausalConv1d(in_channels, out_channels, 3), nn.Identity(), ChannelNorm(out_channels))
        else:
            convolution = nn.Conv1d(in_channels, out_channels, 3, padding=1)
            parts = (convolution, nn.GroupNorm(GROUPS, out_channels))  # type: ignore[assignment]
        self.block = nn.Sequential(*parts)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """``valid`` ``[B, 1, T]``: 1 for frames that count, 0 for padding; None: all count."""
        if valid is None:
            return F.mish(self.block(x))
        y = self.block[0](x * valid)
        for layer in list(self.block)[1:]:
            y = _group_norm(y, layer, valid) if isinstance(layer, nn.GroupNorm) else layer(y)
        return F.mish(y)


class ResnetBlock(nn.Module):
    """Two convolution blocks with the time between them, around a skip connection."""

    def __init__(self, in_channels: int, out_channels: int, time_size: int, *, causal: bool) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Mish(), nn.Linear(time_size, out_channels))
        self.block1 = ConvBlock(in_channels, out_channels, causal=causal)
        self.block2 = ConvBlock(out_channels, out_channels, causal=causal)
        self.res_conv = nn.Conv1d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, time: Tensor, valid: Tensor | None = None) -> Tensor:
        """``x [B, in, T]``, ``time [B, time_size]`` → ``[B, out, T]``; ``valid`` as in ``ConvBlock``."""
        hidden = self.block2(self.block1(x, valid) + self.mlp(time)[..., None], valid)
        result: Tensor = hidden + self.res_conv(x)
        return result


class Attention(nn.Module):
    """Multi-head self-attention without positions."""

    def __init__(self, size: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        inner = heads * dim_head
        self.to_q = nn.Linear(size, inner, bias=False)
        self.to_k = nn.Linear(size, inner, bias=False)
        self.to_v = nn.Linear(size, inner, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(inner, size)])

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``x [B, T, size]``; ``mask`` broadcasts to ``[B, heads, T, T]``, True where a query may look."""
        parts = [project(x).unflatten(-1, (self.heads, -1)) for project in (self.to_q, self.to_k, self.to_v)]
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        result: Tensor = self.to_out[0](mixed.transpose(1, 2).flatten(2))
        return result


class _Projection(nn.Module):
    """Keeps an official parameter name."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_size, out_size)


class _FeedForward(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            [_Projection(size, FF_MULT * size), nn.Identity(), nn.Linear(FF_MULT * size, size)]
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net[2](F.gelu(cast(_Projection, self.net[0]).proj(x)))
        return result


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind its norm and added to the stream."""

    def __init__(self, size: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size)
        self.attn1 = Attention(size, heads, dim_head)
        self.norm3 = nn.LayerNorm(size)
        self.ff = _FeedForward(size)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``[B, T, size]`` to the same shape."""
        x = x + self.attn1(self.norm1(x), mask)
        result: Tensor = x + self.ff(self.norm3(x))
        return result


class _Resample(nn.Module):
    """Keeps an official parameter name."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(x)
        return result


class UNet(nn.Module):
    """The velocity estimator. Inputs join in the order x, mu, speaker, cond."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        self.causal = config.static_chunk_frames is not None
        channels, time_size = config.channels, 4 * config.channels[0]
        inputs = 4 * config.mel_dim
        self.time_mlp = TimestepEmbedding(inputs, time_size)
        self.down_blocks, self.mid_blocks = nn.ModuleList(), nn.ModuleList()
        self.up_blocks = nn.ModuleList()
        for index, width in enumerate(channels):
            before = inputs if index == 0 else channels[index - 1]
            down = (
                self._conv(width)
                if index == len(channels) - 1
                else _Resample(nn.Conv1d(width, width, 3, 2, 1))
            )
            self.down_blocks.append(nn.ModuleList([*self._level(before, width, time_size), down]))
        for _ in range(config.num_mid_blocks):
            self.mid_blocks.append(nn.ModuleList(self._level(channels[-1], channels[-1], time_size)))
        outputs = (*channels[::-1], channels[0])
        for index, width in enumerate(outputs[:-1]):
            after = outputs[index + 1]
            is_last = index == len(channels) - 1
            up = self._conv(after) if is_last else _Resample(nn.ConvTranspose1d(after, after, 4, 2, 1))
            self.up_blocks.append(nn.ModuleList([*self._level(2 * width, after, time_size), up]))
        self.final_block = ConvBlock(channels[0], channels[0], causal=self.causal)
        self.final_proj = nn.Conv1d(channels[0], config.mel_dim, 1)

    def _conv(self, width: int) -> nn.Module:
        return CausalConv1d(width, width, 3) if self.causal else nn.Conv1d(width, width, 3, padding=1)

    def _level(self, before: int, width: int, time_size: int) -> list[nn.Module]:
        config = self.config
        blocks = [TransformerBlock(width, config.heads, config.dim_head) for _ in range(config.num_blocks)]
        return [ResnetBlock(before, width, time_size, causal=self.causal), nn.ModuleList(blocks)]

    def forward(
        self,
        x: Tensor,
        mu: Tensor,
        cond: Tensor,
        spks: Tensor,
        t: Tensor,
        streaming: bool,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """One velocity estimate.

        Args:
            x: noisy mel ``[B, 80, T]``; ``mu`` (encoded speech tokens) and ``cond`` (the prompt's mel, zero after it)
                have its shape.
            spks: projected speaker embedding ``[B, 80]``.
            t: time of each row in 0 … 1, ``[B]``.
            streaming: chunk mask instead of full attention; for the causal estimator only.
            lengths: valid frames of each row ``[B]``; the rest is padding, which no valid frame sees, and the result
                there has no meaning. None: all are valid.

        Returns:
            velocity ``[B, 80, T]``.
        """
        time = self.time_mlp(t)
        chunks = chunk_mask(x.shape[-1], self.config.static_chunk_frames if streaming else None, x.device)
        valid = None
        if lengths is not None:
            frames = torch.arange(x.shape[-1], device=x.device)
            valid = (frames < lengths[:, None])[:, None].to(mu.dtype)
        hidden = torch.cat((x, mu, spks[..., None].expand(-1, -1, x.shape[-1]), cond), dim=1)
        skips = []
        for level in self.down_blocks:
            resnet, blocks, down = cast(nn.ModuleList, level)
            hidden = _run_level(resnet, cast(nn.ModuleList, blocks), hidden, time, chunks, valid)
            skips.append((hidden, valid))
            hidden = down(_only(hidden, valid))
            if valid is not None and valid.shape[-1] != hidden.shape[-1]:
                valid = valid[..., ::2]
        for level in self.mid_blocks:
            resnet, blocks = cast(nn.ModuleList, level)
            hidden = _run_level(resnet, cast(nn.ModuleList, blocks), hidden, time, chunks, valid)
        for level in self.up_blocks:
            resnet, blocks, up = cast(nn.ModuleList, level)
            skip, valid = skips.pop()
            hidden = torch.cat((hidden[..., : skip.shape[-1]], skip), dim=1)
            hidden = _run_level(resnet, cast(nn.ModuleList, blocks), hidden, time, chunks, valid)
            hidden = up(_only(hidden, valid))
        result: Tensor = self.final_proj(self.final_block(hidden, valid))
        return result


def _only(x: Tensor, valid: Tensor | None) -> Tensor:
    """Zeros behind the end of each row, as a row alone has."""
    return x if valid is None else x * valid


def _group_norm(x: Tensor, norm: nn.GroupNorm, valid: Tensor) -> Tensor:
    """Group norm of ``[B, C, T]`` whose mean and variance are those of the valid frames alone."""
    batch, channels, frames = x.shape
    groups = x.float().view(batch, norm.num_groups, -1, frames)
    counts = valid.float()[:, None]  # [B, 1, 1, T]
    size = counts.sum(dim=(2, 3), keepdim=True) * (channels // norm.num_groups)
    centred = groups - (groups * counts).sum(dim=(2, 3), keepdim=True) / size
    variance = (centred.square() * counts).sum(dim=(2, 3), keepdim=True) / size
    normal = (centred * torch.rsqrt(variance + norm.eps)).view(batch, channels, frames).to(x.dtype)
    return normal * norm.weight[:, None] + norm.bias[:, None]


def _run_level(
    resnet: nn.Module,
    blocks: nn.ModuleList,
    x: Tensor,
    time: Tensor,
    chunks: Tensor | None,
    valid: Tensor | None,
) -> Tensor:
    hidden = resnet(x, time, valid).transpose(1, 2)
    mask = chunks
    if valid is not None:
        keys = valid[:, None].bool()  # [B, 1, 1, T]
        mask = keys if chunks is None else keys & chunks
    for block in blocks:
        hidden = block(hidden, mask)
    result: Tensor = hidden.transpose(1, 2)
    return result
