"""The speech LM of CosyVoice 2 and 3: a Qwen2 decoder that reads text tokens and writes speech tokens.

Source: ``Qwen2LM`` and ``CosyVoice3LM`` of the reference implementation; parameter names are those of Qwen2 below
``model.``, plus ``speech_embedding`` and ``llm_decoder``. The official files also hold Qwen2's own text head
(``lm_head``); nothing here needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vivace.config import SpeechLMConfig
from vivace.layers.attention import CausalSelfAttention, KeyValueCache, causal_mask, rotary_tables
from vivace.layers.norm import RMSNorm

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, no biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same shape."""
        gate, up = self._gate_and_up(x)
        out: Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return out

    def _gate_and_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate_proj(x), self.up_proj(x)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind its norm and added to the stream."""

    def __init__(self, config: SpeechLMConfig, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = CausalSelfAttention(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KeyValueCache | None,
        layer: int,
    ) -> Tensor:
        """``[B, T, hidden]`` to the same shape; arguments as in ``CausalSelfAttention``."""
        attended = self.self_attn(self.input_layernorm(x), rotary, mask, cache, layer)
        x = x + self.dropout(attended)
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class SpeechLM(nn.Module):
    """Text and speech tokens in, scores for the next speech token out.

    The same forward serves training (whole sequences, no cache) and inference (any split into pieces, with
    a cache). Rows of a batch advance together; shorter training rows are padded on the right, where causality
    keeps the padding from touching them.

    Args:
        config: sizes.
        dropout: share of each layer's output dropped in training mode.
    """

    def __init__(self, config: SpeechLMConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.text_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, dropout) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.speech_embedding = nn.Embedding(config.num_embedding_rows, config.hidden_size)
        self.llm_decoder = nn.Linear(config.hidden_size, config.num_speech_rows, bias=config.head_bias)
        self.dropout = nn.Dropout(dropout)

    speaker: NDArray[np.float32] | None = None
    """The model does not read a speaker embedding."""

    def for_speaker(self, embedding: NDArray[np.float32] | None) -> SpeechLM:
        """The same model: it does not read the speaker embedding."""
        return self

    def embed_text(self, ids: Tensor) -> Tensor:
        """Text tokens ``[...]`` (integers) to ``[..., hidden]``."""
        embedded: Tensor = self.embed_tokens(ids)
        return embedded

    def embed_speech(self, ids: Tensor) -> Tensor:
        """Speech tokens or special rows (start, task, fill) ``[...]`` to ``[..., hidden]``."""
        embedded: Tensor = self.speech_embedding(ids)
        return embedded

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """An empty cache for ``batch`` rows with room for ``capacity`` positions; it grows when full."""
        config, weight = self.config, self.norm.weight
        return KeyValueCache(
            num_layers=config.num_layers,
            batch=batch,
            num_kv_heads=config.num_kv_heads,
            capacity=capacity,
            head_dim=config.head_dim,
            device=weight.device,
            dtype=weight.dtype,
        )

    def forward(self, embeds: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Run the decoder over new positions.

        Args:
            embeds: ``[B, T, hidden]``, T at least 1.
            cache: the past of the same rows; the new positions are appended to it.

        Returns:
            The last layer's normalised hidden states ``[B, T, hidden]``, for ``logits``.
        """
        config, length = self.config, embeds.shape[1]
        past = cache.length if cache is not None else 0
        cos, sin = rotary_tables(past, length, config.head_dim, config.rope_theta, embeds.device)
        rotary = cos.to(embeds.dtype), sin.to(embeds.dtype)
        mask = causal_mask(length, past + length, embeds.device) if past and length > 1 else None
        if cache is not None:
            cache.reserve(length)
        x = self.dropout(embeds)
        if x.dtype == torch.float16:  # the stream outgrows it; what enters and leaves a layer does not
            x = x.float()
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, mask, cache, index)
        if cache is not None:
            cache.advance(length)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores ``[..., num_speech_rows]`` of the next token: speech tokens first, then the special rows."""
        scores: Tensor = self.llm_decoder(hidden)
        return scores
