"""What one sentence costs on this machine: the text of ``make demo``, spoken several times by a warm engine.

python -m benchmarks.say [--threads 1] | python -m benchmarks.rows benchmarks/results/say.jsonl

The engine is called directly, so ``ttfb_ms`` ends when the first samples exist; no socket, no player. The last line
is one JSON document: medians over the runs, and each run.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from vivace import Engine, SamplingParams, SynthesisRequest
from vivace.bench.common import hardware

TEXT = (
    "Hello! This is Vivace, speaking on your own computer. It is 8:05, and the answer is 42. "
    "Would you like to hear 3 more sentences?"
)


def measure(engine: Engine, request: SynthesisRequest) -> dict[str, Any]:
    """Speaks once; the figures of the request, times in milliseconds."""
    result = engine.synthesize(request)
    return {
        "ttfb_ms": round(result.ttfb_ms, 1),
        "rtf": round(result.rtf, 4),
        "tps": round(result.tps, 1),
        "audio_seconds": round(result.audio_seconds, 3),
    } | {name: round(value, 1) for name, value in asdict(result.times).items()}


def main() -> None:
    """Speaks ``--runs`` times after one that warms up."""
    parser = argparse.ArgumentParser(description="Cost of one spoken text.")
    parser.add_argument("--model", default="mini", help="model folder, or mini")
    parser.add_argument("--voice", default=None, help="name of a voice")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None, help="of the CPU; default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("--runs must be 1 or more")
    with Engine.open(options.model, device=options.device, dtype=getattr(torch, options.dtype)) as engine:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        request = SynthesisRequest(
            options.text, voice=options.voice, sampling=SamplingParams(seed=options.seed)
        )
        measure(engine, request)
        runs = []
        for index in range(options.runs):
            runs.append(measure(engine, request))
            print(f"run {index + 1}:", *(f"{name} {value}" for name, value in runs[-1].items()))
        name = engine._config.name
    medians = {key: round(median(run[key] for run in runs), 4) for key in runs[0]}
    document = {
        "bench": "say",
        "hardware": hardware(options.device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": name,
        "precision": options.dtype,
        "runs": len(runs),
        "ttfb_ms_p50": medians.pop("ttfb_ms"),
        **medians,
        "each": runs,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
