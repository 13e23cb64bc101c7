"""Self-attention with relative positions (Transformer-XL's form, as in the reference's Conformer), and its stacks.

The score of a query at position ``i`` for a key at ``j`` is ``(q + u) · k + (q + v) · P(i - j)``, where ``P`` is a
projection of the sinusoids of the distance. ``P`` does not depend on the input, so every layer keeps a table of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.config import EncoderConfig
from vivace.layers.attention import KeyValueCache

_LAYER_EPS = 1e-12
_EMBED_EPS = 1e-5


def distance_sinusoids(first: int, count: int, size: int, device: torch.device) -> Tensor:
    """Float32 ``[count, size]`` for the distances ``first``, ``first - 1`` …: sines and cosines in turn."""
    distances = torch.arange(first, first - count, -1, device=device, dtype=torch.float32)
    steps = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    angles = torch.outer(distances, torch.exp(steps * -(math.log(10_000.0) / size)))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


def shift_to_keys(scores: Tensor, num_keys: int) -> Tensor:
    """From distance to key: ``[..., T, num_keys + T - 1]`` → ``[..., T, num_keys]``.

    Columns are distances, the largest first, for the last query's sake; query ``t`` of ``T`` finds the distance to key
    0 at column ``T - 1 - t``.
    """
    rows, columns = scores.shape[-2:]
    if rows == 1:
        return scores
    flat = scores.flatten(-2)[..., rows - 1 : rows * columns - 1]
    return flat.reshape(*scores.shape[:-2], rows, columns - 1)[..., :num_keys]


class RelativeAttention(nn.Module):
    """Multi-head attention over distances; names are those of the official checkpoints."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, size // heads
        self.linear_q = nn.Linear(size, size)
        self.linear_k = nn.Linear(size, size)
        self.linear_v = nn.Linear(size, size)
        self.linear_out = nn.Linear(size, size)
        self.linear_pos = nn.Linear(size, size, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(heads, self.dim_head))
        self.pos_bias_v = nn.Parameter(torch.zeros(heads, self.dim_head))
        self._table: Tensor | None = None
        self._before, self._after = 0, 0

    def forward(self, x: Tensor, mask: Tensor | None, cache: KeyValueCache | None, layer: int) -> Tensor:
        """Attend from ``x [B, T, size]`` to the cache and to itself; returns ``[B, T, size]``.

        Args:
            mask: bool, True where a query may look, broadcastable to ``[B, heads, T, total]``; None: everywhere.
            cache: the past; the new keys and values are stored in its ``layer``. None: no past, none kept.
        """
        queries, keys, values = (self._split(f(x)) for f in (self.linear_q, self.linear_k, self.linear_v))
        if cache is not None:
            keys, values = cache.append(layer, keys, values)
        length, total = queries.shape[2], keys.shape[2]
        positions = self.positions(total, length)
        scores = (queries + self.pos_bias_v[:, None]) @ positions.transpose(1, 2)
        bias = shift_to_keys(scores, total) / math.sqrt(self.dim_head)
        if mask is not None:
            bias = bias.masked_fill(~mask, -math.inf)
        mixed = F.scaled_dot_product_attention(
            queries + self.pos_bias_u[:, None], keys, values, attn_mask=bias
        )
        out: Tensor = self.linear_out(mixed.transpose(1, 2).flatten(2))
        return out

    def positions(self, total: int, length: int) -> Tensor:
        """Projected distances ``total - 1 … 1 - length``, ``[heads, total + length - 1, dim_head]``.

        In evaluation a table is kept, which grows by doubling; weights changed in place are not noticed.
        """
        if self.training:
            return self.project(total, length)
        if self._table is None or total > self._before or length > self._after:
            self._before = max(total, 2 * self._before if total > self._before else self._before, 64)
            self._after = max(length, 2 * self._after if length > self._after else self._after, 64)
            self._table = self.project(self._before, self._after)
        start = self._before - total
        return self._table[:, start : start + total + length - 1]

    def table(self) -> tuple[Tensor, int]:
        """The table as it is, ``[heads, distances, dim_head]`` with the largest first, and the place of distance 0."""
        assert self._table is not None, "positions() makes it"
        return self._table, self._before - 1

    def project(self, before: int, after: int) -> Tensor:
        """Projected distances ``before - 1 … -after + 1``, ``[heads, before + after - 1, dim_head]``."""
        weight = self.linear_pos.weight
        waves = distance_sinusoids(before - 1, before + after - 1, weight.shape[1], weight.device)
        projected: Tensor = self.linear_pos(waves.to(weight.dtype))
        return projected.view(-1, self.heads, self.dim_head).transpose(0, 1)

    def forget(self) -> None:
        """Drops the table; the weights have changed."""
        self._table, self._before, self._after = None, 0, 0

    def train(self, mode: bool = True) -> RelativeAttention:
        self.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RelativeAttention:
        self.forget()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, self.dim_head).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers around an activation."""

    def __init__(self, size: int, ff_size: int, activation: nn.Module) -> None:
        super().__init__()
        self.w_1 = nn.Linear(size, ff_size)
        self.activation = activation
        self.w_2 = nn.Linear(ff_size, size)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` to the same shape."""
        out: Tensor = self.w_2(self.activation(self.w_1(x)))
        return out


