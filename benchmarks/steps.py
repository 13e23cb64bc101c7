"""Runs named steps one after the other in a given time, each in a process of its own; a second run goes on.

A step's output is in ``OUT/<name>.txt`` while it runs and its document, the last line that is one JSON object, in
``OUT/<name>.json`` once it ended well. ``OUT/steps.json`` says what became of each. Commands run inside OUT, so that
the paths in them stay true when the folder is moved.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import commit_of_checkout, stamped

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {"vivace": [sys.executable, "-m", "vivace.cli"], "python": [sys.executable]}
"""What the first word of a command stands for: this interpreter runs both."""
CACHES = ("VIVACE_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
PORTION_MARGIN_S = 40
"""A step in portions is told to begin nothing new so long before its time is up."""
GRACE_S = 3.0
"""Between the request to end and the end without one."""


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a table.

    Args:
        usual_s: seconds it usually takes; with less left it is not begun.
        most_s: seconds after which it is ended as failed.
        command: a ``vivace`` or ``python`` command line; ``{seconds}`` becomes the time for one portion.
        needs: names of steps whose results on disk it reads; those run first where they are missing.
        makes: what a step that others need leaves in the folder.
        clears: what is removed from the folder before it begins.
        has_document: whether its last line is a JSON document.
        goes_on: works in portions, and is done when no row of its document says ``NO_TIME``.
    """

    name: str
    usual_s: float
    most_s: float
    command: str
    needs: tuple[str, ...] = ()
    makes: str = ""
    clears: tuple[str, ...] = ()
    has_document: bool = True
    goes_on: bool = False


NO_TIME = "no time was left"
"""Reason of a row that a step in portions leaves for its next one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step: "done", "failed", "left" for another run, or "begun" while it runs.

    Args:
        took_s: of the process; None if it did not run.
        reason: why it failed or was left.
        commit: of the checkout it ran in.
        earlier: it ran in an earlier run.
    """

    name: str
    state: str
    took_s: float | None = None
    reason: str = ""
    commit: str = ""
    earlier: bool = False


class StepFailedError(Exception):
    """A step that did not end well; the text is the reason."""


class UnfinishedError(Exception):
    """A step that has more to do in another run; the text is the reason."""


