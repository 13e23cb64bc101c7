"""One position of one row through the speech LM on a CPU, in NumPy.

A small model spends most of a decoding step on the calls themselves: some three hundred of them for a few million
multiplications. NumPy's cost a fraction of torch's at this size, and its matrix-vector product is faster.
Weights and cache are those of the torch model, seen through views; ``SpeechLM.forward`` stays the definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivace.layers.attention import KeyValueCache, rotary_tables
from vivace.models.speech_lm import DecoderLayer, SpeechLM

Array = NDArray[np.float32]

MOST_HIDDEN = 512
"""Wider models gain nothing: their products take longer than the calls."""


@dataclass(frozen=True, slots=True)
class _Layer:
    before: Array
    query: tuple[Array, Array]
    key: tuple[Array, Array]
    value: tuple[Array, Array]
    out: Array
    between: Array
    gate: Array
    up: Array
    down: Array


def _view(weight: Tensor) -> Array:
    array: Array = weight.detach().numpy()
    return array


def _layer(layer: DecoderLayer) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    query, key, value = (
        (_view(linear.weight), _view(linear.bias))
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    return _Layer(
        before=_view(layer.input_layernorm.weight),
        query=query,
        key=key,
        value=value,
        out=_view(attention.o_proj.weight),
        between=_view(layer.post_attention_layernorm.weight),
        gate=_view(mlp.gate_proj.weight),
        up=_view(mlp.up_proj.weight),
        down=_view(mlp.down_proj.weight),
    )


class SingleStep:
    """Runs single positions of ``lm``, whose weights must stay where they are.

    Args:
        lm: float32 on the CPU, in evaluation mode; see ``fits``.
    """

    def __init__(self, lm: SpeechLM) -> None:
        config = lm.config
        self._config = config
        self._layers = [_layer(layer) for layer in lm.layers]  # type: ignore[arg-type]
        self._last = _view(lm.norm.weight)
        self._speech = _view(lm.speech_embedding.weight)
        self._groups = config.num_heads // config.num_kv_heads
        self._scale = np.float32(config.head_dim**-0.5)
        self._cos, self._sin = self._tables(1024)

    @staticmethod
    def fits(lm: object) -> TypeGuard[SpeechLM]:
        """Whether this way is open and worth it for a model; other models than ``SpeechLM`` have none."""
        if not isinstance(lm, SpeechLM):
            return False
        weight = lm.llm_decoder.weight
        narrow = lm.config.hidden_size <= MOST_HIDDEN
        return narrow and weight.device.type == "cpu" and weight.dtype == torch.float32 and not lm.training

    def hidden(self, speech_row: int, cache: KeyValueCache) -> Tensor:
        """Feed one row of the speech embedding behind ``cache`` (one row); ``[hidden]``, for ``SpeechLM.logits``."""
        config, place = self._config, cache.length
        cache.reserve(1)
        stored: Array = cache.storage.numpy()[:, :, 0]  # [layers, 2, kv_heads, capacity, head_dim]
        if place >= len(self._cos):
            self._cos, self._sin = self._tables(2 * place)
        cos, sin = self._cos[place], self._sin[place]
        x = self._speech[speech_row]
        for layer, (keys, values) in zip(self._layers, stored, strict=True):
            y = self._norm(x, layer.before)
            weight, bias = layer.query
            queries = self._turned((weight @ y + bias).reshape(config.num_heads, -1), cos, sin)
            weight, bias = layer.key
            keys[:, place] = self._turned((weight @ y + bias).reshape(config.num_kv_heads, -1), cos, sin)
            weight, bias = layer.value
            values[:, place] = (weight @ y + bias).reshape(config.num_kv_heads, -1)
            x = x + layer.out @ self._attended(queries * self._scale, keys, values, place + 1)
            y = self._norm(x, layer.between)
            gate = layer.gate @ y
            with np.errstate(
                over="ignore"
            ):  # below -88 the exponential is infinite and the quotient 0, as it should
                x = x + layer.down @ (gate / (1 + np.exp(-gate)) * (layer.up @ y))
        cache.advance(1)
        return torch.from_numpy(self._norm(x, self._last))

    def _tables(self, length: int) -> tuple[Array, Array]:
        config = self._config
        cos, sin = rotary_tables(0, length, config.head_dim, config.rope_theta, torch.device("cpu"))
        half = config.head_dim // 2
        # The sine's sign for "first half minus second" is put into the table.
        return cos.numpy(), torch.cat((-sin[:, :half], sin[:, half:]), dim=-1).numpy()

    def _norm(self, x: Array, weight: Array) -> Array:
        mean = np.dot(x, x) / x.shape[0]
        out: Array = x * (weight * np.float32(1 / np.sqrt(mean + self._config.rms_norm_eps)))
        return out

    @staticmethod
    def _turned(x: Array, cos: Array, sin: Array) -> Array:
        half = x.shape[1] // 2
        swapped = np.empty_like(x)
        swapped[:, :half], swapped[:, half:] = x[:, half:], x[:, :half]
        out: Array = x * cos + swapped * sin
        return out

    def _attended(self, queries: Array, keys: Array, values: Array, length: int) -> Array:
        out = np.empty_like(queries)
        for head in range(self._config.num_kv_heads):
            mine = slice(head * self._groups, (head + 1) * self._groups)
            scores = queries[mine] @ keys[head, :length].T
            scores -= scores.max(axis=1, keepdims=True)
            weights = np.exp(scores, out=scores)
            out[mine] = (weights @ values[head, :length]) / weights.sum(axis=1, keepdims=True)
        return out.ravel()
