"""Draws every picture that rows of results allow, in one command:

    python -m benchmarks.pictures benchmarks/results [--published DIR] [--out docs/pictures]

For each kind of hardware the last row of each file counts: ``ladder-cpu.svg``, ``ladder-h200.svg``, ``limits-…``,
``throughput-…``, ``profile-…``; and ``serving-…``, ``serving-rates-…`` with others' published figures beside. Where a
kind of hardware has rows of several models, the ladder's model is drawn. ``--published`` is a folder of
``benchmarks.publish``, whose timeline becomes ``timeline-…``. What there are no rows for gives no picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vivace.bench.ladder_charts import figure_charts, stage_chart
from vivace.bench.report_charts import Stack, picture, stack_chart
from vivace.bench.serving import most_in_real_time
from vivace.bench.serving_chart import serving_svg
from vivace.bench.serving_published import PUBLISHED
from vivace.bench.throughput_table import throughput_svg
from vivace.bench.timeline import COLOURS, LANES

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
Row = dict[str, Any]

GAP_COLOUR, FLOOR_COLOUR = "#c9ced6", "#3f8f5f"
FIGURES = {
    "tps": ("speech LM, tokens per second", "{:,.0f}"),
    "flow_ms_per_second": ("flow, ms per second of audio", "{:,.3g}"),
    "vocoder_ms_per_second": ("vocoder, ms per second of audio", "{:,.3g}"),
    "ttfb_ms": ("first audio, ms", "{:,.3g}"),
    "rtf": ("real-time factor", "{:.3g}"),
    "audio_seconds_per_second": ("side by side, s of audio a second", "{:,.0f}"),
    "memory_per_stream_bytes": ("memory of a stream, MB", "{:,.0f}"),
}
MEGA = {"memory_per_stream_bytes"}
"""Figures drawn in millions."""


SAME = ("hardware", "torch", "model", "precision", "audio_seconds", "loop", "max_streams", "voices")
"""What rows of one sweep have in common."""
LOADS = ("streams", "rate", "offline")


def place_of(row: Row) -> str:
    """A short name of the hardware: "cpu", or the last word of a GPU's name."""
    return "cpu" if "cores" in row["hardware"] else str(row["hardware"]).split()[-1].lower()


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; none if it is missing."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.strip()]


def drawn_model(results: Path, place: str) -> str | None:
    """The model whose figures are drawn for a place: the ladder's, else that of full size, else the last measured."""
    for name in ("ladder", *DRAWINGS):
        models = [row["model"] for row in read_rows(results / f"{name}.jsonl") if place_of(row) == place]
        if models:
            return "full" if "full" in models and name != "ladder" else str(models[-1])
    return None


def last_row(path: Path, place: str, model: str) -> Row | None:
    """The last row of a place and model; on a GPU in halves, if there is one."""
    rows = [row for row in read_rows(path) if (place_of(row), row["model"]) == (place, model)]
    halves = [row for row in rows if place != "cpu" and row.get("precision") != "float32"]
    return next(reversed(halves or rows), None)


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
        entry = measured["figures"].get(name)
        if entry is None or entry["percent_of_floor"] is None:
            continue
        unit = 1e6 if name in MEGA else 1.0
        said = f"{form.format(entry['measured'] / unit)}, floor {form.format(entry['floor'] / unit)}"
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


def sweep(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last row of the default mode with the points of all rows that belong to it, by load.

    A sweep may stand in several rows: every row of the same hardware, model and settings belongs to it. A load that
    was measured twice counts as it was measured last; ``commit`` names those of all loads, the oldest first.

    Raises:
        ValueError: no row has listeners who play what they hear, in the default mode.
    """
    found = [row for row in rows if row["loop"] == "playback" and not row["deterministic"]]
    drawn = [row for row in found if any("streams" in point for point in row["points"])]
    if not drawn:
        raise ValueError("no row has listeners who ask again behind playback")
    last = drawn[-1]
    points = {
        _load(point): (point, number)
        for number, row in enumerate(found)
        if all(row[name] == last[name] for name in SAME)
        for point in row["points"]
    }
    merged = [points[load][0] for load in sorted(points)]
    numbers = sorted({number for _, number in points.values()})
    commits = ", ".join(dict.fromkeys(found[number]["commit"] for number in numbers))
    return last | {
        "commit": commits,
        "points": merged,
        "most_streams_in_real_time": most_in_real_time(merged),
    }


def _load(point: dict[str, Any]) -> tuple[int, float]:
    """Listeners before rates before requests at once; each by how many."""
    kind = next(index for index, name in enumerate(LOADS) if name in point)
    return kind, point[LOADS[kind]]


def serving(rows: Sequence[Row]) -> dict[str, str]:
    """Pictures of listeners and of requests at random times, by name; those that there are points for."""
    try:
        document = sweep(rows)
    except ValueError:
        return {}
    found = {"serving": serving_svg(document, PUBLISHED)}
    rates = [point for point in document["points"] if "rate" in point]
    if rates:
        found["serving-rates"] = serving_svg(document | {"points": rates}, PUBLISHED)
    return found


DRAWINGS: dict[str, Callable[[Row], str | None]] = {
    "ladder": ladder,
    "limits": limits,
    "throughput": throughput,
    "profile": profile,
}


def draw(results: Path) -> dict[str, str]:
    """Every picture that there are rows for, by file name."""
    made: dict[str, str] = {}
    files = (*DRAWINGS, "serving")
    places = dict.fromkeys(place_of(row) for name in files for row in read_rows(results / f"{name}.jsonl"))
    for place in places:
        model = drawn_model(results, place)
        for name, drawing in DRAWINGS.items():
            row = None if model is None else last_row(results / f"{name}.jsonl", place, model)
            text = None if row is None else drawing(row)
            if text is not None:
                made[f"{name}-{place}.svg"] = text
        listeners = [row for row in read_rows(results / "serving.jsonl") if place_of(row) == place]
        made |= {f"{name}-{place}.svg": text for name, text in serving(listeners).items()}
    return made


def timeline(published: Path) -> dict[str, str]:
    """The picture of one utterance's stages that a run of ``benchmarks.publish`` has left, by file name."""
    row, path = published / "single.json", published / "timeline.svg"
    if not row.exists() or not path.exists():
        return {}
    place = place_of(json.loads(row.read_text(encoding="utf-8")))
    return {f"timeline-{place}.svg": path.read_text(encoding="utf-8")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the pictures and prints their paths."""
    parser = argparse.ArgumentParser(description="Draws all pictures of results.")
    parser.add_argument("results", type=Path, help="folder of rows, such as benchmarks/results")
    parser.add_argument("--published", type=Path, help="folder of benchmarks.publish")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder of the pictures")
    options = parser.parse_args(arguments)
    made = draw(options.results)
    if options.published is not None:
        made |= timeline(options.published)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (options.out / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{options.out / name}\n")


if __name__ == "__main__":
    main()
