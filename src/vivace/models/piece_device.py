"""CosyVoice-300M's flow for many streams on one device: the same pieces, noise and fades as ``PieceFlow.step``.

Streams are those of ``PieceFlow``. Windows of several streams, or whole utterances, are computed in one launch of
padded rows (``piece_solver``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vivace.errors import SynthesisError
from vivace.kernels.unet_reference import PlainUNetOps
from vivace.models.flow_paged import FLAGS, MelHandle
from vivace.models.flow_pieces import PieceFlow, PieceStream, Window, stretched_places
from vivace.models.piece_solver import PieceSolver, SolverParts, WindowRow

BUCKETS = (*range(64, 641, 64), 768, 896, 1024, 1280, 1536, 2048)
"""Frames of a row. Longer utterances run alone and without a graph: they keep a GPU busy by themselves."""

_MOST_FRAMES = 16_384  # of all rows of a launch together

PieceItem = tuple[PieceStream, Sequence[int], bool]
"""A stream, its next tokens, and whether they are the last."""

WholeItem = tuple[Sequence[int], Tensor, Tensor]
"""Tokens of prompt and utterance, the prompt's mel ``[n, 80]``, the speaker embedding ``[192]``."""


@dataclass(slots=True)
class PieceHandle(MelHandle):
    """Frames of several pieces on their way; ``sizes`` are the frames of each."""

    sizes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Work:
    """One stream's part in a launch: what it gets of it."""

    stream: PieceStream
    error: SynthesisError | None = None
    mels: list[Tensor] = field(default_factory=list)
    faults: list[Tensor] = field(default_factory=list)


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
        on_gpu = self.device.type == "cuda"
        self._max_rows, self._use_graphs = max_rows, on_gpu if use_graphs is None else use_graphs
        self._parts = SolverParts.of(model, _ops(on_gpu if use_kernels is None else use_kernels), BUCKETS[-1])
        self._solvers: dict[tuple[int, int], PieceSolver] = {}
        self._flags = torch.zeros(FLAGS, dtype=torch.bool, pin_memory=on_gpu)
        self._launches = 0

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

    @torch.no_grad()
    def launch_batch(self, items: Sequence[PieceItem]) -> list[MelHandle]:
        """The next tokens of several streams, all pieces that they complete; errors lie in the handles."""
        works = []
        for stream, tokens, is_last in items:
            works.append(work := _Work(stream))
            try:
                self.model.take(stream, tokens, is_last)
            except SynthesisError as error:
                work.error = error
        while jobs := [job for work in works if work.error is None and (job := self._next_job(work))]:
            self._run(jobs)
        return self._handles(works)

    @torch.no_grad()
    def generate_batch(self, items: Sequence[WholeItem]) -> list[MelHandle]:
        """Whole utterances, as ``PieceFlow.generate``; errors lie in the handles."""
        works, jobs = [], []
        for tokens, prompt_mel, embedding in items:
            stream = self.model.new_stream(embedding, prompt_mel)
            works.append(work := _Work(stream))
            try:
                self.model.take(stream, tokens, True)
            except SynthesisError as error:
                work.error = error
                continue
            window = Window(stream.tokens, 0, is_whole=True, is_last=True)
            if stream.tokens:
                jobs.append(_Job(work, self._row(stream, window), None, stream.known))
        self._run(jobs)
        return self._handles(works)

    def solver(self, rows: int, frames: int) -> PieceSolver:
        """The solver for so many rows of up to so many frames; made at first use, or by ``warm_up``."""
        found = self._solvers.get((rows, frames))
        if found is None:
            found = self._solvers[rows, frames] = PieceSolver(self._parts, rows, frames, self._use_graphs)
            if self._use_graphs:
                found.capture()
        return found

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
            if not bucket:
                self._run_alone(jobs.pop(), longest)
                continue
            count = min(self._rows(bucket), 1 << (len(jobs) - 1).bit_length())
            self._run_rows(self.solver(count, bucket), jobs[-count:])
            del jobs[-count:]

    def _run_alone(self, job: _Job, frames: int) -> None:
        """A row that is longer than all graphs: made for it alone, operation by operation."""
        grid = 2 ** (len(self.model.config.unet.channels) - 1)
        self._run_rows(PieceSolver(self._parts, 1, -(-frames // grid) * grid, False), [job])

    def _run_rows(self, solver: PieceSolver, jobs: list[_Job]) -> None:
        solver.send([job.row for job in jobs])
        solver.run()
        first = self._launches % (FLAGS - self._max_rows)
        self._launches += len(jobs)
        flags = self._flags[first : first + len(jobs)]
        flags.copy_(solver.faults[: len(jobs)], non_blocking=True)
        for number, job in enumerate(jobs):
            stream, frames = job.work.stream, len(job.row.places)
            mel = solver.x[number, len(stream.prompt_mel) : frames].T.clone()
            if job.window is not None:
                mel = self.model.join(stream, mel, job.window, job.num_tokens)
            job.work.mels.append(mel)
            job.work.faults.append(flags[number])

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
