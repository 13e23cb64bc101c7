"""How many chunks a step may render, from what the last steps took. Plain Python on integers."""

from __future__ import annotations

from collections import deque

RAISE_BELOW_PERCENT = 60
"""Share of the time in steps below which a step may hold more."""


class BatchLimit:
    """Shrinks when steps get long, grows while the device is idle for much of the time or steps are short.

    Args:
        most: never more chunks than this.
        target_ms: the 99th percentile of the time of a step is to stay below it: a new request waits that long.
        window: steps that are looked at, and after which it decides again.

    Attributes:
        chunks: of a step, at present.
        busy_percent, step_ms_p99: of the last window.
    """

    def __init__(self, most: int, *, target_ms: int = 100, window: int = 64) -> None:
        self.most = most
        self.target_ms = target_ms
        self.chunks = most
        self.busy_percent = 0
        self.step_ms_p99 = 0
        self._times: deque[int] = deque(maxlen=window)
        self._window = window
        self._busy_ms = 0
        self._wall_ms = 0
        self._seen = 0

    def note(self, step_ms: int, wall_ms: int) -> None:
        """One step, and the time from the end of the step before it to its own end."""
        self._times.append(step_ms)
        self._busy_ms += step_ms
        self._wall_ms += max(step_ms, wall_ms)
        self._seen += 1
        if self._seen >= self._window:
            self._decide()

    def shrink(self) -> None:
        """Memory was missing for so much at once."""
        self.chunks = max(1, self.chunks * 3 // 4)

    def _decide(self) -> None:
        times = sorted(self._times)
        self.step_ms_p99 = times[(99 * len(times)) // 100 if len(times) > 100 else -1]
        self.busy_percent = 100 * self._busy_ms // max(1, self._wall_ms)
        self._busy_ms = self._wall_ms = self._seen = 0
        if self.step_ms_p99 > self.target_ms:
            self.chunks = max(1, self.chunks * 3 // 4)
        elif self.busy_percent < RAISE_BELOW_PERCENT or self.step_ms_p99 < self.target_ms // 2:
            self.chunks = min(self.most, self.chunks + max(1, self.chunks // 4))
