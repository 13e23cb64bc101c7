"""Many streams at once, as listeners would meet them: ``vivace bench serving``.

A simulated player per stream begins with the first audio and plays in real time. What counts is what happens inside
a window of fixed length: before it the clients come one after the other for as long as one utterance takes, so that
the window sees the load as it stays, and behind it the load goes on until the window's requests have their first
audio.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from vivace.bench.common import heading
from vivace.bench.ladder_measure import forget_peak, peak_memory
from vivace.bench.profile_device import DeviceSampler
from vivace.bench.serving_count import CountingScheduler, Steps
from vivace.bench.serving_figures import figures
from vivace.bench.serving_load import Load
from vivace.bench.serving_player import Window
from vivace.bench.single import Bench
from vivace.datatypes import SamplingParams
from vivace.engine.async_engine import AsyncEngine
from vivace.engine.request import SynthesisRequest
from vivace.engine.routing import MANY_STREAMS
from vivace.errors import InvalidRequestError
from vivace.voice import Voice

Loop = Literal["playback", "reply"]

TTFB_LIMIT_MS = 200.0
"""99th percentile of the first audio, up to which streams count as in real time."""

_LOST = ("underruns", "refused", "failed", "failed_of_ramp", "unanswered")

OFFLINE_AHEAD = 5, 4
"""Clients of the offline mode, as a ratio to the streams that run: some must always wait."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes:
        streams: listeners of each closed loop. rates: requests per second of each open loop.
        offline: requests spoken as fast as possible; 0: none. whole: these in one piece each.
        loop: a client sends its next request when it has played the one before, or when it has its last chunk.
        seconds: length of each window. ramp_s: of the time before it; None: that of one utterance.
        max_streams: that the device serves at once; 0: as many as the largest load has, up to ``MANY_STREAMS``:
            generation runs ahead of playback, so a few serve many listeners.
        voices: how many different ones.
        deterministic: the engine's mode of that name.
    """

    streams: tuple[int, ...] = (1, 2, 4, 8)
    rates: tuple[float, ...] = ()
    offline: int = 0
    whole: bool = False
    loop: Loop = "playback"
    seconds: float = 20.0
    ramp_s: float | None = None
    utterance_seconds: float = 10.0
    max_streams: int = 0
    voices: int = 1
    seed: int = 0
    deterministic: bool = False

    def check(self) -> None:
        """Raises InvalidRequestError for numbers out of range."""
        if not self.streams and not self.rates and not self.offline:
            raise InvalidRequestError("nothing to measure: give streams, rates or offline", param="streams")
        if any(not 1 <= count <= 10_000 for count in self.streams):
            raise InvalidRequestError("streams must lie between 1 and 10000", param="streams")
        if any(not 0 < rate <= 10_000 for rate in self.rates):
            raise InvalidRequestError("rates must lie above 0 and up to 10000 per second", param="rates")
        if not 0 <= self.offline <= 1_000_000:
            raise InvalidRequestError("offline must lie between 0 and 1000000", param="offline")
        if not 1 <= self.seconds <= 3600:
            raise InvalidRequestError("seconds must lie between 1 and 3600", param="seconds")
        if self.ramp_s is not None and not 0 <= self.ramp_s <= 3600:
            raise InvalidRequestError("the ramp must lie between 0 and 3600 seconds", param="ramp")
        if not 1 <= self.voices <= 1000:
            raise InvalidRequestError("voices must lie between 1 and 1000", param="voices")

    @property
    def running(self) -> int:
        """Streams that the engine is opened for."""
        most = MANY_STREAMS if self.rates else max((*self.streams, self.offline))
        return self.max_streams or min(MANY_STREAMS, most)

    @property
    def ramp(self) -> float:
        return self.utterance_seconds if self.ramp_s is None else self.ramp_s


def run(
    model: str = "mini",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    settings: Settings = Settings(),
    progress: Callable[[dict[str, Any]], object] = bool,
) -> dict[str, Any]:
    """Measures every point on one warm engine.

    Args:
        model: folder, "mini", or "random" (full size).
        progress: called with each point's document when it is done.

    Raises:
        ModelFolderError, InvalidRequestError: the model cannot be used, or a number is out of range.
    """
    settings.check()
    scheduler = CountingScheduler()
    bench = Bench(
        model,
        device,
        dtype,
        settings.utterance_seconds,
        settings.running,
        scheduler,
        deterministic=settings.deterministic,
    )
    gc.collect()
    gc.freeze()  # as the server's engine process does
    try:
        points = asyncio.run(_measure(bench, scheduler, settings, progress))
        config = bench.assets.model.config
    finally:
        gc.unfreeze()
        bench.close()
    return {
        **heading("serving", device, config.name, dtype),
        "audio_seconds": settings.utterance_seconds,
        "loop": settings.loop,
        "window_s": settings.seconds,
        "max_streams": settings.running,
        "deterministic": settings.deterministic,
        "voices": settings.voices,
        "start_s": round(bench.start_s, 2),
        "most_streams_in_real_time": most_in_real_time(points),
        "points": points,
    }


def most_in_real_time(points: Sequence[dict[str, Any]]) -> int:
    """The largest closed loop that had first audio in time, no underrun, and no request lost; 0: none."""
    good = [
        point["streams"]
        for point in points
        if "streams" in point
        and not any(point.get(name) for name in _LOST)  # older rows count fewer kinds
        and point["ttfb_ms_p99"] is not None  # nobody may have asked
        and point["ttfb_ms_p99"] < TTFB_LIMIT_MS
    ]
    return max(good, default=0)


async def _measure(
    bench: Bench,
    scheduler: CountingScheduler,
    settings: Settings,
    progress: Callable[[dict[str, Any]], object],
) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    async with AsyncEngine(bench.engine) as engine:
        voices = await _voices(bench, engine, settings.voices)
        meter = Meter(bench, engine, scheduler, voices, settings)
        for streams in settings.streams:
            points.append(await meter.closed(streams))
            progress(points[-1])
        for rate in settings.rates:
            points.append(await meter.poisson(rate))
            progress(points[-1])
        if settings.offline:
            points.append(await meter.offline())
            progress(points[-1])
    return points


async def _voices(bench: Bench, engine: AsyncEngine, count: int) -> list[Voice | None]:
    """The model's own voice and copies under other names, each spoken with once: prompts of stored voices are warm."""
    own = bench.assets.default_voice
    voices: list[Voice | None] = [own]
    if own is not None:
        voices += [replace(own, name=f"{own.name}-{number}") for number in range(1, count)]
    for voice in voices:
        await engine.synthesize(SynthesisRequest("Ready.", voice=voice, sampling=SamplingParams()))
    return voices


