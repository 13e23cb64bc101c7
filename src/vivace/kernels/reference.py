"""Plain PyTorch versions of the speech LM's kernels: the definition, and the fallback where Triton is missing.

Same arguments and same effects in place as the kernels; shapes are those of ``vivace.kernels.lm_rows``. They read
values back from the device where that is simplest, so none of them can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vivace.kernels.row_state import NOT_FINITE, RING, RUNS, SPECIAL, RowState

SpeechRow = 1
"""``sampler.TokenKind.SPEECH``: speech tokens only."""

DrawRows = Callable[[Tensor, RowState, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(logits, state, slots, kinds, recent) -> (ids, ok)``: ``sampler.sample`` with a row's settings taken from the
state; ``recent`` right-aligned, -1 where there is none yet."""


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's view of the paged cache.

    Attributes:
        pool: ``[2, pages, kv_heads, page_tokens, head_dim]``. table: int32 ``[slots, max_pages]``.
        cos, sin: float32 ``[positions, head_dim / 2]``.
    """

    pool: Tensor
    table: Tensor
    cos: Tensor
    sin: Tensor


def live_rows(state: RowState, slots: Tensor) -> Tensor:
    """Bool ``[rows]``: which graph rows make progress."""
    safe = slots.clamp(min=0).long()
    return (slots >= 0) & (state.stop[safe] == RUNS) & (state.remaining[safe] > 0)


def embed(table: Tensor, state: RowState, slots: Tensor) -> Tensor:
    """The rows of ``table`` that are fed next, float32 ``[rows, hidden]``."""
    return table[state.token[slots.clamp(min=0).long()].long()].float()


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``x += delta`` in place (float32); the norm of it in ``dtype``."""
    if delta is not None:
        x += delta.float()
    return functional.rms_norm(x, weight.shape, weight.float(), eps).to(dtype)


def silu_mul(x: Tensor) -> Tensor:
    """``silu(first half) * second half`` of the last axis."""
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: ``x [n, heads, head_dim]``, ``cos``, ``sin [n, head_dim / 2]``; float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def split_heads(qkv: Tensor, bias: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[n, heads, head_dim]``, float32, with their bias."""
    joined = (qkv.float() + bias.float()).reshape(*qkv.shape[:-1], heads + 2 * kv_heads, -1)
    return joined[:, :heads], joined[:, heads:-kv_heads], joined[:, -kv_heads:]


def store(pages: Pages, slot: int, first: int, keys: Tensor, values: Tensor) -> None:
    """Keys and values ``[n, kv_heads, head_dim]`` into positions ``first …`` of a slot."""
    size, dtype = pages.pool.shape[3], pages.pool.dtype
    at = torch.arange(first, first + keys.shape[0], device=keys.device)
    page = pages.table[slot, at // size].long()
    pages.pool[0, page, :, at % size] = keys.to(dtype)
    pages.pool[1, page, :, at % size] = values.to(dtype)


def stored(pages: Pages, slot: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a slot's first ``length`` positions, each ``[kv_heads, length, head_dim]``."""
    size = pages.pool.shape[3]
    used = pages.table[slot, : -(-length // size)].long()
    both = pages.pool[:, used].transpose(1, 2).flatten(2, 3)[:, :, :length]
    return both[0], both[1]


def _attended(queries: Tensor, keys: Tensor, values: Tensor, past: int) -> Tensor:
    """``queries [n, heads, head_dim]`` at positions ``past …`` to all stored ones; float32, same shape."""
    groups = queries.shape[1] // keys.shape[0]
    keys = keys.float().repeat_interleave(groups, 0)
    values = values.float().repeat_interleave(groups, 0)
    scores = torch.einsum("nhd,htd->hnt", queries.float(), keys) * queries.shape[-1] ** -0.5
    at = torch.arange(past, past + queries.shape[0], device=queries.device)
    hidden = torch.arange(keys.shape[1], device=queries.device)[None] > at[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hnt,htd->nhd", weights, values)


def attend(
    qkv: Tensor, bias: Tensor, pages: Pages, state: RowState, slots: Tensor, heads: int, kv_heads: int
) -> Tensor:
    """Bias, rotary positions, cache write and attention of one new position per row: ``[rows, heads * head_dim]``.

    Rows that make no progress store nothing; what they return has no meaning.
    """
    live = live_rows(state, slots).tolist()
    queries, keys, values = split_heads(qkv, bias, heads, kv_heads)
    dtype = pages.pool.dtype
    out = torch.zeros(queries.shape, dtype=torch.float32, device=qkv.device)
    for row, slot in enumerate(slots.tolist()):
        if not live[row]:
            continue
        past = int(state.length[slot])
        angles = pages.cos[past : past + 1], pages.sin[past : past + 1]
        mine = slice(row, row + 1)
        store(pages, slot, past, turn(keys[mine], *angles), values[mine])
        query = turn(queries[mine], *angles).to(dtype)
        out[mine] = _attended(query, *stored(pages, slot, past + 1), past)
    return out.flatten(1).to(qkv.dtype)


def attend_prompt(
    qkv: Tensor, bias: Tensor, pages: Pages, state: RowState, place: Tensor, heads: int, kv_heads: int
) -> Tensor:
    """The same for many new positions of one row. ``place``: its slot, and how many positions are no padding."""
    slot, count = (int(value) for value in place.tolist())
    past = int(state.length[slot])
    queries, keys, values = split_heads(qkv[:count], bias, heads, kv_heads)
    angles = pages.cos[past : past + count], pages.sin[past : past + count]
    store(pages, slot, past, turn(keys, *angles), values)
    out = torch.zeros(qkv.shape[0], *queries.shape[1:], dtype=torch.float32, device=qkv.device)
    query = turn(queries, *angles).to(pages.pool.dtype)
    out[:count] = _attended(query, *stored(pages, slot, past + count), past)
    return out.flatten(1).to(qkv.dtype)


def sample_rows(
    logits: Tensor, state: RowState, slots: Tensor, draw: DrawRows, speech_token_size: int
) -> None:
    """Draws one token per row that makes progress and moves its state on."""
    live = live_rows(state, slots)
    if not bool(live.any()):
        return
    logits, chosen = logits[live], slots[live].long()
    early = state.place[chosen] < state.min_place[chosen]
    kinds = torch.where(early, SpeechRow, state.kind[chosen])
    ages = torch.arange(RING, 0, -1, device=logits.device)
    count = state.decoded[chosen]
    recent = state.recent[chosen].gather(1, (count[:, None].long() - ages) % RING)
    recent = torch.where(ages <= count[:, None], recent, -1).long()
    ids, ok = draw(logits, state, chosen, kinds, recent)
    state.stop[chosen[~ok]] = NOT_FINITE
    chosen, drawn = chosen[ok], ids[ok].int()
    room = state.out_count[chosen] < state.out.shape[1]
    state.out[chosen[room], state.out_count[chosen[room]].long()] = drawn[room]
    state.recent[chosen, (state.decoded[chosen] % RING).long()] = drawn
    state.token[chosen] = drawn
    for counter in (state.out_count, state.decoded, state.place, state.length):
        counter[chosen] += 1
    state.remaining[chosen] -= 1
    state.stop[chosen[drawn >= speech_token_size]] = SPECIAL
