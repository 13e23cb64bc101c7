"""One stream at a time: first audio, real-time factor and tokens per second of a warm engine, with the floor beside.

The number of speech tokens is fixed, so that every run does the same work whatever the weights say.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from vivace.bench.common import heading
from vivace.bench.floors import floor_rtf, measure_ceilings, stage_work
from vivace.bench.progress import Count, Progress
from vivace.bench.timeline import timeline_svg
from vivace.checkpoint import model_folder
from vivace.datatypes import AudioChunk, SamplingParams, SynthesisResult
from vivace.engine.compile_ahead import compile_ahead
from vivace.engine.engine import Engine
from vivace.engine.loading import load_assets
from vivace.engine.request import SynthesisRequest
from vivace.engine.scheduler import Scheduler
from vivace.errors import InvalidRequestError
from vivace.models.source import CounterNoise
from vivace.random_checkpoint import write_random_checkpoint

RANDOM = "random"
"""A full-size model with random weights, made in a temporary folder."""

TEXT = "The quick brown fox jumps over the lazy dog, and nobody in the village was surprised."


@dataclass(frozen=True, slots=True)
class Utterance:
    """One request as its consumer saw it."""

    result: SynthesisResult
    ready_ms: list[float]
    """When each chunk was ready, since the request was received."""


class Bench:
    """An engine whose utterances have exactly ``seconds`` of speech tokens.

    Args:
        model: folder, "mini", or "random".
        seconds: of audio per utterance.
        scheduler: in place of the engine's own.
        is_plain: PyTorch's operations one by one, one request at a time, whatever the device.
        deterministic: the engine's mode of that name.

    Attributes:
        loaded_bytes: memory of a CUDA device that the loaded model takes, before the engine adds its own; 0 elsewhere.
    """

    def __init__(
        self,
        model: str,
        device: str,
        dtype: torch.dtype,
        seconds: float,
        max_streams: int = 1,
        scheduler: Scheduler | None = None,
        *,
        is_plain: bool = False,
        deterministic: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vivace-") if model == RANDOM else None
        started = time.perf_counter()
        if self._folder is not None:
            model = str(Path(self._folder.name) / RANDOM)
            write_random_checkpoint(model, "full")
            started = time.perf_counter()
        # As ``Engine.open``; the plain way has no kernels.
        with (
            nullcontext()
            if is_plain
            else compile_ahead(model_folder(model), device, dtype, max_streams, deterministic=deterministic)
        ):
            self.assets = load_assets(model, device=device, dtype=dtype)
        target = self.assets.model.device
        self.loaded_bytes = torch.cuda.memory_allocated(target) if target.type == "cuda" else 0
        noise = None
        if is_plain:  # an engine whose noise is given takes the plain way
            noise = CounterNoise()
            for stage in (self.assets.model.lm, self.assets.model.flow):
                if hasattr(stage, "use_graphs"):
                    stage.use_graphs = False
        self.engine = Engine(
            self.assets,
            scheduler=scheduler,
            max_streams=max_streams,
            vocoder_noise=noise,
            deterministic=deterministic,
        )
        self.engine.warm_up()
        self.start_s = time.perf_counter() - started
        self.set_seconds(seconds)

    def set_seconds(self, seconds: float) -> None:
        """Fixes the length of the utterances that follow."""
        config = self.assets.model.config
        tokens = round(seconds * config.token_rate_hz)
        if tokens < config.token_rate_hz:
            raise InvalidRequestError("seconds must be 1 or more", param="seconds")
        text_tokens = self._text_tokens()
        ratio = (tokens + 0.5) / text_tokens
        self.assets.model.config = replace(config, token_text_ratio=(ratio, ratio))
        self.num_tokens = tokens

    def _text_tokens(self) -> int:
        """How many tokens the text has: told by a request that is cut after its first chunk of speech."""
        config = self.assets.model.config
        self.assets.model.config = replace(config, token_text_ratio=(0.0, 1.0))
        result = self.engine.synthesize(SynthesisRequest(TEXT))
        self.assets.model.config = config
        return result.num_text_tokens

    def speak(self, seed: int, on_chunk: Callable[[AudioChunk], None] | None = None) -> Utterance:
        """One utterance, start to end."""
        ready = []
        with self.engine.stream(SynthesisRequest(TEXT, sampling=SamplingParams(seed=seed))) as stream:
            for chunk in stream:
                ready.append(chunk.elapsed_ms)
                if on_chunk is not None:
                    on_chunk(chunk)
            return Utterance(stream.summary(), ready)

    def close(self) -> None:
        """Ends the engine and removes what was made for it."""
        self.engine.close()
        if self._folder is not None:
            self._folder.cleanup()


def run(
    model: str = "mini",
    *,
    seconds: float = 10.0,
    requests: int = 10,
    runs: int = 3,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    timeline: Path | None = None,
    long_seconds: float = 0.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Speaks ``runs * requests`` utterances one after the other.

    Args:
        model: folder, "mini", or "random".
        timeline: where a picture of one utterance's stages is written (SVG).
        long_seconds: length of one more utterance, whose last second is compared with its second one; 0: none.
        progress: told of every utterance.

    Returns:
        One document with the field names of the benchmark rows: percentiles over all utterances, medians of the
        runs' medians for the rest.

    Raises:
        ModelFolderError, InvalidRequestError: the model cannot be used, or a number is out of range.
    """
    if runs < 1 or requests < 1:
        raise InvalidRequestError("runs and requests must be 1 or more", param="runs")
    count = Count(progress, 1 + runs * requests + (runs if long_seconds else 0))
    count.begin("loading")
    bench = Bench(model, device, dtype, seconds)

    def speak(seed: int) -> Utterance:
        utterance = bench.speak(seed)
        count.advance()
        return utterance

    try:
        count.begin("one stream")
        speak(0)
        _forget_peak(device)
        measured = [[speak(index * requests + number) for number in range(requests)] for index in range(runs)]
        document = _document(bench, measured, device, dtype)
        if timeline is not None:
            timeline.write_text(draw(bench), encoding="utf-8")
        if long_seconds:
            bench.set_seconds(long_seconds)
            count.begin(f"{long_seconds:g} s at once")
            document["long"] = _long(bench, runs, count)
    finally:
        bench.close()
    return document


