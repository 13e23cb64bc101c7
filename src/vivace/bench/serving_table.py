"""Table and picture of ``vivace bench serving``."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from vivace.bench.serving import TTFB_LIMIT_MS
from vivace.bench.tables import cells, wide_console
from vivace.errors import InvalidRequestError

_COLUMNS = (
    ("ttfb_ms_p50", "p50 ms", 1.0, "{:,.0f}"),
    ("ttfb_ms_p90", "p90 ms", 1.0, "{:,.0f}"),
    ("ttfb_ms_p99", "p99 ms", 1.0, "{:,.0f}"),
    ("requests", "asked", 1.0, "{:d}"),
    ("refused", "refused", 1.0, "{:d}"),
    ("playing_mean", "play", 1.0, "{:.1f}"),
    ("underruns", "dry", 1.0, "{:d}"),
    ("underrun_ms_max", "dry ms", 1.0, "{:,.0f}"),
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
        return "1 listener" if point["streams"] == 1 else f"{point['streams']} listeners"
    return f"{point['rate']:g} a second" if "rate" in point else f"{point['offline']} offline"


def line_of(point: dict[str, Any]) -> str:
    """One point, for those who wait."""
    ttfb = f"TTFB p50 {point['ttfb_ms_p50']} ms, p99 {point['ttfb_ms_p99']} ms"
    heard = "" if point["underruns"] is None else f", {point['underruns']} underruns"
    pace = f"{point['audio_seconds_per_second']} audio s/s"
    return f"{name_of(point)}: {point['requests']} requests, {ttfb}{heard}, {pace}"


def print_serving(document: dict[str, Any], console: Console | None = None) -> None:
    """One line a point."""
    what = f"{document['model']}, {document['precision']}, {document['hardware']}"
    table = Table(title=f"{what}: utterances of {document['audio_seconds']:g} s")
    table.add_column("load", justify="right", no_wrap=True)
    for _, heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for point in document["points"]:
        table.add_row(name_of(point), *cells(point, _COLUMNS))
    console = console or wide_console(WIDTH)
    console.print(table)
    most = document["most_streams_in_real_time"]
    console.print(
        f"most listeners without an underrun and with first audio (p99) below {TTFB_LIMIT_MS:g} ms: {most or 'none'}"
    )
