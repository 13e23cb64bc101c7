"""Runs the speech LM for one segment at a time: feeds what the sequence asks for, samples, hands tokens back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vivace.datatypes import FinishReason, SamplingParams
from vivace.engine.interleave import Action, Done, Feed, Interleaver, Piece, WaitForText
from vivace.engine.lm_rules import SegmentRules
from vivace.engine.sampler import OneRow, SamplingRows, TokenKind, allowed_tokens, sample, sample_one
from vivace.errors import SynthesisError
from vivace.models.kinds import SpokenLM
from vivace.models.lm_single import SingleStep

SEGMENT_STRIDE = 1 << 40
"""Distance of the sampling positions of two segments of one request, so that no draw is used twice."""

EQUAL_SECONDS = 2
"""One token over and over for so long is no speech: the model has run away, as a rule into silence."""

NOT_FINITE_MESSAGE = "the speech LM gave values that are not finite; the weights may be damaged"


class PlainSequence:
    """All text is known: start, text, task, prompt speech; then speech until the end of sequence.

    Args:
        prefix: text tokens up to the end of the prompt's text; ``text``: what is to be spoken.

    Attributes:
        speaker: speaker embedding ``[192]`` behind the start row; None where the model does not read it.
    """

    def __init__(
        self, lm: SpokenLM, prefix: Sequence[int], text: Sequence[int], prompt_speech: Sequence[int]
    ) -> None:
        config = lm.config
        self.speaker = lm.speaker
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

    def accept_run(self, tokens: Sequence[int]) -> None:
        """``accept`` of speech tokens, one after the other; at least one."""
        self.history += tokens
        self._pending = (Piece("speech", (tokens[-1],)),)


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
        lm: SpokenLM,
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
        self._rules = SegmentRules(
            sequence,
            token_text_ratio=token_text_ratio,
            max_tokens=max_tokens,
            max_equal_tokens=max_equal_tokens,
            attempt=attempt,
        )
        self._device = lm.llm_decoder.weight.device
        self._rows = SamplingRows.from_params([sampling], lm.config.sampling, self._device)
        self._row = OneRow.of(self._rows)
        self._window = max(1, self._row.win_size)
        self._on_cpu = self._device.type == "cpu"
        self._single = SingleStep(lm) if SingleStep.fits(lm) else None
        self._allowed = allowed_tokens(lm.config, self._device)
        self._offset = (segment * 4 + attempt) * SEGMENT_STRIDE
        self._cache = lm.new_cache(1, capacity=512)
        self.waits_for_text = False

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._rules.finish_reason

    @property
    def num_speech_tokens(self) -> int:
        return self._rules.num_speech_tokens

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
                self._rules.finish_reason = "stop"
                break
            token = self._sequence.accept(self._sample(action))
            if token is not None:
                made.append(token)
                self._rules.count(token, text_is_known=action.final)
        return made

    def close(self) -> None:
        """Nothing to give back: the cache goes with the session."""

    def _kind(self, action: Feed) -> TokenKind:
        if not action.final:
            return TokenKind.SPEECH_OR_FILL
        if self._rules.missing() > 0:
            return TokenKind.SPEECH
        return TokenKind.ANY if self._plain else TokenKind.SPEECH_OR_EOS

    def _sample(self, action: Feed) -> int:
        logits = self._logits(action.pieces)
        history, allowed = self._sequence.history, self._allowed[self._kind(action)]
        place = self._offset + len(history)
        if self._on_cpu:
            drawn = sample_one(logits, self._row, place, history, allowed)
            if drawn is None:
                raise SynthesisError(NOT_FINITE_MESSAGE)
            return drawn
        last = history[-self._window :]
        recent = torch.tensor([[-1] * (self._window - len(last)) + last], device=self._device)
        position = torch.tensor([place], device=self._device)
        token, ok = sample(logits[None], self._rows, position, recent, allowed[None])
        if not bool(ok):
            raise SynthesisError(NOT_FINITE_MESSAGE)
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
