"""One launch of CosyVoice 2's flow: a chunk of each of ``S`` streams, encoder and all Euler steps, as one graph.

The host sends one packet (token ids, positions, page numbers); everything else happens on the device. Chunks are always
computed whole: frames behind the last one of an utterance have no meaning and are masked. Page tables are padded to a
power of two, one graph for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.layers.relative import RelativeAttention, RelativeLayer, shift_to_keys
from vivace.models.dit_stream import BRANCHES
from vivace.models.flow import LOOKAHEAD_KERNEL
from vivace.models.flow_unet import UNetFlow
from vivace.models.unet_pages import UNetPages
from vivace.models.unet_stream import CONTEXT, Block, Conv, ConvBlockWeights, Level

BEFORE = LOOKAHEAD_KERNEL - 1
"""Tokens that the look-ahead layer looks back on."""

HEADER = 4
"""Numbers of a stream in the packet before its token ids: first frame, frames, own page, page before."""


class UNetChunk(NamedTuple):
    """What the host knows of one stream's chunk.

    Attributes:
        ids: the tokens before the chunk, its own, those ahead; -1 where there is none.
        start: absolute first frame; ``num_frames`` the valid ones.
        pages: page of each chunk of the stream up to this one, its own included.
    """

    ids: Sequence[int]
    start: int
    num_frames: int
    pages: Sequence[int]


class _View(NamedTuple):
    """What the attentions of one launch look at.

    Attributes:
        here, table: own page of each stream ``[S]``; all pages ``[S * P]``.
        mask: True for keys that are there, ``[S, 1, 1, P * chunk]``.
        start: absolute first query, ``[S]``.
    """

    here: Tensor
    table: Tensor
    mask: Tensor
    start: Tensor


class UNetSolver:
    """Buffers and graphs for ``streams`` chunks at once. Inputs besides the packet are written by the caller.

    Attributes:
        speakers: projected speaker embeddings ``[S, 80]``.
        conditions: the prompt's mel in the chunk, zero elsewhere, ``[S, 80, chunk]``.
        x: the mel after ``run``, float32 ``[S, 80, chunk]``.
        fault: nonzero where values are not finite, ``[S]``.
    """

    def __init__(
        self, model: UNetFlow, pages: UNetPages, streams: int, max_pages: int, use_graphs: bool
    ) -> None:
        config, self._pages, self._prepared = model.config, pages, model.prepare()
        self._model, self._config, self._encoder = model, config, model.encoder
        self.streams, self._use_graphs = streams, use_graphs
        chunk = config.unet.static_chunk_frames
        assert chunk is not None, "only a causal estimator has chunks"
        self.chunk, self.tokens = chunk, chunk // config.token_mel_ratio
        self.max_pages = 1 << (max_pages - 1).bit_length()
        weight = model.speaker_projection.weight
        device, mel = weight.device, config.output_size
        self.num_ids = BEFORE + self.tokens + config.lookahead_tokens
        width = HEADER + self.num_ids + self.max_pages
        self._host = torch.zeros(streams, width, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._packet = torch.zeros(streams, width, dtype=torch.int64, device=device)
        self._sent: torch.cuda.Event | None = None
        self.speakers = weight.new_zeros(streams, mel)
        self.conditions = weight.new_zeros(streams, mel, chunk)
        self.x = weight.new_zeros(streams, mel, chunk, dtype=torch.float32)
        self.fault = torch.zeros(streams, dtype=torch.int32, device=device)
        self._frames = torch.arange(chunk, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._has_mel: set[int] = set()
        self._pool: Any = None
        # Made before any graph: the tables of projected distances must not move afterwards.
        for layers, size in ((self._encoder.encoders, self.tokens), (self._encoder.up_encoders, chunk)):
            for layer in layers:
                assert isinstance(layer, RelativeLayer)
                layer.self_attn.positions(self.max_pages * size, self.max_pages * size)

    def send(self, chunks: Sequence[UNetChunk]) -> int:
        """Puts what the chunks are on its way to the device; returns how many pages the tables are padded to."""
        assert len(chunks) == self.streams
        if self._sent is not None:
            self._sent.synchronize()
        rows = self._host.numpy()
        for row, chunk in zip(rows, chunks, strict=True):
            before = chunk.pages[-2] if len(chunk.pages) > 1 else 0
            row[:HEADER] = chunk.start, chunk.num_frames, chunk.pages[-1], before
            row[HEADER : HEADER + self.num_ids] = chunk.ids
            row[HEADER + self.num_ids :] = 0
            row[HEADER + self.num_ids : HEADER + self.num_ids + len(chunk.pages)] = chunk.pages
        self._packet.copy_(self._host, non_blocking=True)
        if self._packet.is_cuda:
            if self._sent is None:
                self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()
        longest = max(len(chunk.pages) for chunk in chunks)
        return 1 << (longest - 1).bit_length()

    def set_voice(self, slot: int, speaker: Tensor, mel: Tensor) -> None:
        """Speaker ``[80]`` of a stream, and the prompt's mel in its chunk ``[n, 80]``; mostly there is none."""
        self.speakers[slot].copy_(speaker, non_blocking=True)
        if slot in self._has_mel:
            self.conditions[slot].zero_()
            self._has_mel.remove(slot)
        if len(mel):
            self.conditions[slot, :, : len(mel)] = mel.T
            self._has_mel.add(slot)

    def run(self, num_pages: int) -> None:
        """Solves what was sent; the mel is in ``x``."""
        if not self._use_graphs:
            self.solve(num_pages)
            return
        if num_pages not in self._graphs:
            self.capture(num_pages)
        self._graphs[num_pages].replay()

    def capture(self, num_pages: int) -> None:
        """Makes the graph for tables of ``num_pages``; what was sent is solved on the way."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.solve(num_pages)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:  # graphs of one solver never run side by side: they share their memory
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            self.solve(num_pages)
        self._graphs[num_pages] = graph

    @torch.no_grad()
    def solve(self, num_pages: int) -> None:
        """The same, operation by operation."""
        prepared, packet = self._prepared, self._packet
        start, count, here, before = packet[:, :HEADER].unbind(1)
        table = packet[:, HEADER + self.num_ids :][:, :num_pages].flatten()
        mu = self._encode(start, count, here, before, table)
        keys = torch.arange(num_pages * self.chunk, device=table.device)
        mask = (keys < (start + count)[:, None])[:, None, None]
        view = _View(here, table, mask.repeat_interleave(BRANCHES, dim=0), start)
        places = (start[:, None] + self._frames).clamp_(max=self._config.noise_frames - 1)
        self.x.copy_(prepared.noise.T[places].transpose(1, 2))
        speakers = self.speakers[..., None].expand(-1, -1, self.chunk)
        joined = torch.cat((mu, speakers, self.conditions), dim=1)
        condition = torch.stack((joined, torch.zeros_like(joined)), dim=1)
        guidance = self._config.guidance_scale
        for step, (_, dt) in enumerate(prepared.grid):
            velocity = self._velocity(condition, step, view, before).float()
            with_condition, without = velocity.view(self.streams, BRANCHES, *velocity.shape[1:]).unbind(1)
            self.x.add_((1.0 + guidance) * with_condition - guidance * without, alpha=dt)
        valid = self._frames < count[:, None]
        bad = ~(self.x.isfinite() | ~valid[:, None]).flatten(1).all(dim=1)
        self.fault.copy_(bad)

    # -- the token encoder ---------------------------------------------------------------------------------------

    def _encode(self, start: Tensor, count: Tensor, here: Tensor, before: Tensor, table: Tensor) -> Tensor:
        """``mu [S, 80, chunk]``; stores the chunk's part in its pages."""
        encoder, pages, ratio = self._encoder, self._pages, self._config.token_mel_ratio
        ids = self._packet[:, HEADER : HEADER + self.num_ids]
        there = (ids >= 0)[..., None]
        hidden = encoder.embed(self._model.input_embedding(ids.clamp(min=0)))
        hidden = hidden.masked_fill(~there, 0.0)
        look = encoder.pre_lookahead_layer
        y = F.leaky_relu(look.conv1(hidden.transpose(1, 2)))
        y = y.masked_fill(~there[:, : y.shape[2]].transpose(1, 2), 0.0)
        own = hidden[:, BEFORE : BEFORE + self.tokens]
        hidden = look.conv2(y).transpose(1, 2) + own
        first, tokens = start // ratio, count // ratio
        view = self._view(first, tokens, here, table, self.tokens)
        for index, layer in enumerate(encoder.encoders):
            hidden = self._relative(layer, hidden, pages.tokens[:, index], view)
        repeated = hidden.transpose(1, 2).repeat_interleave(ratio, dim=2)
        joined = torch.cat((pages.repeated.index_select(0, before), repeated), dim=2)
        pages.repeated.index_copy_(0, here, joined[..., -2 * ratio :])
        hidden = encoder.up_embed(encoder.up_layer.conv(joined).transpose(1, 2))
        view = self._view(start, count, here, table, self.chunk)
        for index, layer in enumerate(encoder.up_encoders):
            hidden = self._relative(layer, hidden, pages.frames[:, index], view)
        mu: Tensor = self._model.encoder_proj(encoder.after_norm(hidden)).transpose(1, 2)
        return mu

    def _view(self, start: Tensor, count: Tensor, here: Tensor, table: Tensor, chunk: int) -> _View:
        keys = torch.arange(table.shape[0] // self.streams * chunk, device=table.device)
        return _View(here, table, (keys < (start + count)[:, None])[:, None, None], start)

    def _relative(self, layer: torch.nn.Module, x: Tensor, cache: Tensor, view: _View) -> Tensor:
        """One encoder layer; ``cache [pages, 2, heads, chunk, dim_head]``."""
        assert isinstance(layer, RelativeLayer)
        attention, y = layer.self_attn, layer.norm_mha(x)
        parts = [attention._split(f(y)) for f in (attention.linear_q, attention.linear_k, attention.linear_v)]
        cache.index_copy_(0, view.here, torch.stack(parts[1:], dim=1))
        keys, values = _gather(cache, view.table, self.streams).unbind(1)
        bias = self._distances(attention, parts[0], keys.shape[2], view.start)
        bias = bias.masked_fill(~view.mask, float("-inf"))
        query = parts[0] + attention.pos_bias_u[:, None]
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias)
        x = x + attention.linear_out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + layer.feed_forward(layer.norm_ff(x))
        return out

    def _distances(self, attention: RelativeAttention, query: Tensor, num_keys: int, start: Tensor) -> Tensor:
        """Scores of the distances, ``[S, heads, T, num_keys]``; a query's place is known on the device only."""
        length = query.shape[2]
        table, zero = attention.table()
        # Column c is the distance start + length - 1 - c; the table has the largest distance first.
        columns = torch.arange(length + num_keys - 1, device=query.device)
        places = (zero - (start[:, None] + length - 1) + columns).clamp(0, table.shape[1] - 1)
        positions = table[:, places].transpose(0, 1)  # [S, heads, columns, dim_head]
        scores = (query + attention.pos_bias_v[:, None]) @ positions.transpose(2, 3)
        scale: float = attention.dim_head**-0.5
        return shift_to_keys(scores, num_keys) * scale

    # -- the estimator -------------------------------------------------------------------------------------------

    def _velocity(self, condition: Tensor, step: int, view: _View, before: Tensor) -> Tensor:
        """Velocity of both branches, ``[S * 2, 80, chunk]``."""
        unet, pages = self._prepared.unet, self._pages
        x = self.x.to(condition.dtype)[:, None].expand(-1, BRANCHES, -1, -1)
        hidden = torch.cat((x, condition), dim=2).flatten(0, 1)
        past = pages.contexts[:, step].index_select(0, before).flatten(0, 1)
        future = torch.empty_like(past)
        blocks = iter(range(unet.num_blocks))
        skip, hidden = self._level(unet.down, hidden, step, past, future, blocks, view)
        for level in unet.middle:
            _, hidden = self._level(level, hidden, step, past, future, blocks, view)
        hidden = torch.cat((hidden, skip), dim=1)
        _, hidden = self._level(unet.up, hidden, step, past, future, blocks, view)
        hidden = _conv_block(unet.final, hidden, past, future)
        pages.contexts[:, step].index_copy_(
            0, view.here, future.view(self.streams, BRANCHES, *future.shape[1:])
        )
        return F.conv1d(hidden, *unet.proj)

    def _level(
        self,
        level: Level,
        x: Tensor,
        step: int,
        past: Tensor,
        future: Tensor,
        blocks: Iterator[int],
        view: _View,
    ) -> tuple[Tensor, Tensor]:
        hidden = _conv_block(level.first, x, past, future) + level.shifts[step]
        hidden = _conv_block(level.second, hidden, past, future) + F.conv1d(x, *level.residual)
        hidden = hidden.transpose(1, 2)
        for block in level.blocks:
            hidden = self._attend(block, hidden, self._pages.attention[:, step, next(blocks)], view)
        hidden = hidden.transpose(1, 2)
        return hidden, hidden if level.after is None else _convolve(level.after, hidden, past, future)

    def _attend(self, block: Block, hidden: Tensor, cache: Tensor, view: _View) -> Tensor:
        """One attention block; ``cache [pages, 2, branches, heads, chunk, dim_head]``."""
        unet, size, rows = self._prepared.unet, hidden.shape[2:], hidden.shape[0]
        normed = F.layer_norm(hidden, size, *block.norm1, block.eps)
        qkv = F.linear(normed, block.qkv).view(rows, self.chunk, 3, unet.heads, unet.dim_head)
        query, *rest = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        own = torch.stack(rest, dim=1)
        own = own.view(self.streams, BRANCHES, *own.shape[1:]).transpose(1, 2)
        cache.index_copy_(0, view.here, own)
        keys, values = _gather(cache, view.table, self.streams).unbind(1)
        mixed = F.scaled_dot_product_attention(
            query, keys.flatten(0, 1), values.flatten(0, 1), attn_mask=view.mask
        )
        hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), *block.out)
        normed = F.layer_norm(hidden, size, *block.norm3, block.eps)
        return hidden + F.linear(F.gelu(F.linear(normed, *block.ff_in)), *block.ff_out)


def _gather(cache: Tensor, table: Tensor, streams: int) -> Tensor:
    """Pages one behind the other: ``[pages, …, chunk, dim] → [S, …, P * chunk, dim]``."""
    pages = cache.index_select(0, table)
    return pages.view(streams, -1, *pages.shape[1:]).movedim(1, -3).flatten(-3, -2)


def _convolve(conv: Conv, x: Tensor, past: Tensor, future: Tensor) -> Tensor:
    joined = torch.cat((past[:, conv.start : conv.stop], x), dim=2)
    future[:, conv.start : conv.stop] = joined[..., -CONTEXT:]
    return F.conv1d(joined, *conv.weights)


def _conv_block(block: ConvBlockWeights, x: Tensor, past: Tensor, future: Tensor) -> Tensor:
    y = _convolve(block.conv, x, past, future).transpose(1, 2)
    return F.mish(F.layer_norm(y, y.shape[2:], *block.norm, block.eps)).transpose(1, 2)
