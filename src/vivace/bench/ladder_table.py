"""The table of ``vivace bench ladder``, and its progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from vivace.bench.tables import Column, cell, cells, wide_console

if TYPE_CHECKING:
    from vivace.bench.ladder import Progress

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
    """One line a measurement, what is not available below, the floors last."""
    console = console or wide_console(WIDTH)
    seconds = sum(document["tokens"]) / 25
    table = Table(title=f"{document['model']}, {seconds:.1f} s of audio, {document['hardware']}")
    columns = columns_of(document)
    table.add_column("rung", min_width=16)
    for _, heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    missing: dict[str, None] = {}
    for row in document["rows"]:
        if row["reason"] is not None:
            missing.setdefault(f"{title_of(row)}: {row['reason'][:160]}", None)
            continue
        is_alone = row["kind"] == "alone"
        label = "  · alone" if is_alone else row["title"]
        table.add_row(label, *cells(row, columns), style="dim" if is_alone else None)
    for floor in document["floors"]:
        figures = [cell(floor, {"ttfb_ms_p50": "ttfb_ms"}.get(n, n), f, form) for n, _, f, form in columns]
        table.add_row(f"floor, {floor['format']}", *figures, style="green")
    console.print(table)
    for line in missing:
        console.print(f"not available: {line}", markup=False, highlight=False)


@contextmanager
def ladder_progress(console: Console | None = None) -> Iterator[Progress]:
    """A bar on standard error; silent where that is no terminal."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def show(title: str, done: int, total: int) -> None:
            bar.update(task, description=title, completed=done, total=total)

        yield show
