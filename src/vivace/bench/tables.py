"""Figures of result rows as cells of a table on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console

Column = tuple[str, str, float, str]
"""Member of a row, heading, factor, format."""


def cell(row: Mapping[str, Any], name: str, factor: float, form: str) -> str:
    """A figure as text; a dash where there is none."""
    value = row.get(name)
    if value is None:
        return "–"
    return "0" if value == 0 else form.format(value if factor == 1.0 else value * factor)


def cells(row: Mapping[str, Any], columns: Iterable[Column]) -> list[str]:
    """A row's figures."""
    return [cell(row, name, factor, form) for name, _, factor, form in columns]


def wide_console(width: int) -> Console:
    """Standard output, taken to be at least ``width`` characters wide; a narrower terminal breaks the lines."""
    return Console(width=max(width, Console().width))
