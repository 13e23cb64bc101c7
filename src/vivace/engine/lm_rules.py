"""When a segment's speech may end and when it must: the rules that every kind of LM session applies. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vivace.datatypes import FinishReason

LONGER_TOKENS = 8
"""By how much each further attempt's shortest length grows. Speech near silence is mostly too short: the model ended
a single syllable before it began."""

SHORTEST_LIMIT_TOKENS = 25
"""Speech that any text may have, however short."""


class _Counted(Protocol):
    @property
    def num_text_tokens(self) -> int: ...


class SegmentRules:
    """Counts one segment's speech tokens and says when it is over.

    Args:
        sequence: knows how many text tokens there are so far.
        token_text_ratio: shortest and longest speech for one text token.
        max_tokens: speech tokens that the segment may have whatever its text.
        max_equal_tokens: so many equal speech tokens in a row end the segment.
        attempt: another one has a longer shortest length.

    Attributes:
        finish_reason: None while it runs; "length" at the longest allowed or when one token is repeated; the session
            sets "stop" at the end of sequence.
        num_speech_tokens: speech tokens made so far.
    """

    def __init__(
        self,
        sequence: _Counted,
        *,
        token_text_ratio: tuple[float, float],
        max_tokens: int,
        max_equal_tokens: int,
        attempt: int,
    ) -> None:
        self._sequence = sequence
        self._ratio = token_text_ratio
        self._max_tokens = max_tokens
        self._max_equal_tokens = max_equal_tokens
        self._least_tokens = attempt * LONGER_TOKENS
        self._last_token, self._num_equal = -1, 0
        self.finish_reason: FinishReason | None = None
        self.num_speech_tokens = 0

    def missing(self) -> int:
        """Speech tokens that must come before the end of sequence may, now that all text is known.

        Also for streamed text, where the reference has no shortest length: a short text must not end in silence.
        """
        least = max(self._least_tokens, int(self._ratio[0] * self._sequence.num_text_tokens))
        return max(0, least - self.num_speech_tokens)

    def limit(self, *, text_is_known: bool) -> int:
        """Most speech tokens: the share of the text where all of it is known, and the segment's bound."""
        if not text_is_known:
            return self._max_tokens
        share = int(self._ratio[1] * self._sequence.num_text_tokens)
        return min(self._max_tokens, max(SHORTEST_LIMIT_TOKENS, share))

    def count_run(self, tokens: Sequence[int], *, text_is_known: bool) -> int:
        """``count`` of one token after the other until they are over; how many that were."""
        left = self.limit(text_is_known=text_is_known) - self.num_speech_tokens
        last, equal, most_equal, counted = self._last_token, self._num_equal, self._max_equal_tokens, 0
        for token in tokens:
            counted += 1
            equal = equal + 1 if token == last else 1
            last = token
            if counted >= left or equal >= most_equal:
                self.finish_reason = "length"
                break
        self._last_token, self._num_equal = last, equal
        self.num_speech_tokens += counted
        return counted

    def count(self, token: int, *, text_is_known: bool) -> None:
        """Takes a speech token into account."""
        self.num_speech_tokens += 1
        self._num_equal = self._num_equal + 1 if token == self._last_token else 1
        self._last_token = token
        is_long = self.num_speech_tokens >= self.limit(text_is_known=text_is_known)
        if is_long or self._num_equal >= self._max_equal_tokens:
            self.finish_reason = "length"
