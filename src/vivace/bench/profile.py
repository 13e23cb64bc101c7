"""Where one request's time goes, and how busy the machine is under load: ``vivace bench profile``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vivace.bench.common import hardware, heading
from vivace.bench.profile_device import DeviceSampler, advice
from vivace.bench.progress import Count, Progress
from vivace.bench.single import Bench, Utterance
from vivace.bench.throughput import check, serve
from vivace.bench.timeline import GAPS_LABEL, LANES, find_gaps, merged, timeline_svg

if TYPE_CHECKING:
    from vivace.engine.trace import Span


def run(
    model: str = "mini",
    *,
    out: Path,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seconds: float = 5.0,
    batch: int = 4,
    requests: int = 2,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Traces one request into ``out/timeline.svg`` and ``out/trace.json``, then speaks side by side and looks on.

    Args:
        model: folder, "mini", or "random" (full size).
        out: folder for the files.
        seconds: length of each request's audio.
        batch: requests side by side under load. requests: of each client.
        progress: told of every request.

    Raises:
        ModelFolderError, InvalidRequestError: the model cannot be used, or a number is out of range.
    """
    check((batch,), requests)
    out.mkdir(parents=True, exist_ok=True)
    count = Count(progress, 2 + batch * requests)
    count.begin("loading")
    bench = Bench(model, device, dtype, seconds, batch)
    try:
        count.begin("one request")
        bench.speak(0)
        count.advance()
        spans, utterance = _trace(bench)
        count.advance()
        config = bench.assets.model.config
        count.begin(f"{batch} side by side")
        load = _under_load(bench, batch, requests, utterance.result.wall_ms, count)
    finally:
        bench.close()
    result = utterance.result
    title = f"{config.name}, {result.audio_seconds:.1f} s of audio on {hardware(device)}"
    (out / "timeline.svg").write_text(timeline_svg(spans, utterance.ready_ms, title), encoding="utf-8")
    trace = chrome_trace(spans, utterance.ready_ms)
    (out / "trace.json").write_text(json.dumps(trace), encoding="utf-8")
    gaps = find_gaps(spans)
    busy_ms = busy(spans)
    return {
        **heading("profile", device, config.name, dtype),
        "audio_seconds": round(result.audio_seconds, 2),
        "ttfb_ms_p50": round(result.ttfb_ms, 2),
        "wall_ms": round(result.wall_ms, 2),
        "rtf": round(result.rtf, 5),
        "stages_ms": {
            lane: round(sum(span.end_ms - span.start_ms for span in spans if span.lane == lane), 3)
            for lane, _ in LANES
        },
        "busy_ms": round(busy_ms, 3),
        "gap_ms": round(sum(gap.length_ms for gap in gaps), 3),
        "gaps": len(gaps),
        "longest_gaps": [asdict(gap) for gap in sorted(gaps, key=lambda gap: -gap.length_ms)[:5]],
        "files": [str(out / "timeline.svg"), str(out / "trace.json")],
        "load": load,
    }


def _trace(bench: Bench) -> tuple[list[Span], Utterance]:
    trace = bench.engine.start_trace()
    try:
        utterance = bench.speak(0)
    finally:
        bench.engine.stop_trace()
    return trace.spans(), utterance


def _under_load(bench: Bench, batch: int, requests: int, alone_ms: float, count: Count) -> dict[str, Any]:
    """Latency, and how busy host and device were meanwhile."""
    sampler = DeviceSampler(bench.assets.model.device)
    host_s, begun = time.process_time(), time.perf_counter()
    with sampler:
        load = serve(bench, batch, batch * requests, on_done=count.advance)
    wall_s = time.perf_counter() - begun
    host = 100 * (time.process_time() - host_s) / wall_s
    seen = sampler.summary()
    growth = load.latency_ms_mean / alone_ms
    return {
        **asdict(load),
        "host_busy_percent_of_one_core": round(host, 1),
        "latency_growth": round(growth, 2),
        "device": None if seen is None else asdict(seen),
        "device_reason": sampler.reason,
        "advice": None if seen is None else advice(seen.busy_percent_mean, growth),
    }


def busy(spans: Sequence[Span]) -> float:
    """Milliseconds in which some stage ran."""
    return sum(end - start for start, end in merged(spans))


def chrome_trace(spans: Sequence[Span], chunk_ready_ms: Sequence[float]) -> dict[str, Any]:
    """The same in the format that chrome://tracing and Perfetto open: times in microseconds."""
    rows = {lane: index for index, (lane, _) in enumerate(LANES)}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": index, "args": {"name": label}}
        for index, (_, label) in enumerate(LANES)
    ]
    events += [
        {
            "name": span.lane,
            "cat": "stage",
            "ph": "X",
            "pid": 1,
            "tid": rows[span.lane],
            "ts": round(span.start_ms * 1e3, 3),
            "dur": round((span.end_ms - span.start_ms) * 1e3, 3),
        }
        for span in spans
    ]
    events += [
        {
            "name": f"{gap.after} to {gap.before}",
            "cat": "gap",
            "ph": "X",
            "pid": 1,
            "tid": len(LANES),
            "ts": round(gap.start_ms * 1e3, 3),
            "dur": round(gap.length_ms * 1e3, 3),
        }
        for gap in find_gaps(spans)
    ]
    events.append(
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": len(LANES), "args": {"name": GAPS_LABEL}}
    )
    events += [
        {
            "name": f"chunk {index} ready",
            "ph": "i",
            "s": "p",
            "pid": 1,
            "tid": rows["vocoder"],
            "ts": round(ready * 1e3, 3),
        }
        for index, ready in enumerate(chunk_ready_ms)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
