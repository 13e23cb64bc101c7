"""The reference implementation and Vivace beside each other: same checkpoint, voice, token counts and device, one run.

    python -m benchmarks.compare_reference --repo ~/CosyVoice [--reference-python ~/cosyvoice-env/bin/python]

``--repo`` is your own checkout of FunAudioLLM/CosyVoice, ``--reference-python`` the interpreter of an environment with
what it needs. Without ``--model`` a full-size folder with random weights is made, of the ``--generation`` asked for.
End-of-sequence tokens are held back until the number of tokens asked for is there, on both sides, so that both do the
same work. Each implementation runs in a process of its own, one after the other. What is measured is printed as it
comes; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vivace.bench.single import TEXT, run
from vivace.checkpoint import find_paths, load_config
from vivace.config import ModelConfig
from vivace.errors import ModelFolderError
from vivace.random_checkpoint import write_random_checkpoint
from vivace.text.styles import open_tokenizer

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ("ttfb_ms_p50", "rtf", "tps", "audio_seconds", "peak_memory_bytes")
KEPT = (*FIGURES, "ttfb_ms_p99", "precision", "model", "torch", "hardware", "start_s")
MOST_PER_TEXT_TOKEN = 20
"""Speech tokens per text token at which the reference ends an utterance."""


def main() -> None:
    """Runs both sides and prints the ratios."""
    options = _options()
    if options.side == "vivace":
        print(json.dumps(_vivace(options)))
        return
    end = time.monotonic() + options.limit_seconds
    with _model_folder(options) as folder:
        config = load_config(folder)
        command = reference_command(options, folder, config)
        half = (end - time.monotonic()) / 2
        ours = run_side(_vivace_command(options, folder), dict(os.environ), half, _shown("vivace"))
        environment = reference_environment(options.reference_python)
        references = run_side(command, environment, end - time.monotonic(), _shown("reference"))
    if not ours or not references:
        raise SystemExit("one side measured nothing: no ratios")
    for figures in references:
        better = ratios(figures, ours[0])
        print("ratio to", figures["precision"], *(f"{key} {value}" for key, value in better.items()))
    print(json.dumps(_document(options, config, references, ours[0])))


def _shown(side: str) -> Callable[[dict[str, Any]], None]:
    def show(figures: dict[str, Any]) -> None:
        measured = (f"{key} {figures[key]}" for key in FIGURES)
        print(f"{side}, {figures['precision']}, {figures['runs']} runs:", *measured, flush=True)

    return show


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The reference implementation and Vivace, side by side.")
    parser.add_argument("--repo", type=Path, required=True, help="checkout of FunAudioLLM/CosyVoice")
    parser.add_argument(
        "--matcha", type=Path, help="checkout of Matcha-TTS; default: third_party of the repo"
    )
    parser.add_argument("--reference-python", help="interpreter that runs the checkout; default: this one")
    parser.add_argument(
        "--reference-fp16", action="store_true", help="also with the reference's own autocast"
    )
    parser.add_argument(
        "--model", type=Path, help="official model folder; default: random weights at full size"
    )
    parser.add_argument(
        "--generation",
        type=int,
        choices=(1, 2, 3),
        default=3,
        help="of the random weights; 1: CosyVoice-300M",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of speech per utterance")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of Vivace")
    parser.add_argument(
        "--limit-seconds", type=float, default=1800.0, help="most time in all; Vivace gets half"
    )
    parser.add_argument("--reference-commit", help="named in the document; default: what git says")
    parser.add_argument("--side", choices=("vivace",), help=argparse.SUPPRESS)
    return parser.parse_args()


@contextmanager
def _model_folder(options: argparse.Namespace) -> Iterator[Path]:
    if options.model is not None:
        yield options.model.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        path = Path(folder) / "random"
        write_random_checkpoint(path, "full", generation=options.generation)
        yield path


def _vivace_command(options: argparse.Namespace, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.compare_reference", "--side", "vivace"]
    command += ["--repo", str(options.repo), "--model", str(folder), "--device", options.device]
    return [
        *command,
        "--seconds",
        str(options.seconds),
        "--runs",
        str(options.runs),
        "--dtype",
        options.dtype,
    ]


def reference_command(options: argparse.Namespace, folder: Path, config: ModelConfig) -> list[str]:
    """How the other side is started; it reads as many text tokens as Vivace.

    Raises:
        ModelFolderError: the folder has no tokenizer.
        SystemExit: the reference would not speak for so long.
    """
    paths, missing = find_paths(folder, config)
    if paths.tokenizer is None:
        raise ModelFolderError(missing["tokenizer"])
    text_tokens = len(open_tokenizer(paths.tokenizer, config).encode(TEXT))
    tokens = round(options.seconds * config.token_rate_hz)
    if tokens >= text_tokens * MOST_PER_TEXT_TOKEN:
        longest = (text_tokens * MOST_PER_TEXT_TOKEN - 1) / config.token_rate_hz
        raise SystemExit(f"the reference ends a text of this length before: --seconds {longest} is the most")
    matcha = options.matcha or options.repo / "third_party" / "Matcha-TTS"
    command = [options.reference_python or sys.executable, "-m", "benchmarks.reference_side"]
    command += [
        "--repo",
        str(options.repo.resolve()),
        "--matcha",
        str(matcha.resolve()),
        "--model",
        str(folder),
    ]
    command += ["--device", options.device, "--tokens", str(tokens), "--runs", str(options.runs)]
    command += ["--text-tokens", str(text_tokens), "--precision", "float32"]
    return [*command, "--precision", "float16"] if options.reference_fp16 else command


def reference_environment(python: str | None) -> dict[str, str]:
    """An interpreter of its own sees its own packages only."""
    return {name: value for name, value in os.environ.items() if python is None or name != "PYTHONPATH"}


def run_side(
    command: list[str],
    environment: dict[str, str],
    limit_seconds: float,
    on_document: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """The last document of each precision that the process printed, whether or not it came to its end.

    Args:
        on_document: called with every document as it comes.
    """
    documents: dict[str, dict[str, Any]] = {}
    late = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(max(0.0, limit_seconds), end)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("{") and line.endswith("\n"):
                    document = json.loads(line)
                    documents[document["precision"]] = document
                    on_document(document)
        finally:
            timer.cancel()
    if late.is_set():
        print(f"{command[2]}: ended after {limit_seconds:.0f} s", file=sys.stderr)
    if process.returncode != 0:
        print(f"{command[2]}: exit code {process.returncode}", file=sys.stderr)
    return list(documents.values())


def ratios(reference: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    """How many times better Vivace is.

    Raises:
        SystemExit: both sides did not speak for the same time.
    """
    if abs(reference["audio_seconds"] - ours["audio_seconds"]) > 0.05 * ours["audio_seconds"]:
        lengths = f"{reference['audio_seconds']} s and {ours['audio_seconds']} s"
        raise SystemExit(f"the utterances have different lengths, {lengths}: nothing to compare")
    result = {
        "ttfb": round(reference["ttfb_ms_p50"] / ours["ttfb_ms_p50"], 1),
        "rtf": round(reference["rtf"] / ours["rtf"], 1),
        "tps": round(ours["tps"] / reference["tps"], 1),
    }
    if reference["peak_memory_bytes"] and ours["peak_memory_bytes"]:
        result["memory"] = round(reference["peak_memory_bytes"] / ours["peak_memory_bytes"], 2)
    return result


def _document(
    options: argparse.Namespace,
    config: ModelConfig,
    references: list[dict[str, Any]],
    ours: dict[str, Any],
) -> dict[str, Any]:
    document = {
        "bench": "compare_reference",
        "hardware": ours["hardware"],
        "model": ours["model"],
        "precision": options.dtype,
        "runs": options.runs,
        "generation": config.generation,
        "speech_tokens": round(options.seconds * config.token_rate_hz),
        "reference_commit": options.reference_commit or _commit(options.repo),
        "ratios": ratios(references[0], ours),
        "reference": references[0],
        "vivace": {key: ours[key] for key in KEPT if key in ours},
    }
    for figures in references[1:]:
        document["ratios_float16"], document["reference_float16"] = ratios(figures, ours), figures
    return document


def _commit(repo: Path) -> str:
    git = ["git", "-C", str(repo), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    try:
        top, commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\n")[:2]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit if Path(top) == repo.resolve() else "unknown"  # a copy inside another checkout


def _vivace(options: argparse.Namespace) -> dict[str, Any]:
    return run(
        str(options.model),
        seconds=options.seconds,
        requests=options.runs,
        runs=options.runs,
        device=options.device,
        dtype=getattr(torch, options.dtype),
    )


if __name__ == "__main__":
    main()
