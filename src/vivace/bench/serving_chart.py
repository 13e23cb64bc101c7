"""Picture of ``vivace bench serving``: first audio, broken streams and audio seconds per second over the load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from vivace.bench.serving_published import Published, PublishedPoint

WIDTH, LEFT, RIGHT = 900, 80, 190
HEIGHT, GAP, TOP, FOOT = 190, 52, 66, 70
P50, P90, P99, RATE, BROKEN = "#3b6fb6", "#b08d3c", "#c2573a", "#3f8f5f", "#c2573a"
MARKS = ("circle", "square", "diamond")
MARK_COLOUR = "#7a869a"

_Pairs = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """One measured figure over the load."""

    label: str
    colour: str
    points: _Pairs


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram. ``marks`` are others' points, in the order of the systems."""

    title: str
    lines: tuple[Line, ...]
    marks: tuple[_Pairs, ...]
    is_log: bool = False


class Axis:
    """Places values on a stretch of pixels.

    Args:
        start, length: where the least value stands, and how far the largest is from it.
    """

    def __init__(self, values: Iterable[float], start: float, length: float, *, is_log: bool) -> None:
        found = [value for value in values if value > 0 or not is_log]
        self._log = is_log
        self._start, self._length = start, length
        high = max(found, default=1.0) or 1.0
        low = min(found, default=1.0) if is_log else 0.0
        if is_log:
            low, high = low / 1.25, high * 1.25
        self.low, self.high = low, high

    def at(self, value: float) -> float:
        """Pixels. Below the axis' least value: its start."""
        if self._log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = value / self.high
        return self._start + self._length * share

    def ticks(self) -> list[float]:
        """Round values, about five."""
        if not self._log:
            step = 10 ** math.floor(math.log10(self.high))
            step = next(step * part for part in (0.2, 0.25, 0.5, 1.0, 2.0) if self.high / (step * part) <= 5)
            return [step * index for index in range(int(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        factors = (1, 2, 5) if self.high / self.low < 500 else (1,)
        rounds = [factor * 10.0**decade for decade in decades for factor in factors]
        return [value for value in rounds if self.low <= value <= self.high]


def serving_svg(document: dict[str, Any], peers: Sequence[Published] = ()) -> str:
    """Self-contained SVG.

    Args:
        document: of ``serving.run``; its closed loops are drawn, or its rates where it has no closed loop.
        peers: others' figures, drawn as hollow marks and named as theirs.
    """
    is_closed = any("streams" in point for point in document["points"])
    key, label = ("streams", "listeners at once") if is_closed else ("rate", "requests per second")
    points = [point for point in document["points"] if key in point]
    theirs = [peer.streams if is_closed else peer.rates for peer in peers]
    peers = [peer for peer, own in zip(peers, theirs, strict=True) if own]
    panels = _panels(points, key, [own for own in theirs if own])
    loads = [x for panel in panels for _, pairs in _all(panel) for x, _ in pairs]
    foot = TOP + len(panels) * (HEIGHT + GAP) - 4
    height = foot + (FOOT if peers else 16)
    across = Axis(loads, LEFT, WIDTH - LEFT - RIGHT, is_log=True)
    what = f"{document['model']}, {document['precision']}, {document['hardware']}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(what)}" font-family="system-ui, sans-serif" font-size="13" fill="#222222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="600">{escape(what)}</text>',
        f'<text x="{LEFT}" y="42" fill="#555555">{escape(_how(document, is_closed=is_closed))}</text>',
    ]
    ticks = sorted({float(point[key]) for point in points})
    for row, panel in enumerate(panels):
        lines += _panel(panel, TOP + 18 + row * (HEIGHT + GAP), across, ticks)
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{foot}" text-anchor="end">{label}</text>')
    lines += _legend(peers, foot + 26)
    return "\n".join([*lines, "</svg>", ""])


def _how(document: dict[str, Any], *, is_closed: bool) -> str:
    count = document["voices"]
    voices = "1 stored voice" if count == 1 else f"{count} stored voices"
    said = f"utterances of {document['audio_seconds']:g} s, {voices}"
    if not is_closed:
        return f"{said}; requests come at random times"
    behind = "playback" if document["loop"] == "playback" else "its last chunk"
    return f"{said}; a listener asks again behind {behind}"


def _panels(
    points: Sequence[dict[str, Any]], key: str, peers: Sequence[tuple[PublishedPoint, ...]]
) -> list[Panel]:
    def line(label: str, colour: str, figure: Callable[[dict[str, Any]], float | None]) -> Line:
        found = [(float(point[key]), figure(point)) for point in points]
        return Line(label, colour, [(x, y) for x, y in found if y is not None])

    def marks(figure: Callable[[PublishedPoint], float | None]) -> tuple[_Pairs, ...]:
        return tuple([(p.load, y) for p in own if (y := figure(p)) is not None] for own in peers)

    first = tuple(
        line(name, colour, lambda point, name=name: point[f"ttfb_ms_{name}"])  # type: ignore[misc]
        for name, colour in (("p50", P50), ("p90", P90), ("p99", P99))
    )
    return [
        Panel("First audio, ms", first, marks(lambda point: point.ttfb_ms_p50), is_log=True),
        Panel(
            "Streams with an underrun, percent",
            (line("ours", BROKEN, broken_percent),),
            marks(lambda point: point.broken_percent),
        ),
        Panel(
            "Audio seconds per second",
            (line("ours", RATE, lambda point: point["audio_seconds_per_second"]),),
            marks(lambda point: point.audio_seconds_per_second),
        ),
    ]


def broken_percent(point: dict[str, Any]) -> float | None:
    """Streams that ran dry, of all that were heard; None if none was."""
    heard = point["streams_heard"]
    return round(100 * (heard - point["streams_in_real_time"]) / heard, 2) if heard else None


def _all(panel: Panel) -> list[tuple[str, _Pairs]]:
    return [(line.label, line.points) for line in panel.lines] + [("theirs", pairs) for pairs in panel.marks]


def _panel(panel: Panel, top: float, across: Axis, loads: Sequence[float]) -> list[str]:
    bottom = top + HEIGHT - 20
    values = [y for _, pairs in _all(panel) for _, y in pairs]
    up = Axis(values, bottom, top - bottom + 12, is_log=panel.is_log)
    right = WIDTH - RIGHT
    lines = [f'<text x="{LEFT}" y="{top - 6}" font-weight="600">{escape(panel.title)}</text>']
    for tick in up.ticks():
        y = up.at(tick)
        lines.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        lines.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{tick:,g}</text>'
        )
    for load in loads:
        x = across.at(load)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="#555555"/>')
        lines.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#555555">{load:g}</text>'
        )
    lines.append(f'<line x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" stroke="#555555"/>')
    for line in panel.lines:
        lines += _curve(line, across, up)
    lines += _line_labels(panel.lines, up)
    for index, pairs in enumerate(panel.marks):
        for x, y in pairs:
            lines.append(_mark(index, across.at(x), up.at(y), f"theirs, {x:g}: {y:,g}"))
    return lines


