"""Turns a request's text into segments that the speech LM speaks one after the other.

A known text is normalised and split at once. Streamed text is cut into clauses as it arrives; the clauses
of one segment go into one interleaved sequence, and a new segment begins at a clause border when the segment is
long enough.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vivace.engine.interleave import Interleaver
from vivace.errors import InvalidTextError

if TYPE_CHECKING:
    from vivace.engine.frontend import Frontend
    from vivace.engine.request import SynthesisRequest
    from vivace.voice import Voice


@dataclass(frozen=True, slots=True)
class SegmentInput:
    """What the speech LM gets for one segment.

    Attributes:
        text: the words as they go to the model, for the caller to read.
        prefix: text tokens before the text: instruction or template, and the prompt's text.
        prompt_speech: the prompt's speech tokens; empty where the LM must not see them.
        interleaver: set for streamed text, which then arrives through it.
    """

    text: str
    prefix: list[int]
    text_tokens: list[int]
    prompt_speech: list[int]
    interleaver: Interleaver | None = None

    @property
    def is_streamed(self) -> bool:
        return self.interleaver is not None

    @property
    def num_text_tokens(self) -> int:
        return len(self.text_tokens) if self.interleaver is None else self.interleaver.num_text_tokens


class TextFeed:
    """The text side of one request: ``push`` and ``finish`` on one end, ``next_segment`` on the other.

    Raises:
        InvalidTextError: from ``push`` (known text) or ``finish``: nothing to speak, control tokens, …
    """

    def __init__(self, frontend: Frontend, request: SynthesisRequest, voice: Voice) -> None:
        self._frontend = frontend
        self._language = request.language
        self._prompt = frontend.prompt(voice, request.instruction, cross_lingual=request.cross_lingual)
        self._segments: deque[SegmentInput] = deque()
        self._clauses = None if isinstance(request.text, str) else frontend.text_stream(request.language)
        self._open: Interleaver | None = None
        self._spoke = False
        self._finished = False

    @property
    def has_segment(self) -> bool:
        return bool(self._segments)

    @property
    def is_exhausted(self) -> bool:
        """All text has come and every segment was handed out."""
        return self._finished and not self._segments

    def next_segment(self) -> SegmentInput | None:
        return self._segments.popleft() if self._segments else None

    def push(self, text: str) -> None:
        """Known text: the whole. Streamed text: a piece, cut anywhere."""
        if self._clauses is None:
            for segment in self._frontend.segments(text, self._language):
                self._add(*segment)
            return
        for clause in self._clauses.push(text):
            self._add_clause(clause)

    def finish(self) -> None:
        """No more text will come."""
        if self._finished:
            return
        if self._clauses is not None:
            for clause in self._clauses.flush():
                self._add_clause(clause)
            if self._open is not None:
                self._open.finish()
                self._open = None
        self._finished = True
        if not self._spoke:
            raise InvalidTextError(
                "text is empty; give at least one word to speak", code="empty_input", param="text"
            )

    def _add(self, text: str, tokens: list[int]) -> None:
        self._spoke = True
        prompt = self._prompt
        self._segments.append(
            SegmentInput(text, [*prompt.instruction, *prompt.prompt_text], tokens, prompt.prompt_speech)
        )

    def _add_clause(self, clause: str) -> None:
        """Streamed text goes into the open interleaved sequence, or opens one."""
        tokens = self._frontend.tokens(clause)
        if not tokens:
            return
        self._spoke = True
        prompt = self._prompt
        if (
            self._open is not None
            and self._open.num_text_tokens + len(tokens) > self._frontend.segment_tokens
        ):
            self._open.finish()
            self._open = None
        if self._open is None:
            self._open = Interleaver(
                self._frontend.lm_config,
                instruction=prompt.instruction,
                prompt_text=prompt.prompt_text,
                prompt_speech=prompt.prompt_speech,
            )
            self._segments.append(SegmentInput(clause, [], [], [], self._open))
        self._open.push_text(tokens)
