"""The table of ``vivace bench llm``."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from vivace.bench.tables import cells

_COLUMNS = (
    ("tps", "tokens/s", 1.0, "{:,.0f}"),
    ("us_per_step", "µs a step", 1.0, "{:,.0f}"),
    ("floor_us", "floor µs", 1.0, "{:,.0f}"),
    ("floor_share", "of floor", 100.0, "{:.0f} %"),
    ("host_us_per_step", "host µs", 1.0, "{:,.0f}"),
)


def print_table(document: dict[str, Any], console: Console | None = None) -> None:
    """One line a way and batch size; what is not available says why."""
    title = (
        f"{document['model']}, {document['precision']}, context {document['context']}, {document['hardware']}"
    )
    table = Table(title=title)
    table.add_column("way", no_wrap=True)
    for name in ("batch", *(heading for _, heading, _, _ in _COLUMNS)):
        table.add_column(name, justify="right")
    missing: dict[str, None] = {}
    for row in document["rows"]:
        if row["reason"] is not None:
            missing.setdefault(f"{row['choice']}: {row['reason'][:120]}", None)
            table.add_row(row["choice"], str(row["batch"]), *["–"] * len(_COLUMNS), style="dim")
        else:
            table.add_row(row["choice"], str(row["batch"]), *cells(row, _COLUMNS))
    exact = Table(title="scores against the float32 plain version")
    for name in ("way", "KL mean", "KL largest", "same likeliest token"):
        exact.add_column(name, justify="left" if name == "way" else "right")
    for entry in document["exactness"]:
        exact.add_row(
            entry["choice"],
            f"{entry['kl_mean']:.1e}",
            f"{entry['kl_max']:.1e}",
            f"{100 * entry['argmax_agreement']:.1f} %",
        )
    console = console or Console()
    console.print(table)
    for line in missing:
        console.print(f"not available: {line}", markup=False, highlight=False)
    console.print(exact)
