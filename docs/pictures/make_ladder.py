"""Draws the pictures of the ladder, the floors, the throughput and the profile from rows of ``benchmarks/results``.

python docs/pictures/make_ladder.py benchmarks/results

For each kind of hardware the last row of each file counts: ``ladder-cpu.svg``, ``ladder-h200.svg``, ``limits-…``,
``throughput-…``, ``profile-…``. A file that is missing, or has no row of that hardware and model, gives no picture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vivace.bench.ladder_charts import figure_charts, stage_chart
from vivace.bench.report_charts import Stack, picture, stack_chart
from vivace.bench.throughput_table import throughput_svg
from vivace.bench.timeline import COLOURS, LANES

Row = dict[str, Any]

GAP_COLOUR, FLOOR_COLOUR = "#c9ced6", "#3f8f5f"
FIGURES = {
    "tps": ("speech LM, tokens per second", "{:,.0f}"),
    "flow_ms_per_second": ("flow, ms per second of audio", "{:,.3g}"),
    "vocoder_ms_per_second": ("vocoder, ms per second of audio", "{:,.3g}"),
    "ttfb_ms": ("first audio, ms", "{:,.3g}"),
    "rtf": ("real-time factor", "{:.3g}"),
}


def place_of(row: Row) -> str:
    """A short name of the hardware: "cpu", or the last word of a GPU's name."""
    return "cpu" if "cores" in row["hardware"] else str(row["hardware"]).split()[-1].lower()


def last_rows(path: Path) -> dict[tuple[str, str], Row]:
    """The last row of each place and model."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return {(place_of(row), row["model"]): row for row in rows}


def foot_of(row: Row) -> str:
    """What was measured, where, and at which commit."""
    return f"{row['model']}, {row['hardware']}, {row['date']}, commit {row['commit']}"


def ladder(row: Row) -> str:
    """First audio, real-time factor, host time and stages of every rung."""
    seconds = sum(row["tokens"]) / 25
    charts = [*figure_charts(row, ("ttfb_ms_p50", "rtf", "host_us_per_step")), stage_chart(row)]
    return picture(charts, f"{seconds:.1f} s of audio; thin: alone; green: floor; {foot_of(row)}")


def limits(row: Row) -> str | None:
    """The engine in percent of its floors."""
    measured = row["measured"]
    if measured is None:
        return None
    stacks = []
    for name, (label, form) in FIGURES.items():
        entry = measured["figures"][name]
        said = f"{form.format(entry['measured'])}, floor {form.format(entry['floor'])}"
        stacks.append(Stack(label, ((entry["percent_of_floor"], FLOOR_COLOUR),), said))
    stacks.append(Stack("floor", ((100.0, GAP_COLOUR),), "100 %"))
    return picture([stack_chart(f"In percent of the {measured['format']} floor", stacks)], foot_of(row))


def throughput(row: Row) -> str:
    """Sentences per second by how many are spoken side by side."""
    return picture([throughput_svg(row)], f"sentences of {row['audio_seconds']:g} s; {foot_of(row)}")


def profile(row: Row) -> str:
    """Where one request's time goes."""
    labels = dict(LANES)
    parts = [(label, row["stages_ms"][lane], COLOURS[lane]) for lane, label in labels.items()]
    parts.append(("no stage runs", row["gap_ms"], GAP_COLOUR))
    stacks = [Stack(label, ((value, colour),), f"{value:,.1f} ms") for label, value, colour in parts]
    title = f"One request of {row['audio_seconds']:g} s: {row['wall_ms']:,.0f} ms in all, stages may overlap"
    return picture([stack_chart(title, stacks)], foot_of(row))


DRAWINGS: dict[str, Callable[[Row], str | None]] = {
    "ladder": ladder,
    "limits": limits,
    "throughput": throughput,
    "profile": profile,
}


def draw(results: Path, out: Path) -> list[Path]:
    """Writes every picture that there are rows for. Without a row of the ladder, hardware has no pictures."""
    made = []
    ladders = last_rows(results / "ladder.jsonl")
    for key in ladders:
        for name, drawing in DRAWINGS.items():
            row = last_rows(results / f"{name}.jsonl").get(key)
            text = None if row is None else drawing(row)
            if text is not None:
                path = out / f"{name}-{key[0]}.svg"
                path.write_text(text, encoding="utf-8")
                made.append(path)
    return made


if __name__ == "__main__":
    for written in draw(Path(sys.argv[1]), Path(__file__).parent):
        sys.stdout.write(f"{written}\n")
