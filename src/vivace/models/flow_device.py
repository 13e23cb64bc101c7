"""The flow for many streams on one device: same chunks, same noise and same results as ``FlowModel.step``.

Streams hold pages of one pool; a voice's prompt is computed once and its pages are shared. On a GPU each launch is one
copy of a small packet and one graph, and nothing waits for the device before a result is read. All launches must come
from one CUDA stream.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.errors import SynthesisError
from vivace.kernels import dit_reference
from vivace.models.flow import FlowModel
from vivace.models.flow_kernels import Kernels, choose_kernels, choose_packed, launch_costs
from vivace.models.flow_paged import MelHandle, PagedFlow, PagedStream, Work
from vivace.models.flow_pages import PageLayout, PagePool, StartBranch, padded, pages_within
from vivace.models.flow_solver import LOOKAHEAD_BEFORE, Chunk, Solver
from vivace.models.flow_weights import FlowWeights
from vivace.models.flow_whole import embed_tokens, solve_whole
from vivace.models.launch_sizes import cheapest, powers_of_two

MOST_IN_WAVE = 16
"""Chunks of one stream that share a launch, at most, where that is known to cost less than one by one."""

_MEASURED_WAVE_MS = 57
"""Where costs are known a chunk takes some 10 ms in all: behind the first 0.92 s of audio comes a launch of 16."""

WholeItem = tuple[Sequence[int], Tensor, Tensor]
"""All tokens of a sequence, those of the prompt too; the prompt's mel ``[frames, mel]``; the speaker's embedding."""

_MOST_WHOLE_FRAMES = 16_384  # of all rows of a launch together
_LEAST_FILLED = 0.75  # of the longest row: shorter ones have a launch of their own


class DeviceFlow(PagedFlow):
    """The flow of one engine.

    Args:
        model: its weights are copied in its dtype; nothing of it is needed afterwards.
        device: where to run; None: where the model is.
        kernels: None chooses those that fit the device.
        max_bytes: memory for pages and what all streams share beside them; None: all that there is.
        max_streams: streams of one launch.
        costs: of a launch, by its size: only launches of these sizes are made, padded where chunks are few. None: as
            known for the kernels, or launches of 1, 2, 4 … chunks without padding.
        most_in_wave: chunks of one stream in a launch; None: ``MOST_IN_WAVE`` where costs are known, 1 elsewhere.
        use_graphs: whole chunks as CUDA graphs; None: on a GPU with kernels.
    """

    def __init__(
        self,
        model: FlowModel,
        device: torch.device | None = None,
        *,
        kernels: Kernels | None = None,
        max_bytes: int | None = None,
        max_streams: int = 1,
        costs: Mapping[int, float] | None = None,
        most_in_wave: int | None = None,
        use_graphs: bool | None = None,
    ) -> None:
        device = model.speaker_projection.weight.device if device is None else device
        self._config = config = model.config
        self._speaker = copy.deepcopy(model.speaker_projection).to(device)
        self.weights = FlowWeights.of(model, device)
        self.layout = PageLayout.of(config)
        dtype = self.weights.x.dtype
        self._kernels = choose_kernels(config, dtype, device) if kernels is None else kernels
        self._is_chosen = kernels is None
        # The plain ones read on the host what a graph cannot hold.
        has_kernels = self._kernels is not dit_reference
        self._use_graphs = device.type == "cuda" and has_kernels if use_graphs is None else use_graphs
        self._graph_memory = torch.cuda.graph_pool_handle() if self._use_graphs else None
        self._solvers: dict[int, Solver] = {}
        if costs is None and kernels is None:
            costs = launch_costs(self._kernels, config, dtype, device)
        if most_in_wave is None:
            most_in_wave = MOST_IN_WAVE if costs else 1
        self.most_in_wave = most_in_wave
        self._most_rows = max(max_streams, most_in_wave)
        self._costs = costs and {size: cost for size, cost in costs.items() if size <= self._most_rows}
        if costs:
            self.wave_ms = _MEASURED_WAVE_MS
        self._padding_chunk: Chunk | None = None
        self._no_mel = torch.zeros(0, config.dit.mel_dim, dtype=dtype, device=device)
        self.pool, blocks, self._padding_pool = self._pools(dtype, device, max_bytes, max_streams)
        velocities = torch.zeros(config.noise_frames, config.dit.mel_dim, device=device)
        self.start = StartBranch(blocks, velocities)
        super().__init__(
            device, self.pool, config.output_size, max_streams, LOOKAHEAD_BEFORE, model.check_length
        )

    def _pools(
        self, dtype: torch.dtype, device: torch.device, max_bytes: int | None, max_streams: int
    ) -> tuple[PagePool, PagePool, PagePool]:
        """Pages, blocks of the unconditional branch, and the row of padding: within ``max_bytes``."""
        layout, config = self.layout, self._config
        arena = torch.empty(256, dtype=dtype, device=device)
        size = dtype.itemsize
        page, block = padded(layout.page) * size, padded(layout.block) * size
        room = padded(layout.page + layout.block)
        page_limit = block_limit = None
        if max_bytes is not None:
            longest = -(-config.noise_frames // config.dit.static_chunk_frames)
            scratch = self._most_rows * block  # of chunks whose own is thrown away
            pages = pages_within(max(0, max_bytes - room * size - scratch), page, block, longest)
            page_limit, block_limit = pages * page, min(pages, longest) * block + scratch
        return (
            PagePool(layout.page, dtype, device, page_limit, arena),
            PagePool(layout.block, dtype, device, block_limit, arena),
            PagePool(room, dtype, device, room * size, arena),
        )

    @torch.no_grad()
    def warm_up(self, frames: int = 500) -> None:
        """Compiles, captures all graphs, takes memory for ``frames`` and computes what all streams share there."""
        chunk = self._config.dit.static_chunk_frames
        chunks = max(1, min(frames, self._config.noise_frames) // chunk)
        weight = self._speaker.weight
        tokens = [0] * (chunks * chunk // self._config.token_mel_ratio)
        for count in self._warm_sizes():
            streams = [
                self.open(weight.new_ones(weight.shape[1]), weight.new_zeros(0, weight.shape[0]))
                for _ in range(count)
            ]
            self.launch_batch([(stream, tokens, True) for stream in streams])
            for stream in streams:
                self.close(stream)
            tokens = tokens[: chunk // self._config.token_mel_ratio]
            for solver in self._solvers.values():
                solver.warm_up()

    def rehearse(self) -> None:
        """Runs once, without memory, what ``warm_up`` compiles; see ``vivace.kernels.launches``."""
        if self._kernels is dit_reference:
            return
        for count in self._warm_sizes():
            self.solver(count).rehearse()

    def _warm_sizes(self) -> list[int]:
        """Chunks of the launches that are made at the start."""
        most = self._most_rows
        return sorted(self._costs or {min(most, 1 << power) for power in range(most.bit_length() + 1)})

    @torch.no_grad()
    def open(self, embedding: Tensor, prompt_mel: Tensor) -> PagedStream:
        """Begins a stream, as ``FlowModel.new_stream``; its first tokens must be those of the prompt."""
        speaker = self._speaker(F.normalize(embedding.to(self._speaker.weight), dim=-1))
        speaker = F.linear(speaker.to(self.weights.speaker), self.weights.speaker, self.weights.bias)
        return PagedStream(speaker, prompt_mel.to(self.weights.x))

    def generate(self, tokens: Sequence[int], prompt_mel: Tensor, embedding: Tensor) -> Tensor:
        """A whole sequence with full attention, as ``FlowModel.generate`` without streaming.

        Raises:
            SynthesisError: the sequence is too long, or values are not finite.
        """
        return self.generate_batch([(tokens, prompt_mel, embedding)])[0].check()

    @torch.no_grad()
    def generate_batch(self, items: Sequence[WholeItem]) -> list[MelHandle]:
        """``generate`` for several sequences, those of like length together; errors lie in the handles.

        It is thousands of small operations, whatever the number of rows. Where memory is missing for so many, half of
        them are tried, down to one.
        """
        made: dict[int, MelHandle] = {}
        waiting = sorted(range(len(items)), key=lambda number: len(items[number][0]))
        for number in list(waiting):
            try:
                self._check_length(self._frames_of(items[number]))
            except SynthesisError as error:
                made[number] = self._no_frames(error)
                waiting.remove(number)
        while waiting:
            longest = self._frames_of(items[waiting[-1]])
            most = min(self.max_streams, max(1, _MOST_WHOLE_FRAMES // longest))
            together = [
                number
                for number in waiting[-most:]
                if self._frames_of(items[number]) >= _LEAST_FILLED * longest
            ]
            made |= self._generate_or_halve(together, items)
            del waiting[-len(together) :]
        done = self._mark()
        for handle in made.values():
            handle.done = done
        return [made[number] for number in range(len(items))]

    def _frames_of(self, item: WholeItem) -> int:
        return self._config.token_mel_ratio * len(item[0])

    def _generate_or_halve(self, numbers: Sequence[int], items: Sequence[WholeItem]) -> dict[int, MelHandle]:
        try:
            return dict(zip(numbers, self._generate_rows([items[number] for number in numbers]), strict=True))
        except torch.OutOfMemoryError as error:
            fault = error.with_traceback(None)  # which would keep what the launch has taken so far
        self.launches_halved += 1
        if len(numbers) == 1:
            return {numbers[0]: self._no_frames(fault)}
        half = len(numbers) // 2
        return self._generate_or_halve(numbers[:half], items) | self._generate_or_halve(numbers[half:], items)

    def _generate_rows(self, items: Sequence[WholeItem]) -> list[MelHandle]:
        """One launch."""
        counts = [self._frames_of(item) for item in items]
        streams = [self.open(embedding, prompt_mel) for _, prompt_mel, embedding in items]
        table = self.weights.tokens.embedding
        mu = table.new_zeros(len(items), max(counts), table.shape[1])
        cond = torch.zeros_like(mu)
        for row, ((tokens, _, _), stream) in enumerate(zip(items, streams, strict=True)):
            ids = torch.tensor(tokens, pin_memory=mu.is_cuda).to(self.device, non_blocking=True)
            mu[row, : counts[row]] = embed_tokens(self.weights, self._config, ids)
            cond[row, : len(stream.prompt_mel)] = stream.prompt_mel
        speakers = torch.stack([stream.speaker for stream in streams])
        mel = solve_whole(self.weights, self._config, mu, cond, speakers, counts)
        rows = [row[:count] for row, count in zip(mel, counts, strict=True)]
        flags = self._send_flags(torch.stack([~row.isfinite().all() for row in rows]))
        return [
            MelHandle(row[len(stream.prompt_mel) :].T, None, [flag])
            for row, stream, flag in zip(rows, streams, flags, strict=True)
        ]

    def _chunk_sizes(self) -> tuple[int, int, int]:
        config = self._config
        ratio = config.token_mel_ratio
        return config.dit.static_chunk_frames // ratio, config.lookahead_tokens, ratio

    def _take(self, stream: PagedStream, count: int) -> list[int]:
        self.pool.reserve(self.pool.pages_in_use + count)  # who gets no pages takes no blocks either
        self.start.reserve(len(stream.pages) + count)
        return self.pool.take_many(count)

    def _shared_chunks(self) -> int:
        return self.start.known

    def _forget_shared(self, known: int) -> None:
        self.start.forget(known)

    def _launch_sizes(self, count: int) -> list[int]:
        return cheapest(count, self._costs) if self._costs else powers_of_two(count, self._most_rows)

    def _choose(self, active: list[Work]) -> list[Work]:
        counts = [self._together(work) for work in active]
        room = self._launch_sizes(sum(counts))[0]
        chosen: list[Work] = []
        for work, count in zip(active, counts, strict=True):
            chosen += [work] * min(count, room - len(chosen))
        return chosen

    def _together(self, work: Work) -> int:
        """How many of the stream's next chunks may share a launch: all must be known whole, but for one that is cut."""
        is_cut = work.sizes[-1] < self._chunk_sizes()[0]
        whole = len(work.sizes) - is_cut
        known = max(0, self.start.known - len(work.stream.pages))
        return min(self.most_in_wave, len(work.sizes) if known >= whole else max(1, known))

    def _run(self, works: list[Work]) -> None:
        count = len(works)
        size = min(size for size in self._costs if size >= count) if self._costs else count
        chunk = self._config.dit.static_chunk_frames
        solver = self.solver(size)
        chunks, is_known = self._next_chunks(works)
        if size > count:
            chunks += [self._padding()] * (size - count)
        solver.send(chunks)
        for slot, (work, part) in enumerate(zip(works, chunks, strict=False)):
            stream, mel = work.stream, self._no_mel
            if part.start < stream.prompt_mel.shape[0]:
                mel = stream.prompt_mel[part.start : part.start + chunk]
            solver.set_voice(slot, stream.speaker, mel)
        solver.run(is_known)
        frames = [part.num_frames for part in chunks[:count]]
        self._note(works, frames, solver.x[:count].clone(), solver.fault[:count])

    def _next_chunks(self, works: list[Work]) -> tuple[list[Chunk], bool]:
        """Chunks of a launch, and whether the unconditional branch at step 0 is known for all of them.

        Where it is not, what nobody has computed yet is kept for the others. What is known is computed again and thrown
        away: others in the launch may be reading what was kept.
        """
        whole, ahead = self._chunk_sizes()[0], 0
        places: list[tuple[Work, int]] = []
        for number, work in enumerate(works):
            ahead = ahead + 1 if number and works[number - 1] is work else 0
            places.append((work, ahead))
        is_known = all(
            work.sizes[ahead] == whole and len(work.stream.pages) + ahead < self.start.known
            for work, ahead in places
        )
        self.start.begin()
        chunks = []
        for work, ahead in places:
            work.stream.pages.append(work.pages.pop(0))
            is_new = len(work.stream.pages) > self.start.known
            chunks.append(self._next_chunk(work, ahead, is_shared=is_known or is_new))
        return chunks, is_known

    def _next_chunk(self, work: Work, ahead: int, is_shared: bool) -> Chunk:
        """The chunk that the stream's last page is for.

        Args:
            ahead: chunks of its stream before it in this launch.
            is_shared: a whole chunk's unconditional branch at step 0 is that of all streams, or becomes it.
        """
        config, stream = self._config, work.stream
        size, done = work.sizes[ahead], sum(work.sizes[:ahead])
        num_frames = config.token_mel_ratio * size
        is_whole = num_frames == config.dit.static_chunk_frames
        try:
            blocks = self.start.blocks(len(stream.pages), is_whole and is_shared)
        except SynthesisError as error:  # as any other want of memory: fewer chunks are tried
            raise torch.OutOfMemoryError(str(error)) from error
        start = stream.length + config.token_mel_ratio * done
        return Chunk(self._ids(stream, done, size), start, num_frames, list(stream.pages), blocks, ahead)

    def _padding(self) -> Chunk:
        """A row that nobody reads: one token at frame 0, in a page of its own."""
        if self._padding_chunk is None:
            try:
                page = self._padding_pool.take()
            except SynthesisError as error:  # as any other want of memory: fewer streams are tried
                raise torch.OutOfMemoryError(str(error)) from error
            config = self._config
            tokens = config.dit.static_chunk_frames // config.token_mel_ratio + config.lookahead_tokens
            ids = [-1] * (LOOKAHEAD_BEFORE + tokens)
            self._padding_chunk = Chunk(ids, 0, config.token_mel_ratio, [page], [page + self.layout.page])
        return self._padding_chunk

    def solver(self, streams: int) -> Solver:
        """The solver for so many chunks; made at first use, or by ``warm_up``."""
        if streams not in self._solvers:
            self._solvers[streams] = Solver(
                self._config,
                self.weights,
                self.pool.arena,
                self._resolve,
                self.layout,
                self.start.velocities,
                streams,
                self._kernels_for(streams),
                self._use_graphs,
                self._graph_memory,
            )
        return self._solvers[streams]

    def _kernels_for(self, streams: int) -> Kernels:
        if not self._is_chosen:
            return self._kernels
        return choose_packed(self._kernels, self._config, self.weights.x.dtype, self.device, streams)

    def _ids(self, stream: PagedStream, done: int, num_tokens: int) -> list[int]:
        """Of a chunk of ``num_tokens`` behind ``done`` waiting tokens."""
        config = self._config
        total = config.dit.static_chunk_frames // config.token_mel_ratio + config.lookahead_tokens
        after = stream.waiting[done : done + num_tokens + config.lookahead_tokens]
        before = (stream.before + stream.waiting[max(0, done - LOOKAHEAD_BEFORE) : done])[-LOOKAHEAD_BEFORE:]
        if after and min(after) < 0:
            after = [max(0, token) for token in after]
        before = [max(0, token) for token in before]
        return [-1] * (LOOKAHEAD_BEFORE - len(before)) + before + after + [-1] * (total - len(after))

    def _resolve(self, offset: int) -> Tensor:
        """For the plain kernels: what is in a page from ``offset`` on."""
        for pool in (self.pool, self.start.pool, self._padding_pool):
            found = pool.resolve(offset)
            if found is not None:
                return found
        raise AssertionError(f"no page at {offset}")
