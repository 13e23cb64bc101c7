"""Charts as SVG text, for reports and pictures that need nothing but a browser."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT = 900, 250, 110
TOP, ROW = 40, 27
THIN_ROW = 11
"""What a row takes more where a thin bar lies below its bar."""

FLOOR_COLOUR = "#2bb673"
INK, PAPER = "#1f2328", "#ffffff"
"""Of pictures that stand alone."""

_Place = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Step:
    """One row of ``step_chart``.

    Attributes:
        value, text: its bar, and what stands behind it; None: not measured, and ``text`` says so.
        floor: what cannot be beaten; a mark on the row.
        alone, alone_text: a thin bar below.
    """

    label: str
    value: float | None
    text: str
    floor: float | None = None
    alone: float | None = None
    alone_text: str = ""


@dataclass(frozen=True, slots=True)
class Stack:
    """One bar of several parts, value and colour each from left to right."""

    label: str
    parts: tuple[tuple[float, str], ...]
    text: str

    @property
    def total(self) -> float:
        return sum(value for value, _ in self.parts)


def step_chart(title: str, steps: Sequence[Step], colour: str) -> str:
    """Horizontal bars on a logarithmic axis, one row a step, a thin bar for the step alone, a mark for its floor."""
    row = ROW + (THIN_ROW if any(step.alone is not None for step in steps) else 0)
    height = TOP + row * len(steps) + 34
    values = [
        value
        for step in steps
        for value in (step.value, step.floor, step.alone)
        if value is not None and value > 0
    ]
    low, high = (min(values) / 1.6, max(values)) if values else (1.0, 10.0)
    span = WIDTH - LEFT - RIGHT

    def place(value: float) -> float:
        return span * math.log(max(value, low) / low) / math.log(high / low) if high > low else 0.0

    lines = _head(title, height)
    for tick in _ticks(low, high):
        x = LEFT + place(tick)
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 28}" stroke="currentColor"'
            f' opacity="0.15"/><text x="{x:.1f}" y="{height - 12}" text-anchor="middle" fill="currentColor"'
            f' opacity="0.6" font-size="11">{tick:,g}</text>'
        )
    for index, step in enumerate(steps):
        lines += _step_lines(step, TOP + index * row, place, colour)
    return "\n".join([*lines, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1.0,) if high / low > 300 else (1.0, 2.0, 5.0)
    ticks = (factor * 10.0**power for power in decades for factor in factors)
    return [tick for tick in ticks if low <= tick <= high]


def _step_lines(step: Step, y: int, place: _Place, colour: str) -> list[str]:
    lines = [_label(step.label, y)]
    if step.value is None:
        lines.append(_text(LEFT + 6, y, step.text, 'opacity="0.6" font-size="11"'))
    else:
        end = LEFT + max(1.0, place(step.value))
        lines += [_rect(LEFT, y + 3, end - LEFT, ROW - 10, colour, f"{step.label}: {step.text}")]
        lines.append(_text(end + 6, y, step.text))
    if step.alone is not None:
        end = LEFT + max(1.0, place(step.alone))
        says = f"{step.label}, alone: {step.alone_text}"
        lines.append(f'<g opacity="0.5">{_rect(LEFT, y + ROW - 6, end - LEFT, 6, colour, says)}</g>')
        lines.append(_text(end + 6, y + ROW - 13, step.alone_text, 'opacity="0.6" font-size="10"'))
    if step.floor is not None and step.value is not None:
        x = LEFT + place(step.floor)
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + ROW - 4}" stroke="{FLOOR_COLOUR}"'
            f' stroke-width="3"><title>floor: {step.floor:,.4g}</title></line>'
        )
    return lines


def stack_chart(title: str, stacks: Sequence[Stack], key: Sequence[tuple[str, str]] = ()) -> str:
    """Horizontal bars of parts, one a row, lengths from zero.

    Args:
        key: what the colours mean: words and colour.
    """
    height = TOP + ROW * len(stacks) + 8
    most = max((stack.total for stack in stacks), default=1.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / most
    lines = _head(title, height)
    for index, (words, colour) in enumerate(reversed(key)):
        x = WIDTH - 100.0 * (index + 1)
        lines += [_rect(x, 9, 12, 12, colour, words), _text(x + 18, 4, words)]
    for index, stack in enumerate(stacks):
        x, y = float(LEFT), TOP + index * ROW
        lines.append(_label(stack.label, y))
        for value, colour in stack.parts:
            if value > 0:
                lines.append(_rect(x, y + 3, value * scale, ROW - 10, colour, f"{stack.label}: {value:,.4g}"))
                x += value * scale
        lines.append(_text(x + 6, y, stack.text))
    return "\n".join([*lines, "</svg>"])


def _label(text: str, y: float) -> str:
    return (
        f'<text x="{LEFT - 8}" y="{y + 16:.1f}" text-anchor="end" fill="currentColor">{escape(text)}</text>'
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y + 16:.1f}" fill="currentColor" {more}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str, says: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="2" fill="{colour}">'
        f"<title>{escape(says)}</title></rect>"
    )


def line_chart(title: str, points: Sequence[tuple[float, float]], x_label: str, y_label: str) -> str:
    """Points joined by a line, both axes from zero; a label at each point."""
    height = 280
    most_x = max((x for x, _ in points), default=1.0) or 1.0
    most_y = max((y for _, y in points), default=1.0) or 1.0
    span_x, span_y = WIDTH - 160, height - 115

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


def picture(charts: Sequence[str], foot: str = "") -> str:
    """Charts of this module below one another on white, as one file; ``foot`` is a line of text below them."""
    heights = [int(found[1]) for chart in charts if (found := re.search(r'viewBox="0 0 \d+ (\d+)"', chart))]
    gap, margin = 24, 20
    height = sum(heights) + gap * (len(heights) - 1) + 2 * margin + (26 if foot else 0)
    width, y = WIDTH + 2 * margin, margin
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' color="{INK}" font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
    ]
    for chart, own in zip(charts, heights, strict=True):
        size = f'x="{margin}" y="{y}" width="{WIDTH}" height="{own}" viewBox='
        lines.append(chart.replace("viewBox=", size, 1))
        y += own + gap
    if foot:
        lines.append(f'<text x="{margin}" y="{height - 16}" fill="{INK}" opacity="0.7">{escape(foot)}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _head(title: str, height: int) -> list[str]:
    """A picture's first lines."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<text x="0" y="20" font-size="15" font-weight="600" fill="currentColor">{escape(title)}</text>',
    ]
