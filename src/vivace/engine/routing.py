"""Where a request goes when there are several engines, and their figures as those of one. Plain Python."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

MANY_STREAMS = 64
"""Streams of a device that serves many callers, where nobody says how many."""
SLACK_STREAMS = 2
SLACK_SHARE = 4
"""A voice's own engine is kept while it has no more streams than the least busy one and the larger of two and a
quarter of them."""

_SMALLEST = ("heartbeat_age_seconds",)
_LARGEST = ("step_seconds_p99",)
_MEAN = ("engine_busy_ratio", "gpu_busy_ratio")


def choose_engine(voice: object, loads: Mapping[int, int], places: int | None = None) -> int:
    """The engine on which a voice's prompt is likely to be kept, unless another one has clearly less to do.

    Args:
        voice: name of a voice, a ``Voice``, or None.
        loads: streams of each engine that may be chosen, by its number; at least one.
        places: streams that an engine runs at once. One whose places are taken is not chosen while others have some.
    """
    least = min(loads.values())
    most = least + max(SLACK_STREAMS, least // SLACK_SHARE)
    if places is not None and least < places:
        most = min(most, places - 1)
    name = voice if isinstance(voice, str) else getattr(voice, "name", "")
    near = [index for index, load in loads.items() if load <= most]
    return max(near, key=lambda index: _affinity(name, index))


def merge_gauges(sources: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Figures of all engines together: sums; of ratios the mean, of latencies the largest, of ages the smallest."""
    merged: dict[str, list[float]] = {}
    for source in sources:
        for name, value in source.items():
            merged.setdefault(name, []).append(value)
    return {name: _merge(name, values) for name, values in merged.items()}


def _affinity(name: str, index: int) -> bytes:
    """The same for a name and an engine at all times, and independent between engines: the highest wins."""
    return hashlib.blake2b(f"{index} {name}".encode(), digest_size=8).digest()


def _merge(name: str, values: list[float]) -> float:
    if name in _LARGEST:
        return max(values)
    if name in _SMALLEST:
        return min(values)
    return sum(values) / len(values) if name in _MEAN else sum(values)
