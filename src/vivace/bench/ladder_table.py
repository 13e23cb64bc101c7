"""The table of ``vivace bench ladder``."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from vivace.bench.tables import Column, cell, cells, wide_console

COLUMNS = (
    ("ttfb_ms_p50", "TTFB ms", 1.0, "{:,.0f}"),
    ("rtf", "RTF", 1.0, "{:.3f}"),
    ("rtf_gain", "gain", 1.0, "{:.2f}"),
    ("floor_percent", "% floor", 1.0, "{:.0f}"),
    ("tps", "TPS", 1.0, "{:,.0f}"),
    ("lm_ms", "LM ms", 1.0, "{:,.0f}"),
    ("flow_ms", "flow", 1.0, "{:,.0f}"),
    ("vocoder_ms", "vocoder", 1.0, "{:,.0f}"),
    ("peak_memory_bytes", "MB", 1e-6, "{:,.0f}"),
    ("host_us_per_step", "host µs", 1.0, "{:,.0f}"),
    ("lm_kl", "LM KL", 1.0, "{:.0e}"),
    ("mel_snr_db", "mel dB", 1.0, "{:.0f}"),
    ("wer", "WER %", 100.0, "{:.1f}"),
)
"""Field, heading, factor, format; columns without any value are left out."""

WIDTH = 132
"""Characters that the table takes; a narrower terminal breaks its lines."""


def columns_of(document: dict[str, Any]) -> list[Column]:
    """The columns in which at least one row has a value."""
    return [column for column in COLUMNS if any(row.get(column[0]) is not None for row in document["rows"])]


def title_of(row: dict[str, Any]) -> str:
    """The rung's title, and whether its change is alone."""
    return f"{row['title']} (alone)" if row["kind"] == "alone" else str(row["title"])


def print_ladder(document: dict[str, Any], console: Console | None = None) -> None:
    """One line a measurement, the floors last, what is not available below; that alone where nothing was measured."""
    console = console or wide_console(WIDTH)
    seconds = sum(document["tokens"]) / 25
    title = f"{document['model']}, {seconds:.1f} s of audio, {document['hardware']}"
    if any(row["reason"] is None for row in document["rows"]):
        console.print(_table(document, title))
    else:
        console.print(f"{title}: no rung was measured", markup=False, highlight=False)
    for line in _missing(document):
        console.print(f"not available: {line}", markup=False, highlight=False)


def _table(document: dict[str, Any], title: str) -> Table:
    table, columns = Table(title=title), columns_of(document)
    table.add_column("rung", min_width=16)
    for _, heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in document["rows"]:
        if row["reason"] is not None:
            continue
        is_alone = row["kind"] == "alone"
        label = "  · alone" if is_alone else row["title"]
        table.add_row(label, *cells(row, columns), style="dim" if is_alone else None)
    for floor in document["floors"]:
        figures = [cell(floor, {"ttfb_ms_p50": "ttfb_ms"}.get(n, n), f, form) for n, _, f, form in columns]
        table.add_row(f"floor, {floor['format']}", *figures, style="green")
    return table


def _missing(document: dict[str, Any]) -> list[str]:
    """Rungs and reasons; a change alone is named only where its reason is another one than the rung's."""
    lines: list[str] = []
    reasons: dict[str, str] = {}
    for row in document["rows"]:
        if row["reason"] is None or reasons.get(row["rung"]) == row["reason"]:
            continue
        reasons.setdefault(row["rung"], row["reason"])
        lines.append(f"{title_of(row)}: {row['reason'][:160]}")
    return lines
