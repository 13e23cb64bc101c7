"""Plain PyTorch versions of the kernels in ``relative_rows``: the definition, and what runs without Triton.

They read values back from the device where that is simplest, so none of them can be captured in a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vivace.kernels.reference import live_rows, split_heads
from vivace.kernels.row_state import RowState


def add_layer_norm(
    x: Tensor, delta: Tensor | None, gain: Tensor, offset: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """``x += delta`` in place (float32); the layer norm of it in ``dtype``."""
    if delta is not None:
        x += delta.float()
    return functional.layer_norm(x, gain.shape, gain.float(), offset.float(), eps).to(dtype)


def attend_distances(
    qkv: Tensor,
    bias: Tensor,
    positions: tuple[Tensor, Tensor, Tensor],
    pool: Tensor,
    table: Tensor,
    state: RowState,
    slots: Tensor,
) -> Tensor:
    """Bias, cache write and attention of one new position per row: ``[rows, heads * head_dim]``.

    Rows that make no progress store nothing; what they return has no meaning.

    Args:
        positions: what joins the query for the keys ``[heads, head_dim]``, for the distances, and the projected
            distances ``[heads, n, head_dim]``, 0 first.
        pool: one layer ``[2, pages, heads, page_tokens, head_dim]``. table: int32 ``[slots, max_pages]``.
    """
    heads, size = pool.shape[2], pool.shape[3]
    for_keys, for_distances, distances = (part.float() for part in positions)
    live = live_rows(state, slots).tolist()
    queries, keys, values = split_heads(qkv, bias, heads, heads)
    out = torch.zeros_like(queries)
    for row, slot in enumerate(slots.tolist()):
        if not live[row]:
            continue
        past = int(state.length[slot])
        page = int(table[slot, past // size])
        pool[0, page, :, past % size] = keys[row].to(pool.dtype)
        pool[1, page, :, past % size] = values[row].to(pool.dtype)
        used = table[slot, : past // size + 1].long()
        both = pool[:, used].transpose(1, 2).flatten(2, 3)[:, :, : past + 1].float()
        query, places = queries[row][:, None], distances[:, : past + 1].flip(1)
        scores = (query + for_keys[:, None]) @ both[0].mT + (query + for_distances[:, None]) @ places.mT
        weights = (scores * queries.shape[-1] ** -0.5).softmax(dim=-1)
        out[row] = (weights @ both[1])[:, 0]
    return out.flatten(1).to(qkv.dtype)
