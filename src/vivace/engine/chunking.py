"""Where chunk borders lie. Plain integers; ``docs/streaming.md`` has the picture.

Borders are absolute: multiples of ``chunk_tokens`` counted from the first token of the voice prompt. A chunk
can be computed when its last token and ``lookahead_tokens`` more are known, so the first audio of a request
needs ``chunk_tokens - prompt_tokens % chunk_tokens + lookahead_tokens`` new tokens, never a fixed hop.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The arithmetic of one model: chunk length, look-ahead, frames per token."""

    chunk_tokens: int
    lookahead_tokens: int
    frames_per_token: int

    def next_border(self, done_tokens: int) -> int:
        """First border strictly beyond ``done_tokens`` (prompt included)."""
        return (done_tokens // self.chunk_tokens + 1) * self.chunk_tokens

    def ready_border(self, known_tokens: int) -> int:
        """Last border whose chunk can be computed with ``known_tokens`` known (prompt included)."""
        return max(0, known_tokens - self.lookahead_tokens) // self.chunk_tokens * self.chunk_tokens

    def tokens_until_audio(self, done_tokens: int, known_tokens: int) -> int:
        """How many more tokens the next chunk needs; 0 when it can be computed now."""
        return max(0, self.next_border(done_tokens) + self.lookahead_tokens - known_tokens)

    def prompt_lookahead(self, prompt_tokens: int) -> int:
        """New tokens that the last chunk of the prompt itself waits for; 0: none, or there is no such chunk.

        So a prompt that ends at a border, or up to ``lookahead_tokens`` behind it, has a chunk that can be computed
        long before the first audio.
        """
        border = prompt_tokens // self.chunk_tokens * self.chunk_tokens
        return max(0, border + self.lookahead_tokens - prompt_tokens) if border else 0

    def first_audio_tokens(self, prompt_tokens: int) -> int:
        """New tokens before the first chunk of a request with this voice prompt."""
        return self.tokens_until_audio(prompt_tokens, prompt_tokens)
