"""One launch of CosyVoice 2's flow: ``S`` chunks, encoder and all Euler steps, as two graphs.

The chunks are those of several streams, or successive ones of one stream behind each other: every layer has a frame's
past before it computes the frame, so that they give what they would one by one. The host sends one packet (token ids,
positions, page numbers); everything else happens on the device. Chunks are always computed whole: frames behind the
last one of an utterance have no meaning and are masked. The encoder's page tables are padded to a power of two, one
graph for each; the other graph is one Euler step, whatever the number of pages, and is replayed for every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.layers.precision import full_float32
from vivace.layers.relative import RelativeAttention, RelativeLayer, shift_to_keys
from vivace.models.capture import before_capture, capturing
from vivace.models.dit_stream import BRANCHES
from vivace.models.flow import LOOKAHEAD_KERNEL
from vivace.models.flow_unet import UNetFlow
from vivace.models.unet_chunk import ChunkUNet
from vivace.models.unet_pages import UNetPages

BEFORE = LOOKAHEAD_KERNEL - 1
"""Tokens that the look-ahead layer looks back on."""

HEADER = 5
"""Numbers of a chunk in the packet before its token ids: see ``PlainChunkOps``."""


class UNetChunk(NamedTuple):
    """What the host knows of one chunk.

    Attributes:
        ids: the tokens before the chunk, its own, those ahead; -1 where there is none.
        start: absolute first frame; ``num_frames`` the valid ones.
        pages: page of each chunk of the stream up to this one, its own included.
        behind: how many chunks of the stream stand right before it in this launch.
    """

    ids: Sequence[int]
    start: int
    num_frames: int
    pages: Sequence[int]
    behind: int = 0


class _View(NamedTuple):
    """What the attentions of one launch look at.

    Attributes:
        here, table: own page of each chunk ``[S]``; all pages ``[S * P]``.
        mask: True for keys that are there, ``[S, 1, 1, P * chunk]``.
        start: absolute first query, ``[S]``.
    """

    here: Tensor
    table: Tensor
    mask: Tensor
    start: Tensor


class UNetSolver:
    """Buffers and graphs for ``chunks`` at once. Inputs besides the packet are written by the caller.

    Attributes:
        speakers: projected speaker embeddings ``[S, 80]``.
        conditions: the prompt's mel in the chunk, zero elsewhere, ``[S, chunk, 80]``.
        x: the mel after ``run``, float32 ``[S, chunk, 80]``.
        fault: nonzero where values are not finite, ``[S]``.
    """

    def __init__(
        self,
        model: UNetFlow,
        pages: UNetPages,
        chunks: int,
        max_pages: int,
        use_graphs: bool,
        use_kernels: bool,
    ) -> None:
        config, self._pages, self._prepared = model.config, pages, model.prepare()
        self._model, self._config, self._encoder = model, config, model.encoder
        self.chunks, self._use_graphs = chunks, use_graphs
        chunk = config.unet.static_chunk_frames
        assert chunk is not None, "only a causal estimator has chunks"
        self.chunk, self.tokens = chunk, chunk // config.token_mel_ratio
        assert self.tokens >= BEFORE, "a chunk's convolutions look back on one other chunk at most"
        self.max_pages = 1 << (max_pages - 1).bit_length()
        weight = model.speaker_projection.weight
        device, mel = weight.device, config.output_size
        self.num_ids = BEFORE + self.tokens + config.lookahead_tokens
        width = HEADER + self.num_ids + self.max_pages
        self._host = torch.zeros(chunks, width, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._packet = torch.zeros(chunks, width, dtype=torch.int64, device=device)
        self._sent: torch.cuda.Event | None = None
        self.speakers = weight.new_zeros(chunks, mel)
        self.conditions = weight.new_zeros(chunks, chunk, mel)
        self.x = weight.new_zeros(chunks, chunk, mel, dtype=torch.float32)
        # Both branches of each chunk: with and without condition.
        self._joined = weight.new_zeros(chunks, BRANCHES, chunk, 4 * mel)
        self._noise = self._prepared.noise.T.contiguous()
        self._lengths = torch.tensor([dt for _, dt in self._prepared.grid], device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        table = HEADER + self.num_ids
        self._unet = ChunkUNet(self._prepared.unet, pages, self._packet, self._step, table, use_kernels)
        self.fault = torch.zeros(chunks, dtype=torch.int32, device=device)
        self._frames = torch.arange(chunk, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._euler_graph: torch.cuda.CUDAGraph | None = None
        self._has_mel: set[int] = set()
        self._pool: Any = None
        # Made before any graph: the tables of projected distances must not move afterwards.
        for layers, size in ((self._encoder.encoders, self.tokens), (self._encoder.up_encoders, chunk)):
            for layer in layers:
                assert isinstance(layer, RelativeLayer)
                layer.self_attn.positions(self.max_pages * size, self.max_pages * size)

    def send(self, chunks: Sequence[UNetChunk]) -> int:
        """Puts what the chunks are on its way to the device; returns how many pages the tables are padded to."""
        assert len(chunks) == self.chunks
        if self._sent is not None:
            self._sent.synchronize()
        rows = self._host.numpy()
        for row, chunk in zip(rows, chunks, strict=True):
            before = chunk.pages[-2] if len(chunk.pages) > 1 else 0
            row[:HEADER] = chunk.start, chunk.num_frames, chunk.pages[-1], before, chunk.behind
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
        """Speaker ``[80]`` of a chunk, and the prompt's mel in its chunk ``[n, 80]``; mostly there is none."""
        self.speakers[slot].copy_(speaker, non_blocking=True)
        if slot in self._has_mel:
            self.conditions[slot].zero_()
            self._has_mel.remove(slot)
        if len(mel):
            self.conditions[slot, : len(mel)] = mel
            self._has_mel.add(slot)

    @torch.no_grad()
    def run(self, num_pages: int) -> None:
        """Solves what was sent; the mel is in ``x``."""
        with full_float32(self.x.device):
            if not self._use_graphs:
                self._begin(num_pages)
            else:
                if num_pages not in self._graphs:
                    self.capture(num_pages)
                self._graphs[num_pages].replay()
            for _ in self._prepared.grid:
                if self._euler_graph is None:
                    self._euler()
                else:
                    self._euler_graph.replay()
        valid = self._frames < self._packet[:, 1:2]
        self.fault.copy_(~(self.x.isfinite() | ~valid[..., None]).flatten(1).all(dim=1))

    @torch.no_grad()
    def rehearse(self) -> None:
        """Runs once, without memory, what graphs hold."""
        self._begin(1)
        self._euler()

    @torch.no_grad()
    def capture(self, num_pages: int) -> None:
        """Makes the graph for tables of ``num_pages``, and that of a step if there is none yet. Runs what was sent."""
        with before_capture(self.x.device):
            self._begin(num_pages)
            if self._euler_graph is None:
                self._euler()
        self._graphs[num_pages] = self._captured(lambda: self._begin(num_pages))
        if self._euler_graph is None:
            self._euler_graph = self._captured(self._euler)

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:  # graphs of one solver never run side by side: they share their memory
            self._pool = torch.cuda.graph_pool_handle()
        with capturing(graph, self.x.device, self._pool):
            work()
        return graph

    def _begin(self, num_pages: int) -> None:
        """What the Euler steps begin with; the number of the step becomes 0."""
        packet = self._packet
        start, count, here, before, _ = packet[:, :HEADER].unbind(1)
        table = packet[:, HEADER + self.num_ids :][:, :num_pages].flatten()
        mu = self._encode(start, count, here, before, table)
        places = (start[:, None] + self._frames).clamp(max=self._config.noise_frames - 1)
        self.x.copy_(self._noise[places])
        speakers = self.speakers[:, None].expand(-1, self.chunk, -1)
        condition = torch.cat((mu, speakers, self.conditions), dim=2)
        self._joined[:, 0, :, self.x.shape[2] :] = condition
        self._step.zero_()

    def _euler(self) -> None:
        """One step of the solver with guidance."""
        guidance, mel = self._config.guidance_scale, self.x.shape[2]
        self._joined[..., :mel] = self.x[:, None]
        velocity = self._unet.velocity(self._joined.flatten(0, 1)).float()
        with_condition, without = velocity.view(self.chunks, BRANCHES, *self.x.shape[1:]).unbind(1)
        self.x.add_(self._lengths[self._step] * ((1.0 + guidance) * with_condition - guidance * without))
        self._step.add_(1)

    # -- the token encoder ---------------------------------------------------------------------------------------

    def _encode(self, start: Tensor, count: Tensor, here: Tensor, before: Tensor, table: Tensor) -> Tensor:
        """``mu [S, chunk, 80]``; stores the chunk's part in its pages."""
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
        # Written first: the chunk before may be one of this launch.
        pages.repeated.index_copy_(0, here, repeated[..., -2 * ratio :])
        joined = torch.cat((pages.repeated.index_select(0, before), repeated), dim=2)
        hidden = encoder.up_embed(encoder.up_layer.conv(joined).transpose(1, 2))
        view = self._view(start, count, here, table, self.chunk)
        for index, layer in enumerate(encoder.up_encoders):
            hidden = self._relative(layer, hidden, pages.frames[:, index], view)
        mu: Tensor = self._model.encoder_proj(encoder.after_norm(hidden))
        return mu

    def _view(self, start: Tensor, count: Tensor, here: Tensor, table: Tensor, chunk: int) -> _View:
        keys = torch.arange(table.shape[0] // self.chunks * chunk, device=table.device)
        return _View(here, table, (keys < (start + count)[:, None])[:, None, None], start)

    def _relative(self, layer: torch.nn.Module, x: Tensor, cache: Tensor, view: _View) -> Tensor:
        """One encoder layer; ``cache [pages, 2, heads, chunk, dim_head]``."""
        assert isinstance(layer, RelativeLayer)
        attention, y = layer.self_attn, layer.norm_mha(x)
        parts = [attention._split(f(y)) for f in (attention.linear_q, attention.linear_k, attention.linear_v)]
        cache.index_copy_(0, view.here, torch.stack(parts[1:], dim=1))
        keys, values = _gather(cache, view.table, self.chunks).unbind(1)
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


def _gather(cache: Tensor, table: Tensor, chunks: int) -> Tensor:
    """Pages one behind the other: ``[pages, …, chunk, dim] → [S, …, P * chunk, dim]``."""
    pages = cache.index_select(0, table)
    return pages.view(chunks, -1, *pages.shape[1:]).movedim(1, -3).flatten(-3, -2)
