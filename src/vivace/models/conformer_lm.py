"""The speech LM of CosyVoice-300M: a text encoder, then a decoder with relative positions, both causal.

Source: ``TransformerLM`` of the reference implementation. The sequence is ``start, speaker, encoded text, task,
speech``; the text of a segment, the prompt's included, is encoded in one go. Rows of the speech embedding are the
speech tokens, then start and task; rows of the head are the speech tokens, then the end of sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.config import ConformerLMConfig
from vivace.layers.attention import KeyValueCache, causal_mask
from vivace.layers.relative import RelativeEncoder, forget_tables, new_cache

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ConformerLM(nn.Module):
    """Text and speech tokens in, scores for the next speech token out; the interface is that of ``SpeechLM``."""

    use_graphs: bool | None = None
    """Single positions as CUDA graphs; None: on a GPU."""

    speaker: NDArray[np.float32] | None = None
    """Speaks as nobody."""

    def __init__(self, config: ConformerLMConfig) -> None:
        super().__init__()
        self.config = config
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_encoder.input_size)
        self.text_encoder = RelativeEncoder(config.text_encoder)
        self.text_projection = nn.Linear(config.text_encoder.output_size, config.decoder.input_size)
        self.speaker_projection = nn.Linear(config.spk_embed_dim, config.decoder.input_size)
        self.speech_embedding = nn.Embedding(config.num_embedding_rows, config.decoder.input_size)
        self.decoder = RelativeEncoder(config.decoder, nn.ReLU, relu=True)
        self.llm_decoder = nn.Linear(config.decoder.output_size, config.num_speech_rows)
        self.idle_rows: list[object] = []
        """What ``conformer_graph`` keeps for the next sequence."""
        self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Drops what was computed from the weights; they have changed."""
        forget_tables(self)
        self.idle_rows.clear()

    def embed_text(self, ids: Tensor) -> Tensor:
        """The whole text of a segment ``[B, T]`` to ``[B, T, hidden]``: each token sees itself and those before."""
        mask = causal_mask(ids.shape[1], ids.shape[1], ids.device)
        encoded: Tensor = self.text_projection(self.text_encoder(self.text_embedding(ids), mask))
        return encoded

    def embed_speech(self, ids: Tensor) -> Tensor:
        """Speech tokens, start or task ``[B, T]`` to ``[B, T, hidden]``."""
        embedded: Tensor = self.speech_embedding(ids)
        return embedded

    def embed_speaker(self, embedding: NDArray[np.float32]) -> Tensor:
        """Speaker embedding ``[192]`` of any length → ``[1, 1, hidden]``."""
        unit = F.normalize(torch.tensor(embedding).to(self.speaker_projection.weight), dim=-1)
        projected: Tensor = self.speaker_projection(unit[None, None])
        return projected

    def for_speaker(self, embedding: NDArray[np.float32] | None) -> ConformerLM | SpeakerView:
        """The model with the speaker behind its start row; None: without, as for instructions.

        On a GPU its single positions run as a CUDA graph.
        """
        if self.llm_decoder.weight.is_cuda if self.use_graphs is None else self.use_graphs:
            from vivace.models.conformer_graph import GraphView

            return GraphView(self, embedding)
        return self if embedding is None else SpeakerView(self, embedding)

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """An empty cache for ``batch`` rows with room for ``capacity`` positions; it grows when full."""
        sizes = self.config.decoder
        return new_cache(sizes, self.llm_decoder.weight, capacity, layers=sizes.num_blocks, batch=batch)

    def forward(self, embeds: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Run the decoder over new positions ``[B, T, hidden]``; see ``SpeechLM.forward``."""
        length, past = embeds.shape[1], 0 if cache is None else cache.length
        mask = causal_mask(length, past + length, embeds.device) if length > 1 else None
        out: Tensor = self.decoder(embeds, mask, cache)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores ``[..., num_speech_rows]`` of the next token: speech tokens first, then the end of sequence."""
        scores: Tensor = self.llm_decoder(hidden)
        return scores

    def train(self, mode: bool = True) -> ConformerLM:
        self.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ConformerLM:
        self.forget()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]


class SpeakerView:
    """A ``ConformerLM`` that speaks as one speaker, if any: the start row is followed by the speaker's own.

    Attributes:
        speaker: embedding ``[192]`` of any length.
    """

    def __init__(self, lm: ConformerLM, speaker: NDArray[np.float32] | None) -> None:
        self._lm, self.speaker = lm, speaker
        self.config, self.llm_decoder = lm.config, lm.llm_decoder
        self.embed_text, self.logits = lm.embed_text, lm.logits

    def embed_speech(self, ids: Tensor) -> Tensor:
        """As ``ConformerLM.embed_speech`` for ``[1, T]``; one position more behind a start row that comes first."""
        embedded = self._lm.embed_speech(ids)
        if self.speaker is None or ids.shape[1] != 1 or int(ids[0, 0]) != self.config.sos_id:
            return embedded
        return torch.cat((embedded, self._lm.embed_speaker(self.speaker)), dim=1)

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """See ``ConformerLM.new_cache``."""
        return self._lm.new_cache(batch, capacity)

    def for_speaker(self, embedding: NDArray[np.float32] | None) -> ConformerLM | SpeakerView:
        """Another speaker's view, or the model without one."""
        return self._lm.for_speaker(embedding)

    def __call__(self, embeds: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        out: Tensor = self._lm(embeds, cache)
        return out


def _forget(model: ConformerLM, _: object) -> None:
    """After loading a state dict."""
    model.forget()
