"""One launch of the flow: ``S`` chunks through all Euler steps, as one graph on a GPU.

They may be those of several streams, and successive ones of one stream: at each step a chunk attends to what the same
kernels have just written for those before it. The host fills one packet (token ids, positions, page tables) and starts;
everything else happens on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.config import FlowConfig
from vivace.kernels import dit_reference
from vivace.kernels.dit_reference import Guidance, Normed, Rows
from vivace.models.capture import before_capture, capturing
from vivace.models.dit import POSITION_KERNEL
from vivace.models.flow_kernels import Kernels
from vivace.models.flow_pages import PageLayout
from vivace.models.flow_weights import FlowWeights
from vivace.models.flow_whole import windows

ROW_PADDING = 128
"""Rows that kernels may read beyond the last one: a whole tile."""

PACKETS = 4
"""Packets that may be under way to the device at once."""

LOOKAHEAD_BEFORE = 2
"""Tokens that the look-ahead layer looks back on."""


class Chunk(NamedTuple):
    """What the host knows of one chunk.

    Attributes:
        ids: the two tokens before the chunk, those of the chunk, those ahead; -1 where there is none.
        start: absolute first frame; ``num_frames`` the valid ones.
        pages: page of each chunk of the stream up to this one, its own included.
        shared: block of each chunk for the unconditional branch at step 0, likewise.
        ahead: how many of the stream's chunks stand right ahead of this one in the launch, the next before last.
    """

    ids: Sequence[int]
    start: int
    num_frames: int
    pages: Sequence[int]
    shared: Sequence[int]
    ahead: int = 0


class _Packet:
    """Views of one buffer of int64: offsets of pages, then pairs of int32."""

    def __init__(self, streams: int, pages: int, ids: int, device: torch.device | str, pinned: bool) -> None:
        wide = 4 * streams * (pages + 2)
        narrow = streams * (6 + ids)
        size = wide + (narrow + 1) // 2
        self.buffer = torch.zeros(size, dtype=torch.int64, device=device, pin_memory=pinned)
        ends, table = self.buffer[: 8 * streams], self.buffer[8 * streams : wide]
        self.here, self.before = ends.view(2, 2, 2 * streams)
        self.table = table.view(2, 2 * streams, pages)
        numbers = self.buffer[wide:].view(torch.int32)[:narrow]
        self.starts, self.counts, self.ahead = numbers[: 6 * streams].view(3, 2 * streams)
        self.ids = numbers[6 * streams :].view(streams, ids)

    def fill(self, chunks: Sequence[Chunk], layout: PageLayout) -> None:
        """Index 0 of the offsets is step 0, index 1 all later steps."""
        # Through NumPy, whose small writes are far quicker.
        here, before, table = self.here.numpy(), self.before.numpy(), self.table.numpy()
        starts, counts, ids = self.starts.numpy(), self.counts.numpy(), self.ids.numpy()
        ahead = self.ahead.numpy()
        streams = len(chunks)
        for index, chunk in enumerate(chunks):
            count, row = len(chunk.pages), streams + index
            table[:, index, :count] = chunk.pages
            table[0, row, :count] = chunk.shared
            table[1, row, :count] = table[1, index, :count] - layout.block
        # All streams at once, as far as they have as many values each; both branches have the same.
        last = [len(chunk.pages) - 1 for chunk in chunks] * 2
        rows = range(2 * streams)
        here[:] = table[:, rows, last]
        before[:] = table[:, rows, [max(0, place - 1) for place in last]]
        starts[:] = [chunk.start for chunk in chunks] * 2
        counts[:] = [chunk.num_frames for chunk in chunks] * 2
        ahead[:] = [chunk.ahead for chunk in chunks] * 2
        ids[:] = [chunk.ids for chunk in chunks]


class Calls:
    """Kernels by the names of ``CALLS``, each with its options.

    Args:
        kernels: ``vivace.kernels.dit`` or what has its functions.
    """

    def __init__(self, kernels: Kernels, weights: FlowWeights) -> None:
        options = kernels.default_options(weights.x.dtype, weights.x.device)
        self._options: dict[str, dict[str, Any]] = {name: options.get(name, {}) for name in CALLS}
        self._kernels = kernels

    def __call__(self, name: str, *args: object) -> None:
        kernel: Callable[..., None] = getattr(self._kernels, _KERNELS.get(name, name))
        kernel(*args, **self._options[name])

    def tiles(self, name: str, dim: int) -> int:
        """Sums per row that a call leaves for the next norm."""
        tile = self._options[name].get("tile")
        return 1 if tile is None else dim // tile.columns


class Solver:
    """Buffers and graphs for ``streams`` chunks at once, of as many streams or fewer.

    Args:
        arena, resolve: where page offsets count from, and what gives the plain kernels the elements there.
        kernels: ``vivace.kernels.dit`` or its plain versions.
        shared: velocities of the unconditional branch at step 0, float32 ``[noise frames, mel]``.
        memory: of the graphs of all solvers of a flow, as ``capturing``.
    """

    def __init__(
        self,
        config: FlowConfig,
        weights: FlowWeights,
        arena: Tensor,
        resolve: Callable[[int], Tensor],
        layout: PageLayout,
        shared: Tensor,
        streams: int = 1,
        kernels: Kernels = dit_reference,
        use_graphs: bool = False,
        memory: Any = None,
    ) -> None:
        self._config, self._weights, self._layout = config, weights, layout
        self._arena, self._resolve = arena, resolve
        self._streams = streams
        self._shared, self._use_graphs, self._memory = shared, use_graphs, memory
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        dit, device = config.dit, weights.x.device
        chunk, dim = dit.static_chunk_frames, dit.dim
        pages = -(-config.noise_frames // chunk)
        ids = LOOKAHEAD_BEFORE + chunk // config.token_mel_ratio + config.lookahead_tokens
        self._host = [
            _Packet(streams, pages, ids, "cpu", device.type == "cuda")
            for _ in range(PACKETS if device.type == "cuda" else 1)
        ]
        self._sent: list[torch.cuda.Event | None] = [None] * len(self._host)
        self._next = 0
        self._packet = _Packet(streams, pages, ids, device, False)
        self._steps = torch.arange(config.num_steps, dtype=torch.int32, device=device)
        self._steps = self._steps[:, None].expand(-1, 2 * streams).contiguous()
        half, single = weights.x.new_zeros, weights.bias.new_zeros
        rows = -(-2 * streams * chunk // ROW_PADDING) * ROW_PADDING + ROW_PADDING
        inner = dit.heads * dit.dim_head
        self.speakers = single(streams, dim)
        self.conditions = half(streams, chunk, dit.mel_dim)
        self._voices: list[Tensor | None] = [None] * streams
        self._has_mel = [False] * streams
        self.x = single(streams, chunk, dit.mel_dim)
        self.fault = torch.zeros(streams, dtype=torch.int32, device=device)
        self._condition = weights.bias.repeat(2 * streams * chunk, 1)
        back = POSITION_KERNEL - 1
        joined = (2 * streams + 2, back + chunk, dim)
        self._first, self._second = half(joined), half(joined)
        self._hidden = single(rows, dim)
        self._query, self._mixed = half(rows, inner), half(rows, inner)
        self._inner = half(rows, dim * dit.ff_mult)
        self._calls = Calls(kernels, weights)
        tiles = max(self._calls.tiles(name, dim) for name in ("convolve_add", "add_attention", "add_ff"))
        self._normed = Normed(half(rows, dim), single(2 * rows * tiles), 0)
        self._frames = torch.arange(chunk, device=device)

    def send(self, chunks: Sequence[Chunk]) -> None:
        """Puts what the chunks are on its way to the device."""
        assert len(chunks) == self._streams
        index, self._next = self._next, (self._next + 1) % len(self._host)
        sent = self._sent[index]
        if sent is not None:
            sent.synchronize()  # its last copy has long arrived, unless the device is far behind
        self._host[index].fill(chunks, self._layout)
        self._packet.buffer.copy_(self._host[index].buffer, non_blocking=True)
        if self._packet.buffer.is_cuda:
            if sent is None:
                sent = self._sent[index] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.record()

    def set_voice(self, slot: int, speaker: Tensor, mel: Tensor) -> None:
        """What a voice adds: ``speaker`` float32 ``[dim]``, the prompt's ``mel`` in this chunk (mostly none)."""
        if self._voices[slot] is not speaker:
            self.speakers[slot].copy_(speaker, non_blocking=True)
            self._voices[slot] = speaker
        if self._has_mel[slot]:
            self.conditions[slot].zero_()
        length = mel.shape[0]
        self._has_mel[slot] = length > 0
        if length:
            self.conditions[slot, :length] = mel

    def warm_up(self) -> None:
        """Makes all graphs. What was sent last is solved again."""
        if self._use_graphs:
            for use_shared in (False, True):
                if use_shared not in self._graphs:
                    self.capture(use_shared)

    def rehearse(self) -> None:
        """Runs once, without memory, what ``warm_up`` compiles."""
        for use_shared in (False, True):
            self.solve(use_shared)

    def run(self, use_shared: bool) -> None:
        """Solves what was sent; the mel is in ``x``.

        Args:
            use_shared: the unconditional branch at step 0 is known for all of the chunks, which are whole.
        """
        if not self._use_graphs:
            self.solve(use_shared)
            return
        if use_shared not in self._graphs:
            self.capture(use_shared)
        self._graphs[use_shared].replay()

    def capture(self, use_shared: bool) -> None:
        """Makes the graph. The first time kernels are compiled; what was sent is solved on the way."""
        device = self.x.device
        with before_capture(device):
            self.solve(use_shared)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, device, self._memory):
            self.solve(use_shared)
        self._graphs[use_shared] = graph

    @torch.no_grad()
    def solve(self, use_shared: bool) -> None:
        """The same, kernel by kernel."""
        self._prepare()
        for step in range(self._config.num_steps):
            is_shared = use_shared and step == 0
            rows = self._rows(step, self._streams * (1 if is_shared else 2))
            self._advance(rows, use_shared=is_shared, keep_shared=step == 0 and not is_shared)

    def _prepare(self) -> None:
        """Tokens to condition, noise to ``x``."""
        weights, packet, config = self._weights, self._packet, self._config
        self.fault.zero_()
        positions = (packet.starts[: self._streams, None] + self._frames).clamp_(max=config.noise_frames - 1)
        self.x.copy_(weights.noise[positions])
        nothing = weights.tokens.embedding.shape[0] - 1
        embedded = weights.tokens.embedding[packet.ids.remainder(nothing + 1)]
        y = F.leaky_relu(windows(embedded, *weights.tokens.first))
        # Before the first token the second convolution sees zeros.
        y[:, :LOOKAHEAD_BEFORE] *= (packet.ids[:, :LOOKAHEAD_BEFORE, None] >= 0).to(y.dtype)
        mu = windows(y, *weights.tokens.second) + embedded[:, LOOKAHEAD_BEFORE : -config.lookahead_tokens]
        mu = mu.repeat_interleave(config.token_mel_ratio, dim=1)
        joined = torch.cat((self.conditions, mu), dim=-1).float()
        condition = F.linear(joined, weights.condition) + self.speakers[:, None]
        self._condition[: condition.shape[0] * condition.shape[1]] = condition.flatten(0, 1)

    def _rows(self, step: int, groups: int) -> Rows:
        packet, later = self._packet, min(step, 1)
        return Rows(
            chunk=self._config.dit.static_chunk_frames,
            look_back=POSITION_KERNEL - 1,
            starts=packet.starts[:groups],
            counts=packet.counts[:groups],
            steps=self._steps[step, :groups],
            here=packet.here[later, :groups],
            before=packet.before[later, :groups],
            ahead=packet.ahead[:groups],
            table=packet.table[later, :groups],
            step_stride=self._layout.step_stride,
            context_offset=self._layout.context,
            arena=self._arena,
            resolve=self._resolve,
            step=step,
        )

    def _advance(self, rows: Rows, *, use_shared: bool = False, keep_shared: bool = False) -> None:
        """One Euler step; see ``Guidance``."""
        weights, heads = self._weights, self._config.dit.heads
        call = self._calls
        dim, tiles = self._config.dit.dim, call.tiles
        call("embed_input", rows, self.x, weights.x, self._condition, self._first, self._second)
        call("convolve", rows, self._first, weights.positions[0], self._second)
        normed = self._normed._replace(tiles=tiles("convolve_add", dim))
        call(
            "convolve_add", rows, self._second, weights.positions[1], self._first, weights.blocks[0].norm.scale,
            self._hidden, normed,
        )  # fmt: skip
        for index, block in enumerate(weights.blocks):
            layer = index * self._layout.layer
            call("qkv", rows, normed, block.qkv, weights.rope, self._query, heads, layer)
            call("attention", rows, self._query, self._mixed, heads, layer)
            normed = self._normed._replace(tiles=tiles("add_attention", dim))
            call("add_attention", rows, self._mixed, block.out, self._hidden, normed)
            call("ff_in", rows, normed, block.ff_in, self._inner)
            normed = self._normed._replace(tiles=tiles("add_ff", dim))
            call("add_ff", rows, self._inner, block.ff_out, self._hidden, normed)
        scale = self._config.guidance_scale
        guidance = Guidance(scale, weights.dt, self._shared, use_shared, keep_shared)
        call("advance", rows, normed, weights.output, guidance, self.x, self.fault)


CALLS = (
    "embed_input", "convolve", "convolve_add", "qkv", "attention", "add_attention", "ff_in", "add_ff", "advance"
)  # fmt: skip
"""Kernel calls of an Euler step, by the names of their options."""

_KERNELS = {"add_attention": "add_projection", "add_ff": "add_projection"}
