"""The plain way through the paged speech LM: the same methods as ``vivace.kernels.lm_launch.KernelOps``."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vivace.kernels import reference
from vivace.kernels.row_state import RING, RUNS, RowState

HEADER = 14
"""Numbers of a prompt's header before the ring of decoded ids and the ids of the prompt."""


class RowOps(Protocol):
    """What a step and a prompt are made of, beside matrix products."""

    def begin(self, commands: Tensor, slots: Tensor) -> None: ...
    def report(self, slots: Tensor, launches: Tensor, results: Tensor) -> None: ...
    def embed(self, table: Tensor, slots: Tensor) -> Tensor: ...
    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor: ...
    def silu_mul(self, x: Tensor) -> Tensor: ...
    def attend(self, qkv: Tensor, bias: Tensor, pool: Tensor, slots: Tensor) -> Tensor: ...
    def sample(self, logits: Tensor, slots: Tensor) -> None: ...
    def prompt_begin(self, header: Tensor, slots: Tensor) -> None: ...
    def embed_prompt(self, text: Tensor, speech: Tensor, ids: Tensor) -> Tensor: ...
    def attend_prompt(self, qkv: Tensor, bias: Tensor, pool: Tensor) -> Tensor: ...
    def prompt_end(self, x: Tensor) -> Tensor: ...


class PlainOps:
    """PyTorch only, on any device, in any float dtype; arguments as ``KernelOps``."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        eps: float,
        state: RowState,
        table: Tensor,
        cos: Tensor,
        sin: Tensor,
        speech_token_size: int,
        draw: reference.DrawRows,
    ) -> None:
        self._heads, self._kv_heads, self._eps = heads, kv_heads, eps
        self._state, self._table, self._cos, self._sin = state, table, cos, sin
        self._speech_token_size, self._draw = speech_token_size, draw
        self._place = torch.zeros(2, dtype=torch.int32, device=table.device)

    def begin(self, commands: Tensor, slots: Tensor) -> None:
        state = self._state
        slots.copy_(commands[:, 0])
        used = commands[commands[:, 0] >= 0]
        chosen = used[:, 0]
        state.remaining[chosen] = used[:, 1].int()
        state.kind[chosen] = used[:, 2].int()
        state.min_place[chosen] = used[:, 3]
        state.out_count[chosen] = 0

    def report(self, slots: Tensor, launches: Tensor, results: Tensor) -> None:
        state, result = self._state, results[int(launches) % results.shape[0], : slots.shape[0]]
        safe = slots.clamp(min=0).long()
        result[:, 0] = state.stop[safe]
        result[:, 1] = torch.where(slots >= 0, state.out_count[safe], 0)
        result[:, 2:] = state.out[safe]

    def embed(self, table: Tensor, slots: Tensor) -> Tensor:
        return reference.embed(table, self._state, slots)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        return reference.add_norm(x, delta, weight, self._eps, weight.dtype)

    def silu_mul(self, x: Tensor) -> Tensor:
        return reference.silu_mul(x)

    def attend(self, qkv: Tensor, bias: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        return reference.attend(qkv, bias, self._pages(pool), self._state, slots, self._heads, self._kv_heads)

    def sample(self, logits: Tensor, slots: Tensor) -> None:
        reference.sample_rows(logits, self._state, slots, self._draw, self._speech_token_size)

    def prompt_begin(self, header: Tensor, slots: Tensor) -> None:
        state, numbers = self._state, header[:HEADER].tolist()
        fractions = header[:HEADER].view(torch.float64)
        slot = numbers[0]
        slots.fill_(slot)
        self._place.copy_(header[:2])
        if slot < 0:
            return
        for index, row in (
            (2, state.length),
            (3, state.place),
            (4, state.min_place),
            (5, state.kind),
            (6, state.seed),
            (8, state.top_k),
            (9, state.win_size),
            (12, state.decoded),
            (13, state.remaining),
        ):
            row[slot] = numbers[index]
        for index, row in ((7, state.top_p), (10, state.tau_r), (11, state.temperature)):
            row[slot] = fractions[index]
        state.stop[slot] = RUNS
        state.out_count[slot] = state.token[slot] = 0
        state.recent[slot] = header[HEADER : HEADER + RING].int()

    def embed_prompt(self, text: Tensor, speech: Tensor, ids: Tensor) -> Tensor:
        is_text = ids < text.shape[0]
        rows = torch.where(is_text[:, None], text[torch.where(is_text, ids, 0)], speech[0])
        other = speech[torch.where(is_text, 0, ids - text.shape[0])]
        return torch.where(is_text[:, None], rows, other).float()

    def attend_prompt(self, qkv: Tensor, bias: Tensor, pool: Tensor) -> Tensor:
        return reference.attend_prompt(
            qkv, bias, self._pages(pool), self._state, self._place, self._heads, self._kv_heads
        )

    def prompt_end(self, x: Tensor) -> Tensor:
        slot, count = self._place.tolist()
        self._state.length[slot] += count - 1
        return x[count - 1 : count]

    def _pages(self, pool: Tensor) -> reference.Pages:
        return reference.Pages(pool, self._table, self._cos, self._sin)
