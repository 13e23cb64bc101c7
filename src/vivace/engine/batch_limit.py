"""How many chunks of streams that have time a step may render, from what the last steps took. Integers only."""

from __future__ import annotations

from collections import deque

RAISE_BELOW_PERCENT = 60
"""Share of the time in steps below which a step may hold more."""

FULL_PERCENT, SPARE_PERCENT = 50, 25
"""Share of steps that left chunks out: from the first one on steps are too small for the load; up to the second one
smaller steps would do."""


class BatchLimit:
    """Shrinks when steps get long and the load allows it; grows when it does not, or the device is idle.

    A step costs something whatever is in it, so smaller steps serve less in all: under more load than they can serve
    they make every wait longer, not shorter. Therefore steps shrink only while few of them are full.

    Args:
        most, least: never more chunks than the one; not fewer than the other, unless memory is missing.
        target_ms: the 99th percentile of the time of a step is to stay below it: a new request waits for the end of
            one step, for the tokens of a second, for its chunk in a third.
        window: steps that are looked at, and after which it decides again.

    Attributes:
        chunks: of a step, at present.
        was_cut: whether the step that runs has left chunks out for want of room.
        busy_percent, full_percent, step_ms_p99: of the last window.
    """

    def __init__(self, most: int, *, least: int = 1, target_ms: int = 75, window: int = 64) -> None:
        self.most, self.least = most, least
        self.target_ms = target_ms
        self.chunks = most
        self.was_cut = False
        self.busy_percent = 0
        self.full_percent = 0
        self.step_ms_p99 = 0
        self._times: deque[int] = deque(maxlen=window)
        self._window = window
        self._busy_ms = 0
        self._wall_ms = 0
        self._seen = 0
        self._cut = 0

    def note(self, step_ms: int, wall_ms: int) -> None:
        """One step, and the time from the end of the step before it to its own end."""
        self._times.append(step_ms)
        self._busy_ms += step_ms
        self._wall_ms += max(step_ms, wall_ms)
        self._seen += 1
        self._cut += self.was_cut
        if self._seen >= self._window:
            self._decide()

    def shrink(self) -> None:
        """Memory was missing for so much at once."""
        self.chunks = max(1, self.chunks * 3 // 4)

    def _decide(self) -> None:
        times = sorted(self._times)
        self.step_ms_p99 = times[(99 * len(times)) // 100 if len(times) > 100 else -1]
        self.busy_percent = 100 * self._busy_ms // max(1, self._wall_ms)
        self.full_percent = 100 * self._cut // self._seen
        self._busy_ms = self._wall_ms = self._seen = self._cut = 0
        is_slow = self.step_ms_p99 > self.target_ms
        is_idle = self.busy_percent < RAISE_BELOW_PERCENT or self.step_ms_p99 < self.target_ms // 2
        if self.full_percent >= FULL_PERCENT or (is_idle and not is_slow):
            self.chunks = min(self.most, self.chunks + max(1, self.chunks // 4))
        elif is_slow and self.full_percent <= SPARE_PERCENT:
            self.chunks = min(self.chunks, max(self.least, self.chunks * 3 // 4))
