"""Draws ``serving.svg`` from a file of rows: listeners at once, with others' published figures beside them.

python docs/pictures/make_serving.py benchmarks/results/serving.jsonl

A sweep may stand in several rows. The last row of listeners who play what they hear counts, and with it every row of
the same commit, hardware, model and settings; a load that was measured twice counts as it was measured last.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivace.bench.serving import most_in_real_time
from vivace.bench.serving_chart import serving_svg
from vivace.bench.serving_published import PUBLISHED

SAME = ("commit", "hardware", "torch", "model", "precision", "audio_seconds", "loop", "max_streams", "voices")
"""What rows of one sweep have in common."""
LOADS = ("streams", "rate", "offline")


def sweep(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last row of the default mode with the points of all rows that belong to it, by load.

    Raises:
        ValueError: no row has listeners who play what they hear, in the default mode.
    """
    found = [row for row in rows if row["loop"] == "playback" and not row["deterministic"]]
    drawn = [row for row in found if any("streams" in point for point in row["points"])]
    if not drawn:
        raise ValueError("no row has listeners who ask again behind playback")
    last = drawn[-1]
    points = {
        _load(point): point
        for row in found
        if all(row[name] == last[name] for name in SAME)
        for point in row["points"]
    }
    merged = [points[load] for load in sorted(points)]
    return last | {"points": merged, "most_streams_in_real_time": most_in_real_time(merged)}


def _load(point: dict[str, Any]) -> tuple[int, float]:
    """Listeners before rates before requests at once; each by how many."""
    kind = next(index for index, name in enumerate(LOADS) if name in point)
    return kind, point[LOADS[kind]]


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    document = sweep([json.loads(line) for line in lines if line.strip()])
    Path(__file__).with_name("serving.svg").write_text(serving_svg(document, PUBLISHED), encoding="utf-8")
