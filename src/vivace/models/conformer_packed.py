"""The weights of CosyVoice-300M's speech LM packed for decoding, and one step and one prompt over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.kernels import relative_reference
from vivace.layers.attention import KeyValueCache, causal_mask
from vivace.layers.relative import RelativeEncoder, RelativeLayer, new_cache, run_layers
from vivace.models.lm_ops import PlainOps, RowOps

if TYPE_CHECKING:
    from vivace.kernels.relative_launch import RelativeOps
    from vivace.models.conformer_lm import ConformerLM

_HEAD_ROWS = 64  # rows of the head are padded to a multiple, so that its products are aligned


class DistanceOps(RowOps, Protocol):
    """What a step is made of, beside matrix products."""

    def add_layer_norm(
        self, x: Tensor, delta: Tensor | None, gain: Tensor, offset: Tensor, eps: float
    ) -> Tensor: ...
    def attend_distances(
        self,
        qkv: Tensor,
        bias: Tensor,
        positions: tuple[Tensor, Tensor, Tensor],
        pool: Tensor,
        slots: Tensor,
    ) -> Tensor: ...


class PlainDistanceOps(PlainOps):
    """PyTorch only; arguments as ``vivace.kernels.relative_launch.RelativeOps``."""

    def add_layer_norm(
        self, x: Tensor, delta: Tensor | None, gain: Tensor, offset: Tensor, eps: float
    ) -> Tensor:
        return relative_reference.add_layer_norm(x, delta, gain, offset, eps, gain.dtype)

    def attend_distances(
        self,
        qkv: Tensor,
        bias: Tensor,
        positions: tuple[Tensor, Tensor, Tensor],
        pool: Tensor,
        slots: Tensor,
    ) -> Tensor:
        return relative_reference.attend_distances(
            qkv, bias, positions, pool, self._table, self._state, slots
        )


@dataclass(frozen=True, slots=True)
class ConformerLayerWeights:
    """One decoder layer: ``qkv [3 * hidden, hidden]``; norms are gain, offset and epsilon; products weight and bias.

    ``positions`` are both biases of the queries ``[heads, head_dim]``, for keys and for distances, and the projected
    distances ``[heads, n, head_dim]``, 0 first.
    """

    before: tuple[Tensor, Tensor, float]
    qkv: Tensor
    qkv_bias: Tensor
    positions: tuple[Tensor, Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    between: tuple[Tensor, Tensor, float]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class ConformerWeights:
    """All that a step needs.

    Attributes:
        speech: speech tokens, start and task as the decoder's layers see them, ``[rows, hidden]``.
        head: ``[padded vocab, hidden]``, ending in rows of zeros; ``head_bias`` alike, float32.
    """

    layers: tuple[ConformerLayerWeights, ...]
    speech: Tensor
    last: tuple[Tensor, Tensor, float]
    head: Tensor
    head_bias: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, lm: ConformerLM, max_positions: int) -> ConformerWeights:
        """Packs ``lm``'s weights.

        Args:
            max_positions: the furthest distance, and one.
        """
        head, bias = lm.llm_decoder.weight, lm.llm_decoder.bias
        padding = -head.shape[0] % _HEAD_ROWS
        return cls(
            layers=tuple(_pack(layer, max_positions) for layer in _layers(lm.decoder)),
            speech=lm.decoder.embed(lm.speech_embedding.weight).contiguous(),
            last=_norm(lm.decoder.after_norm),
            head=F.pad(head.detach(), (0, 0, 0, padding)).contiguous(),
            head_bias=F.pad(bias.detach().float(), (0, padding)),
        )


def _layers(encoder: RelativeEncoder) -> list[RelativeLayer]:
    return [layer for layer in encoder.encoders if isinstance(layer, RelativeLayer)]


def _norm(norm: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return norm.weight.detach(), norm.bias.detach(), norm.eps


def _linear(linear: nn.Linear) -> tuple[Tensor, Tensor]:
    return linear.weight.detach(), linear.bias.detach()


def _pack(layer: RelativeLayer, max_positions: int) -> ConformerLayerWeights:
    attention = layer.self_attn
    projections = attention.linear_q, attention.linear_k, attention.linear_v
    return ConformerLayerWeights(
        before=_norm(layer.norm_mha),
        qkv=torch.cat([projection.weight.detach() for projection in projections]),
        qkv_bias=torch.cat([projection.bias.detach() for projection in projections]),
        positions=(
            attention.pos_bias_u.detach().contiguous(),
            attention.pos_bias_v.detach().contiguous(),
            attention.project(max_positions, 1).flip(1).contiguous(),
        ),
        out=_linear(attention.linear_out),
        between=_norm(layer.norm_ff),
        up=_linear(layer.feed_forward.w_1),
        down=_linear(layer.feed_forward.w_2),
    )


def _head_scores(y: Tensor, weights: ConformerWeights) -> Tensor:
    """Float32 scores ``[rows, padded vocab]``; not rounded to the weights' dtype on the way where that can be."""
    if y.is_cuda and y.dtype != torch.float32:
        return torch.mm(y, weights.head.t(), out_dtype=torch.float32) + weights.head_bias
    return (y @ weights.head.t()).float() + weights.head_bias


