"""Runs the speech LM for one segment at a time: feeds what the sequence asks for, samples, hands tokens back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vivace.datatypes import FinishReason, SamplingParams
from vivace.engine.interleave import Action, Done, Feed, Interleaver, Piece, WaitForText
from vivace.engine.sampler import OneRow, SamplingRows, TokenKind, allowed_tokens, sample, sample_one
from vivace.errors import SynthesisError
from vivace.models.lm_single import SingleStep
from vivace.models.speech_lm import SpeechLM

SEGMENT_STRIDE = 1 << 40
"""Distance of the sampling positions of two segments of one request, so that no draw is used twice."""

EQUAL_SECONDS = 2
"""One token over and over for so long is no speech: the model has run away, as a rule into silence."""

LONGER_TOKENS = 8
"""By how much each further attempt's shortest length grows. Speech near silence is mostly too short: the model ended
a single syllable before it began."""

_NOT_FINITE = "the speech LM gave values that are not finite; the weights may be damaged"


class PlainSequence:
    """All text is known: start, text, task, prompt speech; then speech until the end of sequence.

    Args:
        prefix: text tokens up to the end of the prompt's text; ``text``: what is to be spoken.
    """

    def __init__(
        self, lm: SpeechLM, prefix: Sequence[int], text: Sequence[int], prompt_speech: Sequence[int]
    ) -> None:
        config = lm.config
        self._speech_token_size = config.speech_token_size
        pieces = [Piece("speech", (config.sos_id,))]
        if prefix or text:
            pieces.append(Piece("text", (*prefix, *text)))
        pieces.append(Piece("speech", (config.task_id, *prompt_speech)))
        self._pending = tuple(pieces)
        self._done = False
        self.history: list[int] = []
        self.num_text_tokens = len(text)

    def next_action(self) -> Action:
        return Done() if self._done else Feed(self._pending, final=True)

    def accept(self, token: int) -> int | None:
        self.history.append(token)
        if token >= self._speech_token_size:
            self._done = True
            return None
        self._pending = (Piece("speech", (token,)),)
        return token


class LMSession:
    """The decoding of one segment.

    Args:
        token_text_ratio: shortest and longest speech for one text token.
        max_tokens: speech tokens that the segment may have whatever its text.
        max_equal_tokens: so many equal speech tokens in a row end the segment.
        attempt: 0, 1, 2, 3: another one has other draws and a longer shortest length.

    Attributes:
        finish_reason: None while it runs; "stop" at the end of sequence, "length" at the longest
            allowed or when one token is repeated.
        waits_for_text: streamed text is used up.
        num_speech_tokens: speech tokens made so far.
    """

    def __init__(
        self,
        lm: SpeechLM,
        sequence: PlainSequence | Interleaver,
        sampling: SamplingParams,
        *,
        segment: int,
        token_text_ratio: tuple[float, float],
        max_tokens: int,
        max_equal_tokens: int = 50,
        attempt: int = 0,
    ) -> None:
        self._lm = lm
        self._sequence = sequence
        self._plain = isinstance(sequence, PlainSequence)
        self._ratio = token_text_ratio
        self._max_tokens = max_tokens
        self._max_equal_tokens = max_equal_tokens
        self._last_token, self._num_equal = -1, 0
        self._device = lm.llm_decoder.weight.device
        self._rows = SamplingRows.from_params([sampling], lm.config.sampling, self._device)
        self._row = OneRow.of(self._rows)
        self._window = max(1, self._row.win_size)
        self._on_cpu = self._device.type == "cpu"
        self._single = SingleStep(lm) if SingleStep.fits(lm) else None
        self._allowed = allowed_tokens(lm.config, self._device)
        self._least_tokens = attempt * LONGER_TOKENS
        self._offset = (segment * 4 + attempt) * SEGMENT_STRIDE
        self._cache = lm.new_cache(1, capacity=512)
        self.finish_reason: FinishReason | None = None
        self.waits_for_text = False
        self.num_speech_tokens = 0

    def decode(self, count: int) -> list[int]:
        """Make up to ``count`` speech tokens; fewer at the end or when text is missing.

        Raises:
            SynthesisError: the logits of this request hold NaN, or nothing could be drawn.
        """
        made: list[int] = []
        while len(made) < count and self.finish_reason is None:
            action = self._sequence.next_action()
            if isinstance(action, WaitForText):
                self.waits_for_text = True
                return made
            self.waits_for_text = False
            if isinstance(action, Done):
                self.finish_reason = "stop"
                break
            token = self._sequence.accept(self._sample(action))
            if token is not None:
                made.append(token)
                self.num_speech_tokens += 1
                self._check_repetition(token)
                self._check_length(text_is_known=action.final)
        return made

    def _check_repetition(self, token: int) -> None:
        """End a segment in which one token comes over and over."""
        self._num_equal = self._num_equal + 1 if token == self._last_token else 1
        self._last_token = token
        if self._num_equal >= self._max_equal_tokens:
            self.finish_reason = "length"

    def _check_length(self, *, text_is_known: bool) -> None:
        """End runaway speech: at the share of the text where all of it is known, and at the segment's bound."""
        limit = self._max_tokens
        if text_is_known:
            limit = min(limit, max(25, int(self._ratio[1] * self._sequence.num_text_tokens)))
        if self.num_speech_tokens >= limit:
            self.finish_reason = "length"

    def _kind(self, action: Feed) -> TokenKind:
        if not action.final:
            return TokenKind.SPEECH_OR_FILL
        # Also for streamed text, where the reference has no shortest length: a short text must not end in silence.
        least = max(self._least_tokens, int(self._ratio[0] * self._sequence.num_text_tokens))
        if self.num_speech_tokens < least:
            return TokenKind.SPEECH
        return TokenKind.ANY if self._plain else TokenKind.SPEECH_OR_EOS

    def _sample(self, action: Feed) -> int:
        logits = self._logits(action.pieces)
        history, allowed = self._sequence.history, self._allowed[self._kind(action)]
        place = self._offset + len(history)
        if self._on_cpu:
            drawn = sample_one(logits, self._row, place, history, allowed)
            if drawn is None:
                raise SynthesisError(_NOT_FINITE)
            return drawn
        last = history[-self._window :]
        recent = torch.tensor([[-1] * (self._window - len(last)) + last], device=self._device)
        position = torch.tensor([place], device=self._device)
        token, ok = sample(logits[None], self._rows, position, recent, allowed[None])
        if not bool(ok):
            raise SynthesisError(_NOT_FINITE)
        return int(token)

    def _logits(self, pieces: Sequence[Piece]) -> Tensor:
        """Feed ``pieces``; float32 scores ``[rows]`` of the next token."""
        first = pieces[0]
        is_single = len(pieces) == 1 and len(first.ids) == 1 and first.kind == "speech"
        if self._single is not None and is_single and self._cache.length:
            hidden = self._single.hidden(first.ids[0], self._cache)
        else:
            hidden = self._lm(self._embed(pieces), self._cache)[0, -1]
        return self._lm.logits(hidden).float()

    def _embed(self, pieces: Sequence[Piece]) -> Tensor:
        parts = []
        for piece in pieces:
            ids = torch.tensor([piece.ids], device=self._device)
            parts.append(self._lm.embed_text(ids) if piece.kind == "text" else self._lm.embed_speech(ids))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
