"""A player that begins with the first audio and plays in real time, worked out from when the chunks arrived.

Consumers only note times; everything else is arithmetic behind the measurement. All times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """One request as its consumer saw it.

    Attributes:
        submitted_s: when it was sent.
        arrivals: when each chunk came, and its seconds of audio.
        dry_s: when the player has played all that came so far; 0 before the first chunk.
        delivery_ms: how long each chunk took from the engine to the consumer.
        ended_s: when its last chunk or its error came; None: neither has.
        error: code of the error that ended it.
    """

    submitted_s: float
    arrivals: list[tuple[float, float]] = field(default_factory=list)
    dry_s: float = 0.0
    delivery_ms: list[float] = field(default_factory=list)
    ended_s: float | None = None
    error: str | None = None

    def note(self, now_s: float, audio_s: float) -> None:
        """A chunk came."""
        self.arrivals.append((now_s, audio_s))
        self.dry_s = max(self.dry_s, now_s) + audio_s

    @property
    def first_s(self) -> float | None:
        """When its first audio came."""
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def is_open(self) -> bool:
        return self.ended_s is None


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a measurement that counts."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def holds(self, time_s: float) -> bool:
        """Whether it lies inside."""
        return self.start_s <= time_s < self.end_s

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """How much of a stretch lies inside."""
        return max(0.0, min(end_s, self.end_s) - max(start_s, self.start_s))


@dataclass(frozen=True, slots=True)
class Playback:
    """What a listener heard.

    Attributes:
        start_s, end_s: from the first sample to the last; of an open stream to the moment asked for.
        gaps: underruns, from when the player ran dry to when audio came.
    """

    start_s: float
    end_s: float
    gaps: tuple[tuple[float, float], ...]


def play(arrivals: Sequence[tuple[float, float]], now_s: float, *, is_open: bool) -> Playback | None:
    """Plays chunks as they arrived; None if there were none.

    Args:
        arrivals: when each came, and its seconds of audio.
        now_s: until when is asked; an open stream that is dry then is in an underrun.
    """
    if not arrivals:
        return None
    dry_s = arrivals[0][0]
    gaps = []
    for arrived_s, audio_s in arrivals:
        if arrived_s > dry_s:
            gaps.append((dry_s, arrived_s))
        dry_s = max(dry_s, arrived_s) + audio_s
    if is_open:
        if dry_s < now_s:
            gaps.append((dry_s, now_s))
        dry_s = now_s
    return Playback(arrivals[0][0], dry_s, tuple(gaps))
