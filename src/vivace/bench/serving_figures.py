"""What the listeners of a window met, from the records of their requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from vivace.bench.serving_player import Record, Window, play
from vivace.bench.single import percentile
from vivace.errors import OverloadedError

_PLAYED = (
    "streams_heard",
    "streams_in_real_time",
    "playing_mean",
    "underruns",
    "underrun_ms_total",
    "underrun_ms_max",
)


def figures(records: Sequence[Record], window: Window, now_s: float, *, plays: bool = True) -> dict[str, Any]:
    """Figures of a window, under the names of the benchmark rows.

    A request that has no first audio yet counts with the time it has waited so far, so that overload does not look
    like speed. Of the requests sent inside the window each is counted once, whenever it ended: ``requests`` are those
    that ``finished``, were ``refused``, ``failed`` (by their code) or were ``cancelled`` with the load. What was sent
    before the window and failed inside it is counted apart, ``failed_of_ramp``. None that failed has a part in the
    percentiles.

    Args:
        now_s: when the load ended.
        plays: False: nobody listens, the figures of players are None.
    """
    mine = [record for record in records if window.holds(record.submitted_s)]
    return {
        "seconds": round(window.seconds, 3),
        "requests": len(mine),
        "requests_per_second": round(len(mine) / window.seconds, 3),
        **_ends(mine),
        "failed_of_ramp": _failed_of_ramp(records, window),
        **_first_audio(mine, now_s),
        **(_playback(records, window) if plays else dict.fromkeys(_PLAYED)),
        "audio_seconds_per_second": round(_audio_s(records, window) / window.seconds, 3),
        "latency_ms_p50": _latency(records, window, 50),
        "latency_ms_p99": _latency(records, window, 99),
        "delivery_ms_p50": _delivery(records, window, 50),
        "delivery_ms_p99": _delivery(records, window, 99),
    }


def _ends(mine: Sequence[Record]) -> dict[str, Any]:
    """What became of each request."""
    errors = Counter(record.error for record in mine if record.error is not None)
    cancelled = sum(record.is_open for record in mine)
    return {
        "finished": len(mine) - cancelled - errors.total(),
        "refused": errors.pop(OverloadedError.default_code, 0),
        "failed": dict(errors),
        "cancelled": cancelled,
    }


def _failed_of_ramp(records: Sequence[Record], window: Window) -> int:
    ended = [record.ended_s for record in records if record.error and record.submitted_s < window.start_s]
    return sum(ended_s is not None and window.holds(ended_s) for ended_s in ended)


def _first_audio(mine: Sequence[Record], now_s: float) -> dict[str, Any]:
    going = [record for record in mine if record.error is None]
    waits = sorted(((record.first_s or now_s) - record.submitted_s) * 1e3 for record in going)
    return {
        "unanswered": sum(record.first_s is None for record in going),
        "ttfb_ms_p50": _at(waits, 50),
        "ttfb_ms_p90": _at(waits, 90),
        "ttfb_ms_p99": _at(waits, 99),
        "ttfb_ms_max": _at(waits, 100),
    }


def _playback(records: Sequence[Record], window: Window) -> dict[str, Any]:
    played_s = underrun_s = longest_s = 0.0
    underruns = heard = broken = 0
    for record in records:
        playback = play(record.arrivals, window.end_s, is_open=record.is_open)
        if playback is None or not window.overlap_s(playback.start_s, playback.end_s):
            continue
        lengths = [length for gap in playback.gaps if (length := window.overlap_s(*gap))]
        heard += 1
        broken += bool(lengths)
        underruns += len(lengths)
        underrun_s += sum(lengths)
        longest_s = max(longest_s, *lengths, 0.0)
        played_s += window.overlap_s(playback.start_s, playback.end_s)
    values = (
        heard,
        heard - broken,
        round(played_s / window.seconds, 2),
        underruns,
        round(underrun_s * 1e3, 1),
        round(longest_s * 1e3, 1),
    )
    return dict(zip(_PLAYED, values, strict=True))


def _audio_s(records: Sequence[Record], window: Window) -> float:
    """Audio that came inside the window."""
    chunks = chain.from_iterable(record.arrivals for record in records)
    return sum(audio_s for arrived_s, audio_s in chunks if window.holds(arrived_s))


def _latency(records: Sequence[Record], window: Window, percent: int) -> float | None:
    """From submission to the last chunk, of requests that ended inside the window."""
    ended = [
        (record.ended_s - record.submitted_s) * 1e3
        for record in records
        if record.ended_s is not None and record.error is None and window.holds(record.ended_s)
    ]
    return _at(sorted(ended), percent)


def _delivery(records: Sequence[Record], window: Window, percent: int) -> float | None:
    """From the engine's own note of a chunk to its consumer."""
    delays = [
        delay
        for record in records
        for (arrived_s, _), delay in zip(record.arrivals, record.delivery_ms, strict=True)
        if window.holds(arrived_s)
    ]
    return _at(sorted(delays), percent)


def _at(ordered: list[float], percent: int) -> float | None:
    return round(percentile(ordered, percent), 2) if ordered else None
