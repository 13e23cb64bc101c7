"""CosyVoice-300M's speech LM one sequence at a time, each single position as one CUDA graph.

The interface is that of ``ConformerLM``; keys and values lie in a ``ConformerRows`` of one row, which is used again
when its sequence has ended, graph included.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from vivace.layers.attention import KeyValueCache
from vivace.models.conformer_lm import ConformerLM, SpeakerView
from vivace.models.conformer_rows import ConformerRows

CAPACITY = 1024
"""Positions at first: a prompt of five seconds and a sentence; it doubles when needed."""


class RowCache:
    """The past of one sequence; when nobody holds it any more, its row is free for the next."""

    def __init__(self, lm: ConformerLM) -> None:
        self._lm = lm
        idle = lm.idle_rows
        self.rows = (
            cast(ConformerRows, idle.pop()) if idle else ConformerRows(lm, 1, CAPACITY, by_token=False)
        )
        self.length = 0

    def __del__(self) -> None:
        self.rows.remove(0)
        self._lm.idle_rows.append(self.rows)


class GraphView(SpeakerView):
    """A ``SpeakerView`` whose caches are ``RowCache``."""

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """For one row; it grows when full."""
        assert batch == 1, "a cache of this kind has one row"
        return cast(KeyValueCache, RowCache(self._lm))

    def __call__(self, embeds: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """The prompt first, then one position at a time; the last position's hidden state ``[1, 1, hidden]``."""
        if cache is None:
            return super().__call__(embeds)
        own, length = cast(RowCache, cache), embeds.shape[1]
        if own.length == 0:
            own.rows.add(0, embeds)
        else:
            assert length == 1, "after its prompt a sequence grows by one position at a time"
            own.rows.embeds.copy_(embeds[:, 0])
            own.rows.step()
        own.length += length
        return own.rows.hidden[:, None].clone()
