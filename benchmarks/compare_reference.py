"""The reference implementation and Vivace beside each other: same checkpoint, voice, token counts and device, one run.

    python -m benchmarks.compare_reference --repo ~/CosyVoice [--reference-python ~/cosyvoice-env/bin/python]

``--repo`` is your own checkout of FunAudioLLM/CosyVoice, ``--reference-python`` the interpreter of an environment with
what it needs. Without ``--model`` a full-size folder with random weights is made. End-of-sequence tokens are held back
until the number of tokens asked for is there, on both sides, so that both do the same work. Each implementation runs in
a process of its own, one after the other. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vivace.bench.single import TEXT, run
from vivace.random_checkpoint import write_random_checkpoint
from vivace.text.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ("ttfb_ms_p50", "rtf", "tps", "audio_seconds", "peak_memory_bytes")
KEPT = (*FIGURES, "ttfb_ms_p99", "precision", "model", "torch", "hardware", "start_s")


def main() -> None:
    """Runs both sides and prints the ratios."""
    options = _options()
    if options.side == "vivace":
        print(json.dumps(_vivace(options)))
        return
    end = time.monotonic() + options.limit_seconds
    with _model_folder(options) as folder:
        half = (end - time.monotonic()) / 2
        ours = run_side(_vivace_command(options, folder), dict(os.environ), half)
        _show("vivace", ours)
        command = reference_command(options, folder)
        environment = reference_environment(options.reference_python)
        references = run_side(command, environment, end - time.monotonic())
        _show("reference", references)
    if not ours or not references:
        raise SystemExit("one side measured nothing: no ratios")
    for figures in references:
        better = ratios(figures, ours[0])
        print("ratio to", figures["precision"], *(f"{key} {value}" for key, value in better.items()))
    print(json.dumps(_document(options, references, ours[0])))


def _show(side: str, documents: list[dict[str, Any]]) -> None:
    for figures in documents:
        print(f"{side}, {figures['precision']}:", *(f"{key} {figures[key]}" for key in FIGURES), flush=True)


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
    parser.add_argument("--tokens", type=int, default=250, help="speech tokens per utterance")
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
        write_random_checkpoint(path, "full")
        yield path


def _vivace_command(options: argparse.Namespace, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.compare_reference", "--side", "vivace"]
    command += ["--repo", str(options.repo), "--model", str(folder), "--device", options.device]
    return [*command, "--tokens", str(options.tokens), "--runs", str(options.runs), "--dtype", options.dtype]


def reference_command(options: argparse.Namespace, folder: Path) -> list[str]:
    """How the other side is started; it reads as many text tokens as Vivace."""
    text_tokens = len(TextTokenizer.from_folder(folder / "CosyVoice-BlankEN").encode(TEXT))
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
    command += ["--device", options.device, "--tokens", str(options.tokens), "--runs", str(options.runs)]
    command += ["--text-tokens", str(text_tokens), "--precision", "float32"]
    return [*command, "--precision", "float16"] if options.reference_fp16 else command


def reference_environment(python: str | None) -> dict[str, str]:
    """An interpreter of its own sees its own packages only."""
    return {name: value for name, value in os.environ.items() if python is None or name != "PYTHONPATH"}


def run_side(command: list[str], environment: dict[str, str], limit_seconds: float) -> list[dict[str, Any]]:
    """The last document of each precision that the process printed, whether or not it came to its end."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        try:
            printed, _ = process.communicate(timeout=max(0.0, limit_seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
            print(f"{command[2]}: ended after {limit_seconds:.0f} s", file=sys.stderr)
    if process.returncode != 0:
        print(f"{command[2]}: exit code {process.returncode}", file=sys.stderr)
    documents = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    return list({document["precision"]: document for document in documents}.values())


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
    options: argparse.Namespace, references: list[dict[str, Any]], ours: dict[str, Any]
) -> dict[str, Any]:
    document = {
        "bench": "compare_reference",
        "hardware": ours["hardware"],
        "model": ours["model"],
        "precision": options.dtype,
        "runs": options.runs,
        "speech_tokens": options.tokens,
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
        seconds=options.tokens / 25,
        requests=options.runs,
        runs=options.runs,
        device=options.device,
        dtype=getattr(torch, options.dtype),
    )


if __name__ == "__main__":
    main()
