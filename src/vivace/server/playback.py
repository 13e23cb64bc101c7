"""What the front ends note about one request's audio while they send it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from vivace.datatypes import AudioChunk, SynthesisResult
    from vivace.server.metrics import Metrics


class Playback:
    """The figures of one request: counted as accepted when made, and as ended exactly once.

    Args:
        front_end: "http", "sse", "websocket" …
        clock: seconds; tests give their own.
    """

    def __init__(
        self, metrics: Metrics, front_end: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics, self._front_end, self._clock = metrics, front_end, clock
        self._started = clock()
        self._first: float | None = None
        self._audio_seconds = 0.0
        self._has_ended = False
        metrics.accepted.labels(front_end).inc()

    def note(self, chunk: AudioChunk) -> None:
        """A chunk is about to be sent. One that comes after a player has run dry is an underrun."""
        now = self._clock()
        if self._first is None:
            self._first = now
            self._metrics.ttfb_seconds.observe(now - self._started)
        elif now - self._first > self._audio_seconds:
            self._metrics.underruns.inc()
            self._first = now - self._audio_seconds  # the player waits and goes on from here
        seconds = len(chunk.samples) / chunk.sample_rate_hz
        self._audio_seconds += seconds
        self._metrics.audio_seconds.inc(seconds)

    def held(self, seconds: float) -> None:
        """Sending waited for the reader, which then has audio enough: that time runs no player dry."""
        if self._first is not None:
            self._first += seconds

    def end(self, outcome: str, summary: SynthesisResult | None = None) -> None:
        """``done``, ``failed`` or ``cancelled``; later calls do nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        self._metrics.ended.labels(self._front_end, outcome).inc()
        if summary is not None and outcome == "done":
            self._metrics.rtf.observe(summary.rtf)
