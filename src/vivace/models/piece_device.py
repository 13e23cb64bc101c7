"""CosyVoice-300M's flow for many streams on one device: the same pieces, noise and fades as ``PieceFlow.step``.

Streams are those of ``PieceFlow``. Windows of several streams, or whole utterances, are computed in one launch of
padded rows (``piece_solver``). Where memory is missing for so many, half of them are tried, down to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vivace.errors import SynthesisError
from vivace.kernels.gpu import gpu_of
from vivace.kernels.unet_reference import PlainUNetOps
from vivace.models.flow_paged import FLAGS, MelHandle
from vivace.models.flow_pieces import PieceFlow, PieceStream, Window, stretched_places
from vivace.models.piece_solver import PieceSolver, SolverParts, WindowRow

BUCKETS = (*range(64, 641, 64), 768, 896, 1024, 1280, 1536, 2048)
"""Frames of a row. Longer utterances run alone and without a graph: they keep a GPU busy by themselves."""

PLANNED_FRAMES = 1024
"""Of a window with its prompt, for which kernels are compiled ahead."""

_MOST_FRAMES = 16_384  # of all rows of a launch together

PieceItem = tuple[PieceStream, Sequence[int], bool]
"""A stream, its next tokens, and whether they are the last."""

WholeItem = tuple[PieceStream, Sequence[int]]
"""A stream of which nothing was computed, and all its tokens: those of the prompt too, unless it has had them."""


@dataclass(slots=True)
class PieceHandle(MelHandle):
    """Frames of several pieces on their way; ``sizes`` are the frames of each."""

    sizes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Work:
    """One stream's part in a launch: what it gets of it.

    Attributes:
        before: the stream as it was, should anything fail.
    """

    stream: PieceStream
    before: PieceStream
    error: Exception | None = None
    mels: list[Tensor] = field(default_factory=list)
    faults: list[Tensor] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        """There are no frames, and the stream is as it was before."""
        stream, before = self.stream, self.before
        stream.prompt, stream.tokens, stream.first = before.prompt, before.tokens, before.first
        stream.done, stream.overlap, stream.finished = before.done, before.overlap, before.finished
        self.error, self.mels = error, []


class _Job(NamedTuple):
    """A row of a launch; ``window`` None: a whole utterance."""

    work: _Work
    row: WindowRow
    window: Window | None
    num_tokens: int


class DevicePieceFlow:
    """The flow of one engine. All launches must come from one CUDA stream.

    Args:
        model: lives on the device that is to be used; its weights must not change afterwards.
        max_rows: rows of one launch.
        use_graphs: None: on a GPU. use_kernels: Triton, or the plain versions; None: on a GPU.

    Attributes:
        launches_halved: for want of memory, so far.
    """

    def __init__(
        self,
        model: PieceFlow,
        *,
        max_rows: int = 1,
        use_graphs: bool | None = None,
        use_kernels: bool | None = None,
    ) -> None:
        self.model = model
        self.device = model.speaker_projection.weight.device
        on_gpu, has_kernels = self.device.type == "cuda", gpu_of(self.device) is not None
        self._max_rows, self._use_graphs = max_rows, on_gpu if use_graphs is None else use_graphs
        self._parts = SolverParts.of(
            model, _ops(has_kernels if use_kernels is None else use_kernels), BUCKETS[-1]
        )
        self._solvers: dict[tuple[int, int], PieceSolver] = {}
        self._flags = torch.zeros(FLAGS, dtype=torch.bool, pin_memory=on_gpu)
        self._launches = 0
        self.launches_halved = 0

    @property
    def max_streams(self) -> int:
        """Streams of one launch, where their windows are short."""
        return self._rows(BUCKETS[0])

    @torch.no_grad()
    def warm_up(self, prompt_frames: int = 0) -> None:
        """Captures the graphs that streams behind a prompt of so many frames take, for every number of rows."""
        config = self.model.config
        context, piece, ahead = self.model.context_tokens, self.model.piece_tokens, config.lookahead_tokens
        longest = prompt_frames + config.num_frames(context + piece + ahead) + 2
        shortest = prompt_frames + config.num_frames(ahead + 1)
        for bucket in BUCKETS:
            if shortest <= bucket < longest + 64:
                rows = 1
                while rows <= self._rows(bucket):
                    self.solver(rows, bucket)
                    rows *= 2

    def rehearse(self, frames: int = PLANNED_FRAMES) -> None:
        """Runs once, without memory, what ``warm_up`` compiles for windows of up to so many frames, prompt included."""
        for bucket in BUCKETS:
            if bucket <= frames:
                self.solver(1, bucket).rehearse()

    @torch.no_grad()
    def launch_batch(self, items: Sequence[PieceItem]) -> list[MelHandle]:
        """The next tokens of several streams, all pieces that they complete; errors lie in the handles."""
        works = [self._begin(*item) for item in items]
        while jobs := [job for work in works if work.error is None and (job := self._next_job(work))]:
            self._run(jobs)
        return self._handles(works)

    @torch.no_grad()
    def generate_batch(self, items: Sequence[WholeItem]) -> list[MelHandle]:
        """Whole utterances, as ``PieceFlow.generate``; errors lie in the handles."""
        works, jobs = [self._begin(stream, tokens, True) for stream, tokens in items], []
        for work in works:
            stream = work.stream
            if work.error is None and stream.tokens:
                window = Window(stream.tokens, 0, is_whole=True, is_last=True)
                jobs.append(_Job(work, self._row(stream, window), None, stream.known))
        self._run(jobs)
        return self._handles(works)

    def solver(self, rows: int, frames: int) -> PieceSolver:
        """The solver for so many rows of up to so many frames; made at first use, or by ``warm_up``."""
        found = self._solvers.get((rows, frames))
        if found is None:
            found = PieceSolver(self._parts, rows, frames, self._use_graphs)
            if self._use_graphs:
                found.capture()
            self._solvers[rows, frames] = found  # if there was memory for all of it
        return found

    def _begin(self, stream: PieceStream, tokens: Sequence[int], is_last: bool) -> _Work:
        """Takes the tokens; what is refused is refused here."""
        work = _Work(stream, stream.fork())
        try:
            self.model.take(stream, tokens, is_last)
        except SynthesisError as error:
            work.error = error
        return work

    def _rows(self, frames: int) -> int:
        """Rows of one launch of so many frames: a power of two."""
        most = min(self._max_rows, max(1, _MOST_FRAMES // frames))
        return 1 << (most.bit_length() - 1)

    def _next_job(self, work: _Work) -> _Job | None:
        stream, model = work.stream, self.model
        count = model.next_count(stream)
        if count == 0:
            return None
        window = model.window(stream, count, is_last=model.ends_with(stream, count))
        return _Job(work, self._row(stream, window), window, count)

    def _row(self, stream: PieceStream, window: Window) -> WindowRow:
        config, prompt_frames = self.model.config, len(stream.prompt_mel)
        places = self.model.places(window).numpy() + stream.num_prompt
        before = stretched_places(stream.num_prompt, prompt_frames).numpy()
        first = prompt_frames + config.num_frames(window.begin)
        noise = np.concatenate((np.arange(prompt_frames), np.arange(first, first + len(places))))
        ids = [*stream.prompt, *window.tokens]
        return WindowRow(ids, np.concatenate((before, places)), noise, stream.spks[0], stream.prompt_mel)

    def _run(self, jobs: list[_Job]) -> None:
        """Launches rows of like length together."""
        jobs = sorted(jobs, key=lambda job: len(job.row.places))
        while jobs:
            longest = len(jobs[-1].row.places)
            bucket = next((size for size in BUCKETS if size >= longest), 0)
            count = min(self._rows(bucket), len(jobs)) if bucket else 1
            self._run_or_halve(jobs[-count:], bucket)
            del jobs[-count:]

    def _run_or_halve(self, jobs: list[_Job], bucket: int) -> None:
        """One launch, or smaller ones where memory is missing; a row that does not fit alone has an error."""
        left = list(jobs)
        try:
            self._run_rows(self._solver_for(jobs, bucket), left)
            return
        except torch.OutOfMemoryError as error:
            fault = error.with_traceback(None)  # which would keep what the launch has taken so far
        self.launches_halved += 1
        if len(jobs) == 1:
            jobs[0].work.fail(fault)
            return
        half = len(jobs) // 2
        for part in (left[:half], left[half:]):
            if part:
                self._run_or_halve(part, bucket)

    def _solver_for(self, jobs: list[_Job], bucket: int) -> PieceSolver:
        if bucket:
            return self.solver(1 << (len(jobs) - 1).bit_length(), bucket)
        # A row that is longer than all graphs: made for it alone, operation by operation.
        grid, frames = 2 ** (len(self.model.config.unet.channels) - 1), len(jobs[0].row.places)
        return PieceSolver(self._parts, 1, -(-frames // grid) * grid, False)

    def _run_rows(self, solver: PieceSolver, jobs: list[_Job]) -> None:
        """Those that have their frames are no longer in ``jobs``."""
        solver.send([job.row for job in jobs])
        solver.run()
        first = self._launches % (FLAGS - self._max_rows)
        self._launches += len(jobs)
        flags = self._flags[first : first + len(jobs)]
        flags.copy_(solver.faults[: len(jobs)], non_blocking=True)
        for number, job in enumerate(list(jobs)):
            stream, frames = job.work.stream, len(job.row.places)
            mel = solver.x[number, len(stream.prompt_mel) : frames].T.clone()
            if job.window is not None:
                mel = self.model.join(stream, mel, job.window, job.num_tokens)
            job.work.mels.append(mel)
            job.work.faults.append(flags[number])
            del jobs[0]

    def _handles(self, works: list[_Work]) -> list[MelHandle]:
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        handles: list[MelHandle] = []
        for work in works:
            if work.error is None and work.mels:
                mel = work.mels[0] if len(work.mels) == 1 else torch.cat(work.mels, dim=1)
                sizes = [part.shape[1] for part in work.mels]
                handles.append(PieceHandle(mel, None, work.faults, done, sizes))
            else:
                nothing = torch.zeros(self.model.config.output_size, 0, device=self.device)
                handles.append(PieceHandle(nothing, work.error))
        return handles


def _ops(use_kernels: bool) -> PlainUNetOps:
    if not use_kernels:
        return PlainUNetOps()
    from vivace.kernels.unet_launch import KernelUNetOps

    return KernelUNetOps()
