"""One job of a batch: a voice, the audio, a second try where it is near silent, a file."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from vivace.audio.encoders import encode_whole
from vivace.batch.results import JobResult
from vivace.engine.request import MAX_SEED
from vivace.engine.results import join
from vivace.errors import OverloadedError, SynthesisError, VivaceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vivace.audio.decode import AudioSource
    from vivace.batch.jobs import BatchJob
    from vivace.batch.results import ResultsFolder
    from vivace.datatypes import Samples, SynthesisResult
    from vivace.engine.async_stream import AsyncSpeechStream
    from vivace.engine.request import SynthesisRequest
    from vivace.voice import Voice

JOINT_SECONDS = 0.25
"""The vocoder runs on through segments: so much of a later segment's audio may hold the end of the one before."""

MAX_VOICES = 64
"""Voices made from recordings that are kept for further jobs."""

VOICES_AT_ONCE = 8
"""Recordings that are encoded side by side; the engine's pool for them takes no more than 16."""

MAX_WRITERS = 16
"""Threads that write. Mostly they wait for the disk, and of files that are synced together it writes more a second."""

MAX_REFUSALS = 3
"""Times in a row that the engine may find no room for a request while nothing else is in flight."""

FATAL = ("storage_full", "engine_closed")
"""Errors that the next job would meet as well."""

_log = logging.getLogger(__name__)


