"""Table and picture of ``vivace bench throughput``."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from vivace.bench.report_charts import line_chart
from vivace.bench.tables import cells, wide_console

_COLUMNS = (
    ("batch", "batch", 1.0, "{:d}"),
    ("latency_ms_mean", "mean ms", 1.0, "{:,.0f}"),
    ("latency_ms_p99", "p99 ms", 1.0, "{:,.0f}"),
    ("queue_ms_mean", "waiting ms", 1.0, "{:,.0f}"),
    ("ttfb_ms_p50", "TTFB ms", 1.0, "{:,.0f}"),
    ("sentences_per_second", "sentences/s", 1.0, "{:.2f}"),
    ("audio_seconds_per_second", "audio s/s", 1.0, "{:.2f}"),
    ("peak_memory_bytes", "MB", 1e-6, "{:,.0f}"),
    ("speedup", "× start", 1.0, "{:.1f}"),
)

WIDTH = 108
"""Characters that the table takes."""


def print_throughput(document: dict[str, Any], console: Console | None = None) -> None:
    """One line a batch size; the start, if it was measured, comes first."""
    what = f"{document['model']}, {document['precision']}, {document['hardware']}"
    title = f"{what}: sentences of {document['audio_seconds']:g} s, {document['mode']}"
    table = Table(title=title)
    for _, heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    if document["start"] is not None:
        table.add_row(*cells(document["start"], _COLUMNS), style="dim", end_section=True)
    for load in document["loads"]:
        table.add_row(*cells(load, _COLUMNS))
    (console or wide_console(WIDTH)).print(table)


def throughput_svg(document: dict[str, Any]) -> str:
    """Sentences per second by batch size."""
    points = [(float(load["batch"]), float(load["sentences_per_second"])) for load in document["loads"]]
    return line_chart("Sentences per second", points, "sentences side by side", "sentences per second")
