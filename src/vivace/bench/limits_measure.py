"""The engine beside its floors: ``vivace limits --measure``.

First utterances one after the other by an engine for one stream, then many side by side by one for so many. Floors
are counted at the length that was spoken.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from vivace.bench.ladder_setup import read_phrase
from vivace.bench.single import RANDOM, TEXT, Bench
from vivace.bench.throughput import serve
from vivace.engine.chunking import ChunkPlan
from vivace.random_checkpoint import write_random_checkpoint

if TYPE_CHECKING:
    import torch

    from vivace.bench.limits import Floors
    from vivace.bench.progress import Count
    from vivace.bench.throughput import Load
    from vivace.datatypes import SynthesisResult

STREAMS = {"cuda": 32, "cpu": 4}
"""Side by side, by kind of device."""

ROUNDS = {"cuda": 3, "cpu": 2}
"""Utterances of each of them, after one that warms up."""

HIGHER_IS_BETTER = ("tps", "audio_seconds_per_second")


@dataclass(frozen=True, slots=True)
class Spoken:
    """What an utterance was made of.

    Attributes:
        text_tokens: before the speech, the prompt's text included.
        prompt_tokens: the voice's speech tokens that the speech LM reads. prompt_frames: those that the flow reads.
        first_tokens: new ones behind which the first audio comes.
        context_tokens: positions before a new one of the speech LM, on average.
        context_frames: frames before a new one of the flow, on average.
    """

    text_tokens: int
    prompt_tokens: int
    prompt_frames: int
    first_tokens: int
    context_tokens: int
    context_frames: int


@dataclass(frozen=True, slots=True)
class Together:
    """Utterances side by side.

    Attributes:
        memory_per_stream_bytes: of a CUDA device, what came on top of the loaded model, shared out; None elsewhere,
            where nothing tells what a stream takes from what the process keeps.
    """

    audio_seconds_per_second: float
    memory_per_stream_bytes: int | None


def num_measured(kind: str, requests: int, streams: int | None = None) -> int:
    """Utterances that ``measure_engine`` speaks on a kind of device."""
    streams = streams or STREAMS[kind]
    return 1 + requests + streams * (1 + ROUNDS[kind])


def measure_engine(
    model: str,
    device: str,
    dtype: torch.dtype,
    *,
    seconds: float,
    requests: int,
    streams: int | None,
    floors: Floors,
    count: Count,
) -> dict[str, Any]:
    """The engine's own figures, and how near they come: floor over measured in percent, of rates the inverse.

    Args:
        model: folder, "mini", or "random".
        seconds: of audio per utterance. requests: one after the other. streams: side by side; None: ``STREAMS``.
        floors: in the format of ``dtype``.
    """
    with _folder_of(model) as folder:
        results, spoken = _one_by_one(Bench(folder, device, dtype, seconds), requests, count)
        gc.collect()  # the first engine's memory is no stream's
        streams = streams or STREAMS["cuda" if device.startswith("cuda") else "cpu"]
        together = _side_by_side(Bench(folder, device, dtype, seconds, streams), streams, count)
    found, best = _found(results, together), _best(floors, spoken, streams, results[0].audio_seconds)
    return {
        "format": floors.form.name,
        "requests": requests,
        "streams": streams,
        "audio_seconds": round(results[0].audio_seconds, 2),
        "context_tokens": spoken.context_tokens,
        "context_frames": spoken.context_frames,
        "figures": {name: beside(name, found[name], best[name]) for name in best},
    }


def beside(name: str, measured: float | None, floor: float) -> dict[str, float | None]:
    """One figure, its floor, and the percentage of it; None where it was not measured."""
    if measured is None:
        return {"measured": None, "floor": floor, "percent_of_floor": None}
    share = measured / floor if name in HIGHER_IS_BETTER else floor / measured
    return {"measured": round(measured, 4), "floor": floor, "percent_of_floor": round(100 * share, 2)}


def memory_per_stream(load: Load, loaded_bytes: int) -> int | None:
    """The peak over ``loaded_bytes``, shared out among the streams; None where there is no such figure."""
    if not loaded_bytes or load.peak_memory_bytes is None:
        return None
    return (load.peak_memory_bytes - loaded_bytes) // load.batch


@contextmanager
def _folder_of(model: str) -> Iterator[str]:
    """The model's folder; a random one is made once for both engines."""
    if model != RANDOM:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="vivace-") as place:
        folder = str(Path(place) / RANDOM)
        write_random_checkpoint(folder, "full")
        yield folder


