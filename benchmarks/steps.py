"""Runs named steps one after the other in a given time, each in a process of its own; a second run goes on.

A step's output is in ``OUT/<name>.txt`` while it runs. Once it ended well its document, the last line that is one JSON
object, is in ``OUT/<name>.json`` as a row of results: with commit, date and the step's name. ``OUT/steps.json`` says
what became of each. Commands run inside OUT, so that the paths in them stay true when the folder is moved.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.processes import end_processes_of, run_process
from benchmarks.rows import add_row, commit_of_checkout, stamped

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {"vivace": [sys.executable, "-m", "vivace.cli"], "python": [sys.executable]}
"""What the first word of a command stands for: this interpreter runs both."""
CACHES = ("VIVACE_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
PORTION_MARGIN_S = 60
"""A step in portions is told to begin nothing new so long before its time is up."""


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
    """Runs steps in one folder, which no other runner may use meanwhile.

    Args:
        steps: all steps of the table, in their order.
        out: the folder; made if missing.
        limit_s: seconds for everything from now on; None: no limit.
        results: folder of the files that rows of finished steps are added to, once each, those of earlier runs too;
            None: nowhere.
        identity: members for documents that have no ``bench`` or ``hardware``; called for those only.
        commit: named in rows; None: what git says.
        archive: file (tar.gz) that is written anew behind every step with all of the folder but what can be made again.
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
        archive: Path | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._steps = {step.name: step for step in steps}
        unknown = {need for step in steps for need in step.needs} - set(self._steps)
        if len(self._steps) != len(steps) or unknown:
            raise ValueError(f"steps need different names, and the steps that they need: {sorted(unknown)}")
        self._ends = math.inf if limit_s is None else time.monotonic() + limit_s
        self._out, self._results, self._archive = out.resolve(), results, archive
        self._identity, self._say = identity, say
        self._commit = commit or commit_of_checkout()
        self._out.mkdir(parents=True, exist_ok=True)
        self._before = kept_outcomes(self._out)
        self._now: dict[str, Outcome] = {}
        self.is_interrupted = False

    def run(self, names: Sequence[str]) -> list[Outcome]:
        """Runs these steps in their order, and what they need; a step that an earlier run began in vain comes last.

        Returns:
            The outcome of every step named, and of others that ran for them, in the order of the table.

        Raises:
            BusyError: another run works in this folder.
        """
        in_vain = {name for name, kept in self._before.items() if kept.state != "done"}
        with only_one_in(self._out):
            if cut := end_processes_of(self._out):
                self._say(f"ended {cut} processes that an earlier run had left")
            for name in self._before:
                self._add_row(name)
            try:
                for name in sorted(names, key=lambda name: name in in_vain):
                    self._bring_about(self._steps[name])
            except KeyboardInterrupt:
                self.is_interrupted = True
                for name in names:
                    kept = self._before.get(
                        name, Outcome(name, "left", reason="the run was interrupted before")
                    )
                    self._now.setdefault(name, _earlier(kept) if kept.state == "done" else kept)
        return [self._now[name] for name in self._steps if name in self._now]

    def _bring_about(self, step: Step) -> None:
        before = self._before.get(step.name)
        if step.name in self._now:
            return
        if before is not None and before.state == "done":
            self._now[step.name] = _earlier(before)
            return
        missing = self._missing(step)
        needed_s = sum(usual_s(each, self._before.get(each.name)) for each in (*missing, step))
        left_s = self._ends - time.monotonic()
        if needed_s > left_s:
            said = f"; before: {before.reason or before.state}" if before is not None else ""
            reason = f"takes about {needed_s:.0f} s, {max(0, left_s):.0f} s were left{said}"
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
        self._keep(Outcome(step.name, "begun", reason="the run ended meanwhile", commit=self._commit))
        self._say(f"{step.name}: begins, takes about {step.usual_s:g} s")
        begun, state, reason = time.monotonic(), "left", "was interrupted"
        try:
            self._run(step)
            state, reason = "done", ""
        except StepFailedError as failure:
            state, reason = "failed", str(failure)
        except UnfinishedError as unfinished:
            reason = str(unfinished)
        finally:
            took_s = round(time.monotonic() - begun, 1)
            outcome = Outcome(step.name, state, took_s, reason, self._commit)
            self._keep(outcome)
            self._now[step.name] = outcome
            self._say(f"{step.name}: {state} after {took_s} s{reason and ': ' + reason}")
        self._add_row(step.name)
        if self._archive is not None:
            remade = {name for each in self._steps.values() for name in (each.makes, *each.clears)}
            write_archive(self._out, self._archive, remade)
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
        output, command = self._out / f"{step.name}.txt", [*PROGRAMS.get(first, [first]), *rest]
        status = run_process(command, self._out, output, limit_s, environment(self._out, os.environ))
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
        """Keeps the document of a step that ended well, as a row."""
        document = last_document(output)
        if document is None:
            raise StepFailedError("printed no JSON document")
        if not {"bench", "hardware"} <= set(document):
            document = self._identity() | {"bench": step.name} | document
        write_document(self._out / f"{step.name}.json", stamped(document | {"step": step.name}, self._commit))
        if step.goes_on and (left := sum(row["reason"] == NO_TIME for row in document["rows"])):
            raise UnfinishedError(f"{left} of {len(document['rows'])} rows are left")

    def _add_row(self, name: str) -> None:
        """The row of a finished step to the results, also where an earlier run ended just before, but only once."""
        path = self._out / f"{name}.json"
        if self._results is None or self._before[name].state != "done" or not path.exists():
            return
        row = json.loads(path.read_text(encoding="utf-8"))
        add_row(self._results / f"{row['bench']}.jsonl", row)

    def _keep(self, outcome: Outcome) -> None:
        self._before[outcome.name] = outcome
        kept = {name: asdict(outcome) for name, outcome in self._before.items()}
        write_document(self._out / "steps.json", kept)


