"""The ladder: the same phrases through every rung, from the reference's way to the engine: ``vivace bench ladder``.

A rung that cannot run here, or fails, is a row with a reason and never the end of the run. With a folder, finished
rungs are kept there, so that a second run goes on where one ended.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vivace.bench.common import hardware, heading
from vivace.bench.floors import int8_ceilings, measure_ceilings
from vivace.bench.ladder_compare import compared
from vivace.bench.ladder_judge import Judge
from vivace.bench.ladder_measure import Measurer
from vivace.bench.ladder_rungs import RUNGS, Plan, Switches, plan_ladder
from vivace.bench.ladder_setup import TOKENS, Setup, check_tokens, open_setup
from vivace.bench.ladder_store import FIGURES, Store
from vivace.bench.limits import Floors, count_work, describe, formats, vocoder_format
from vivace.bench.llm import limited
from vivace.bench.progress import Progress
from vivace.errors import InvalidRequestError

LONGEST_S = {"cuda": 600.0, "cpu": 7200.0}
"""Of one rung, by kind of device, compiling included: what takes longer never ends."""

MOST_CUTS = 3
"""Runs that ended in the midst of a rung, after which it is not tried again."""


def run(
    model: str = "mini",
    *,
    device: str = "cpu",
    tokens: tuple[int, ...] = (),
    runs: int = 1,
    alone: bool = True,
    rungs: tuple[str, ...] = (),
    out: Path | None = None,
    judge: Judge | None = None,
    limit_s: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures the rungs.

    Args:
        model: folder, "mini", or "random" (full size).
        tokens: speech tokens of each phrase, one to three numbers; none: ``TOKENS``.
        runs: repetitions after one that warms up; medians count.
        alone: also each change alone, on top of the reference's way.
        rungs: some of them by name; none: all.
        out: folder that keeps finished rungs; its ``ladder.json`` and ``ladder.csv`` are written anew.
        judge: word error rate of spoken phrases, where one is installed.
        limit_s: no further rung is begun after so many seconds. The last rungs come first then, single changes last;
            those without time left are rows that say so, and a second run with the same ``out`` takes them up.

    Returns:
        One document with the field names of the benchmark rows.

    Raises:
        ModelFolderError, VoiceNotFoundError: the model cannot be used.
        InvalidRequestError: an argument is out of range, or ``out`` holds a run with other settings.
    """
    _check(runs, rungs)
    begun = time.perf_counter()
    limit = Limit(None if limit_s is None else begun + limit_s)
    tokens = tokens or TOKENS
    check_tokens(tokens)
    setup = open_setup(model, device, tokens)
    try:
        settings = {
            "model": model,
            "hardware": hardware(device),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "tokens": list(tokens),
            "runs": runs,
            "judge": judge is not None,
        }
        store = None if out is None else Store(out, settings)
        plans = plan_ladder(setup.device.type, alone=alone, names=rungs)
        measure = _Measuring(setup, runs, judge)
        rows = _measure_all(setup, plans, measure, store, progress, limit)
        floors = _floors(setup) if store is None else store.floors(lambda: _floors(setup))
        rows = compared(rows, floors)
        document = heading("ladder", device, setup.assets.model.config.name, torch.float32) | {
            "runs": runs,
            "tokens": list(tokens),
            "prompt_tokens": len(setup.voice.speech_tokens),
            "took_s": round(time.perf_counter() - begun, 1),
            "floors": floors,
            "rows": rows,
        }
    finally:
        setup.close()
    if store is not None:
        store.write(document)
    return document


def parse_tokens(text: str) -> tuple[int, ...]:
    """Lengths of a command line, such as "150,200,230"; none if empty. Raises InvalidRequestError."""
    if not text.strip():
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 6 for part in parts):
        raise InvalidRequestError(f"{text!r} is no list of lengths such as 150,200,230", param="tokens")
    return tuple(int(part) for part in parts)


