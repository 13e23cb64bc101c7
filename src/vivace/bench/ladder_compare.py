"""What stands beside each rung's figures: the floor of its precision, and what its change has bought."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vivace.bench.ladder_rungs import RUNGS

Row = dict[str, Any]

ADDED = ("floor_ttfb_ms", "floor_rtf", "floor_tps", "floor_percent", "ttfb_gain", "rtf_gain")
"""Members that ``compared`` adds."""


def compared(rows: Sequence[Row], floors: Sequence[Row]) -> list[Row]:
    """The rows with ``ADDED``, None where a rung was not measured.

    Gains are times of what the change was made to over the rung's own, so 2 is twice as fast: for a single change the
    reference's way, otherwise the rung that this one builds on.

    Args:
        floors: of float32, of halves, and of int8 where the machine has products of it.
    """
    return [row | _beside(row, rows, floors) for row in rows]


def measured(rows: Sequence[Row], kind: str = "cumulative") -> list[Row]:
    """Those of a kind that have figures, bottom rung first."""
    return [row for row in rows if row["kind"] == kind and row["reason"] is None]


def per_phrase(row: Row, num_phrases: int) -> Row:
    """Of a measured row: ``phrase_ms``, the mean wall time of a phrase, and ``phrases_per_second``, its inverse."""
    mean_s = float(row["rtf"]) * float(row["audio_seconds"]) / num_phrases
    return {"phrase_ms": mean_s * 1e3, "phrases_per_second": 1 / mean_s}


def base_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The highest measured rung below that lacks ``row``'s change or a part of it, and nothing else; None: none."""
    rungs = [rung.name for rung in RUNGS]
    change = {name for name, _ in RUNGS[rungs.index(row["rung"])].change}
    for other in reversed(measured(rows)):
        switches = other["switches"]
        differing = {name for name, value in row["switches"].items() if switches[name] != value}
        is_below = rungs.index(other["rung"]) < rungs.index(row["rung"])
        if is_below and differing and differing <= change:  # int8 is the engine too, and is compared with it
            return other
    return None


def _beside(row: Row, rows: Sequence[Row], floors: Sequence[Row]) -> Row:
    if row["reason"] is not None:
        return dict.fromkeys(ADDED)
    switches = row["switches"]
    floor, lm_floor = floors[int(row["half"])], floors[int(switches["half_lm"])]
    if switches["engine"]:
        floor = lm_floor = floors[-1] if switches["int8"] else floor
    base = base_of(row, rows)

    def gain(name: str) -> float | None:
        return None if base is None else round(float(base[name]) / float(row[name]), 2)

    return {
        "floor_ttfb_ms": floor["ttfb_ms"],
        "floor_rtf": floor["rtf"],
        "floor_tps": lm_floor["tps"],
        "floor_percent": round(100 * float(floor["rtf"]) / float(row["rtf"]), 2),
        "ttfb_gain": gain("ttfb_ms_p50"),
        "rtf_gain": gain("rtf"),
    }
