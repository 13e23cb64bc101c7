"""CosyVoice 2's flow for many streams on one device: same chunks, same noise and same results as ``UNetFlow.step``.

The interface is that of ``DeviceFlow``. Streams hold pages of one pool; a voice's prompt is computed once and its pages
are shared. A launch computes all chunks that are ready, successive ones of a stream too: its time is that of its many
small kernels, hardly of what they work on. On a GPU it is one copy of a small packet and two graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vivace.kernels.gpu import gpu_of
from vivace.models.flow_paged import PagedFlow, PagedStream, Work, not_finite
from vivace.models.flow_unet import UNetFlow
from vivace.models.unet_pages import UNetPages
from vivace.models.unet_solver import BEFORE, UNetChunk, UNetSolver

CPU_PAGES = 64

WAVE = 4
"""Chunks that a launch may have where it serves one stream."""


class DeviceUNetFlow(PagedFlow):
    """The flow of one engine.

    Args:
        model: lives on the device that is to be used; its weights must not change afterwards.
        max_bytes: memory for pages, taken at once; None: a quarter of what the GPU has free.
        max_streams: streams of one launch.
        alone: every chunk has a launch of its own.
        use_graphs: whole launches as CUDA graphs; None: on a GPU.
        use_kernels: Triton, or the plain versions; None: on a GPU.
    """

    gains_by_waiting = True

    def __init__(
        self,
        model: UNetFlow,
        *,
        max_bytes: int | None = None,
        max_streams: int = 1,
        alone: bool = False,
        use_graphs: bool | None = None,
        use_kernels: bool | None = None,
    ) -> None:
        config, weight = model.config, model.speaker_projection.weight
        device = weight.device
        self._model, self._config = model, config
        page_bytes = UNetPages.bytes_of(config, weight.dtype)
        if max_bytes is None:
            is_cpu = device.type != "cuda"
            max_bytes = CPU_PAGES * page_bytes if is_cpu else torch.cuda.mem_get_info(device)[0] // 4
        self.pool = UNetPages(config, model.prepare().unet, weight, max(1, max_bytes // page_bytes))
        on_gpu = device.type == "cuda"
        self._use_graphs = on_gpu if use_graphs is None else use_graphs
        self._use_kernels = gpu_of(device) is not None if use_kernels is None else use_kernels
        self._solvers: dict[int, UNetSolver] = {}
        self._most_chunks = 1 if alone else max(max_streams, WAVE)
        self.most_in_wave = min(WAVE, self._most_chunks)
        super().__init__(device, self.pool, config.output_size, max_streams, BEFORE, model.check_length)

    @torch.no_grad()
    def warm_up(self, frames: int = 500) -> None:
        """Captures the graphs that streams of up to so many frames take, and runs each of them once."""
        chunks = max(1, min(frames, self._config.noise_frames) // self.solver(1).chunk)
        for count in self._sizes():
            solver, num_pages = self.solver(count), 1
            while num_pages < 2 * chunks:
                solver.send([self._padding(solver)] * count)
                solver.run(num_pages)
                num_pages *= 2

    def rehearse(self) -> None:
        """Runs once, without memory, what ``warm_up`` compiles; see ``vivace.kernels.launches``."""
        for count in self._sizes():
            self.solver(count).rehearse()

    @torch.no_grad()
    def open(self, embedding: Tensor, prompt_mel: Tensor) -> PagedStream:
        """Begins a stream, as ``UNetFlow.new_stream``; its first tokens must be those of the prompt."""
        speaker = self._model.project_speaker(embedding[None].to(self.device))[0]
        return PagedStream(speaker, prompt_mel.to(speaker))

    @torch.no_grad()
    def generate(self, tokens: Sequence[int], prompt_mel: Tensor, embedding: Tensor) -> Tensor:
        """A whole sequence with full attention, as ``UNetFlow.generate`` without streaming.

        Raises:
            SynthesisError: the sequence is too long, or values are not finite.
        """
        ids, device = torch.tensor(tokens, device=self.device), self.device
        mel = self._model.generate(ids, prompt_mel.to(device), embedding.to(device), streaming=False)
        if not bool(mel.isfinite().all()):
            raise not_finite()
        return mel

    def solver(self, chunks: int) -> UNetSolver:
        """The solver for so many chunks; made at first use, or by ``warm_up``."""
        if chunks not in self._solvers:
            chunk = self._config.unet.static_chunk_frames or 1
            longest = -(-self._config.noise_frames // chunk)
            self._solvers[chunks] = UNetSolver(
                self._model, self.pool, chunks, longest, self._use_graphs, self._use_kernels
            )
        return self._solvers[chunks]

    def _sizes(self) -> list[int]:
        """Chunks of a launch, for which there are solvers."""
        return [1 << power for power in range(self._most_chunks.bit_length())]

    def _chunk_sizes(self) -> tuple[int, int, int]:
        config = self._config
        return self.solver(1).tokens, config.lookahead_tokens, config.token_mel_ratio

    def _take(self, stream: PagedStream, count: int) -> list[int]:
        return self.pool.take(count)

    def _choose(self, active: list[Work]) -> list[Work]:
        """As many chunks as fit, of the streams with most of them left."""
        rows = [work for work in active for _ in work.sizes]
        return rows[: self._sizes()[-1]]

    def _run(self, works: list[Work]) -> None:
        solver = self.solver(next(size for size in self._sizes() if size >= len(works)))
        chunks = [self._next_chunk(solver, works, index) for index in range(len(works))]
        num_pages = solver.send(chunks + [self._padding(solver)] * (solver.chunks - len(works)))
        for slot, (work, part) in enumerate(zip(works, chunks, strict=True)):
            mel = work.stream.prompt_mel[part.start : part.start + solver.chunk]
            solver.set_voice(slot, work.stream.speaker, mel)
        solver.run(num_pages)
        frames, count = [part.num_frames for part in chunks], len(works)
        self._note(works, frames, solver.x[:count].clone(), solver.fault[:count])

    def _next_chunk(self, solver: UNetSolver, works: list[Work], index: int) -> UNetChunk:
        """The chunk of row ``index``, with a page for it; those of its stream in this launch stand right before it."""
        work = works[index]
        stream, behind = work.stream, sum(other is work for other in works[:index])
        done, size = sum(work.sizes[:behind]), work.sizes[behind]
        stream.pages.append(work.pages.pop(0))
        start = stream.length + self._config.num_frames(done)
        ids = self._ids(stream, done, size, solver)
        return UNetChunk(ids, start, self._config.num_frames(size), list(stream.pages), behind)

    def _padding(self, solver: UNetSolver) -> UNetChunk:
        """A row that nobody reads: one token at frame 0, in a page that is nobody's."""
        ids = [-1] * BEFORE + [0] + [-1] * (solver.num_ids - BEFORE - 1)
        return UNetChunk(ids, 0, self._config.num_frames(1), [self.pool.spare])

    def _ids(self, stream: PagedStream, done: int, count: int, solver: UNetSolver) -> list[int]:
        """Of a chunk of ``count`` tokens behind ``done`` waiting ones."""
        before = (stream.before + stream.waiting[max(0, done - BEFORE) : done])[-BEFORE:]
        after = stream.waiting[done : done + count + self._config.lookahead_tokens]
        known = [max(0, token) for token in (*before, *after)]
        front = BEFORE - len(before)
        return [-1] * front + known + [-1] * (solver.num_ids - front - len(known))