class RelativeLayer(nn.Module):
    """Attention and feed-forward, each behind its norm and added to the stream."""

    def __init__(self, config: EncoderConfig, activation: nn.Module) -> None:
        super().__init__()
        self.self_attn = RelativeAttention(config.output_size, config.heads)
        self.feed_forward = FeedForward(config.output_size, config.ff_size, activation)
        self.norm_mha = nn.LayerNorm(config.output_size, eps=_LAYER_EPS)
        self.norm_ff = nn.LayerNorm(config.output_size, eps=_LAYER_EPS)

    def forward(self, x: Tensor, mask: Tensor | None, cache: KeyValueCache | None, layer: int) -> Tensor:
        """``[B, T, size]`` to the same shape; arguments as in ``RelativeAttention``."""
        x = x + self.self_attn(self.norm_mha(x), mask, cache, layer)
        out: Tensor = x + self.feed_forward(self.norm_ff(x))
        return out


class InputEmbedding(nn.Module):
    """Linear layer and norm, scaled by the root of the width; a ReLU before the scale where ``relu``."""

    def __init__(self, input_size: int, size: int, *, relu: bool = False) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(input_size, size), nn.LayerNorm(size, eps=_EMBED_EPS))
        self._relu, self._scale = relu, math.sqrt(size)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., input_size]`` → ``[..., size]``."""
        y: Tensor = self.out(x)
        return (F.relu(y) if self._relu else y) * self._scale


class RelativeEncoder(nn.Module):
    """Embedding, layers, norm.

    Args:
        activation: makes the feed-forward's (SiLU in the Conformer, ReLU in the Transformer).
        relu: the embedding ends in a ReLU.
    """

    def __init__(
        self, config: EncoderConfig, activation: Callable[[], nn.Module] = nn.SiLU, *, relu: bool = False
    ) -> None:
        super().__init__()
        self.embed = InputEmbedding(config.input_size, config.output_size, relu=relu)
        self.encoders = nn.ModuleList(RelativeLayer(config, activation()) for _ in range(config.num_blocks))
        self.after_norm = nn.LayerNorm(config.output_size, eps=_EMBED_EPS)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """``[B, T, input_size]`` → ``[B, T, output_size]``; with ``cache`` the new positions follow its past."""
        out: Tensor = self.after_norm(run_layers(self.encoders, self.embed(x), mask, cache))
        return out


def run_layers(layers: nn.ModuleList, x: Tensor, mask: Tensor | None, cache: KeyValueCache | None) -> Tensor:
    """``RelativeLayer`` after layer; the new positions are counted into ``cache`` once all have stored theirs."""
    length = x.shape[1]
    if cache is not None:
        cache.reserve(length)
    for index, layer in enumerate(layers):
        x = layer(x, mask, cache, index)
    if cache is not None:
        cache.advance(length)
    return x


def new_cache(
    config: EncoderConfig, weight: Tensor, capacity: int, *, layers: int, batch: int = 1
) -> KeyValueCache:
    """An empty cache for a stack of ``layers`` of these sizes, on the device and in the dtype of ``weight``."""
    return KeyValueCache(
        num_layers=layers,
        batch=batch,
        num_kv_heads=config.heads,
        capacity=capacity,
        head_dim=config.head_dim,
        device=weight.device,
        dtype=weight.dtype,
    )


def forget_tables(module: nn.Module) -> None:
    """After new weights were loaded into a module that holds ``RelativeAttention``."""
    for part in module.modules():
        if isinstance(part, RelativeAttention):
            part.forget()


def chunk_mask(length: int, chunk: int | None, device: torch.device) -> Tensor | None:
    """True where a query may look: every earlier chunk and all of its own, ``[length, length]``; None: everywhere."""
    if chunk is None:
        return None
    chunks = torch.arange(length, device=device) // chunk
    return chunks[:, None] >= chunks
