"""The ladder: the same phrases through every rung, from the reference's way to the engine: ``vivace bench ladder``.

A rung that cannot run here, or fails, is a row with a reason and never the end of the run. With a folder, finished
rungs are kept there and a second run goes on behind them.
"""

from __future__ import annotations

import csv
import gc
import hashlib
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vivace.bench.common import hardware
from vivace.bench.floors import measure_ceilings
from vivace.bench.ladder_measure import Judge, Measurer
from vivace.bench.ladder_rungs import RUNGS, Plan, plan_ladder
from vivace.bench.ladder_setup import CPU_TOKENS, TOKENS, Setup, check_tokens, open_setup
from vivace.bench.limits import Floors, count_work, describe, formats
from vivace.errors import InvalidRequestError

Progress = Callable[[str, int, int], None]
"""Called before each measurement: its title, how many are done, how many there are."""

FIGURES = (
    "ttfb_ms_p50",
    "rtf",
    "floor_percent",
    "tps",
    "lm_ms",
    "flow_ms",
    "vocoder_ms",
    "peak_memory_bytes",
    "host_us_per_step",
    "lm_kl",
    "mel_snr_db",
    "wer",
)


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
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures the rungs.

    Args:
        model: folder, "mini", or "random" (full size).
        tokens: speech tokens of each phrase, one to three numbers; none: ``TOKENS``, on a CPU ``CPU_TOKENS``.
        runs: repetitions after one that warms up; medians count.
        alone: also each change alone, on top of the reference's way.
        rungs: some of them by name; none: all.
        out: folder that keeps finished rungs; its ``ladder.json`` and ``ladder.csv`` are written anew.
        judge: word error rate of spoken phrases, where one is installed.

    Returns:
        One document with the field names of the benchmark rows.

    Raises:
        ModelFolderError, VoiceNotFoundError: the model cannot be used.
        InvalidRequestError: an argument is out of range, or ``out`` holds a run with other settings.
    """
    _check(runs, rungs)
    kind = torch.device(device).type
    tokens = tokens or (CPU_TOKENS if kind == "cpu" else TOKENS)
    check_tokens(tokens)
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
    setup = open_setup(model, device, tokens)
    try:
        plans = plan_ladder(kind, alone=alone, names=rungs)
        rows = _measure_all(setup, plans, runs, judge, store, progress)
        floors = _floors(setup) if store is None else store.floors(lambda: _floors(setup))
        rows = [row | {"floor_percent": floor_percent(row, floors)} for row in rows]
        document = {
            "bench": "ladder",
            "hardware": settings["hardware"],
            "torch": torch.__version__,
            "threads": settings["threads"],
            "model": setup.assets.model.config.name,
            "precision": "float32",
            "runs": runs,
            "tokens": list(tokens),
            "prompt_tokens": len(setup.voice.speech_tokens),
            "floors": floors,
            "rows": rows,
        }
    finally:
        setup.close()
    if store is not None:
        store.write(document)
    return document


class Store:
    """A folder with one file per finished rung.

    Raises:
        InvalidRequestError: it holds rungs that were measured with other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder, self._rows = folder, folder / "rows"
        self._rows.mkdir(parents=True, exist_ok=True)
        path = folder / "settings.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            other = [name for name, value in settings.items() if found.get(name) != value]
            if other:
                raise InvalidRequestError(
                    f"{folder} holds a ladder with another {other[0]}; take another folder", param="out"
                )
        path.write_text(json.dumps(settings), encoding="utf-8")

    def read(self, plan: Plan) -> dict[str, Any] | None:
        """The row of a rung that was finished with the same switches."""
        path = self._path(plan)
        if not path.exists():
            return None
        row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return row

    def keep(self, plan: Plan, row: dict[str, Any]) -> None:
        """Writes a finished rung; a half-written file is never read."""
        path = self._path(plan)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(row), encoding="utf-8")
        part.replace(path)

    def floors(self, measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """What the machine allows, measured once for all rungs of the folder."""
        path = self._folder / "floors.json"
        if not path.exists():
            path.write_text(json.dumps(measure()), encoding="utf-8")
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def write(self, document: dict[str, Any]) -> None:
        """The whole ladder as JSON and CSV."""
        text = json.dumps(document, ensure_ascii=False, indent=1)
        (self._folder / "ladder.json").write_text(text, encoding="utf-8")
        (self._folder / "ladder.csv").write_text(csv_text(document), encoding="utf-8")

    def _path(self, plan: Plan) -> Path:
        switches = json.dumps(asdict(plan.switches), sort_keys=True)
        return self._rows / f"{plan.key}-{hashlib.sha256(switches.encode()).hexdigest()[:8]}.json"


def floor_percent(row: dict[str, Any], floors: list[dict[str, Any]]) -> float | None:
    """The floor's RTF over the rung's, in percent; the floor is that of the precision of its flow."""
    if row["reason"] is not None:
        return None
    floor = floors[1 if row["half"] else 0]
    return round(100 * float(floor["rtf"]) / float(row["rtf"]), 2)


def csv_text(document: dict[str, Any]) -> str:
    """One line a measurement."""
    file = io.StringIO()
    names = ["rung", "title", "kind", "reason", *FIGURES]
    writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(document["rows"])
    return file.getvalue()


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
    plans: Iterable[Plan],
    runs: int,
    judge: Judge | None,
    store: Store | None,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    plans = list(plans)
    measurer: Measurer | None = None
    rows = []
    for done, plan in enumerate(plans):
        if progress is not None:
            progress(plan.rung.title, done, len(plans))
        row = None if store is None else store.read(plan)
        if row is None:
            if plan.reason is None and measurer is None:
                measurer = Measurer(setup, runs, judge)
            row = _row(plan, setup.device.type, measurer)
            if store is not None and row["reason"] is None:
                store.keep(plan, row)
        rows.append(row)
    return rows


def _row(plan: Plan, device_type: str, measurer: Measurer | None) -> dict[str, Any]:
    rung, switches = plan.rung, plan.switches
    row: dict[str, Any] = {
        "rung": rung.name,
        "title": rung.title,
        "about": rung.about,
        "kind": plan.kind,
        "switches": asdict(switches),
        "half": device_type == "cuda" if switches.engine else switches.half_flow,
        "reason": plan.reason,
    }
    if plan.reason is None:
        assert measurer is not None
        try:
            return row | asdict(measurer.measure(plan))
        except Exception as error:  # whatever a back end raises: the other rungs still count
            row["reason"] = (str(error).strip() or type(error).__name__).splitlines()[0]
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return row | dict.fromkeys(FIGURES)


def _floors(setup: Setup) -> list[dict[str, Any]]:
    """Bounds of ``vivace limits`` for the formats that the rungs use."""
    config, device = setup.assets.model.config, setup.device
    half_type = torch.float16 if device.type == "cuda" else torch.bfloat16
    full, half = measure_ceilings(device, torch.float32), measure_ceilings(device, half_type)
    bandwidth, work = max(full.bandwidth, half.bandwidth), count_work(config)
    prompt_tokens = len(setup.voice.speech_tokens)
    found = []
    for form in formats(full, half)[:2]:
        all_floors = describe(Floors(work, form, bandwidth, full.matrix_rate), config, prompt_tokens)
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