def scores(ops: DistanceOps, weights: ConformerWeights, pool: Tensor, slots: Tensor) -> Tensor:
    """Feeds every graph row's token; float32 scores ``[rows, padded vocab]`` of the next.

    ``pool [layers, 2, pages, heads, page_tokens, head_dim]``.
    """
    x = ops.embed(weights.speech, slots)
    delta = None
    for layer, pages in zip(weights.layers, pool, strict=True):
        y = ops.add_layer_norm(x, delta, *layer.before)
        attended = ops.attend_distances(y @ layer.qkv.t(), layer.qkv_bias, layer.positions, pages, slots)
        y = ops.add_layer_norm(x, F.linear(attended, *layer.out), *layer.between)
        delta = F.linear(F.relu(F.linear(y, *layer.up)), *layer.down)
    return _head_scores(ops.add_layer_norm(x, delta, *weights.last), weights)


def fused_scores(ops: RelativeOps, weights: ConformerWeights, pool: Tensor, slots: Tensor) -> Tensor:
    """The same for few rows, in five kernels per layer."""
    x = ops.embed(weights.speech, slots)
    for layer, pages in zip(weights.layers, pool, strict=True):
        qkv = ops.layer_norm_linear(x, layer.before, layer.qkv)
        parts = ops.attend_distances_parts(qkv, layer.qkv_bias, layer.positions, pages, slots)
        (out, bias), (down, down_bias) = layer.out, layer.down
        ops.linear_add(*parts, out, x, bias)
        ops.linear_add(
            ops.layer_norm_linear(x, layer.between, *layer.up, relu=True), None, down, x, down_bias
        )
    return ops.layer_norm_linear(x, weights.last, weights.head, weights.head_bias, dtype=torch.float32)


def embed_prompt(lm: ConformerLM, weights: ConformerWeights, ids: Tensor, embedding: Tensor) -> Tensor:
    """What the decoder's layers see of a prompt, ``[1, n, hidden]``. Does not wait for the device.

    Args:
        ids: int64 ``[n]``: text tokens, which lie side by side and of which all are here; from the text table's size on
            rows of the speech embedding; behind those the speaker.
        embedding: of the speaker, ``[spk_embed_dim]``.
    """
    config = lm.config
    places = torch.arange(len(ids), device=ids.device)
    is_text = ids < config.text_vocab_size
    first = is_text.int().argmax()
    # Each token sees itself and those before it, so that what follows the text does not matter.
    text = ids[(first + places).clamp(max=len(ids) - 1)].clamp(max=config.text_vocab_size - 1)
    encoded = lm.decoder.embed(lm.embed_text(text[None]))[0][(places - first).clamp(min=0)]
    unit = F.normalize(embedding.to(lm.speaker_projection.weight), dim=-1)
    speaker = lm.decoder.embed(lm.speaker_projection(unit))
    rows = torch.cat((weights.speech, speaker[None]))
    speech = rows[(ids - config.text_vocab_size).clamp(min=0)]
    return torch.where(is_text[:, None], encoded, speech)[None]


def prompt(
    ops: DistanceOps,
    lm: ConformerLM,
    weights: ConformerWeights,
    pool: Tensor,
    pages: Tensor,
    x: Tensor,
    slots: Tensor,
) -> None:
    """The prompt of the row in ``slots [1]``, and one token behind it.

    Args:
        pages: where its keys and values go, ``[n / page_tokens]``.
        x: ``[1, n, hidden]``; what is behind the prompt's last position is padding.
    """
    sizes, length, size = lm.config.decoder, x.shape[1], pool.shape[4]
    cache: KeyValueCache = new_cache(sizes, weights.head, length, layers=sizes.num_blocks)
    mask = causal_mask(length, length, x.device) if length > 1 else None
    x = run_layers(lm.decoder.encoders, x, mask, cache)
    layers, heads = sizes.num_blocks, sizes.heads
    kept = cache.storage.view(layers, 2, heads, length // size, size, sizes.head_dim).transpose(2, 3)
    pool.index_copy_(2, pages, kept)
    y = ops.prompt_end(x[0].float())
    ops.sample(_head_scores(ops.add_layer_norm(y, None, *weights.last), weights), slots)
