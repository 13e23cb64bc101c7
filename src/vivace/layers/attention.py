"""Causal self-attention with grouped key-value heads, rotary positions and a growing key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rotary_tables(
    start: int, length: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions ``start … start + length - 1``, each float32 ``[length, head_dim]``.

    Both halves of the last axis hold the same angles (Qwen2's layout: the halves rotate, not neighbours).
    Angles are taken in float32 whatever the weights' dtype: in bf16, positions past 256 would collapse.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(start, start + length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x [B, heads, T, head_dim]`` by the tables' angles ``[T, head_dim]``."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class KeyValueCache:
    """Keys and values of every layer for a batch of rows that advance together.

    The storage doubles when it runs full, so ``capacity`` is a hint and not a limit.

    Attributes:
        length: positions stored so far, the same for every row and layer.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.length = 0
        self._shape = (num_layers, 2, batch, num_kv_heads, max(capacity, 1), head_dim)
        self._storage = torch.empty(self._shape, device=device, dtype=dtype)

    @property
    def capacity(self) -> int:
        """Positions that fit before the storage grows."""
        return self._storage.shape[4]

    @property
    def storage(self) -> Tensor:
        """Everything, ``[layers, keys and values, B, kv_heads, capacity, head_dim]``; ``length`` positions count."""
        return self._storage

    def reserve(self, extra: int) -> None:
        """Make room for ``extra`` more positions; what is stored stays."""
        needed = self.length + extra
        if needed <= self.capacity:
            return
        shape = list(self._storage.shape)
        shape[4] = max(needed, 2 * self.capacity)
        grown = self._storage.new_empty(shape)
        grown[:, :, :, :, : self.length] = self._storage[:, :, :, :, : self.length]
        self._storage = grown

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new ``[B, kv_heads, T, head_dim]`` behind the old ones; returns views of all, new included.

        ``length`` moves only with ``advance``, once every layer has stored its part.
        """
        end = self.length + keys.shape[2]
        stored = self._storage[layer]
        stored[0, :, :, self.length : end] = keys
        stored[1, :, :, self.length : end] = values
        return stored[0, :, :, :end], stored[1, :, :, :end]

    def advance(self, count: int) -> None:
        """Count ``count`` positions, now stored in every layer, as part of the past."""
        self.length += count

    def fork(self, capacity: int | None = None) -> KeyValueCache:
        """An independent copy, so that one prompt's past can be continued more than once."""
        layers, _, batch, heads, _, head_dim = self._storage.shape
        copy = KeyValueCache(
            num_layers=layers,
            batch=batch,
            num_kv_heads=heads,
            capacity=max(capacity or self.capacity, self.length),
            head_dim=head_dim,
            device=self._storage.device,
            dtype=self._storage.dtype,
        )
        copy._storage[:, :, :, :, : self.length] = self._storage[:, :, :, :, : self.length]
        copy.length = self.length
        return copy


def causal_mask(new: int, total: int, device: torch.device) -> Tensor:
    """Bool ``[new, total]``: the i-th new position sees everything up to itself."""
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(diagonal=total - new)


class CausalSelfAttention(nn.Module):
    """Qwen2's attention: projections with bias for queries, keys and values, none for the output.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim: sizes; each key-value head serves
            ``num_heads / num_kv_heads`` query heads.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KeyValueCache | None,
        layer: int,
    ) -> Tensor:
        """Attend from ``x [B, T, hidden]`` to the cache and to itself; returns ``[B, T, hidden]``.

        Args:
            rotary: cosines and sines ``[T, head_dim]`` of the new positions, in ``x``'s dtype.
            mask: bool ``[T, total]`` where a past and several new positions meet; None where plain causality
                (no past) or no mask at all (one new position) says the same and runs faster.
            cache: the past; the new keys and values are stored in its ``layer``. None: no past, none kept.
        """
        batch, length, _ = x.shape
        queries, keys, values = self._project(x)
        queries = queries.view(batch, length, -1, self.head_dim).transpose(1, 2)
        keys = keys.view(batch, length, -1, self.head_dim).transpose(1, 2)
        values = values.view(batch, length, -1, self.head_dim).transpose(1, 2)
        # Under autocast the tables are float32 and the projections are not: all three must agree again.
        queries = rotate(queries, *rotary).to(values.dtype)
        keys = rotate(keys, *rotary).to(values.dtype)
        if cache is not None:
            keys, values = cache.append(layer, keys, values)
        attended = nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and length > 1,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        joined: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return joined

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``[B, T, heads * head_dim]``."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)
