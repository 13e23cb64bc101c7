"""What goes into a launch of the speech LM for many rows, and what comes of it (``lm_paged``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vivace.kernels.row_state import RING
from vivace.models.lm_ops import HEADER

PAGE_TOKENS = 32
"""Positions of a page of the cache."""

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
"""Rows of a launch."""

OUT_TOKENS = 32
"""Tokens that one launch can report."""


@dataclass(slots=True)
class RowCommand:
    """What one row is to do in a launch.

    Attributes:
        slot: which row. count: tokens at most. kind: ``sampler.TokenKind``. min_place: before it only speech.
    """

    slot: int
    count: int
    kind: int
    min_place: int


@dataclass(frozen=True, slots=True)
class RowPrompt:
    """New positions of a row and its whole state behind them.

    Attributes:
        ids: text tokens, or ``text_vocab_size + speech row``; at least one.
        past: positions already in the cache. place: sampling position of the token drawn behind the prompt.
        history: decoded ids so far (the last ``RING`` count); decoded: how many there were.
        seed … temperature: as ``sampler.OneRow``.
    """

    command: RowCommand
    ids: Sequence[int]
    past: int
    place: int
    history: Sequence[int]
    decoded: int
    seed: int
    top_p: float
    top_k: int
    win_size: int
    tau_r: float
    temperature: float

    def packet(self, ids: Sequence[int], past: int, bucket: int, *, draws: bool) -> list[int]:
        """What the device reads of a launch for ``ids`` behind ``past`` positions, padded to ``bucket``.

        Args:
            draws: a token is drawn behind the last of them.
        """
        command = self.command
        header = np.zeros(HEADER, dtype=np.int64)
        header[:7] = command.slot, len(ids), past, self.place, command.min_place, command.kind, self.seed
        header[8], header[9], header[12], header[13] = self.top_k, self.win_size, self.decoded, draws
        fractions = header.view(np.float64)
        fractions[7], fractions[10], fractions[11] = self.top_p, self.tau_r, self.temperature
        ring = [-1] * RING
        for age, token in enumerate(reversed(self.history[-RING:]), 1):
            ring[(self.decoded - age) % RING] = token
        return [*header.tolist(), *ring, *ids, *([0] * (bucket - len(ids)))]


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row made in one launch: ids, special ones included, and ``row_state``'s stop reason."""

    ids: list[int]
    stop: int


@dataclass(slots=True)
class Launch:
    """One launch under way: where its result will lie, and which slots it served.

    Attributes:
        number: of all launches, in the order in which they run.
        begun, done: on the device's clock; None where there is none.
        spent_ms: between them, once it is collected.
    """

    slots: list[int]
    host: Tensor
    number: int
    begun: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    results: dict[int, RowResult] = field(default_factory=dict)
    spent_ms: float = 0.0
    is_collected: bool = False
