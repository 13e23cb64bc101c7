"""Many rows of CosyVoice-300M's speech LM in step: one launch a token for all, a CUDA graph on a GPU.

Attention knows distances only, so rows need no common origin: all are aligned at their newest position, and a row that
joins writes its prompt right before it. The table of projected distances is then one slice for all rows. When the
storage is full, what no row needs any more is moved out; when nothing can be, it doubles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.layers.relative import RelativeLayer
from vivace.models.capture import before_capture, capturing
from vivace.models.conformer_lm import ConformerLM

FIRST_CAPACITY = 512

FREE = 1 << 40
"""First position of a row that is not in use."""


class ConformerRows:
    """Keys and values of ``rows`` sequences, and the step that feeds each of them one speech token.

    Args:
        lm: in evaluation mode; its weights must not change afterwards.
        rows: sequences at most; those that are not in use cost time, no correctness.
        use_graphs: the step as a CUDA graph; None: on a GPU.
        by_token: ``step`` feeds ``tokens``; otherwise ``embeds``.

    Attributes:
        tokens: what ``step`` feeds, int64 ``[rows]``; the caller (or its sampler) writes it.
        embeds: the same as embeddings, ``[rows, hidden]``.
        hidden: normalised hidden states ``[rows, hidden]`` after ``add`` or ``step``.
        scores: float32 ``[rows, num_speech_rows]`` of each row's next token after ``add`` or ``step``.
    """

    def __init__(
        self,
        lm: ConformerLM,
        rows: int,
        capacity: int = FIRST_CAPACITY,
        use_graphs: bool | None = None,
        *,
        by_token: bool = True,
    ) -> None:
        sizes, weight = lm.config.decoder, lm.llm_decoder.weight
        self._lm, self.rows = lm, rows
        self._use_graphs = weight.is_cuda if use_graphs is None else use_graphs
        shape = (sizes.num_blocks, 2, rows, sizes.heads, capacity, sizes.head_dim)
        self._storage = weight.new_zeros(shape)
        self._starts = torch.full((rows,), FREE, device=weight.device)
        self._place = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self._end = 0  # where the next position will be written
        self._first = [FREE] * rows
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        self.embeds = weight.new_zeros(rows, sizes.input_size)
        self.hidden = weight.new_zeros(rows, sizes.output_size)
        self.scores = weight.new_zeros(rows, lm.config.num_speech_rows, dtype=torch.float32)
        self._by_token = by_token
        self._graph: torch.cuda.CUDAGraph | None = None
        self._make_tables()

    @property
    def capacity(self) -> int:
        """Positions that fit before the storage is compacted or grows."""
        return self._storage.shape[4]

    @torch.no_grad()
    def add(self, row: int, embeds: Tensor) -> None:
        """Begins a sequence in a row that is not in use.

        Args:
            embeds: its prompt ``[1, T, hidden]``; its scores come at once.
        """
        length = embeds.shape[1]
        if self._end < length:
            capacity = self.capacity
            while capacity < length:
                capacity *= 2
            self._move(self._oldest + length - self._end, capacity)
        cache = self._lm.new_cache(1, length)
        hidden = self._lm(embeds, cache)[:, -1]
        first = self._end - length
        self._storage[:, :, row, :, first : self._end] = cache.storage[:, :, 0, :, :length]
        self._set_first(row, first)
        self.hidden[row] = hidden[0]
        self.scores[row] = self._lm.logits(hidden)[0].float()

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """The sequence has ended: the row may be used again."""
        self._set_first(row, FREE)

    @torch.no_grad()
    def step(self) -> None:
        """Feeds ``tokens`` to all rows; ``scores`` are then those of the next. Rows not in use give no meaning."""
        if self._end == self.capacity:
            self._make_room()
        self._place.fill_(self._end)
        if not self._use_graphs:
            self._run()
        else:
            if self._graph is None:
                self._capture()
            assert self._graph is not None
            self._graph.replay()
        self._end += 1

    def _capture(self) -> None:
        device = self._place.device
        with before_capture(device):
            self._run()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, device):
            self._run()
        self._graph = graph

    def _run(self) -> None:
        lm, place = self._lm, self._place
        keys = torch.arange(self.capacity, device=place.device)
        # A row that is not in use sees itself, so that its values stay finite.
        first = torch.minimum(self._starts, place)
        mask = ((keys >= first[:, None]) & (keys <= place))[:, None, None]
        embeds = lm.speech_embedding(self.tokens) if self._by_token else self.embeds
        x = lm.decoder.embed(embeds)[:, None]
        for index, layer in enumerate(lm.decoder.encoders):
            assert isinstance(layer, RelativeLayer)
            x = self._layer(layer, x, self._storage[index], place - keys, mask)
        self.hidden.copy_(lm.decoder.after_norm(x[:, 0]))
        self.scores.copy_(lm.logits(self.hidden))

    def _layer(
        self, layer: RelativeLayer, x: Tensor, stored: Tensor, distances: Tensor, mask: Tensor
    ) -> Tensor:
        """One layer; ``stored [2, rows, heads, capacity, dim_head]``, ``distances`` of every key."""
        attention, y = layer.self_attn, layer.norm_mha(x)
        query, key, value = (
            project(y).view(self.rows, 1, attention.heads, attention.dim_head).transpose(1, 2)
            for project in (attention.linear_q, attention.linear_k, attention.linear_v)
        )
        stored.index_copy_(3, self._place, torch.stack((key, value)))
        table, zero = attention.table()
        places = (zero - distances).clamp(0, table.shape[1] - 1)
        scores = (query + attention.pos_bias_v[:, None]) @ table[:, places].transpose(1, 2)
        bias = (scores / math.sqrt(attention.dim_head)).masked_fill(~mask, -math.inf)
        mixed = F.scaled_dot_product_attention(
            query + attention.pos_bias_u[:, None], stored[0], stored[1], attn_mask=bias
        )
        x = x + attention.linear_out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + layer.feed_forward(layer.norm_ff(x))
        return out

    def _set_first(self, row: int, first: int) -> None:
        self._first[row] = first
        self._starts[row] = first

    def _make_room(self) -> None:
        """Room for one more position: what is in use moves to the front, into twice the storage if it is most of it."""
        used = self._end - self._oldest
        self._move(0, 2 * self.capacity if 4 * used > 3 * self.capacity else self.capacity)

    @property
    def _oldest(self) -> int:
        """First position that a row still needs; the end if none does."""
        return min(self._end, *self._first) if self._first else self._end

    def _move(self, start: int, capacity: int) -> None:
        """What is in use to ``start``, in a storage of ``capacity``."""
        oldest, end = self._oldest, self._end
        kept = self._storage[..., oldest:end, :].clone()
        if capacity != self.capacity:
            shape = (*self._storage.shape[:4], capacity, self._storage.shape[5])
            self._storage = self._storage.new_zeros(shape)
            self._graph = None
            self._make_tables()
        self._end = start + end - oldest
        self._storage[..., start : self._end, :] = kept
        for row, first in enumerate(self._first):
            if first != FREE:
                self._set_first(row, first + start - oldest)

    def _make_tables(self) -> None:
        """Tables of projected distances that do not move while the capacity stays."""
        for layer in self._lm.decoder.encoders:
            assert isinstance(layer, RelativeLayer)
            layer.self_attn.positions(self.capacity, 1)
