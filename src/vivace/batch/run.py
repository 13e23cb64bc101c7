"""Runs a batch: as many requests in flight as the engine serves at once, and one job after the other behind them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vivace.batch.jobs import BadJob, BatchJob
from vivace.batch.results import JobResult, ResultsFolder
from vivace.batch.speak import JobRunner, Speaker
from vivace.errors import InvalidRequestError, VivaceError

if TYPE_CHECKING:
    from typing import Any


@dataclass(slots=True)
class BatchSummary:
    """What a run amounts to so far.

    Attributes:
        done, skipped: jobs spoken in this run, and in earlier ones. failures: those that were not.
        incomplete: of those done, jobs with words that the model cannot read (``skipped_text`` in the results).
        audio_seconds, wall_seconds: made in this run, and how long it took.
    """

    done: int = 0
    skipped: int = 0
    failures: list[JobResult] = field(default_factory=list)
    incomplete: int = 0
    audio_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def num_jobs(self) -> int:
        """Jobs that have been dealt with."""
        return self.done + self.skipped + len(self.failures)

    def to_dict(self) -> dict[str, Any]:
        """As a JSON document."""
        speed = self.audio_seconds / self.wall_seconds if self.wall_seconds else 0.0
        return {
            "jobs": self.num_jobs,
            "done": self.done,
            "skipped": self.skipped,
            "failed": len(self.failures),
            "incomplete": self.incomplete,
            "audio_seconds": round(self.audio_seconds, 3),
            "wall_seconds": round(self.wall_seconds, 3),
            "audio_seconds_per_second": round(speed, 3),
            "failures": [
                {"id": each.id, "line": each.line, "code": each.code, "message": each.message}
                for each in self.failures
            ],
        }


class Batch:
    """One list of jobs for one folder.

    Args:
        jobs: asked for while the batch runs, in the event loop: an iterable that waits holds up what is in flight.
        results: where files and lines go; jobs that it has are skipped.
        model: a name of the model; jobs that another model spoke are spoken again.
        on_result: called in the event loop for each job that was done or has failed.

    Attributes:
        summary: of the run so far.
    """

    def __init__(
        self,
        jobs: Iterable[BatchJob | BadJob],
        results: ResultsFolder,
        *,
        model: str = "",
        on_result: Callable[[JobResult], object] | None = None,
    ) -> None:
        self.summary = BatchSummary()
        self._results = results
        self._model = model
        self._on_result = on_result
        self._lines: dict[str, int | None] = {}
        self._todo = self._pending(jobs)
        self._next: tuple[BatchJob, str] | None = None

    def has_work(self) -> bool:
        """Whether a job is left to speak; without one no engine is needed."""
        self._next = self._next or next(self._todo, None)
        return self._next is not None

    async def run(self, engine: Speaker) -> BatchSummary:
        """Speaks all jobs. Cancelling it leaves a folder with which another run goes on.

        Raises:
            OSError, VivaceError: the folder cannot be written any more, or the engine has ended. Errors of a single job
                are results.
        """
        started = time.perf_counter()
        streams = engine.streams_at_once
        # A few more wait in the engine's queue, so that a free place is taken within the same step.
        ahead = 0 if streams == 1 else max(1, streams // 8)
        # And while those that have been spoken are written, the next are spoken.
        behind = max(2, streams // 4)
        runner = JobRunner(engine, self._results, streams + ahead, behind)
        tasks = [asyncio.create_task(self._work(runner)) for _ in range(streams + ahead + behind)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for result in await runner.close():
                self._count(result)
            self.summary.wall_seconds += time.perf_counter() - started
        return self.summary

    async def _work(self, runner: JobRunner) -> None:
        while self.has_work():
            assert self._next is not None
            (job, fingerprint), self._next = self._next, None
            self._count(await runner.run(job, fingerprint))

    def _pending(self, jobs: Iterable[BatchJob | BadJob]) -> Iterator[tuple[BatchJob, str]]:
        """The jobs that are to be spoken, with their fingerprints; the others are counted."""
        for job in jobs:
            if isinstance(job, BadJob):
                self._report(JobResult.failed(job.id, job.line, job.error))
                continue
            try:
                job.check()
                self._check_new(job)
            except VivaceError as error:
                self._report(JobResult.failed(job.id, job.line, error))
                continue
            fingerprint = job.fingerprint(self._model)
            if self._results.has(job, fingerprint):
                self.summary.skipped += 1
            else:
                yield job, fingerprint

    def _check_new(self, job: BatchJob) -> None:
        if job.key in self._lines:
            line = self._lines[job.key]
            where = "another job" if line is None else f"line {line}"
            raise InvalidRequestError(f"{where} has the same id", code="duplicate_id", param="id")
        self._lines[job.key] = job.line

    def _report(self, result: JobResult) -> None:
        self._results.append(result)
        self._count(result)

    def _count(self, result: JobResult) -> None:
        if result.code is None:
            self.summary.done += 1
            self.summary.incomplete += result.skipped_text is not None
            self.summary.audio_seconds += result.audio_seconds or 0.0
        else:
            self.summary.failures.append(result)
        if self._on_result is not None:
            self._on_result(result)