def draw(bench: Bench) -> str:
    """The timeline of one utterance."""
    trace = bench.engine.start_trace()
    utterance = bench.speak(0)
    bench.engine.stop_trace()
    result = utterance.result
    title = (
        f"One utterance of {result.audio_seconds:.1f} s: first audio after {result.ttfb_ms:.1f} ms,"
        f" all after {result.wall_ms:.1f} ms"
    )
    return timeline_svg(trace.spans(), utterance.ready_ms, title)


def _document(
    bench: Bench, measured: list[list[Utterance]], device: str, dtype: torch.dtype
) -> dict[str, Any]:
    results = [utterance.result for one_run in measured for utterance in one_run]
    config = bench.assets.model.config
    target = bench.assets.model.device
    ceilings = measure_ceilings(target, dtype)
    ttfb = sorted(result.ttfb_ms for result in results)

    def middle(figure: Callable[[SynthesisResult], float]) -> float:
        return median(median(figure(one.result) for one in one_run) for one_run in measured)

    return {
        **heading("single", device, config.name, dtype),
        "runs": len(measured),
        "requests": len(results),
        "audio_seconds": round(results[0].audio_seconds, 2),
        "ttfb_ms_p50": round(percentile(ttfb, 50), 2),
        "ttfb_ms_p90": round(percentile(ttfb, 90), 2),
        "ttfb_ms_p99": round(percentile(ttfb, 99), 2),
        "rtf": round(middle(lambda result: result.rtf), 5),
        "rtf_floor": round(floor_rtf(stage_work(config, dtype), ceilings), 5),
        "tps": round(middle(lambda result: result.tps), 1),
        "times_ms": {
            name: round(middle(lambda result, name=name: asdict(result.times)[name]), 2)  # type: ignore[misc]
            for name in asdict(results[0].times)
        },
        "start_s": round(bench.start_s, 2),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(target) if target.type == "cuda" else None,
        "bandwidth_bytes_per_second": round(ceilings.bandwidth),
        "matrix_flops_per_second": round(ceilings.matrix_rate),
    }


def _long(bench: Bench, runs: int, count: Count) -> dict[str, Any]:
    """Time of all stages for every chunk of one long utterance: what a second costs near the end, and the second one.

    Chunks grow while the playback is safe, so they are compared by the second of audio.
    """
    costs: list[list[float]] = []
    seconds: list[float] = []
    for seed in range(runs):
        before, mine = 0.0, []
        seconds.clear()

        def note(chunk: AudioChunk) -> None:
            nonlocal before
            spent = chunk.times.lm_ms + chunk.times.flow_ms + chunk.times.vocoder_ms
            mine.append(spent - before)  # noqa: B023
            seconds.append(len(chunk.samples) / chunk.sample_rate_hz)
            before = spent

        bench.speak(seed, note)
        costs.append(mine)
        count.advance()
    length = min(len(mine) for mine in costs)
    by_chunk = [round(median(mine[index] for mine in costs), 3) for index in range(length)]
    return {
        "chunk_ms": by_chunk,
        "chunk_seconds": [round(own, 2) for own in seconds[:length]],
        "ratio_last_to_first": round(last_to_first(by_chunk, seconds), 3),
    }


def last_to_first(by_chunk: Sequence[float], seconds: Sequence[float]) -> float:
    """Cost of a second of the last chunk over that of the second chunk, which the first audio has no part in.

    The very last one is cut short and left out, unless there are no others: where launches are large.
    """
    by_second = [cost / own for cost, own in zip(by_chunk, seconds, strict=False)]
    if len(by_second) > 3:
        by_second.pop()
    return by_second[-1] / by_second[1]


def percentile(ordered: list[float], percent: float) -> float:
    """Of ascending values, by the nearest rank."""
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def _forget_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
