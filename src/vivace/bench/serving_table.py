"""Table and picture of ``vivace bench serving``."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from vivace.bench.report_charts import line_chart
from vivace.errors import InvalidRequestError

_COLUMNS = (
    ("ttfb_ms_p50", "TTFB p50", 1.0, "{:,.0f}"),
    ("ttfb_ms_p90", "p90", 1.0, "{:,.0f}"),
    ("ttfb_ms_p99", "p99 ms", 1.0, "{:,.0f}"),
    ("requests", "requests", 1.0, "{:d}"),
    ("refused", "refused", 1.0, "{:d}"),
    ("playing_mean", "playing", 1.0, "{:.1f}"),
    ("underruns", "underruns", 1.0, "{:d}"),
    ("underrun_ms_max", "longest", 1.0, "{:,.0f}"),
    ("audio_seconds_per_second", "audio s/s", 1.0, "{:.1f}"),
    ("engine_busy_percent", "busy %", 1.0, "{:.0f}"),
    ("gpu_busy_percent", "GPU %", 1.0, "{:.0f}"),
    ("steps_per_second", "steps/s", 1.0, "{:.1f}"),
    ("lm_rows_mean", "rows", 1.0, "{:.1f}"),
    ("flow_chunks_mean", "chunks", 1.0, "{:.1f}"),
    ("peak_memory_bytes", "MB", 1e-6, "{:,.0f}"),
)

WIDTH = 150
"""Characters that the table takes."""


def parse_numbers(text: str, param: str, *, is_whole: bool = False) -> tuple[float, ...]:
    """Numbers separated by commas; none if the text is empty. Raises InvalidRequestError."""
    try:
        numbers = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = (math.nan,)
    if not all(math.isfinite(number) and (not is_whole or number.is_integer()) for number in numbers):
        raise InvalidRequestError(f"{param} must be numbers separated by commas, not {text!r}", param=param)
    return numbers


def name_of(point: dict[str, Any]) -> str:
    """What was measured, in words."""
    if "streams" in point:
        return f"{point['streams']} listeners"
    if "rate" in point:
        return f"{point['rate']:g} requests/s"
    return f"{point['offline']} offline"


def line_of(point: dict[str, Any]) -> str:
    """One point, for those who wait."""
    ttfb = f"TTFB p50 {point['ttfb_ms_p50']} ms, p99 {point['ttfb_ms_p99']} ms"
    heard = f"{point['underruns']} underruns, {point['audio_seconds_per_second']} audio s/s"
    return f"{name_of(point)}: {point['requests']} requests, {ttfb}, {heard}"


def print_serving(document: dict[str, Any], console: Console | None = None) -> None:
    """One line a point."""
    what = f"{document['model']}, {document['precision']}, {document['hardware']}"
    table = Table(title=f"{what}: utterances of {document['audio_seconds']:g} s")
    table.add_column("load", justify="right")
    for _, heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for point in document["points"]:
        cells = [name_of(point)]
        for name, _, factor, form in _COLUMNS:
            value = point[name]
            cells.append("–" if value is None else form.format(value if factor == 1.0 else value * factor))
        table.add_row(*cells)
    console = console or Console(width=max(WIDTH, Console().width))
    console.print(table)


def serving_svg(document: dict[str, Any]) -> str:
    """First audio by the number of listeners."""
    points = [
        (float(point["streams"]), float(point["ttfb_ms_p99"] or 0.0))
        for point in document["points"]
        if "streams" in point
    ]
    return line_chart("First audio, 99th percentile", points, "listeners", "ms")
