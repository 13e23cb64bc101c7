"""How long a text will take to speak, told from what has been spoken of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

if TYPE_CHECKING:
    from vivace.datatypes import AudioChunk, SynthesisResult

LONG_SECONDS = 60.0
"""Work that takes longer is announced."""
SETTLED_SECONDS = 5.0
"""Audio after which the real-time factor is worth something: the first chunk's is that of the start."""
LETTERS_PER_SECOND = 17.0
"""Of English, by the embedded model's voices; holds until the first segment of a text has been spoken."""
LETTERS_PER_IDEOGRAPH = 4.0


class Estimate:
    """Follows one request.

    Args:
        text: None where nobody knows how long it will be: then nothing is ever estimated.
        speed: as of the request.

    Attributes:
        audio_seconds: of the whole text, as far as can be told; None before that.
    """

    def __init__(self, text: str | None, speed: float = 1.0) -> None:
        self.audio_seconds: float | None = None
        self._letters = None if text is None else _letters(text)
        self._letters_per_s = LETTERS_PER_SECOND * speed
        self._num_whole = 0
        self._has_said = False

    def note(self, chunk: AudioChunk, so_far: SynthesisResult) -> str | None:
        """Takes notice of a chunk. Returns a line for the user if the rest will take long, once."""
        done_s = chunk.start_s + len(chunk.samples) / chunk.sample_rate_hz
        if self._letters is None or done_s < SETTLED_SECONDS:
            return None
        if chunk.segment > self._num_whole:  # all segments before it have been spoken
            self._num_whole = chunk.segment
            spoken = sum(map(_letters, so_far.spoken_text[: chunk.segment]))
            self._letters_per_s = spoken / chunk.start_s
        self.audio_seconds = max(done_s, self._letters / self._letters_per_s)
        left_s = (self.audio_seconds - done_s) * chunk.elapsed_ms / 1e3 / done_s
        if self._has_said or left_s < LONG_SECONDS:
            return None
        self._has_said = True
        return (
            f"vivace: about {_minutes(self.audio_seconds)} of audio, which takes about {_minutes(left_s)} more; "
            "Ctrl-C keeps what is there"
        )


def _letters(text: str) -> float:
    """Its length in Latin letters' time."""
    return sum(LETTERS_PER_IDEOGRAPH if east_asian_width(c) in "WF" else 1.0 for c in text)


def _minutes(seconds: float) -> str:
    count = math.ceil(seconds / 60)
    return f"{count} minute{'' if count == 1 else 's'}"
