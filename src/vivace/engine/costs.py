"""What a request takes of the device's memory at most: the integers that admission counts with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.engine.lm_rules import SHORTEST_LIMIT_TOKENS

if TYPE_CHECKING:
    from vivace.engine.live import LiveRequest
    from vivace.engine.text_feed import TextFeed


class Costs:
    """Counts pages of the speech LM's cache and of the flow; both are 0 where a stage has no pages.

    Args:
        longest_tokens: most speech tokens of any segment, those of the prompt included.
        chunk_tokens: of the flow; it takes a page per chunk.
        page_tokens: positions of a page of the speech LM's cache; max_positions: of its longest row.
    """

    def __init__(
        self,
        *,
        longest_tokens: int,
        chunk_tokens: int,
        page_tokens: int,
        max_positions: int,
    ) -> None:
        self._longest = longest_tokens
        self._chunk = chunk_tokens
        self._page, self._max_positions = page_tokens, max_positions

    def apply(
        self, live: LiveRequest, tokens_per_text: float, *, lm_is_paged: bool, flow_is_paged: bool
    ) -> None:
        """Writes the request's costs into its ticket.

        Args:
            tokens_per_text: longest speech for one text token.
        """
        ticket, prompt = live.ticket, len(live.voice.speech_tokens)
        positions, speech, likely = self._of_text(live.feed, prompt, tokens_per_text)
        if live.given_tokens is not None:
            positions, speech, likely = 0, len(live.given_tokens), len(live.given_tokens)
        if lm_is_paged:
            ticket.kv_pages = -(-min(positions, self._max_positions) // self._page)
        if flow_is_paged and live.stream:
            ticket.prompt_pages = prompt // self._chunk  # the last one may come before the first audio
            ticket.flow_pages = -(-(prompt + speech) // self._chunk)
            ticket.likely_pages = -(-(prompt + likely) // self._chunk)
            ticket.hold(ticket.prompt_pages)

    def _of_text(self, feed: TextFeed | None, prompt: int, ratio: float) -> tuple[int, int, int]:
        """Positions of the longest row, its most speech tokens, and as many as its text makes likely at most."""
        most = self._longest - prompt
        if feed is None:
            return 0, 0, 0
        if feed.most_tokens is not None:  # streamed text: what will come is not known
            return self._max_positions, most, min(most, _share(feed.most_tokens, ratio))
        positions = speech = 0
        for entry in feed.waiting:
            limit = min(most, _share(entry.num_text_tokens, ratio))
            # Start, task, and the speaker where the model reads it.
            fed = len(entry.prefix) + entry.num_text_tokens + len(entry.prompt_speech) + 3
            positions, speech = max(positions, fed + limit + 1), max(speech, limit)
        return positions, speech, speech


def _share(text_tokens: int, ratio: float) -> int:
    return max(SHORTEST_LIMIT_TOKENS, int(ratio * text_tokens))
