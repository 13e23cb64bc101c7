"""CosyVoice-300M's speech LM for many rows at once: the machinery of ``PagedLM`` around its own layers.

A prompt comes in one launch, because its text is encoded in one go: long ones run without a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from vivace.errors import SynthesisError
from vivace.layers.relative import RelativeLayer
from vivace.models import conformer_packed
from vivace.models.conformer_lm import ConformerLM
from vivace.models.conformer_packed import ConformerWeights, DistanceOps, PlainDistanceOps
from vivace.models.lm_launches import PAGE_TOKENS, Launch, RowPrompt
from vivace.models.lm_ops import PlainOps
from vivace.models.lm_paged import PagedLM

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vivace.kernels.lm_launch import KernelOps
    from vivace.kernels.relative_launch import RelativeOps
    from vivace.models.kinds import AnyLM

PROMPT_BUCKETS = (32, 64, 128, 192, 256, 384, 512, 1024, 2048)
_LONGEST_GRAPH = 512  # positions of a prompt; what is longer keeps the GPU busy by itself


class PagedConformer(PagedLM):
    """As ``PagedLM``. The id behind the last row of the speech embedding stands for the row's speaker."""

    prompt_buckets = PROMPT_BUCKETS
    plain_ops = PlainDistanceOps
    fused_rows = 1  # measured with one row only

    @torch.no_grad()
    def _pack(self, lm: AnyLM, max_positions: int) -> None:
        assert isinstance(lm, ConformerLM)
        self._lm = lm
        self._packed = ConformerWeights.of(lm, max_positions + 1)
        shape = self.num_slots, lm.config.spk_embed_dim
        self._speakers = torch.zeros(shape, device=self.device)
        self._host_speakers = torch.zeros(shape, pin_memory=self.device.type == "cuda")
        # The prompt's graphs read these tables, which the model may replace by longer ones.
        self._tables: list[Tensor] = []
        for encoder in (lm.text_encoder, lm.decoder):
            for layer in encoder.encoders:
                assert isinstance(layer, RelativeLayer)
                layer.self_attn.positions(PROMPT_BUCKETS[-1], PROMPT_BUCKETS[-1])
                self._tables.append(layer.self_attn.table()[0])

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        empty = torch.zeros(0, device=self.device)
        return empty, empty

    @staticmethod
    def _kernel_ops() -> type[KernelOps]:
        from vivace.kernels.relative_launch import RelativeOps

        return RelativeOps

    @property
    def _distance_ops(self) -> DistanceOps:
        return cast(DistanceOps, self.ops)

    def set_speaker(self, slot: int, embedding: NDArray[np.float32] | None) -> None:
        """Who speaks in a row whose prompt comes next."""
        if embedding is None:
            return
        row = self._host_speakers[slot]
        row.copy_(torch.tensor(embedding))
        with self._on_stream():
            self._speakers[slot].copy_(row, non_blocking=True)

    def prompt(self, row: RowPrompt) -> Launch:
        if len(row.ids) > PROMPT_BUCKETS[-1]:
            raise SynthesisError("the text and the voice's prompt are too long for one segment; shorten them")
        assert row.past == 0, "a row has one prompt"
        return super().prompt(row)

    def _has_graph(self, kind: str, size: int) -> bool:
        is_short = kind != "prompt" or size <= _LONGEST_GRAPH
        return is_short and super()._has_graph(kind, size)

    def _run_prompt(self, ids: Tensor, slots: Tensor) -> None:
        slot = slots.clamp(min=0).long()
        embedding = self._speakers.index_select(0, slot)[0]
        x = conformer_packed.embed_prompt(self._lm, self._packed, ids, embedding)
        # Pages behind the row's own, and those of a run over an empty row, are scratch.
        places = torch.arange(len(ids) // PAGE_TOKENS, device=self.device)
        pages = self.table.index_select(0, slot)[0][places.clamp(max=self.max_pages - 1)]
        pages = torch.where((slots[0] >= 0) & (places < self.max_pages), pages, 0).long()
        conformer_packed.prompt(self._distance_ops, self._lm, self._packed, self.pool, pages, x, slots)

    def _scores(self, slots: Tensor) -> Tensor:
        rows, arguments = slots.shape[0], (self._packed, self.pool)
        if isinstance(self.ops, PlainOps):
            if self.deterministic:  # each row's products alone, as if it had no company
                each = (slots[row : row + 1] for row in range(rows))
                return torch.cat(
                    [conformer_packed.scores(self._distance_ops, *arguments, one) for one in each]
                )
        elif self.deterministic or rows <= self.fused_rows:
            return conformer_packed.fused_scores(cast("RelativeOps", self.ops), *arguments, slots)
        return conformer_packed.scores(self._distance_ops, *arguments, slots)
