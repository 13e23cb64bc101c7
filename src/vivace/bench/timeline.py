"""A picture of when each stage of a request ran, as a self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vivace.engine.trace import Span

LANES = (
    ("text", "text"),
    ("prompt", "prompt"),
    ("lm", "speech LM"),
    ("flow", "flow"),
    ("vocoder", "vocoder"),
)
COLOURS = {"text": "#7a869a", "prompt": "#b08d3c", "lm": "#3b6fb6", "flow": "#c2573a", "vocoder": "#3f8f5f"}
GAPS_LABEL, GAPS_COLOUR = "host gaps", "#9aa2ad"
LEFT, WIDTH, LANE_HEIGHT, TOP = 86, 860, 30, 46

GAP_MS = 0.05
"""Shorter pauses are not counted as gaps."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch in which no stage ran, and what came before and after it."""

    start_ms: float
    length_ms: float
    after: str
    before: str


def merged(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Stretches in which some stage ran, in order, without overlaps."""
    stretches: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start_ms):
        if stretches and span.start_ms <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(stretches[-1][1], span.end_ms))
        else:
            stretches.append((span.start_ms, span.end_ms))
    return stretches


def find_gaps(spans: Sequence[Span]) -> list[Gap]:
    """Pauses between the first and the last work: what the host did while no stage ran."""
    stretches = merged(spans)
    gaps = []
    for (_, end), (start, _) in pairwise(stretches):
        if start - end >= GAP_MS:
            after = next(span.lane for span in spans if span.end_ms == end)
            before = next(span.lane for span in spans if span.start_ms == start)
            gaps.append(Gap(round(end, 4), round(start - end, 4), after, before))
    return gaps


def timeline_svg(spans: Sequence[Span], chunk_ready_ms: Sequence[float], title: str) -> str:
    """The lanes of all stages and of the gaps between them over one time axis; a mark where each chunk was ready.

    Args:
        spans: milliseconds since the request was received.
        chunk_ready_ms: when each chunk was handed over, in the same time.
    """
    end = max([span.end_ms for span in spans] + list(chunk_ready_ms) + [1e-3])
    scale = (WIDTH - LEFT - 20) / end
    height = TOP + LANE_HEIGHT * (len(LANES) + 1) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14" fill="#222222">{_escaped(title)}</text>',
    ]
    parts += _axis(end, scale, height)
    for row, (lane, label) in enumerate(LANES):
        parts.append(_label(row, label))
        for span in spans:
            if span.lane == lane:
                parts.append(_bar(row, label, COLOURS[lane], span.start_ms, span.end_ms, scale))
    parts.append(_label(len(LANES), GAPS_LABEL))
    for gap in find_gaps(spans):
        says = f"no stage, {gap.after} to {gap.before}"
        parts.append(_bar(len(LANES), says, GAPS_COLOUR, gap.start_ms, gap.start_ms + gap.length_ms, scale))
    for index, ready in enumerate(chunk_ready_ms):
        x = LEFT + ready * scale
        parts.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 8}" y2="{height - 36}" stroke="#222222"'
            f' stroke-dasharray="2 3"><title>chunk {index} ready at {ready:.2f} ms</title></line>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _label(row: int, text: str) -> str:
    y = TOP + row * LANE_HEIGHT + 17
    return f'<text x="{LEFT - 8}" y="{y}" text-anchor="end" fill="#222222">{text}</text>'


def _bar(row: int, says: str, colour: str, start_ms: float, end_ms: float, scale: float) -> str:
    x, width = LEFT + start_ms * scale, max(0.6, (end_ms - start_ms) * scale)
    return (
        f'<rect x="{x:.2f}" y="{TOP + row * LANE_HEIGHT + 4}" width="{width:.2f}" height="{LANE_HEIGHT - 10}"'
        f' fill="{colour}"><title>{says}: {start_ms:.2f} to {end_ms:.2f} ms</title></rect>'
    )


def _axis(end: float, scale: float, height: int) -> list[str]:
    step = 10 ** math.floor(math.log10(end / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if end / (step * factor) <= 10)
    parts = []
    for tick in range(int(end / step) + 1):
        x = LEFT + tick * step * scale
        parts.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{TOP}" y2="{height - 36}" stroke="#e4e4e4"/>'
            f'<text x="{x:.2f}" y="{height - 20}" text-anchor="middle" fill="#555555">{tick * step:g} ms</text>'
        )
    return parts


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
