"""Turns a request's text into segments that the speech LM speaks one after the other.

A known text is normalised and split at once. Streamed text is cut into clauses as it arrives; the clauses
of one segment go into one interleaved sequence, and a new segment begins at a clause border when the segment is
long enough. ``TextReader`` is the caller's side and does the work on the text; ``TextFeed`` is the engine's side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vivace.engine.interleave import Interleaver
from vivace.text.normalize import finish_sentence
from vivace.text.split import ends_sentence

if TYPE_CHECKING:
    from vivace.config import SpeechLMConfig
    from vivace.engine.frontend import Frontend, SpokenPart
    from vivace.engine.request import SynthesisRequest
    from vivace.voice import Voice


EARLY_ENDS = (8, 24)
"""Text tokens with which the first segments of a streamed text end where a sentence does. An open segment is spoken
when there is text for all of the prompt's speech and some more; one that has ended is spoken at once."""


class TextReader:
    """Normalises and tokenises the text of one request. One thread at a time.

    Attributes:
        skipped: what the model cannot read and does not speak; grows while text comes.
    """

    def __init__(self, frontend: Frontend, request: SynthesisRequest) -> None:
        self._frontend = frontend
        self._readable = frontend.new_readable()
        self.skipped: list[str] = [] if self._readable is None else self._readable.skipped
        self._language = request.language
        self._clauses = None if isinstance(request.text, str) else frontend.text_stream(request.language)
        self._spoke = False

    def read(self, text: str) -> list[SpokenPart]:
        """Known text: the whole, as segments. Streamed text: a piece, cut anywhere, as the clauses it completes.

        Raises:
            InvalidTextError: nothing to speak (known text), control tokens, too long …
        """
        if self._clauses is None:
            return self._frontend.segments(text, self._language, self._readable)
        return self._speakable(self._clauses.push(text))

    def finish(self) -> list[SpokenPart]:
        """What is left at the end of streamed text.

        Raises:
            InvalidTextError: as ``read``; also if nothing of the whole text could be spoken.
        """
        clauses = [] if self._clauses is None else self._clauses.flush()
        rest = self._speakable([*clauses[:-1], *map(finish_sentence, clauses[-1:])])
        if self._clauses is not None and not self._spoke:
            raise self._frontend.nothing_spoken()
        return rest

    def _speakable(self, clauses: Sequence[str]) -> list[SpokenPart]:
        if self._readable is not None:
            clauses = [self._readable.keep(clause) for clause in clauses]
        parts = self._frontend.spoken_parts(clauses)
        self._spoke = self._spoke or bool(parts)
        return parts


@dataclass(frozen=True, slots=True)
class SegmentInput:
    """What the speech LM gets for one segment.

    Attributes:
        words: the text as it goes to the model, for the caller to read; streamed text adds to it.
        prefix: text tokens before the text: instruction or template, and the prompt's text.
        text_tokens: those of ``words``.
        prompt_speech: the prompt's speech tokens; empty where the LM must not see them.
        interleaver: set for streamed text, which then arrives through it.
        reads_speaker: see ``PromptTokens``.
    """

    words: list[str]
    prefix: list[int]
    text_tokens: list[int]
    prompt_speech: list[int]
    interleaver: Interleaver | None = None
    reads_speaker: bool = True

    @property
    def text(self) -> str:
        return "".join(self.words).strip()

    @property
    def is_all_known(self) -> bool:
        """No more text will join the segment."""
        return self.interleaver is None or self.interleaver.is_finished

    @property
    def num_text_tokens(self) -> int:
        return len(self.text_tokens)

    def as_known(self) -> SegmentInput:
        """The same segment to be spoken anew. Streamed text has come by now: nothing needs interleaving."""
        return replace(self, interleaver=None)


class TextFeed:
    """The segments of one request: ``add`` and ``finish`` on one end, ``next_segment`` on the other."""

    def __init__(self, frontend: Frontend, request: SynthesisRequest, voice: Voice) -> None:
        self._segment_tokens = frontend.segment_tokens
        self._prompt = frontend.prompt(
            voice, request.instruction, cross_lingual=request.cross_lingual, language=request.language
        )
        # A model that does not interleave text and speech speaks each clause of a streamed text as a segment.
        self._is_streamed = not isinstance(request.text, str)
        self._interleaved = None if isinstance(request.text, str) else frontend.interleaving
        self._segments: deque[SegmentInput] = deque()
        self._open: tuple[SegmentInput, Interleaver] | None = None
        self._early_ends = list(EARLY_ENDS)
        self._finished = False

    @property
    def has_segment(self) -> bool:
        return bool(self._segments)

    @property
    def waiting(self) -> Sequence[SegmentInput]:
        """Segments that were not handed out."""
        return self._segments

    @property
    def most_tokens(self) -> int | None:
        """Text tokens of the longest segment where text is streamed; None where all of it is known."""
        return self._segment_tokens if self._is_streamed else None

    @property
    def is_exhausted(self) -> bool:
        """All text has come and every segment was handed out."""
        return self._finished and not self._segments

    def next_segment(self) -> SegmentInput | None:
        return self._segments.popleft() if self._segments else None

    def add(self, parts: Sequence[SpokenPart]) -> None:
        """Segments of a known text, or clauses of a streamed one."""
        for part in parts:
            if self._interleaved is not None:
                self._add_clause(self._interleaved, *part)
            else:
                self._add_segment(*part)

    def finish(self) -> None:
        """No more text will come."""
        self._close_open()
        self._finished = True

    def _add_segment(self, text: str, tokens: list[int]) -> None:
        prompt = self._prompt
        prefix = [*prompt.instruction, *prompt.prompt_text]
        speech, speaker = prompt.prompt_speech, prompt.reads_speaker
        self._segments.append(SegmentInput([text], prefix, tokens, speech, reads_speaker=speaker))

    def _add_clause(self, config: SpeechLMConfig, text: str, tokens: list[int]) -> None:
        """Streamed text goes into the open interleaved sequence, or opens one."""
        if self._open is not None and self._open[1].num_text_tokens + len(tokens) > self._segment_tokens:
            self._close_open()
        if self._open is None:
            prompt = self._prompt
            prefix = [*prompt.instruction, *prompt.prompt_text]
            interleaver = Interleaver(
                config,
                instruction=prompt.instruction,
                prompt_text=prompt.prompt_text,
                prompt_speech=prompt.prompt_speech,
            )
            speech, speaker = prompt.prompt_speech, prompt.reads_speaker
            self._open = SegmentInput([], prefix, [], speech, interleaver, speaker), interleaver
            self._segments.append(self._open[0])
        segment, interleaver = self._open
        segment.words.append(text)
        segment.text_tokens.extend(tokens)
        interleaver.push_text(tokens)
        if self._early_ends and interleaver.num_text_tokens >= self._early_ends[0] and ends_sentence(text):
            self._close_open()

    def _close_open(self) -> None:
        if self._open is not None:
            self._open[1].finish()
            self._open = None
            del self._early_ends[:1]
