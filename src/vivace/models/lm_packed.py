"""The speech LM's weights packed for decoding, and one step and one prompt over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.models.speech_lm import DecoderLayer, SpeechLM

if TYPE_CHECKING:
    from vivace.kernels.lm_launch import KernelOps
    from vivace.models.lm_ops import RowOps

FUSED_ROWS = 2
"""Up to so many rows, matrix-vector kernels with their norms and sums inside are fastest."""

_HEAD_ROWS = 64  # rows of the head are padded to a multiple, so that its products are aligned


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One decoder layer: ``qkv [(heads + 2 kv_heads) * head_dim, hidden]``, ``gate_up [2 * intermediate, hidden]``."""

    before: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    between: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """All of the model; ``head [padded vocab, hidden]`` ends in rows of zeros."""

    layers: tuple[PackedLayer, ...]
    text: Tensor
    speech: Tensor
    last: Tensor
    head: Tensor
    head_bias: Tensor | None

    @classmethod
    def of(cls, lm: SpeechLM) -> PackedWeights:
        """Packs ``lm``'s weights; its own become views of the packed ones, so that nothing is held twice."""
        with torch.no_grad():
            head = lm.llm_decoder.weight
            padded = -(-head.shape[0] // _HEAD_ROWS) * _HEAD_ROWS
            packed = head.new_zeros(padded, head.shape[1])
            packed[: head.shape[0]] = head
            lm.llm_decoder.weight.data = packed[: head.shape[0]]
            return cls(
                layers=tuple(_pack(layer) for layer in lm.layers),  # type: ignore[arg-type]
                text=lm.embed_tokens.weight.detach(),
                speech=lm.speech_embedding.weight.detach(),
                last=lm.norm.weight.detach(),
                head=packed,
                head_bias=None if lm.llm_decoder.bias is None else lm.llm_decoder.bias.detach().float(),
            )


def _join(*parameters: Tensor) -> Tensor:
    """One tensor of all, of which the parameters become views."""
    joined = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return joined


def _pack(layer: DecoderLayer) -> PackedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return PackedLayer(
        before=layer.input_layernorm.weight.detach(),
        qkv=_join(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
        qkv_bias=_join(attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias),
        out=attention.o_proj.weight.detach(),
        between=layer.post_attention_layernorm.weight.detach(),
        gate_up=_join(mlp.gate_proj.weight, mlp.up_proj.weight),
        down=mlp.down_proj.weight.detach(),
    )


def head_scores(y: Tensor, weights: PackedWeights) -> Tensor:
    """Float32 scores ``[rows, padded vocab]``; not rounded to the weights' dtype on the way where that can be."""
    if y.is_cuda and y.dtype != torch.float32:
        found = torch.mm(y, weights.head.t(), out_dtype=torch.float32)
    else:
        found = (y @ weights.head.t()).float()
    return with_bias(found, weights)


def with_bias(found: Tensor, weights: PackedWeights) -> Tensor:
    """Adds the head's bias, where there is one, in place."""
    if weights.head_bias is not None:
        found[:, : weights.head_bias.shape[0]] += weights.head_bias
    return found


def scores(ops: RowOps, weights: PackedWeights, pool: Tensor, slots: Tensor) -> Tensor:
    """Feeds every graph row's token; float32 scores ``[rows, padded vocab]`` of the next.

    ``pool [layers, 2, pages, kv_heads, page_tokens, head_dim]``.
    """
    x = ops.embed(weights.speech, slots)
    delta = None
    for layer, pages in zip(weights.layers, pool, strict=True):
        y = ops.add_norm(x, delta, layer.before)
        attended = ops.attend(y @ layer.qkv.t(), layer.qkv_bias, pages, slots)
        y = ops.add_norm(x, attended @ layer.out.t(), layer.between)
        delta = ops.silu_mul(y @ layer.gate_up.t()) @ layer.down.t()
    return head_scores(ops.add_norm(x, delta, weights.last), weights)


def fused_scores(ops: KernelOps, weights: PackedWeights, pool: Tensor, slots: Tensor) -> Tensor:
    """The same for few rows, in five kernels per layer."""
    splits = ops.splits(slots.shape[0])
    x = ops.embed(weights.speech, slots)
    for layer, pages in zip(weights.layers, pool, strict=True):
        qkv = ops.norm_linear(x, layer.before, layer.qkv)
        parts, meta = ops.attend_parts(qkv, layer.qkv_bias, pages, slots, splits)
        ops.linear_add(parts, meta, layer.out, x)
        ops.linear_add(ops.norm_linear(x, layer.between, layer.gate_up, gated=True), None, layer.down, x)
    return with_bias(ops.norm_linear(x, weights.last, weights.head, dtype=torch.float32), weights)


def prompt(ops: RowOps, weights: PackedWeights, pool: Tensor, ids: Tensor, slots: Tensor) -> None:
    """New positions of the row in ``slots [1]``, and one token behind the last of them.

    ``ids`` int64 ``[n]``: text tokens, or from the text table's size on speech rows.
    """
    x = ops.embed_prompt(weights.text, weights.speech, ids)
    delta = None
    for layer, pages in zip(weights.layers, pool, strict=True):
        y = ops.add_norm(x, delta, layer.before)
        attended = ops.attend_prompt(y @ layer.qkv.t(), layer.qkv_bias, pages)
        y = ops.add_norm(x, attended @ layer.out.t(), layer.between)
        delta = ops.silu_mul(y @ layer.gate_up.t()) @ layer.down.t()
    assert delta is not None
    y = ops.add_norm(ops.prompt_end(x + delta), None, weights.last)
    ops.sample(head_scores(y, weights), slots)
