"""CosyVoice 2's flow for many streams on one device: same chunks, same noise and same results as ``UNetFlow.step``.

The interface is that of ``DeviceFlow``. Streams hold pages of one pool; a voice's prompt is computed once and its pages
are shared. Chunks of several streams run in one launch; on a GPU that is one copy of a small packet and one graph.
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


class DeviceUNetFlow(PagedFlow):
    """The flow of one engine.

    Args:
        model: lives on the device that is to be used; its weights must not change afterwards.
        max_bytes: memory for pages, taken at once; None: a quarter of what the GPU has free.
        max_streams: streams of one launch.
        use_graphs: whole launches as CUDA graphs; None: on a GPU.
        use_kernels: Triton, or the plain versions; None: on a GPU.
    """

    def __init__(
        self,
        model: UNetFlow,
        *,
        max_bytes: int | None = None,
        max_streams: int = 1,
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
        super().__init__(device, self.pool, config.output_size, max_streams, BEFORE, model.check_length)

    @torch.no_grad()
    def warm_up(self, frames: int = 500) -> None:
        """Captures the graphs that streams of up to so many frames take."""
        solver = self.solver(1)
        tokens = [0] * (max(1, min(frames, self._config.noise_frames) // solver.chunk) * solver.tokens)
        weight, count = self._model.speaker_projection.weight, 1
        while count <= self.max_streams:
            streams = [
                self.open(weight.new_ones(weight.shape[1]), weight.new_zeros(0, weight.shape[0]))
                for _ in range(count)
            ]
            self.launch_batch([(stream, tokens, True) for stream in streams])
            for stream in streams:
                self.close(stream)
            count *= 2

    def rehearse(self) -> None:
        """Runs once, without memory, what ``warm_up`` compiles; see ``vivace.kernels.launches``."""
        count = 1
        while count <= self.max_streams:
            self.solver(count).rehearse()
            count *= 2

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

    def solver(self, streams: int) -> UNetSolver:
        """The solver for so many streams; made at first use, or by ``warm_up``."""
        if streams not in self._solvers:
            chunk = self._config.unet.static_chunk_frames or 1
            longest = -(-self._config.noise_frames // chunk)
            self._solvers[streams] = UNetSolver(
                self._model, self.pool, streams, longest, self._use_graphs, self._use_kernels
            )
        return self._solvers[streams]

    def _chunk_sizes(self) -> tuple[int, int, int]:
        config = self._config
        return self.solver(1).tokens, config.lookahead_tokens, config.token_mel_ratio

    def _take(self, stream: PagedStream, count: int) -> list[int]:
        return self.pool.take(count)

    def _run(self, works: list[Work]) -> None:
        solver, chunks = self.solver(len(works)), []
        for work in works:
            stream = work.stream
            stream.pages.append(work.pages.pop(0))
            frames = self._config.num_frames(work.sizes[0])
            chunks.append(UNetChunk(self._ids(work, solver), stream.length, frames, stream.pages))
        num_pages = solver.send(chunks)
        for slot, work in enumerate(works):
            stream = work.stream
            solver.set_voice(
                slot, stream.speaker, stream.prompt_mel[stream.length : stream.length + solver.chunk]
            )
        solver.run(num_pages)
        self._note(works, [part.num_frames for part in chunks], solver.x.clone(), solver.fault)

    def _ids(self, work: Work, solver: UNetSolver) -> list[int]:
        stream = work.stream
        after = stream.waiting[: work.sizes[0] + self._config.lookahead_tokens]
        known = [max(0, token) for token in (*stream.before, *after)]
        front = BEFORE - len(stream.before)
        return [-1] * front + known + [-1] * (solver.num_ids - front - len(known))