class Runner:
    """Runs steps in one folder.

    Args:
        steps: all steps of the table, in their order.
        out: the folder; made if missing.
        limit_s: seconds for everything from now on; None: no limit.
        results: folder of the files of rows that documents of finished steps are appended to; None: nowhere.
        identity: members for documents that have no ``bench`` or ``hardware``; called for those only.
        commit: named in rows; None: what git says.
        say: called with each line for people.

    Raises:
        ValueError: two steps have one name, or one needs a step that is not in the table.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        out: Path,
        *,
        limit_s: float | None = None,
        results: Path | None = None,
        identity: Callable[[], dict[str, Any]] = dict,
        commit: str | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._steps = {step.name: step for step in steps}
        unknown = {need for step in steps for need in step.needs} - set(self._steps)
        if len(self._steps) != len(steps) or unknown:
            raise ValueError(f"steps need different names, and the steps that they need: {sorted(unknown)}")
        self._ends = math.inf if limit_s is None else time.monotonic() + limit_s
        self._out, self._results = out.resolve(), results
        self._identity, self._say = identity, say
        self._commit = commit or commit_of_checkout()
        self._out.mkdir(parents=True, exist_ok=True)
        path = self._out / "steps.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self._before = {name: Outcome(**kept) for name, kept in found.items()}
        self._now: dict[str, Outcome] = {}

    def run(self, names: Sequence[str]) -> list[Outcome]:
        """Runs these steps in their order, and what they need; a step that an earlier run began in vain comes last.

        Returns:
            The outcome of every step named, and of others that ran for them, in the order of the table.
        """
        in_vain = {name for name, kept in self._before.items() if kept.state != "done"}
        for name in sorted(names, key=lambda name: name in in_vain):
            self._bring_about(self._steps[name])
        return [self._now[name] for name in self._steps if name in self._now]

    def _bring_about(self, step: Step) -> None:
        before = self._before.get(step.name)
        if step.name in self._now:
            return
        if before is not None and before.state == "done":
            self._now[step.name] = Outcome(**(asdict(before) | {"earlier": True}))
            return
        missing = self._missing(step)
        needed_s = sum(each.usual_s for each in (*missing, step))
        left_s = self._ends - time.monotonic()
        if needed_s > left_s:
            said = f"; before: {before.reason or before.state}" if before is not None else ""
            reason = f"takes about {needed_s:g} s, {max(0, left_s):.0f} s were left{said}"
            self._now[step.name] = Outcome(step.name, "left", reason=reason)
            return
        for each in missing:
            known = self._now.get(each.name)
            if known is None or known.earlier:  # an earlier run's result is no longer there
                self._now[each.name] = self._measure(each)
            if self._now[each.name].state != "done":
                self._now[step.name] = Outcome(step.name, "left", reason=f"needs {each.name}")
                return
        self._now[step.name] = self._measure(step)

    def _missing(self, step: Step) -> list[Step]:
        """Steps that must run before this one, first one first."""
        found: list[Step] = []
        for need in (self._steps[name] for name in step.needs):
            now = self._now.get(need.name)
            known = now or self._before.get(need.name)
            ran_well = now is not None and now.state == "done" and not now.earlier
            is_there = known is not None and known.state == "done" and (self._out / need.makes).exists()
            if not (ran_well or is_there):
                found += [each for each in (*self._missing(need), need) if each not in found]
        return found

    def _measure(self, step: Step) -> Outcome:
        """Runs one step and keeps what became of it, also if this process ends meanwhile."""
        self._keep(Outcome(step.name, "begun", commit=self._commit))
        self._say(f"{step.name}: begins, takes about {step.usual_s:g} s")
        begun, state, reason = time.monotonic(), "done", ""
        try:
            self._run(step)
        except StepFailedError as failure:
            state, reason = "failed", str(failure)
        except UnfinishedError as unfinished:
            state, reason = "left", str(unfinished)
        outcome = Outcome(step.name, state, round(time.monotonic() - begun, 1), reason, self._commit)
        self._keep(outcome)
        self._say(f"{step.name}: {state} after {outcome.took_s} s{reason and ': ' + reason}")
        return outcome

    def _run(self, step: Step) -> None:
        """Raises StepFailedError, UnfinishedError."""
        for name in step.clears:
            path = self._out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        left_s = self._ends - time.monotonic()
        limit_s = min(step.most_s, left_s)
        seconds = max(1, round(limit_s - PORTION_MARGIN_S))
        first, *rest = shlex.split(step.command.replace("{seconds}", str(seconds)))
        output = self._out / f"{step.name}.txt"
        status = run_process([*PROGRAMS.get(first, [first]), *rest], self._out, output, limit_s)
        if status is None and step.goes_on:
            raise UnfinishedError("ended in the midst of a portion; goes on there")
        if status is None and left_s < step.most_s:
            raise UnfinishedError(f"was ended with the run, after {limit_s:.0f} s")
        if status is None:
            raise StepFailedError(f"took longer than {step.most_s:g} s")
        if status != 0:
            raise StepFailedError(f"exit status {status}: {_last_line(output)}")
        if step.has_document:
            self._take(step, output)

    def _take(self, step: Step, output: Path) -> None:
        """Keeps the document of a step that ended well, and its row."""
        document = last_document(output)
        if document is None:
            raise StepFailedError("printed no JSON document")
        _write(self._out / f"{step.name}.json", document)
        if step.goes_on and (left := sum(row["reason"] == NO_TIME for row in document["rows"])):
            raise UnfinishedError(f"{left} of {len(document['rows'])} rows are left")
        if self._results is None:
            return
        if not {"bench", "hardware"} <= set(document):
            document = self._identity() | {"bench": step.name} | document
        row = stamped(document | {"step": step.name}, self._commit)
        self._results.mkdir(parents=True, exist_ok=True)
        with open(self._results / f"{row['bench']}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _keep(self, outcome: Outcome) -> None:
        self._before[outcome.name] = outcome
        _write(self._out / "steps.json", {name: asdict(kept) for name, kept in self._before.items()})


def run_process(command: Sequence[str], folder: Path, output: Path, limit_s: float) -> int | None:
    """Exit status of a command that runs inside ``folder``; None: it, and all that it had started, was ended.

    Args:
        output: file of what it prints, standard error included.
        limit_s: seconds; infinity: no limit.
    """
    with (
        open(output, "wb") as file,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait(None if limit_s == math.inf else max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its group."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):  # nobody of the group is left
        os.killpg(process.pid, signal.SIGKILL)


def environment(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Of a step: this checkout's modules from any folder, caches of compiled code below ``folder``."""
    paths = [str(ROOT), *(os.path.abspath(path) for path in given.get("PYTHONPATH", "").split(":") if path)]
    caches = {name: str(folder / "cache" / name.lower()) for name in CACHES}
    fixed = {"PYTHONPATH": ":".join(paths), "PYTHONUNBUFFERED": "1"}
    return {"COLUMNS": "150"} | dict(given) | caches | fixed


def last_document(output: Path) -> dict[str, Any] | None:
    """The last line that is a JSON object; warnings may stand behind it."""
    for line in reversed(output.read_text(encoding="utf-8", errors="replace").splitlines()):
        if line.startswith("{"):
            try:
                document: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return document
    return None


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
    said = (line.strip()[:200] for line in reversed(lines) if any(sign.isalnum() for sign in line))
    return next(said, "printed nothing")


def _write(path: Path, document: dict[str, Any]) -> None:
    """A half-written file is never read."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1), encoding="utf-8")
    part.replace(path)
