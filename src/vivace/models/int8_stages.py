"""Speech LM and flow with 8-bit products in their large linear layers, for a CPU.

Embeddings, norms, attention, convolutions and the small layers at the flow's ends keep float32.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from vivace.errors import ModelFolderError
from vivace.layers.attention import CausalSelfAttention
from vivace.layers.int8 import FineInt8Linear, Int8Linear, gain_over_bfloat16, products_are_exact
from vivace.models.dit import DiTBlock
from vivace.models.flow import FlowModel
from vivace.models.lm_single import SingleStep
from vivace.models.speech_lm import DecoderLayer, GatedMLP, SpeechLM

_log = logging.getLogger(__name__)


class Int8SelfAttention(CausalSelfAttention):
    """``CausalSelfAttention`` with one 8-bit product for queries, keys and values, and one for the output."""

    def __init__(self, attention: CausalSelfAttention) -> None:
        nn.Module.__init__(self)
        self.head_dim = attention.head_dim
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._sizes = [part.out_features for part in parts]
        self.qkv_proj = Int8Linear.of(*parts)
        self.add_module("o_proj", Int8Linear.of(attention.o_proj))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = self.qkv_proj(x).split(self._sizes, dim=-1)
        return queries, keys, values


class Int8GatedMLP(GatedMLP):
    """``GatedMLP`` with 8-bit products, one for gate and up; the input down has large single values."""

    def __init__(self, mlp: GatedMLP) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = Int8Linear.of(mlp.gate_proj, mlp.up_proj)
        self.add_module("down_proj", FineInt8Linear.of(mlp.down_proj))

    def _gate_and_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return gate, up


def check_int8(device: torch.device) -> None:
    """Warns where 8-bit products are slower than bfloat16's. Raises ModelFolderError where they cannot be used."""
    if device.type != "cpu":
        raise ModelFolderError(
            f"--dtype int8 is for a CPU; use bfloat16 on {device}", code="unsupported_value", param="dtype"
        )
    if not products_are_exact():
        raise ModelFolderError(
            "--dtype int8: this processor cuts off sums of 8-bit products (it has no VNNI); use bfloat16 or float32",
            code="unsupported_value",
            param="dtype",
        )
    gain = gain_over_bfloat16()
    if gain < 1:
        _log.warning("int8 is %.1f times slower than bfloat16 on this processor: use that", 1 / gain)


def quantize(stage: nn.Module) -> None:
    """Changes a float32 speech LM or flow in place where that gains speed; what it replaces is freed.

    A narrow speech LM stays as it is: single positions in NumPy are faster (``lm_single``), and exact.

    Raises:
        ModelFolderError: a stage of another kind.
    """
    if isinstance(stage, FlowModel):
        quantize_flow(stage)
    elif not isinstance(stage, SpeechLM):
        raise ModelFolderError(
            "--dtype int8: this generation of the model has no 8-bit products; use bfloat16",
            code="unsupported_value",
            param="dtype",
        )
    elif not SingleStep.fits(stage):
        quantize_lm(stage)


def quantize_lm(lm: SpeechLM) -> None:
    """All layers and the head."""
    for layer in lm.layers:
        assert isinstance(layer, DecoderLayer)
        layer.self_attn = Int8SelfAttention(layer.self_attn)
        layer.mlp = Int8GatedMLP(layer.mlp)
    lm.add_module("llm_decoder", Int8Linear.of(lm.llm_decoder))


def quantize_flow(flow: FlowModel) -> None:
    """All blocks of a DiT that has made nothing ready yet (``FlowModel.prepare``)."""
    for block in flow.dit.transformer_blocks:
        assert isinstance(block, DiTBlock)
        for parent in (block.attn, block.attn.to_out, block.ff.ff, block.ff.ff[0]):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear):
                    parent.add_module(name, Int8Linear.of(layer))
