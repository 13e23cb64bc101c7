"""Sentences per second and latency by how many are spoken side by side: ``vivace bench throughput``.

A closed loop: each of ``batch`` clients sends its next sentence when the one before has been spoken. What a request
waits for is the time in which none of its own stages ran: the others' turns, and the engine's own bookkeeping. The
start is the same model without what makes it fast: float32, PyTorch's operations one by one, one sentence at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch

from vivace.bench.common import heading
from vivace.bench.ladder_measure import forget_peak, peak_memory
from vivace.bench.progress import Count, Progress
from vivace.bench.single import TEXT, Bench, percentile
from vivace.datatypes import SamplingParams, SynthesisResult
from vivace.engine.live import LiveRequest
from vivace.engine.request import SynthesisRequest
from vivace.engine.results import summarise
from vivace.errors import InvalidRequestError

BATCHES = (1, 2, 4, 8, 16, 32)
MOST = 32
START_SENTENCES = 4
FEWEST_SENTENCES = 8
"""Of a batch size, however small it is."""


@dataclass(frozen=True, slots=True)
class Load:
    """What ``batch`` clients saw; times are milliseconds."""

    batch: int
    sentences: int
    latency_ms_mean: float
    latency_ms_p50: float
    latency_ms_p90: float
    latency_ms_p99: float
    queue_ms_mean: float
    ttfb_ms_p50: float
    ttfb_ms_p99: float
    sentences_per_second: float
    audio_seconds_per_second: float
    peak_memory_bytes: int | None
    speedup: float | None = None
    """Sentences per second over those of the start."""


def run(
    model: str = "mini",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seconds: float = 3.0,
    batches: tuple[int, ...] = BATCHES,
    requests: int = 2,
    whole: bool = False,
    with_start: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures every batch size on one warm engine.

    Args:
        model: folder, "mini", or "random" (full size).
        seconds: length of each sentence's audio.
        requests: sentences of each client; a small batch gets eight sentences in all.
        whole: each sentence is spoken as a whole (offline mode) instead of streamed.
        with_start: also measures the start.
        progress: told of every sentence.

    Raises:
        ModelFolderError, InvalidRequestError: the model cannot be used, or a number is out of range.
    """
    check(batches, requests)
    sentences = [max(FEWEST_SENTENCES, batch * requests) for batch in batches]
    total = sum(batches) + sum(sentences) + (1 + START_SENTENCES if with_start else 0)
    count = Count(progress, total)
    count.begin("the start" if with_start else "loading")
    start = measure_start(model, device, seconds, whole=whole, on_done=count.advance) if with_start else None
    bench = Bench(model, device, dtype, seconds, max(batches))
    try:
        loads = []
        for batch, many in zip(batches, sentences, strict=True):
            count.begin(f"{batch} side by side")
            # First the shapes that come for the first time.
            serve(bench, batch, batch, whole=whole, on_done=count.advance)
            loads.append(serve(bench, batch, many, whole=whole, on_done=count.advance))
        config = bench.assets.model.config
    finally:
        bench.close()
    if start is not None:
        slow = start.sentences_per_second
        loads = [replace(load, speedup=round(load.sentences_per_second / slow, 2)) for load in loads]
    return {
        **heading("throughput", device, config.name, dtype),
        "audio_seconds": seconds,
        "mode": "whole" if whole else "streamed",
        "start": None if start is None else asdict(start),
        "loads": [asdict(load) for load in loads],
    }


def measure_start(
    model: str, device: str, seconds: float, *, whole: bool = False, on_done: Callable[[], None] | None = None
) -> Load:
    """Four sentences one after the other, in float32 and by plain operations."""
    bench = Bench(model, device, torch.float32, seconds, is_plain=True)
    try:
        serve(bench, 1, 1, whole=whole, on_done=on_done)
        load = serve(bench, 1, START_SENTENCES, whole=whole, on_done=on_done)
        return replace(load, speedup=1.0)
    finally:
        bench.close()


def check(batches: tuple[int, ...], requests: int) -> None:
    """Raises InvalidRequestError for numbers out of range."""
    if not batches or not all(1 <= batch <= MOST for batch in batches):
        raise InvalidRequestError(f"batch sizes must lie between 1 and {MOST}", param="batch")
    if not 1 <= requests <= 1000:
        raise InvalidRequestError("requests must lie between 1 and 1000", param="requests")


def serve(
    bench: Bench,
    batch: int,
    sentences: int,
    *,
    whole: bool = False,
    on_done: Callable[[], None] | None = None,
) -> Load:
    """Speaks ``sentences``, never more than ``batch`` at once; calls ``on_done`` behind each."""
    device = bench.assets.model.device
    forget_peak(device)
    begun = time.perf_counter()
    results = _spoken(bench, batch, sentences, whole, on_done)
    wall_s = time.perf_counter() - begun
    latency = sorted(result.wall_ms for result in results)
    ttfb = sorted(result.ttfb_ms for result in results)
    return Load(
        batch=batch,
        sentences=len(results),
        latency_ms_mean=round(fmean(latency), 2),
        latency_ms_p50=round(percentile(latency, 50), 2),
        latency_ms_p90=round(percentile(latency, 90), 2),
        latency_ms_p99=round(percentile(latency, 99), 2),
        queue_ms_mean=round(fmean(result.times.waiting_ms for result in results), 2),
        ttfb_ms_p50=round(percentile(ttfb, 50), 2),
        ttfb_ms_p99=round(percentile(ttfb, 99), 2),
        sentences_per_second=round(len(results) / wall_s, 3),
        audio_seconds_per_second=round(sum(result.audio_seconds for result in results) / wall_s, 3),
        peak_memory_bytes=peak_memory(device),
    )


def _spoken(
    bench: Bench, batch: int, sentences: int, whole: bool, on_done: Callable[[], None] | None
) -> list[SynthesisResult]:
    """The results in the order in which they were done."""
    engine, waiting = bench.engine, sentences
    live: list[LiveRequest] = []
    done: list[SynthesisResult] = []
    while waiting or live:
        while waiting and len(live) < batch:
            waiting -= 1
            request = SynthesisRequest(TEXT, sampling=SamplingParams(seed=waiting), stream=not whole)
            live.append(engine.submit(request))
        engine.step()
        for each in list(live):
            is_done = each.is_done
            while engine.take(each) is not None:
                pass
            if is_done:
                live.remove(each)
                done.append(summarise(each))
                if on_done is not None:
                    on_done()
    return done
