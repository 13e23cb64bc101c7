"""Whole sequences with full attention (offline mode) on the weights of ``DeviceFlow``.

The same as ``FlowModel.generate`` without streaming, for rows of one launch, which are padded to one length; what
depends on ``t`` alone and the separate projections of queries, keys and values need not be on the device for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.config import FlowConfig
from vivace.models.dit import NORM_EPS, POSITION_GROUPS, POSITION_KERNEL
from vivace.models.dit_stream import BRANCHES
from vivace.models.flow_weights import BlockWeights, FlowWeights, Norm

Rope = tuple[Tensor, Tensor]


def embed_tokens(weights: FlowWeights, config: FlowConfig, ids: Tensor) -> Tensor:
    """All tokens ``[N]`` of a sequence → ``mu`` ``[token_mel_ratio * N, mel]``."""
    embedded = weights.tokens.embedding[ids.clamp(min=0)]
    y = windows(F.pad(embedded, (0, 0, 0, config.lookahead_tokens)), *weights.tokens.first)
    y = F.pad(F.leaky_relu(y), (0, 0, 2, 0))
    mu = windows(y, *weights.tokens.second) + embedded
    return mu.repeat_interleave(config.token_mel_ratio, dim=0)


def windows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A causal convolution without padding as one product: ``x`` ``[..., N, C]`` → ``[..., N - kernel + 1, out]``."""
    channels = x.shape[-1]
    kernel = weight.shape[1] // channels
    x = x.contiguous()
    size = (*x.shape[:-2], x.shape[-2] - kernel + 1, kernel * channels)
    return F.linear(x.as_strided(size, (*x.stride()[:-2], channels, 1)), weight, bias)


def solve_whole(
    weights: FlowWeights,
    config: FlowConfig,
    mu: Tensor,
    cond: Tensor,
    speakers: Tensor,
    counts: Sequence[int] | None = None,
) -> Tensor:
    """Euler integration over all frames at once. Does not wait for the device.

    Args:
        mu, cond: ``[R, T, mel]``.
        speakers: what the speaker adds to the input projection, its bias included, float32 ``[R, dim]``.
        counts: frames of each row, behind which it is padding; None: all.

    Returns:
        mel, float32 ``[R, T, mel]``; what is behind a row's end has no meaning.
    """
    (rows, frames, _), half = mu.shape, weights.x.dtype
    condition = F.linear(torch.cat((cond, mu), dim=-1).float(), weights.condition) + speakers[:, None]
    condition = torch.cat(
        (condition, weights.bias.expand(rows, frames, -1))
    )  # both branches behind each other
    rope: Rope = (weights.rope[0, :frames].to(half), weights.rope[1, :frames].to(half))
    keys = None
    if counts is not None and min(counts) < frames:
        ends = torch.tensor(list(counts), pin_memory=mu.is_cuda).to(mu.device, non_blocking=True)
        keys = (torch.arange(frames, device=mu.device) < ends.repeat(BRANCHES)[:, None])[:, None, None]
    x = weights.noise[:frames].expand(rows, -1, -1)
    for step, dt in enumerate(weights.dt):
        guided, free = _velocity(weights, config, x, condition, step, rope, keys).chunk(BRANCHES)
        x = x + dt * ((1.0 + config.guidance_scale) * guided - config.guidance_scale * free)
    return x


def _velocity(
    weights: FlowWeights,
    config: FlowConfig,
    x: Tensor,
    condition: Tensor,
    step: int,
    rope: Rope,
    keys: Tensor | None,
) -> Tensor:
    """Both branches behind each other, float32 ``[2 R, T, mel]``."""
    half = weights.x.dtype
    first = (F.linear(x.to(half), weights.x).float().repeat(BRANCHES, 1, 1) + condition).to(half)
    y = first
    for position in weights.positions:
        y = F.pad(y.transpose(1, 2), (POSITION_KERNEL - 1, 0))
        kernel, bias = position.weight.permute(1, 2, 0), position.bias.to(half)
        y = F.mish(F.conv1d(y, kernel, bias, groups=POSITION_GROUPS)).transpose(1, 2)
    hidden = first.float() + y
    for block in weights.blocks:
        _run_block(hidden, block, step, config.dit.heads, rope, keys)
    normed = _norm(hidden, weights.last_norm, step).to(half)
    return F.linear(normed, weights.output.weight).float() + weights.output_bias


def _run_block(
    hidden: Tensor, block: BlockWeights, step: int, heads: int, rope: Rope, keys: Tensor | None
) -> None:
    """In place on ``hidden`` float32 ``[rows, T, dim]``."""
    half, (rows, frames, _) = block.qkv.weight.dtype, hidden.shape
    normed = _norm(hidden, block.norm, step).to(half)
    qkv = F.linear(normed, block.qkv.weight, block.qkv_bias.to(half)).view(rows, frames, 3, heads, -1)
    _rotate(qkv[:, :, :2, 0], rope)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=keys)
    mixed = mixed.transpose(1, 2).reshape(rows, frames, -1)
    hidden.addcmul_(block.out.gate[step], F.linear(mixed, block.out.weight).float() + block.out.bias)
    normed = _norm(hidden, block.ff_norm, step).to(half)
    inner = F.gelu(F.linear(normed, block.ff_in.weight, block.ff_in_bias.to(half)), approximate="tanh")
    hidden.addcmul_(block.ff_out.gate[step], F.linear(inner, block.ff_out.weight).float() + block.ff_out.bias)


def _norm(hidden: Tensor, norm: Norm, step: int) -> Tensor:
    return F.layer_norm(hidden, hidden.shape[-1:], norm.scale[step], norm.shift[step], NORM_EPS)


def _rotate(x: Tensor, rope: Rope) -> None:
    """Turns the channel pairs of ``x`` ``[rows, T, 2, dim_head]`` in place."""
    cosine, sine = (part[:, None] for part in rope)
    even, odd = x[..., 0::2].clone(), x[..., 1::2].clone()
    x[..., 0::2] = even * cosine - odd * sine
    x[..., 1::2] = odd * cosine + even * sine
