"""CosyVoice-300M's flow for many streams on one device: the same pieces, noise and fades as ``PieceFlow.step``.

Streams are those of ``PieceFlow``. What a piece is computed from depends on tokens alone, so all windows that the new
tokens of all streams complete are planned first and computed in launches of padded rows (``piece_solver``), as whole
utterances are; each stream's pieces are joined in their order behind them. A launch is bound by its kernels, which are
as many for one row as for several. Where memory is missing for so many rows, half of them are tried, down to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vivace.errors import SynthesisError
from vivace.kernels.gpu import gpu_of
from vivace.kernels.unet_reference import PlainUNetOps
from vivace.models.flow_paged import FLAGS, MelHandle, PagedFlow
from vivace.models.flow_pieces import PieceFlow, PieceStream, Window, stretched_places
from vivace.models.piece_solver import PieceSolver, SolverParts, WindowRow

BUCKETS = (*range(64, 641, 64), 768, 896, 1024, 1280, 1536, 2048)
"""Frames of a row. Longer utterances run alone and without a graph: they keep a GPU busy by themselves."""

WAVE = 4
"""Pieces that a launch may have where it serves one stream."""

PLANNED_FRAMES = 1024
"""Of a window with its prompt, for which kernels are compiled ahead."""

_MOST_FRAMES = 16_384  # of all rows of a launch together
_LONG_GRID = 256  # of frames beyond all buckets: kernels are compiled for blocks of so many

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
    """One stream's part in a call: what it gets of it.

    Attributes:
        before: the stream as it was, should anything fail.
        jobs: its pieces in their order, until they are joined; mels: those that are, ``[80, frames]`` each.
        mel: all of them behind each other.
    """

    stream: PieceStream
    before: PieceStream
    error: Exception | None = None
    jobs: list[_Job] = field(default_factory=list)
    mels: list[Tensor] = field(default_factory=list)
    faults: list[Tensor] = field(default_factory=list)
    mel: Tensor | None = None

    def restore(self) -> None:
        """The stream is as it was before."""
        stream, before = self.stream, self.before
        stream.prompt, stream.tokens, stream.first = before.prompt, before.tokens, before.first
        stream.done, stream.overlap, stream.finished = before.done, before.overlap, before.finished

    def fail(self, error: Exception) -> None:
        """There are no frames, and the stream is as it was before."""
        self.restore()
        self.error, self.jobs, self.mels = error, [], []


@dataclass(slots=True, eq=False)
class _Job:
    """A row of a launch.

    Attributes:
        window: None: a whole utterance. num_tokens: whose frames are wanted.
        mel: of the row without its prompt, ``[80, frames]``, when it was launched; fault: its flag.
    """

    work: _Work
    row: WindowRow
    window: Window | None
    num_tokens: int
    mel: Tensor | None = None
    fault: Tensor | None = None


class DevicePieceFlow:
    """The flow of one engine. All launches must come from one CUDA stream.

    Args:
        model: lives on the device that is to be used; its weights must not change afterwards.
        max_rows: rows of one launch.
        use_graphs: None: on a GPU. use_kernels: Triton, or the plain versions; None: on a GPU.

    Attributes:
        launches_halved: for want of memory, so far.
        most_in_wave: pieces of one stream that share a launch.
    """

    gains_by_waiting = True
    wave_ms = PagedFlow.wave_ms
    """Both as ``PagedFlow``."""

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
        self.most_in_wave = min(WAVE, max_rows)

    @property
    def max_streams(self) -> int:
        """Streams of one launch, where their windows are short."""
        return self._rows(BUCKETS[0])

    @torch.no_grad()
    def warm_up(self, prompt_frames: int = 0) -> None:
        """Captures the graphs that streams behind a prompt of so many frames take, for every number of rows."""
        config = self.model.config
        shortest = prompt_frames + config.num_frames(config.lookahead_tokens + 1)
        longest = prompt_frames + self._longest_window()
        for bucket, below in zip(BUCKETS, (0, *BUCKETS), strict=False):
            if shortest <= bucket and below < longest:
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
        """The next tokens of several streams, all pieces that they complete; errors lie in the handles.

        Raises:
            Exception: what is no stream's own; all streams are as they were before.
        """
        return self._compute([self._begin(*item) for item in items], self._plan)

    @torch.no_grad()
    def generate_batch(self, items: Sequence[WholeItem]) -> list[MelHandle]:
        """Whole utterances, as ``PieceFlow.generate``; errors lie in the handles. Raises as ``launch_batch``."""
        return self._compute([self._begin(*item, True) for item in items], self._plan_whole)

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

    def _longest_window(self) -> int:
        """Frames of the longest window of a piece, without the prompt: where it begins depends on its place."""
        model, config = self.model, self.model.config
        places = range(model.context_tokens, model.context_tokens + 10 * config.token_rate_hz)
        behind = model.piece_tokens + config.lookahead_tokens
        return max(
            config.num_frames(done + behind) - config.num_frames(model.window_start(done)) for done in places
        )

    def _rows(self, frames: int) -> int:
        """Rows of one launch of so many frames: a power of two."""
        most = min(self._max_rows, max(1, _MOST_FRAMES // frames))
        return 1 << (most.bit_length() - 1)

    def _plan(self, work: _Work) -> list[_Job]:
        """All pieces that the stream's tokens complete. The stream itself moves on when they are joined."""
        ahead, model, jobs = work.stream.fork(), self.model, list[_Job]()
        while (count := model.next_count(ahead)) > 0:
            window = model.window(ahead, count, is_last=model.ends_with(ahead, count))
            jobs.append(_Job(work, self._row(ahead, window), window, count))
            ahead.done += count  # windows begin at ``first``, which stays
        return jobs

    def _plan_whole(self, work: _Work) -> list[_Job]:
        """All tokens of the stream at once."""
        stream = work.stream
        if not stream.tokens:
            return []
        window = Window(stream.tokens, 0, is_whole=True, is_last=True)
        return [_Job(work, self._row(stream, window), None, stream.known)]

    def _compute(self, works: list[_Work], plan: Callable[[_Work], list[_Job]]) -> list[MelHandle]:
        """Plans and launches all jobs, then joins each stream's pieces in their order."""
        try:
            for work in works:
                if work.error is None:
                    work.jobs = plan(work)
            self._run([job for work in works for job in work.jobs])
            self._join(works)
            return self._handles(works)
        except BaseException:  # nobody's own
            for work in works:
                work.restore()
            raise

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
        """One launch, or smaller ones where memory is missing; a row that does not fit alone is its stream's error."""
        jobs = [job for job in jobs if job.work.error is None]  # of whom another piece may have failed
        if not jobs:
            return
        try:
            self._run_rows(self._solver_for(jobs, bucket), jobs)
            return
        except torch.OutOfMemoryError as error:
            fault = error.with_traceback(None)  # which would keep what the launch has taken so far
        self.launches_halved += 1
        if len(jobs) == 1:
            jobs[0].work.fail(fault)
            return
        half = len(jobs) // 2
        self._run_or_halve(jobs[:half], bucket)
        self._run_or_halve(jobs[half:], bucket)

    def _solver_for(self, jobs: list[_Job], bucket: int) -> PieceSolver:
        if bucket:
            return self.solver(1 << (len(jobs) - 1).bit_length(), bucket)
        # A row that is longer than all graphs: made for it alone, operation by operation.
        return PieceSolver(self._parts, 1, -(-len(jobs[0].row.places) // _LONG_GRID) * _LONG_GRID, False)

    def _run_rows(self, solver: PieceSolver, jobs: list[_Job]) -> None:
        """Computes the rows; all of them have their frames, or none."""
        solver.send([job.row for job in jobs])
        solver.run()
        first = self._launches % (FLAGS - self._max_rows)
        self._launches += len(jobs)
        flags = self._flags[first : first + len(jobs)]
        flags.copy_(solver.faults[: len(jobs)], non_blocking=True)
        rows = solver.x[: len(jobs)].clone()  # the next launch may be the solver's too
        for number, job in enumerate(jobs):
            job.mel = rows[number, len(job.work.stream.prompt_mel) : len(job.row.places)].T
            job.fault = flags[number]

    def _join(self, works: list[_Work]) -> None:
        """Where memory is missing, once more when the other streams have given back what theirs are made of."""
        for work in [work for work in works if self._try_join(work) is not None]:
            self.launches_halved += 1
            fault = self._try_join(work)
            if fault is not None:
                work.fail(fault)

    def _try_join(self, work: _Work) -> torch.OutOfMemoryError | None:
        """Joins a stream's pieces in their order. After an error it may be called again, and goes on there."""
        try:
            while work.jobs:
                job = work.jobs[0]
                assert job.mel is not None
                assert job.fault is not None
                # A copy, also because joining overwrites what it is given.
                mel = job.mel.clone(memory_format=torch.contiguous_format)
                if job.window is not None:
                    mel = self.model.join(work.stream, mel, job.window, job.num_tokens)
                work.mels.append(mel)
                work.faults.append(job.fault)
                del work.jobs[0]
            if work.mels:
                work.mel = work.mels[0] if len(work.mels) == 1 else torch.cat(work.mels, dim=1)
        except torch.OutOfMemoryError as error:
            return error.with_traceback(None)
        return None

    def _handles(self, works: list[_Work]) -> list[MelHandle]:
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        handles: list[MelHandle] = []
        for work in works:
            if work.error is None and work.mel is not None:
                sizes = [part.shape[1] for part in work.mels]
                handles.append(PieceHandle(work.mel, None, work.faults, done, sizes))
            else:
                nothing = torch.zeros(self.model.config.output_size, 0, device=self.device)
                handles.append(PieceHandle(nothing, work.error))
        return handles


def _ops(use_kernels: bool) -> PlainUNetOps:
    if not use_kernels:
        return PlainUNetOps()
    from vivace.kernels.unet_launch import KernelUNetOps

    return KernelUNetOps()