class Speaker(Protocol):
    """``AsyncEngine`` or ``EngineRouter``, as far as it matters here."""

    @property
    def sample_rate_hz(self) -> int: ...

    @property
    def streams_at_once(self) -> int: ...

    @property
    def is_running(self) -> bool: ...

    def stream(self, request: SynthesisRequest) -> AsyncSpeechStream: ...

    async def make_voice(
        self, prompt_audio: AudioSource, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice: ...

    def is_near_silent(self, samples: Samples, voice: str | Voice | None = None) -> bool: ...


@dataclass(frozen=True, slots=True)
class Spoken:
    """What a request made: the chunks of each segment, and what gives its figures."""

    segments: list[list[Samples]]
    summary: Callable[[Samples], SynthesisResult]


class Voices:
    """Voices made from recordings: each recording is encoded once, however many jobs wait for it."""

    def __init__(self, engine: Speaker) -> None:
        self._engine = engine
        self._slots = asyncio.Semaphore(VOICES_AT_ONCE)
        self._tasks: dict[tuple[object, str], asyncio.Task[Voice]] = {}

    async def of(self, job: BatchJob) -> str | Voice | None:
        """The voice that a job asks for.

        Raises:
            InvalidAudioError, ModelFolderError: as ``make_voice``.
        """
        if job.prompt_audio is None:
            return job.request.voice
        key = job.prompt_audio, job.prompt_text
        task = self._tasks.pop(key, None) or asyncio.create_task(self._make(*key))
        self._tasks[key] = task  # last in the order: used most recently
        if len(self._tasks) > MAX_VOICES:
            del self._tasks[next(iter(self._tasks))]
        return await asyncio.shield(task)

    def close(self) -> None:
        """Nobody waits any more."""
        for task in self._tasks.values():
            task.cancel()

    async def _make(self, prompt_audio: AudioSource, prompt_text: str) -> Voice:
        async with self._slots:
            return await self._engine.make_voice(prompt_audio, prompt_text, consent=True)


class JobRunner:
    """Does jobs, any number side by side.

    What takes a processor or waits for the disk does so in threads of its own, so that neither the event loop nor the
    engine's way in waits for it.

    Args:
        num_streams: requests that may be in flight.
        num_writers: jobs that may be written side by side.
    """

    def __init__(self, engine: Speaker, results: ResultsFolder, num_streams: int, num_writers: int) -> None:
        self._engine = engine
        self._results = results
        self._streams = asyncio.Semaphore(num_streams)
        self._num_running = 0
        self._ended = asyncio.Event()
        self._voices = Voices(engine)
        self._writers = ThreadPoolExecutor(min(num_writers, MAX_WRITERS), thread_name_prefix="vivace-batch")
        self._writing: set[asyncio.Future[JobResult | None]] = set()

    async def close(self) -> list[JobResult]:
        """Waits for what is being written; the results for which nobody waits any more."""
        self._voices.close()
        ended = await asyncio.gather(*self._writing, return_exceptions=True)
        self._writers.shutdown()
        return [result for result in ended if isinstance(result, JobResult)]

    async def run(self, job: BatchJob, fingerprint: str) -> JobResult:
        """Speaks a job, writes its file and its line. What is wrong with the job itself is its result.

        Raises:
            OSError, VivaceError: the folder cannot be written, or the engine has ended.
        """
        first = seed = job.request.sampling.seed
        attempts = 0
        try:
            voice = await self._voices.of(job)
            for seed in (first, other_seed(first)):
                attempts += 1
                spoken = await self._attempt(job, voice, seed)
                if spoken is None:
                    continue
                written = await self._finish(job, spoken, voice, seed, attempts, fingerprint)
                if written is not None:
                    return written
            raise SynthesisError(
                "near silence with two seeds; reword the text or change the seed", code="no_speech"
            )
        except OSError:
            raise
        except VivaceError as error:
            if error.code in FATAL or not self._engine.is_running:
                raise
            failed = JobResult.failed(job.id, job.line, error, seed, attempts)
        except Exception as error:
            _log.exception("internal error in a job")
            wrong = SynthesisError(f"internal error ({type(error).__name__})", code="internal_error")
            failed = JobResult.failed(job.id, job.line, wrong, seed, attempts)
        failed = replace(failed, fingerprint=fingerprint)
        self._results.append(failed)
        return failed

    async def _finish(
        self,
        job: BatchJob,
        spoken: Spoken,
        voice: str | Voice | None,
        seed: int,
        attempts: int,
        fingerprint: str,
    ) -> JobResult | None:
        """In a thread that writes: the file, then the line; None and nothing written for near silence.

        Who is cancelled meanwhile leaves it to ``close`` to hand out the result.
        """

        def write() -> JobResult | None:
            parts = [join(pieces) for pieces in spoken.segments] or [join([])]
            if self._is_silent(parts, voice):
                return None
            result = spoken.summary(parts[0] if len(parts) == 1 else join(parts))
            data = encode_whole(job.format, result.sample_rate_hz, result.samples)
            self._results.save(job, data)
            written = replace(_success(job, result, len(data), seed, attempts), fingerprint=fingerprint)
            self._results.append(written)
            return written

        future = asyncio.get_running_loop().run_in_executor(self._writers, write)
        self._writing.add(future)
        await asyncio.wait([future])  # which leaves it alone when this task is cancelled
        self._writing.discard(future)
        return future.result()

    async def _attempt(self, job: BatchJob, voice: str | Voice | None, seed: int) -> Spoken | None:
        """The job with that seed; None if there was no speech."""
        request = replace(job.request, voice=voice, sampling=replace(job.request.sampling, seed=seed))
        try:
            return await self._speak(request)
        except SynthesisError as error:
            if error.code != "no_speech":
                raise
            return None

    async def _speak(self, request: SynthesisRequest) -> Spoken:
        """Takes all audio of a request. One for which there is no room comes again when another has ended, or later."""
        refusals = 0
        while True:
            try:
                async with self._streams:
                    return await self._take(request)
            except OverloadedError as error:
                refusals = 0 if self._num_running else refusals + 1
                if refusals > MAX_REFUSALS:
                    raise
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), error.retry_after_s)

    async def _take(self, request: SynthesisRequest) -> Spoken:
        self._num_running += 1
        segments: dict[int, list[Samples]] = {}
        is_refused = False
        try:
            async with self._engine.stream(request) as stream:
                async for chunk in stream:
                    segments.setdefault(chunk.segment, []).append(chunk.samples)
                return Spoken(list(segments.values()), stream.summary)
        except OverloadedError:
            is_refused = True
            raise
        finally:
            self._num_running -= 1
            if not is_refused:  # however it ended, others that were refused may come again
                self._ended.set()
                self._ended = asyncio.Event()

    def _is_silent(self, segments: list[Samples], voice: str | Voice | None) -> bool:
        joint = int(JOINT_SECONDS * self._engine.sample_rate_hz)
        first, *later = segments
        heard = [first, *(samples[joint:] for samples in later if len(samples) > joint)]
        return any(self._engine.is_near_silent(samples, voice) for samples in heard)


def other_seed(seed: int) -> int:
    """The seed of a second try: always the same one."""
    return seed + 1 if seed < MAX_SEED else 0


def _success(job: BatchJob, result: SynthesisResult, size: int, seed: int, attempts: int) -> JobResult:
    return JobResult(
        id=job.id,
        line=job.line,
        file=job.file_name,
        bytes=size,
        audio_seconds=round(result.audio_seconds, 3),
        ttfb_ms=round(result.ttfb_ms, 1),
        wall_ms=round(result.wall_ms, 1),
        rtf=round(result.rtf, 4),
        tps=round(result.tps, 1),
        num_text_tokens=result.num_text_tokens,
        num_speech_tokens=result.num_speech_tokens,
        finish_reason=result.finish_reason,
        skipped_text=result.skipped_text or None,
        seed=seed,
        attempts=attempts,
    )