def _curve(line: Line, across: Axis, up: Axis) -> list[str]:
    path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in line.points)
    return [
        f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"/>',
        *(
            f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3.5" fill="{line.colour}">'
            f"<title>{escape(line.label)}, {x:g}: {y:,g}</title></circle>"
            for x, y in line.points
        ),
    ]


def _line_labels(lines: Sequence[Line], up: Axis) -> list[str]:
    """Name and last value of each line on the right, none over another."""
    ended = [line for line in reversed(lines) if line.points]  # of equal ones the last is on top, as drawn
    ended.sort(key=lambda line: up.at(line.points[-1][1]))
    said, before = [], -math.inf
    for line in ended:
        value = line.points[-1][1]
        y = max(up.at(value) + 4, before + 15)
        before = y
        said.append(
            f'<text x="{WIDTH - RIGHT + 12}" y="{y:.1f}" fill="{line.colour}">{escape(line.label)}: {value:,.4g}</text>'
        )
    return said


def _mark(index: int, x: float, y: float, title: str) -> str:
    style = f'fill="#ffffff" stroke="{MARK_COLOUR}" stroke-width="1.8"'
    shape = MARKS[index % len(MARKS)]
    if shape == "circle":
        element, size = "circle", f'cx="{x:.1f}" cy="{y:.1f}" r="5"'
    elif shape == "square":
        element, size = "rect", f'x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"'
    else:
        corners = ((x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y))
        joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in corners)
        element, size = "polygon", f'points="{joined}"'
    return f'<{element} class="theirs" {size} {style}><title>{escape(title)}</title></{element}>'


def _legend(peers: Sequence[Published], top: float) -> list[str]:
    """Whose the hollow marks are, and where they stand published."""
    if not peers:
        return []
    lines = []
    for index, peer in enumerate(peers):
        x = LEFT + index * 250
        lines.append(_mark(index, x + 6, top - 4, peer.system))
        lines.append(f'<text x="{x + 18}" y="{top}">{escape(peer.system)}, {escape(peer.hardware)}</text>')
    sources = dict.fromkeys(source for peer in peers for source in peer.sources)
    said = [
        "Hollow: medians published by others, not measured here; other texts, and a client asks again at once.",
        "Source: " + "; ".join(sources),
    ]
    for row, line in enumerate(said):
        y = top + 18 + 15 * row
        lines.append(f'<text x="{LEFT}" y="{y}" font-size="11" fill="#555555">{escape(line)}</text>')
    return lines