def _one_by_one(bench: Bench, requests: int, count: Count) -> tuple[list[SynthesisResult], Spoken]:
    """``requests`` utterances after one that warms up. Closes ``bench``."""
    count.begin("one stream")
    try:
        results = []
        for seed in range(-1, requests):
            results.append(bench.speak(max(0, seed)).result)
            count.advance()
        return results[1:], _what_is_spoken(bench)
    finally:
        bench.close()


def _side_by_side(bench: Bench, streams: int, count: Count) -> Together:
    """As many utterances at once as ``bench`` was opened for. Closes it."""
    count.begin(f"{streams} side by side")
    try:
        kind = bench.assets.model.device.type
        serve(bench, streams, streams, on_done=count.advance)
        load = serve(bench, streams, streams * ROUNDS[kind], on_done=count.advance)
        return Together(load.audio_seconds_per_second, memory_per_stream(load, bench.loaded_bytes))
    finally:
        bench.close()


def _what_is_spoken(bench: Bench) -> Spoken:
    voice, config = bench.assets.default_voice, bench.assets.model.config
    assert voice is not None, "an utterance was spoken without a voice"
    given = read_phrase(bench.assets, voice, TEXT, bench.num_tokens).given
    flow, prompt = config.flow, len(voice.speech_tokens)
    plan = ChunkPlan(config.chunk_tokens, flow.lookahead_tokens, flow.num_frames(1))
    half = bench.num_tokens // 2
    return Spoken(
        text_tokens=len(given.text),
        prompt_tokens=len(given.prompt_speech),
        prompt_frames=flow.num_frames(prompt),
        first_tokens=plan.first_audio_tokens(prompt),
        context_tokens=len(given.text) + len(given.prompt_speech) + half,
        context_frames=flow.num_frames(prompt + half),
    )


def _found(results: list[SynthesisResult], together: Together) -> dict[str, float | None]:
    audio_s = results[0].audio_seconds
    return {
        "tps": median(result.tps for result in results),
        "flow_ms_per_second": median(result.times.flow_ms for result in results) / audio_s,
        "vocoder_ms_per_second": median(result.times.vocoder_ms for result in results) / audio_s,
        "ttfb_ms": median(result.ttfb_ms for result in results),
        "rtf": median(result.rtf for result in results),
        "audio_seconds_per_second": together.audio_seconds_per_second,
        "memory_per_stream_bytes": together.memory_per_stream_bytes,
    }


def _best(floors: Floors, spoken: Spoken, streams: int, seconds: float) -> dict[str, float]:
    """The floors of an utterance of this length."""
    text, prompt = spoken.text_tokens, spoken.prompt_tokens
    context = {"context": spoken.context_tokens, "context_frames": spoken.context_frames}
    ttfb_s = floors.ttfb_s(spoken.first_tokens, prompt, text_tokens=text, context_frames=spoken.prompt_frames)
    return {
        "tps": round(1 / floors.lm_step_s(context=spoken.context_tokens), 1),
        "flow_ms_per_second": round(floors.flow_s(context_frames=spoken.context_frames) * 1e3, 4),
        "vocoder_ms_per_second": round(floors.vocoder_s() * 1e3, 4),
        "ttfb_ms": round(ttfb_s * 1e3, 3),
        "rtf": round(1 / floors.throughput(1, **context), 6),
        "audio_seconds_per_second": round(floors.throughput(streams, **context), 2),
        "memory_per_stream_bytes": floors.stream_bytes(prompt, text_tokens=text, seconds=seconds),
    }
