"""Jobs per second of ``vivace.batch`` itself: the real thing in front of an engine whose speech costs nothing.

python -m benchmarks.batch_overhead [--jobs 1000] [--format wav] [--profile] [--jobs-per-second 100]

Every request gets the same 4.5 s of speech-like samples at 24 kHz. Everything else is what ``vivace batch`` does, but
for the text front end: it reads jobs, waits for ``AsyncSpeechStream``, looks for near silence, encodes, ``fsync``s, and
writes lines of result. With ``--jobs-per-second`` the engine is a thread that serves so many, ``--streams`` at
once, and computes in Python for ``--host-share`` of each step, as a thread does that keeps a fast device busy. Counted
are then how full its steps were, and how long they took, beside those without a job. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import itertools
import json
import os
import pstats
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vivace.batch import Batch, ResultsFolder, read_jobs
from vivace.datatypes import AudioChunk
from vivace.engine import Engine
from vivace.engine.async_stream import AsyncSpeechStream
from vivace.engine.live import LiveRequest
from vivace.engine.request import SynthesisRequest
from vivace.engine.scheduler import Ticket
from vivace.engine.silence import is_audio_near_silent
from vivace.errors import OverloadedError
from vivace.random_checkpoint import full_config
from vivace.voice import Voice

if TYPE_CHECKING:
    from vivace.datatypes import Samples

SECONDS, RATE_HZ, CHUNKS = 4.5, 24_000, 5
STEP_S, ALONE_S = 0.025, 2.0
QUEUE_PER_STREAM = 2


def speech_like() -> Samples:
    """A gliding tone with syllables and some noise."""
    at = np.arange(int(SECONDS * RATE_HZ)) / RATE_HZ
    tone = np.sin(2 * np.pi * (120 * at + 15 * np.sin(2 * np.pi * at)))
    noise = 0.01 * np.random.default_rng(0).standard_normal(len(at))
    speech: Samples = (0.3 * (0.5 + 0.5 * np.sin(2 * np.pi * 4 * at)) * tone + noise).astype(np.float32)
    return speech


class FreeEngine:
    """Stands for ``AsyncEngine`` and for the ``Engine`` in it: each request is done as soon as it has come."""

    sample_rate_hz = RATE_HZ
    is_running = True

    def __init__(self, streams: int) -> None:
        self.streams_at_once = streams
        self.config = full_config()
        self._ids = itertools.count(1)
        self._pieces = np.array_split(speech_like(), CHUNKS)
        self._voice = Voice(
            name="free",
            prompt_text="Hello.",
            speech_tokens=np.zeros(40, np.int32),
            mel=np.full((80, self.config.flow.output_size), -1.0, np.float32),
            embedding=np.ones(self.config.flow.spk_embed_dim, np.float32),
        )

    # -- as AsyncEngine ---------------------------------------------------------------------------------------

    def stream(self, request: SynthesisRequest) -> AsyncSpeechStream:
        return AsyncSpeechStream(cast("Engine", self), lambda: self.submit(request))

    async def make_voice(self, *_: object, **__: object) -> Voice:
        raise NotImplementedError

    def is_near_silent(self, samples: Samples, voice: str | Voice | None = None) -> bool:
        return is_audio_near_silent(samples, self._voice, self.config)

    # -- as Engine --------------------------------------------------------------------------------------------

    def submit(self, request: SynthesisRequest) -> LiveRequest:
        live = self._new(request)
        while not live.is_done:
            self.give_chunk(live)
        return live

    def take(self, live: LiveRequest) -> AudioChunk | None:
        return live.chunks.popleft() if live.chunks else None

    def listen(self, live: LiveRequest, listener: Callable[[], object]) -> None:
        live.listener = listener
        listener()

    def cancel(self, live: LiveRequest) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing runs."""

    def give_chunk(self, live: LiveRequest) -> None:
        """One more piece of its audio, and its end with the last."""
        index = live.num_chunks
        samples, is_last = self._pieces[index], index + 1 == CHUNKS
        start_s = live.num_samples / RATE_HZ
        live.num_chunks += 1
        live.num_samples += len(samples)
        live.num_speech_tokens = int(SECONDS * 25)
        elapsed_ms = live.elapsed_ms()
        live.chunks.append(
            AudioChunk(samples, RATE_HZ, index, 0, start_s, elapsed_ms, live.times, is_last=is_last)
        )
        if is_last:
            live.wall_ms, live.finish_reason = elapsed_ms, "stop"
        if live.listener is not None:
            live.listener()

    def _new(self, request: SynthesisRequest) -> LiveRequest:
        number = next(self._ids)
        return LiveRequest(
            request_id=number,
            ticket=Ticket(number),
            voice=self._voice,
            sampling=request.sampling,
            stream=True,
            sample_rate_hz=RATE_HZ,
            started=time.perf_counter(),
            speed=1.0,
            vocoder=None,
        )