def _measure_all(
    setup: Setup,
    plans: list[Plan],
    measure: Callable[[Plan], dict[str, Any]],
    store: Store | None,
    progress: Progress | None,
    limit: Limit,
) -> list[dict[str, Any]]:
    """One row a plan, in their order. What two plans have in common is measured once."""
    found: dict[Switches, dict[str, Any]] = {}
    possible = limit.in_order([plan for plan in plans if plan.reason is None], store)
    for done, plan in enumerate(possible):
        if progress is not None:
            progress(plan.rung.title, done, len(possible))
        kept = None if store is None else store.read(plan)
        if kept is not None:
            found[plan.switches] = kept
        elif plan.switches not in found:
            if store is not None and store.cuts(plan) >= MOST_CUTS:
                reason = f"{MOST_CUTS} runs were ended in the midst of it"
                found[plan.switches] = {"reason": reason} | dict.fromkeys(FIGURES)
                continue
            if limit.is_over():
                continue
            with nullcontext() if store is None else store.begun(plan):
                outcome = found[plan.switches] = measure(plan)
            if store is not None and outcome["reason"] is None:
                store.keep(plan, outcome)
    nothing = dict.fromkeys(FIGURES)
    return [
        _row(plan, setup.device.type)
        | (
            found.get(plan.switches, nothing | {"reason": "no time was left"})
            if plan in possible
            else nothing
        )
        for plan in plans
    ]


@dataclass(frozen=True, slots=True)
class Limit:
    """When to begin no further rung, a time of ``time.perf_counter``; None: never."""

    ends: float | None = None

    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.ends is not None and time.perf_counter() >= self.ends

    def in_order(self, plans: list[Plan], store: Store | None) -> list[Plan]:
        """Bottom rung first; where time is short the last first, single changes behind them, and what was cut last."""
        if self.ends is None:
            return plans
        last_first = plans[::-1]
        return sorted(
            last_first, key=lambda plan: (store is not None and store.cuts(plan) > 0, plan.kind == "alone")
        )


def _row(plan: Plan, device_type: str) -> dict[str, Any]:
    """All but the outcome."""
    rung, switches = plan.rung, plan.switches
    return {
        "rung": rung.name,
        "title": rung.title,
        "about": rung.about,
        "kind": plan.kind,
        "switches": asdict(switches),
        "half": device_type == "cuda" if switches.engine else switches.half_flow,
        "reason": plan.reason,
    }


class _Measuring:
    """Measures rungs; what they are compared with is made when the first one needs it."""

    def __init__(self, setup: Setup, runs: int, judge: Judge | None) -> None:
        self._setup, self._runs, self._judge = setup, runs, judge
        self._measurer: Measurer | None = None

    def __call__(self, plan: Plan) -> dict[str, Any]:
        """The rung's figures, or the reason why there are none."""
        longest_s = LONGEST_S[self._setup.device.type]
        alarm = threading.Event()
        try:
            if self._measurer is None:
                self._measurer = Measurer(self._setup, self._runs, self._judge)
            with limited(longest_s) as alarm:
                return {"reason": None} | asdict(self._measurer.measure(plan))
        except Exception as error:  # whatever a back end raises: the other rungs still count
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if alarm.is_set():  # compilers dress up what is raised inside them
                reason = f"took more than {longest_s:g} s"
            return {"reason": reason} | dict.fromkeys(FIGURES)
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _floors(setup: Setup) -> list[dict[str, Any]]:
    """Bounds of ``vivace limits`` for the formats that the rungs use."""
    config, device = setup.assets.model.config, setup.device
    half_type = torch.float16 if device.type == "cuda" else torch.bfloat16
    full, half = measure_ceilings(device, torch.float32), measure_ceilings(device, half_type)
    bandwidth, work = max(full.bandwidth, half.bandwidth), count_work(config)
    prompt_tokens = len(setup.voice.speech_tokens)
    small, found = int8_ceilings(device), []
    forms = formats(full, half, small)
    vocoder = vocoder_format(device, forms)
    for form in forms[: 2 if small is None else 3]:
        all_floors = describe(Floors(work, form, bandwidth, vocoder), config, prompt_tokens)
        figures = {name: all_floors[name] for name in ("format", "ttfb_ms", "rtf")}
        found.append(figures | {"tps": all_floors["lm"][0]["tps"]})
    return found


def _check(runs: int, rungs: tuple[str, ...]) -> None:
    if not 1 <= runs <= 100:
        raise InvalidRequestError("runs must lie between 1 and 100", param="runs")
    known = [rung.name for rung in RUNGS]
    for name in rungs:
        if name not in known:
            raise InvalidRequestError(f"unknown rung {name!r}; there are {', '.join(known)}", param="rungs")
