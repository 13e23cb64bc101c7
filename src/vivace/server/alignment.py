"""When each character is spoken, as far as it is known.

The model tells which text a segment (a sentence or two) speaks and where the segment's audio begins and ends. Within
it the time of a character is an estimate: all characters share the segment's time evenly. A segment's times are known
once the next one begins, or the utterance has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vivace.datatypes import AudioChunk, SynthesisResult

_FIRST_WIDE = "\u2e80"
"""From here on scripts write no blanks between words."""


@dataclass(frozen=True, slots=True)
class SpokenSegment:
    """Text and how long it takes."""

    text: str
    seconds: float

    def characters(self) -> list[str]:
        """Its characters; a blank at the end keeps it apart from the next one where the script has blanks."""
        text = self.text.strip()
        return list(text if text and text[-1] >= _FIRST_WIDE else text + " ")

    def starts_s(self) -> list[float]:
        """Where each character begins, from the segment's own beginning, and where the last one ends."""
        count = len(self.characters())
        return [round(self.seconds * index / count, 3) for index in range(count + 1)]

    def milliseconds(self) -> dict[str, Any]:
        """The shape that ElevenLabs' WebSocket sends."""
        times = [round(start_s * 1000) for start_s in self.starts_s()]
        durations = [end - start for start, end in pairwise(times)]
        return {
            "chars": self.characters(),
            "charStartTimesMs": times[:-1],
            "charDurationsMs": durations,
        }


class SegmentClock:
    """Follows the chunks of one request."""

    def __init__(self) -> None:
        self._segment = 0
        self._start_s = 0.0
        self._end_s = 0.0

    def note(self, chunk: AudioChunk, so_far: SynthesisResult) -> SpokenSegment | None:
        """The segment that has ended before this chunk, if one has."""
        ended = None
        if chunk.segment != self._segment:
            ended = self._take(so_far)
            self._segment = chunk.segment
        self._end_s = chunk.start_s + len(chunk.samples) / chunk.sample_rate_hz
        return ended

    def finish(self, result: SynthesisResult) -> SpokenSegment | None:
        """The last segment."""
        return self._take(result)

    def _take(self, result: SynthesisResult) -> SpokenSegment | None:
        start_s, self._start_s = self._start_s, self._end_s
        if self._segment >= len(result.spoken_text) or not result.spoken_text[self._segment].strip():
            return None
        return SpokenSegment(result.spoken_text[self._segment], self._end_s - start_s)