class BusyError(Exception):
    """Two runs in one folder."""


@contextmanager
def only_one_in(folder: Path) -> Iterator[None]:
    """Holds the folder as long as this process lives at most.

    Raises:
        BusyError: another process holds it.
    """
    with open(folder / "lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"another run works in {folder}") from None
        yield


def kept_outcomes(out: Path) -> dict[str, Outcome]:
    """What became of the steps of earlier runs in a folder, by name."""
    path = out / "steps.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: Outcome(**kept) for name, kept in found.items()}


def usual_s(step: Step, before: Outcome | None) -> float:
    """Seconds that a step is expected to take: more than those after which it was cut."""
    if before is None or before.state != "left" or before.took_s is None or step.goes_on:
        return step.usual_s
    return max(step.usual_s, min(1.5 * before.took_s, step.most_s))


def plan(steps: Sequence[Step], names: Sequence[str], done: set[str], limit_s: float) -> list[list[Step]]:
    """Which steps fall into each of several runs of ``limit_s`` seconds, if all take as long as they usually do.

    A step in portions is in one run only. The last entry holds what no run has time for, if there is such a step.
    """
    table = {step.name: step for step in steps}
    waiting, made = [table[name] for name in names if name not in done], set(done)
    runs: list[list[Step]] = []
    while waiting:
        left_s, run = limit_s, []
        for step in waiting:
            group = [table[need] for need in step.needs if need not in made] + [step]
            needed_s = sum(each.usual_s for each in group)
            if step.name not in made and needed_s <= left_s:
                left_s -= needed_s
                run += group
                made |= {each.name for each in group}
        runs.append(run or waiting)
        waiting = [step for step in waiting if step.name not in made] if run else []
    return runs


def write_archive(folder: Path, archive: Path, without: set[str]) -> None:
    """A folder as ``tar.gz``, but for some of the entries in it; what was there before stays until it is whole."""
    part = archive.with_name(f"{archive.name}.part")
    skipped = without | {"lock", "cache", archive.name, part.name}
    with tarfile.open(part, "w:gz") as file:
        for entry in sorted(folder.iterdir()):
            if entry.name not in skipped and entry.suffix != ".part":
                file.add(entry, f"{folder.name}/{entry.name}")
    part.replace(archive)


def environment(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Of a step: this checkout's modules from any folder, caches of compiled code below ``folder``."""
    paths = [
        str(ROOT / "src"),
        str(ROOT),
        *(os.path.abspath(path) for path in given.get("PYTHONPATH", "").split(":") if path),
    ]
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


def tail(output: Path, lines: int) -> list[str]:
    """The last lines of a step's output that say something, none of them a document."""
    if not output.exists():
        return []
    said = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line[:300] for line in said if line.strip() and not line.startswith("{")][-lines:]


def _earlier(outcome: Outcome) -> Outcome:
    return replace(outcome, earlier=True)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """A half-written file is never read."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1), encoding="utf-8")
    part.replace(path)
