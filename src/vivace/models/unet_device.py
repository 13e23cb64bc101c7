"""CosyVoice 2's flow for many streams on one device: same chunks, same noise and same results as ``UNetFlow.step``.

The interface is that of ``DeviceFlow``. Streams hold pages of one pool; a voice's prompt is computed once and its pages
are shared. Chunks of several streams run in one launch; on a GPU that is one copy of a small packet and one graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vivace.errors import SynthesisError
from vivace.models.flow_paged import MelHandle, PagedStream, Work, not_finite
from vivace.models.flow_unet import UNetFlow
from vivace.models.unet_pages import UNetPages
from vivace.models.unet_solver import BEFORE, UNetChunk, UNetSolver

FLAGS = 4096
"""Chunks that may be under way or unchecked before a flag is used again."""

CPU_PAGES = 64

Item = tuple[PagedStream, Sequence[int], bool]
"""A stream, its next tokens, and whether they are the last."""


class DeviceUNetFlow:
    """The flow of one engine.

    Args:
        model: lives on the device that is to be used; its weights must not change afterwards.
        max_bytes: memory for pages, taken at once; None: a quarter of what the GPU has free.
        max_streams: streams of one launch.
        use_graphs: whole launches as CUDA graphs; None: on a GPU.
    """

    def __init__(
        self,
        model: UNetFlow,
        *,
        max_bytes: int | None = None,
        max_streams: int = 1,
        use_graphs: bool | None = None,
    ) -> None:
        config, weight = model.config, model.speaker_projection.weight
        self.device = device = weight.device
        self._model, self._config = model, config
        page_bytes = UNetPages.bytes_of(config, weight.dtype)
        if max_bytes is None:
            on_gpu = device.type == "cuda"
            max_bytes = torch.cuda.mem_get_info(device)[0] // 4 if on_gpu else CPU_PAGES * page_bytes
        self.pool = UNetPages(config, model.prepare().unet, weight, max(1, max_bytes // page_bytes))
        self._max_streams = max_streams
        self._use_graphs = device.type == "cuda" if use_graphs is None else use_graphs
        self._solvers: dict[int, UNetSolver] = {}
        self._flags = torch.zeros(FLAGS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._launches = 0

    @property
    def pages_in_use(self) -> int:
        """Pages that open streams hold: 0 when all are closed."""
        return self.pool.pages_in_use

    @torch.no_grad()
    def warm_up(self, frames: int = 500) -> None:
        """Captures the graphs that streams of up to so many frames take."""
        solver = self.solver(1)
        tokens = [0] * (max(1, min(frames, self._config.noise_frames) // solver.chunk) * solver.tokens)
        weight, count = self._model.speaker_projection.weight, 1
        while count <= self._max_streams:
            streams = [
                self.open(weight.new_ones(weight.shape[1]), weight.new_zeros(0, weight.shape[0]))
                for _ in range(count)
            ]
            self.launch_batch([(stream, tokens, True) for stream in streams])
            for stream in streams:
                self.close(stream)
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

    def fork(self, stream: PagedStream) -> PagedStream:
        """A stream that goes on from here independently. Finished chunks are shared, not copied."""
        assert not stream.closed, "the stream is closed"
        return PagedStream(
            stream.speaker,
            stream.prompt_mel,
            [self.pool.share(page) for page in stream.pages],
            stream.length,
            list(stream.waiting),
            list(stream.before),
            stream.finished,
        )

    def close(self, stream: PagedStream) -> None:
        """Gives the stream's pages back. Doing so twice is allowed."""
        stream.closed = True
        while stream.pages:
            self.pool.drop(stream.pages.pop())

    def step(self, stream: PagedStream, tokens: Sequence[int], is_last: bool) -> Tensor:
        """As ``UNetFlow.step``: mel of the frames that the tokens complete, float32 ``[80, n]``.

        Raises:
            SynthesisError: the sequence is too long, memory is full (the stream stays as it was), or values are not
                finite.
        """
        return self.launch(stream, tokens, is_last).check()

    def launch(self, stream: PagedStream, tokens: Sequence[int], is_last: bool) -> MelHandle:
        """As ``step``, without waiting for the device.

        Raises:
            SynthesisError: the sequence is too long, or memory is full; the stream stays as it was.
        """
        handle = self.launch_batch([(stream, tokens, is_last)])[0]
        if handle.error is not None:
            raise handle.error
        return handle

    @torch.no_grad()
    def launch_batch(self, items: Sequence[Item]) -> list[MelHandle]:
        """``launch`` for several streams, whose chunks are computed together. Errors lie in the handles."""
        works: list[Work | SynthesisError] = []
        for stream, tokens, is_last in items:
            try:
                works.append(self._begin(stream, tokens, is_last))
            except SynthesisError as error:
                works.append(error)
        active = [work for work in works if isinstance(work, Work)]
        try:
            while active := [work for work in active if work.sizes]:
                rest = active
                while rest:
                    count = min(self._max_streams, 1 << (len(rest).bit_length() - 1))
                    self._run(rest[:count])
                    rest = rest[count:]
        except BaseException:  # no page is lost; what the streams hold goes back when they are closed
            for work in works:
                if isinstance(work, Work):
                    while work.pages:
                        self.pool.drop(work.pages.pop())
            raise
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return [self._handle(work, done) for work in works]

    def solver(self, streams: int) -> UNetSolver:
        """The solver for so many streams; made at first use, or by ``warm_up``."""
        if streams not in self._solvers:
            chunk = self._config.unet.static_chunk_frames or 1
            longest = -(-self._config.noise_frames // chunk)
            self._solvers[streams] = UNetSolver(self._model, self.pool, streams, longest, self._use_graphs)
        return self._solvers[streams]

    def _begin(self, stream: PagedStream, tokens: Sequence[int], is_last: bool) -> Work:
        """Takes tokens and pages; everything that can be refused is refused here."""
        assert not stream.finished, "the last token of this stream already came"
        assert not stream.closed, "the stream is closed"
        config, chunk = self._config, self.solver(1).tokens
        waiting = len(stream.waiting) + len(tokens)
        self._model.check_length(stream.length + config.num_frames(waiting))
        sizes = []
        while waiting >= chunk + config.lookahead_tokens or (is_last and waiting):
            sizes.append(min(chunk, waiting))
            waiting -= sizes[-1]
        left = max(0, len(stream.prompt_mel) - stream.length)
        work = Work(stream, sizes, self.pool.take(len(sizes)), left)
        stream.waiting.extend(tokens)
        stream.finished = is_last
        return work

    def _run(self, works: list[Work]) -> None:
        """The next chunk of each."""
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
        first = self._launches % (FLAGS - self._max_streams)
        self._launches += len(works)
        flags = self._flags[first : first + len(works)]
        flags.copy_(solver.fault, non_blocking=True)
        mels = solver.x.transpose(1, 2).contiguous()
        for slot, (work, part) in enumerate(zip(works, chunks, strict=True)):
            stream, size = work.stream, work.sizes.pop(0)
            stream.length += part.num_frames
            stream.before = (stream.before + stream.waiting[:size])[-BEFORE:]
            del stream.waiting[:size]
            work.mels.append(mels[slot, : part.num_frames])
            work.faults.append(flags[slot])

    def _handle(self, work: Work | SynthesisError, done: torch.cuda.Event | None) -> MelHandle:
        nothing = self._flags.new_zeros(self._config.output_size, 0, dtype=torch.float32, device=self.device)
        if isinstance(work, SynthesisError):
            return MelHandle(nothing, work)
        if not work.mels:
            return MelHandle(nothing)
        mel = work.mels[0] if len(work.mels) == 1 else torch.cat(work.mels)
        return MelHandle(mel[work.skip :].T, None, work.faults, done)

    def _ids(self, work: Work, solver: UNetSolver) -> list[int]:
        stream = work.stream
        after = stream.waiting[: work.sizes[0] + self._config.lookahead_tokens]
        known = [max(0, token) for token in (*stream.before, *after)]
        front = BEFORE - len(stream.before)
        return [-1] * front + known + [-1] * (solver.num_ids - front - len(known))
