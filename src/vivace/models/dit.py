"""Diffusion transformer of CosyVoice 3: estimates the velocity of the flow (``flow/DiT`` of the reference).

Frames are 20 ms of mel. The plain forward pass here is the definition; ``flow_stream`` computes the same
thing chunk by chunk. Parameter names are those of the official checkpoints below ``decoder.estimator.``.

Two facts about the architecture that are easy to get wrong:

- Rotary embedding is applied to the projections *before* they are split into heads and covers ``dim_head``
  channels only, so only head 0 knows positions.
- Under the chunk mask a frame sees every earlier chunk and the whole of its own chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.config import DiTConfig

TIME_FREQUENCIES = 256
"""Width of the sinusoidal embedding of ``t``; fixed in the reference."""

POSITION_KERNEL = 31
"""Kernel of the causal position convolutions; each looks back ``POSITION_KERNEL - 1`` frames."""

POSITION_GROUPS = 16

NORM_EPS = 1e-6


class TimestepEmbedding(nn.Module):
    """``t`` in 0 … 1, ``[B]`` → ``[B, dim]``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(TIME_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        half = TIME_FREQUENCIES // 2
        steps = torch.arange(half, device=t.device, dtype=torch.float32)
        frequencies = torch.exp(steps * -(math.log(10_000) / (half - 1)))
        angles = 1000 * t.float()[:, None] * frequencies
        waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
        result: Tensor = self.time_mlp(waves.to(next(self.time_mlp.parameters()).dtype))
        return result


class PositionConvolution(nn.Module):
    """Two causal grouped convolutions that tell frames apart, ``[B, T, dim]`` → the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv1d(dim, dim, POSITION_KERNEL, groups=POSITION_GROUPS), nn.Mish())
        self.conv2 = nn.Sequential(nn.Conv1d(dim, dim, POSITION_KERNEL, groups=POSITION_GROUPS), nn.Mish())

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        y = self.conv1(F.pad(y, (POSITION_KERNEL - 1, 0)))
        y = self.conv2(F.pad(y, (POSITION_KERNEL - 1, 0)))
        result: Tensor = y.transpose(1, 2)
        return result


class InputEmbedding(nn.Module):
    """Joins the noisy mel, the conditions and the speaker: channels in the order x, cond, mu, speaker."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(2 * config.mel_dim + config.mu_dim + config.spk_dim, config.dim)
        self.conv_pos_embed = PositionConvolution(config.dim)

    def forward(self, x: Tensor, cond: Tensor, mu: Tensor, spks: Tensor) -> Tensor:
        """``x``, ``cond``, ``mu`` ``[B, T, 80]`` and ``spks`` ``[B, 80]`` → ``[B, T, dim]``."""
        spks = spks[:, None].expand(-1, x.shape[1], -1)
        hidden = self.proj(torch.cat((x, cond, mu, spks), dim=-1))
        result: Tensor = self.conv_pos_embed(hidden) + hidden
        return result


class RotaryEmbedding(nn.Module):
    """Angles of the rotary embedding; neighbouring channels form a pair."""

    inv_freq: Tensor

    def __init__(self, dim_head: int) -> None:
        super().__init__()
        exponents = torch.arange(0, dim_head, 2, dtype=torch.float32) / dim_head
        self.register_buffer("inv_freq", 1.0 / (10_000**exponents))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        # Positions reach 15,000: in half precision the angles would be wrong, so only the device may change.
        exact = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines ``[length, dim_head]`` of the positions from ``start``, float32."""
        positions = torch.arange(start, start + length, device=self.inv_freq.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq)
        cosines, sines = angles.cos(), angles.sin()
        return (
            cosines.repeat_interleave(2, dim=-1),
            torch.stack((-sines, sines), dim=-1).flatten(-2),
        )


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the channel pairs of ``x`` ``[..., T, dim_head]`` by their positions' angles."""
    cosines, signed_sines = rope
    swapped = x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return x * cosines.to(x.dtype) + swapped * signed_sines.to(x.dtype)


class AdaptiveNorm(nn.Module):
    """Projects the time embedding to scales, shifts and gates (the norm itself has no weights)."""

    def __init__(self, dim: int, num_vectors: int) -> None:
        super().__init__()
        self.num_vectors = num_vectors
        self.linear = nn.Linear(dim, dim * num_vectors)

    def forward(self, time: Tensor) -> tuple[Tensor, ...]:
        """``time`` ``[B, dim]`` → ``num_vectors`` tensors ``[B, 1, dim]``."""
        vectors: Tensor = self.linear(F.silu(time))
        return vectors[:, None].chunk(self.num_vectors, dim=-1)


def normalize(x: Tensor) -> Tensor:
    """Layer norm without weights over the last dimension."""
    return F.layer_norm(x, (x.shape[-1],), eps=NORM_EPS)


class Attention(nn.Module):
    """Multi-head self-attention whose first head alone is rotated."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.heads, self.dim_head = config.heads, config.dim_head
        inner = config.heads * config.dim_head
        self.to_q = nn.Linear(config.dim, inner)
        self.to_k = nn.Linear(config.dim, inner)
        self.to_v = nn.Linear(config.dim, inner)
        self.to_out = nn.ModuleList([nn.Linear(inner, config.dim)])

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """``x`` ``[B, T, dim]``; ``mask`` broadcasts to ``[B, heads, T, T]``, True where a query may look."""
        query, key = (self._rotate_first_head(project(x), rope) for project in (self.to_q, self.to_k))
        query, key, value = (self._split(part) for part in (query, key, self.to_v(x)))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        result: Tensor = self.to_out[0](mixed.transpose(1, 2).flatten(2))
        return result

    def _rotate_first_head(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat((rotate(x[..., : self.dim_head], rope), x[..., self.dim_head :]), dim=-1)

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, self.dim_head).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with a tanh GELU between them. The identity keeps the official parameter names."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        inner = config.dim * config.ff_mult
        self.ff = nn.Sequential(
            nn.Sequential(nn.Linear(config.dim, inner), nn.GELU(approximate="tanh")),
            nn.Identity(),
            nn.Linear(inner, config.dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.ff(x)
        return result


class DiTBlock(nn.Module):
    """Attention and feed-forward, each normed, modulated and gated by the time embedding."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.attn_norm = AdaptiveNorm(config.dim, 6)
        self.attn = Attention(config)
        self.ff = FeedForward(config)

    def forward(self, x: Tensor, time: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        shift, scale, gate, ff_shift, ff_scale, ff_gate = self.attn_norm(time)
        x = x + gate * self.attn(normalize(x) * (1 + scale) + shift, rope, mask)
        result: Tensor = x + ff_gate * self.ff(normalize(x) * (1 + ff_scale) + ff_shift)
        return result


class DiT(nn.Module):
    """The velocity estimator.

    Args:
        config: sizes; ``static_chunk_frames`` is the chunk of the streaming mask.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.time_embed = TimestepEmbedding(config.dim)
        self.input_embed = InputEmbedding(config)
        self.rotary_embed = RotaryEmbedding(config.dim_head)
        self.transformer_blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.depth))
        self.norm_out = AdaptiveNorm(config.dim, 2)
        self.proj_out = nn.Linear(config.dim, config.out_channels)

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
            x: noisy mel ``[B, 80, T]``.
            mu: encoded speech tokens ``[B, 80, T]``.
            cond: the prompt's mel, zero after it, ``[B, 80, T]``.
            spks: projected speaker embedding ``[B, 80]``.
            t: time of each row in 0 … 1, ``[B]``.
            streaming: chunk-causal mask instead of full attention.
            lengths: valid frames of each row ``[B]``; what lies behind them is never attended to, and the
                result there has no meaning. None: all are valid.

        Returns:
            velocity ``[B, 80, T]``.
        """
        time = self.time_embed(t)
        hidden = self.input_embed(*(part.transpose(1, 2) for part in (x, cond, mu)), spks)
        num_frames = hidden.shape[1]
        rope = self.rotary_embed(0, num_frames)
        mask = attention_mask(
            num_frames, self.config.static_chunk_frames if streaming else None, lengths, x.device
        )
        for block in self.transformer_blocks:
            hidden = block(hidden, time, rope, mask)
        scale, shift = self.norm_out(time)
        result: Tensor = self.proj_out(normalize(hidden) * (1 + scale) + shift)
        return result.transpose(1, 2)


def attention_mask(
    num_frames: int, chunk_frames: int | None, lengths: Tensor | None, device: torch.device
) -> Tensor | None:
    """True where a query (second last dimension) may look, ``[B or 1, 1, T or 1, T]``; None: everywhere."""
    frames = torch.arange(num_frames, device=device)
    mask: Tensor | None = None
    if chunk_frames is not None:
        chunks = frames // chunk_frames
        mask = (chunks[:, None] >= chunks)[None, None]
    if lengths is not None:
        valid = (frames < lengths[:, None])[:, None, None]
        mask = valid if mask is None else mask & valid
    return mask
