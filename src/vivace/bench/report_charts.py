"""Bar charts as SVG text, for reports that need nothing but a browser."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, ROW = 900, 270, 90, 26
TOP = 40


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of one or several parts.

    Attributes:
        parts: value and colour of each, left to right. text: what stands behind it. faint: a lesser bar.
    """

    label: str
    parts: tuple[tuple[float, str], ...]
    text: str
    faint: bool = False

    @property
    def total(self) -> float:
        return sum(value for value, _ in self.parts)


def bar_chart(title: str, bars: Sequence[Bar], *, is_log: bool = False, floor: float | None = None) -> str:
    """Horizontal bars, one a line.

    Args:
        is_log: lengths by logarithm, from half the smallest value on; only for bars of one part.
        floor: where a dashed line stands: what cannot be beaten.
    """
    height = TOP + ROW * len(bars) + 14
    values = [bar.total for bar in bars if bar.total > 0] + ([floor] if floor else [])
    low, high = (min(values) / 2, max(values)) if values else (1.0, 1.0)
    span = WIDTH - LEFT - RIGHT

    def place(value: float) -> float:
        if value <= 0:
            return 0.0
        if is_log and high > low:
            return span * math.log(value / low) / math.log(high / low)
        return span * value / high

    lines = _head(title, height)
    for index, bar in enumerate(bars):
        lines += _bar_lines(bar, TOP + index * ROW, place)
    if floor:
        x = LEFT + place(floor)
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 8}" stroke="#3f8f5f"'
            f' stroke-width="2" stroke-dasharray="4 3"><title>floor: {floor:.4g}</title></line>'
        )
    return "\n".join([*lines, "</svg>"])


def _bar_lines(bar: Bar, y: int, place: Callable[[float], float]) -> list[str]:
    shade = ' opacity="0.55"' if bar.faint else ""
    lines = [
        f'<g{shade}><text x="{LEFT - 8}" y="{y + 16}" text-anchor="end" fill="currentColor">{escape(bar.label)}</text>'
    ]
    x = float(LEFT)
    for value, colour in bar.parts:
        width = max(1.0, place(value)) if value > 0 else 0.0
        lines.append(
            f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{ROW - 9}" rx="2" fill="{colour}">'
            f"<title>{escape(bar.label)}: {value:,.4g}</title></rect>"
        )
        x += width
    lines.append(f'<text x="{x + 6:.1f}" y="{y + 16}" fill="currentColor">{escape(bar.text)}</text></g>')
    return lines


def line_chart(title: str, points: Sequence[tuple[float, float]], x_label: str, y_label: str) -> str:
    """Points joined by a line, both axes from zero; a label at each point."""
    height = 280
    most_x = max((x for x, _ in points), default=1.0) or 1.0
    most_y = max((y for _, y in points), default=1.0) or 1.0
    span_x, span_y = WIDTH - 160, height - 90

    def at(x: float, y: float) -> tuple[float, float]:
        return 80 + span_x * x / most_x, height - 40 - span_y * y / most_y

    places = [at(x, y) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    lines = [
        *_head(title, height),
        f'<line x1="80" x2="{WIDTH - 60}" y1="{height - 40}" y2="{height - 40}" stroke="currentColor"/>',
        f'<text x="{WIDTH - 60}" y="{height - 6}" text-anchor="end" fill="currentColor">{escape(x_label)}</text>',
        f'<text x="80" y="40" fill="currentColor">{escape(y_label)}</text>',
        f'<polyline points="{path}" fill="none" stroke="#3b6fb6" stroke-width="2"/>',
    ]
    for (px, py), (x, y) in zip(places, points, strict=True):
        lines.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="#3b6fb6"/>')
        lines.append(
            f'<text x="{px:.1f}" y="{py - 9:.1f}" text-anchor="middle" fill="currentColor">{y:,.4g}</text>'
        )
        lines.append(
            f'<text x="{px:.1f}" y="{height - 22}" text-anchor="middle" fill="currentColor">{x:g}</text>'
        )
    return "\n".join([*lines, "</svg>"])


def _head(title: str, height: int) -> list[str]:
    """A picture's first lines."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<text x="0" y="20" font-size="15" font-weight="600" fill="currentColor">{escape(title)}</text>',
    ]
