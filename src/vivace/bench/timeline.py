"""A picture of when each stage of a request ran, as a self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
LEFT, WIDTH, LANE_HEIGHT, TOP = 86, 860, 30, 46


def timeline_svg(spans: Sequence[Span], chunk_ready_ms: Sequence[float], title: str) -> str:
    """The lanes of all stages over one time axis; a mark where each chunk of audio was ready.

    Args:
        spans: milliseconds since the request was received.
        chunk_ready_ms: when each chunk was handed over, in the same time.
    """
    end = max([span.end_ms for span in spans] + list(chunk_ready_ms) + [1e-3])
    scale = (WIDTH - LEFT - 20) / end
    height = TOP + LANE_HEIGHT * len(LANES) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14" fill="#222222">{_escaped(title)}</text>',
    ]
    parts += _axis(end, scale, height)
    for row, (lane, label) in enumerate(LANES):
        y = TOP + row * LANE_HEIGHT
        parts.append(f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end" fill="#222222">{label}</text>')
        for span in spans:
            if span.lane == lane:
                x, width = LEFT + span.start_ms * scale, max(0.6, (span.end_ms - span.start_ms) * scale)
                when = f"{label}: {span.start_ms:.2f} to {span.end_ms:.2f} ms"
                parts.append(
                    f'<rect x="{x:.2f}" y="{y + 4}" width="{width:.2f}" height="{LANE_HEIGHT - 10}"'
                    f' fill="{COLOURS[lane]}"><title>{when}</title></rect>'
                )
    for index, ready in enumerate(chunk_ready_ms):
        x = LEFT + ready * scale
        parts.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 8}" y2="{height - 36}" stroke="#222222"'
            f' stroke-dasharray="2 3"><title>chunk {index} ready at {ready:.2f} ms</title></line>'
        )
    return "\n".join([*parts, "</svg>", ""])


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