class PacedEngine(FreeEngine):
    """Serves ``jobs_per_second`` in steps of ``STEP_S``, with its streams always full; its thread computes meanwhile.

    Attributes:
        steps: of each, how many streams it had, and how long it took, in seconds; first come those without a job.
        most_waiting: requests beyond those, at any step.
    """

    def __init__(self, streams: int, jobs_per_second: float, host_share: float) -> None:
        super().__init__(streams)
        self.steps: list[tuple[int, float]] = []
        self.most_waiting = 0
        self._steps_per_job = max(CHUNKS, round(streams / jobs_per_second / STEP_S))
        self._loops = _loops_in(host_share * STEP_S)
        self._queue: deque[LiveRequest] = deque()
        self._running: list[LiveRequest] = []
        self._steps_done: dict[int, int] = {}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paced-engine")
        self._thread.start()
        time.sleep(ALONE_S)

    def submit(self, request: SynthesisRequest) -> LiveRequest:
        if len(self._queue) + len(self._running) >= (1 + QUEUE_PER_STREAM) * self.streams_at_once:
            raise OverloadedError("the queue is full")
        live = self._new(request)
        self._queue.append(live)
        return live

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            started = time.perf_counter()
            while self._queue and len(self._running) < self.streams_at_once:
                self._start(self._queue.popleft())
            self.most_waiting = max(self.most_waiting, len(self._queue))
            _compute(self._loops)
            self._is_closed.wait(max(0.0, started + STEP_S - time.perf_counter()))
            self.steps.append((len(self._running), time.perf_counter() - started))
            self._finish_step()

    def _start(self, live: LiveRequest) -> None:
        """The first ones begin at different places, so that they do not all end together."""
        number, streams = live.request_id - 1, self.streams_at_once
        self._steps_done[live.request_id] = number * self._steps_per_job // streams if number < streams else 0
        self._running.append(live)

    def _finish_step(self) -> None:
        for live in self._running:
            self._steps_done[live.request_id] += 1
            ready = CHUNKS * self._steps_done[live.request_id] // self._steps_per_job
            while live.num_chunks < min(ready, CHUNKS):
                self.give_chunk(live)
        self._running = [live for live in self._running if not live.is_done]


def _compute(loops: int) -> int:
    total = 0
    for number in range(loops):
        total += number
    return total


def _loops_in(seconds: float) -> int:
    """How long a loop takes so long on this machine, alone."""
    count = 200_000
    best = min(_timed(lambda: _compute(count)) for _ in range(5))
    return int(count * seconds / best)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(engine: FreeEngine, count: int, name: str, folder: Path) -> dict[str, Any]:
    """Runs the jobs; wall and processor seconds, the latter of all threads."""
    path = folder / "jobs.jsonl"
    path.write_text("".join(_lines(count, name)), encoding="utf-8")
    with ResultsFolder(folder / "out") as results:
        before, started = os.times(), time.perf_counter()
        batch = Batch(read_jobs(path), results, model="free")
        summary = asyncio.run(batch.run(engine))
        wall, after = time.perf_counter() - started, os.times()
    if summary.done != count:
        raise RuntimeError(f"{summary.done} of {count} jobs were done")
    return {
        "jobs": count,
        "format": name,
        "streams": engine.streams_at_once,
        "jobs_per_second": round(count / wall, 1),
        "cpu_ms_per_job": round((after.user + after.system - before.user - before.system) / count * 1e3, 3),
    }


def _lines(count: int, name: str) -> Iterator[str]:
    for number in range(count):
        text = f"This is sentence number {number}, and it is spoken for nobody."
        yield json.dumps({"id": f"s{number:05}", "text": text, "format": name}) + "\n"


def occupancy(engine: PacedEngine) -> dict[str, Any]:
    """Of the steps from the first that was full to the last: how full they were, and how long they took."""
    full = [index for index, (count, _) in enumerate(engine.steps) if count == engine.streams_at_once]
    if not full:
        raise RuntimeError("no step was full; take more jobs")
    steps = engine.steps[full[0] : full[-1] + 1]
    alone = [seconds for count, seconds in engine.steps[: full[0]] if not count]
    return {
        "steps": len(steps),
        "streams_mean": round(fmean(count for count, _ in steps), 1),
        "steps_not_full": sum(count < engine.streams_at_once for count, _ in steps),
        "most_waiting": engine.most_waiting,
        "step_ms": round(fmean(seconds for _, seconds in steps) * 1e3, 2),
        "step_ms_alone": round(fmean(alone) * 1e3, 2),
    }


def main() -> None:
    """Measures one format."""
    parser = argparse.ArgumentParser(description="What vivace batch costs beside the engine.")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--format", default="wav")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--jobs-per-second", type=float, help="of an engine that takes its time")
    parser.add_argument(
        "--host-share", type=float, default=0.8, help="of a step in which that engine computes"
    )
    parser.add_argument(
        "--folder", type=Path, help="where files go for the time; default: the system's place"
    )
    parser.add_argument(
        "--profile", action="store_true", help="what the event loop's thread spends its time on"
    )
    options = parser.parse_args()
    engine: FreeEngine
    if options.jobs_per_second is None:
        engine = FreeEngine(options.streams)
    else:
        engine = PacedEngine(options.streams, options.jobs_per_second, options.host_share)
    profiler = cProfile.Profile() if options.profile else None
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        try:
            if profiler is not None:
                profiler.enable()
            document = measure(engine, options.jobs, options.format, Path(folder))
        finally:
            if profiler is not None:
                profiler.disable()
            engine.close()
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    paced = occupancy(engine) if isinstance(engine, PacedEngine) else {}
    print(json.dumps({"benchmark": "batch-overhead", "cpus": os.cpu_count(), **document, **paced}))


if __name__ == "__main__":
    main()