class Meter:
    """Measures one point after the other."""

    def __init__(
        self,
        bench: Bench,
        engine: AsyncEngine,
        scheduler: CountingScheduler,
        voices: list[Voice | None],
        settings: Settings,
    ) -> None:
        self._bench, self._engine, self._scheduler = bench, engine, scheduler
        self._voices, self._settings = voices, settings
        self._device = bench.assets.model.device
        self._sampler = DeviceSampler(self._device)
        self._stop: asyncio.Task[None] | None = None
        self._steps = Steps()
        self._peak: int | None = None
        self._cpu_s = self._loop_cpu_s = 0.0

    async def closed(self, streams: int) -> dict[str, Any]:
        """``streams`` listeners."""
        settings, load = self._settings, self._load()
        listens = settings.loop == "playback"
        window = await load.closed(streams, settings.ramp, settings.seconds, listens=listens)
        return await self._point({"streams": streams}, load, window)

    async def poisson(self, rate: float) -> dict[str, Any]:
        """``rate`` requests per second."""
        settings, load = self._settings, self._load()
        window = await load.poisson(rate, settings.ramp, settings.seconds)
        return await self._point({"rate": rate}, load, window)

    async def offline(self) -> dict[str, Any]:
        """All at once."""
        settings, load = self._settings, self._load(whole=self._settings.whole)
        more, than = OFFLINE_AHEAD
        window = await load.offline(settings.offline, settings.running * more // than + 1)
        return await self._point({"offline": settings.offline}, load, window, plays=False)

    def _load(self, *, whole: bool = False) -> Load:
        self._sampler = DeviceSampler(self._device)
        return Load(
            self._engine,
            voices=self._voices,
            seed=self._settings.seed,
            whole=whole,
            at_start=self._begin,
            at_end=self._end,
        )

    def _begin(self) -> None:
        self._scheduler.take()
        forget_peak(self._device)
        self._sampler.__enter__()
        self._cpu_s, self._loop_cpu_s = time.process_time(), time.thread_time()

    def _end(self) -> None:
        self._cpu_s = time.process_time() - self._cpu_s
        self._loop_cpu_s = time.thread_time() - self._loop_cpu_s
        self._steps = self._scheduler.take()
        self._peak = peak_memory(self._device)
        # In a thread: it waits for the sampler's own, and requests of the window are still waiting for audio.
        self._stop = asyncio.create_task(asyncio.to_thread(self._sampler.__exit__, None, None, None))

    async def _point(
        self, what: dict[str, Any], load: Load, window: Window, *, plays: bool = True
    ) -> dict[str, Any]:
        ended_s = time.perf_counter()
        while self._engine.num_running:  # what was cancelled ends within a step
            await asyncio.sleep(0.005)
        if self._stop is not None:
            await self._stop
        use, steps = self._sampler.summary(), self._steps
        document = what | figures(load.records, window, ended_s, plays=plays) | _steps_of(steps, window)
        resident = max(1, steps.resident)
        shared = None if self._peak is None else (self._peak - self._bench.loaded_bytes) // resident
        return document | {
            "gpu_busy_percent": None if use is None else use.busy_percent_mean,
            "gpu_busy_reason": self._sampler.reason,
            "device_memory_bytes": None if use is None else use.memory_bytes_max,
            "power_watts": None if use is None else use.power_watts_mean,
            "peak_memory_bytes": self._peak,
            "memory_per_stream_bytes": shared if self._device.type == "cuda" else None,
            "process_cpu_percent": round(100 * self._cpu_s / window.seconds, 1),
            "consumer_cpu_percent": round(100 * self._loop_cpu_s / window.seconds, 2),
        }


def _steps_of(steps: Steps, window: Window) -> dict[str, Any]:
    times = sorted(steps.step_ms)

    def at(percent: int) -> int | None:
        return times[min(len(times) - 1, len(times) * percent // 100)] if times else None

    return {
        "resident_max": steps.resident,
        "steps_per_second": round(steps.steps / window.seconds, 2),
        "step_ms_p50": at(50),
        "step_ms_p99": at(99),
        "engine_busy_percent": round(sum(times) / window.seconds / 10, 1),
        "lm_rows_mean": _mean(steps.lm_rows, steps.lm_steps),
        "flow_streams_mean": _mean(steps.flow_rows, steps.flow_steps),
        "flow_chunks_mean": _mean(steps.flow_chunks, steps.flow_steps),
    }


def _mean(total: int, count: int) -> float | None:
    return round(total / count, 2) if count else None
