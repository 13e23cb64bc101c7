"""Weights of the flow as the kernels want them; everything that depends on ``t`` alone is computed here, once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.kernels.dit_reference import Added, Folded, Positions, fold
from vivace.models.dit import AdaptiveNorm, DiT, DiTBlock
from vivace.models.flow import FlowModel, LookAhead, time_grid

Move = Callable[[Tensor], Tensor]


class Norm(NamedTuple):
    """What the time does in a norm, at every step: float32 ``[steps, dim]``. The scale has its 1 added."""

    scale: Tensor
    shift: Tensor


class BlockWeights(NamedTuple):
    """One block; the norms are those of attention and feed-forward."""

    norm: Norm
    ff_norm: Norm
    qkv: Folded
    qkv_bias: Tensor
    out: Added
    ff_in: Folded
    ff_in_bias: Tensor
    ff_out: Added


class TokenWeights(NamedTuple):
    """Token embedding and look-ahead layer.

    Attributes:
        embedding: ``[vocab + 1, mel]``; the last row is zero and stands for no token.
        first, second: the two convolutions as products with windows of tokens, ``[out, kernel * in]``.
    """

    embedding: Tensor
    first: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]


class FlowWeights(NamedTuple):
    """All of them on one device.

    Attributes:
        x: input projection of the noisy mel ``[dim, mel]``.
        condition: that of prompt and tokens ``[dim, 2 * mel]``, float32; ``bias`` its bias.
        speaker: that of the speaker ``[dim, spk]``, float32.
        output: projection to the velocity behind the ``last_norm``; ``output_bias`` its bias.
        rope: cosines and sines of all positions, float32 ``[2, positions, dim_head / 2]``.
        dt: of each Euler step.
        noise: float32 ``[noise frames, mel]``.
    """

    tokens: TokenWeights
    x: Tensor
    condition: Tensor
    bias: Tensor
    speaker: Tensor
    positions: tuple[Positions, Positions]
    blocks: list[BlockWeights]
    last_norm: Norm
    output: Folded
    output_bias: Tensor
    rope: Tensor
    dt: Tensor
    noise: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: FlowModel, device: torch.device) -> FlowWeights:
        """Copies what the kernels need to ``device``, in the model's own dtype."""
        dit, mel = model.dit, model.config.dit.mel_dim
        dtype = dit.proj_out.weight.dtype

        def half(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, dtype).contiguous()

        def single(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, torch.float32).contiguous()

        grid = time_grid(model.config.num_steps)
        times = _embed_times(dit, [t for t, _ in grid], device)
        vectors = [_project(block.attn_norm, times) for block in _blocks(dit)]
        scale, shift = _project(dit.norm_out, times)
        weight = dit.input_embed.proj.weight
        mu_end = mel + dit.config.mel_dim + dit.config.mu_dim
        convolutions = dit.input_embed.conv_pos_embed
        following = [(1 + part[1]).contiguous() for part in vectors[1:]] + [(1 + scale).contiguous()]
        cosine, sine = dit.rotary_embed(0, model.config.noise_frames)
        return cls(
            tokens=_token_weights(model, half),
            x=half(weight[:, :mel]),
            condition=single(weight[:, mel:mu_end]),
            bias=single(dit.input_embed.proj.bias),
            speaker=single(weight[:, mu_end:]),
            positions=(
                _positions(convolutions.conv1[0], half, single),
                _positions(convolutions.conv2[0], half, single),
            ),
            blocks=[
                _block(block, part, after, half, single)
                for block, part, after in zip(_blocks(dit), vectors, following, strict=True)
            ],
            last_norm=Norm((1 + scale).contiguous(), shift),
            output=fold(half(dit.proj_out.weight), single(dit.proj_out.bias), 1 + scale, shift),
            output_bias=single(dit.proj_out.bias),
            rope=single(torch.stack((cosine[:, 0::2], sine[:, 1::2]))),
            dt=torch.tensor([dt for _, dt in grid], device=device),
            noise=single(model.noise[0].T),
        )


def _blocks(dit: DiT) -> list[DiTBlock]:
    return [block for block in dit.transformer_blocks if isinstance(block, DiTBlock)]


def _embed_times(dit: DiT, times: list[float], device: torch.device) -> Tensor:
    embed = copy.deepcopy(dit.time_embed).to(device, torch.float32)
    result: Tensor = embed(torch.tensor(times, device=device))
    return result


def _project(norm: AdaptiveNorm, times: Tensor) -> list[Tensor]:
    """The norm's vectors at every step, float32 ``[steps, dim]`` each."""
    exact = copy.deepcopy(norm).to(times.device, torch.float32)
    return [vector[:, 0].contiguous() for vector in exact(times)]


def _block(block: DiTBlock, vectors: list[Tensor], after: Tensor, half: Move, single: Move) -> BlockWeights:
    shift, scale, gate, ff_shift, ff_scale, ff_gate = vectors
    attention, feed_forward = block.attn, block.ff.ff
    parts = (attention.to_q, attention.to_k, attention.to_v)
    last, inner, out = attention.to_out[0], feed_forward[0][0], feed_forward[2]  # type: ignore[index]
    assert isinstance(last, torch.nn.Linear)
    assert isinstance(inner, torch.nn.Linear)
    assert isinstance(out, torch.nn.Linear)
    ff_scale = (1 + ff_scale).contiguous()
    scale = (1 + scale).contiguous()
    qkv_bias, ff_in_bias = single(torch.cat([part.bias for part in parts])), single(inner.bias)
    return BlockWeights(
        norm=Norm(scale, shift),
        ff_norm=Norm(ff_scale, ff_shift),
        qkv=fold(half(torch.cat([part.weight for part in parts])), qkv_bias, scale, shift),
        qkv_bias=qkv_bias,
        out=Added(half(last.weight), single(last.bias), gate, ff_scale),
        ff_in=fold(half(inner.weight), ff_in_bias, ff_scale, ff_shift),
        ff_in_bias=ff_in_bias,
        ff_out=Added(half(out.weight), single(out.bias), ff_gate, after),
    )


def _positions(layer: torch.nn.Module, half: Move, single: Move) -> Positions:
    assert isinstance(layer, torch.nn.Conv1d)
    assert layer.bias is not None
    return Positions(half(layer.weight.permute(2, 0, 1)), single(layer.bias))


def _token_weights(model: FlowModel, half: Move) -> TokenWeights:
    embedding = model.input_embedding.weight
    return TokenWeights(
        half(torch.cat((embedding, embedding.new_zeros(1, embedding.shape[1])))),
        *(_windows(layer, half) for layer in _layers(model.lookahead)),
    )


def _layers(lookahead: LookAhead) -> tuple[torch.nn.Conv1d, torch.nn.Conv1d]:
    return lookahead.conv1, lookahead.conv2


def _windows(layer: torch.nn.Conv1d, half: Move) -> tuple[Tensor, Tensor]:
    """A convolution as a product with joined windows."""
    assert layer.bias is not None
    return half(layer.weight.permute(0, 2, 1).flatten(1)), half(layer.bias)
