"""Text streamed in: how text and speech tokens alternate in the speech LM's sequence. Plain Python.

The model was trained on ``start, instruction, [text group, speech group] …, last text, task, last speech,
end`` with groups of ``mix_ratio`` tokens (CosyVoice 3: 5 text, 15 speech). After each speech group it
predicts a *fill* token, which is never fed back: the next text group stands in its place. The last part holds
what is left of the text (fewer tokens than a group, perhaps none), the task token, and speech until the end.

The order of tokens depends on the text alone and not on when its pieces arrive: a full group is always taken
as a group, also when the end of the text is known already.

Where the reference is wrong we do better (``Qwen2LM.inference_bistream`` at ace7c47):

* Prompt speech that no text group paired with when the text ended is dropped there, so that short texts lose
  part of the voice and the prompt's text stands without its speech. Here it follows the task token, where the
  training format has the speech that is left: nothing of the prompt is lost.
* Where a speech group is exactly full (no prompt speech, or a whole number of groups) the reference samples a
  group without having fed the text that is due. Here text comes first, as in training.
* Before the last part the reference feeds the last speech token a second time. Here every token is fed once.

``as_reference=True`` repeats the last two faults, so that the rest can be compared number by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vivace.config import SpeechLMConfig


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens of one vocabulary; special rows (start, task) belong to the speech vocabulary."""

    kind: Literal["text", "speech"]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Feed:
    """Run the LM over ``pieces``, sample one token at the last position, and hand it to ``accept``.

    ``final`` False: speech tokens and the fill token may be drawn; True: speech tokens and end of sequence.
    """

    pieces: tuple[Piece, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class WaitForText:
    """Nothing to do until ``push_text`` brings enough, or ``finish`` is called."""


@dataclass(frozen=True, slots=True)
class Done:
    """The end of sequence has come."""


Action = Feed | WaitForText | Done


class Interleaver:
    """The state of one sequence with streamed text.

    Args:
        config: the speech LM's; gives ``mix_ratio`` and the special ids.
        instruction: text tokens up to and including ``<|endofprompt|>``; they stand before the groups.
        prompt_text: text tokens of the prompt audio, after the instruction.
        prompt_speech: speech tokens of the prompt audio.
        as_reference: see the module's docstring.

    Attributes:
        history: everything decoded, fill tokens included; the repetition-aware sampler looks back on it, and
            its length is the sampling position.
        num_text_tokens: text pushed so far, the prompt's not included.
    """

    def __init__(
        self,
        config: SpeechLMConfig,
        *,
        instruction: Sequence[int] = (),
        prompt_text: Sequence[int] = (),
        prompt_speech: Sequence[int] = (),
        as_reference: bool = False,
    ) -> None:
        self._config = config
        self._group_text, self._group_speech = config.mix_ratio
        self._text = list(prompt_text)
        self._prompt_speech = list(prompt_speech)
        self._pending = [Piece("speech", (config.sos_id,))]
        if instruction:
            self._pending.append(Piece("text", tuple(instruction)))
        self._room = self._group_speech if as_reference else 0
        self._as_reference = as_reference
        self._prompt_placed = not self._prompt_speech
        self._finished = False
        self._in_final = False
        self._awaits_token = False
        self._done = False
        self.history: list[int] = []
        self.num_text_tokens = 0

    def push_text(self, ids: Sequence[int]) -> None:
        """Append text tokens. Not after ``finish``."""
        assert not self._finished, "text after finish"
        self._text.extend(ids)
        self.num_text_tokens += len(ids)

    def finish(self) -> None:
        """No more text will come."""
        self._finished = True

    @property
    def is_finished(self) -> bool:
        """All text has come."""
        return self._finished

    @property
    def group_room(self) -> int:
        """Speech tokens that the running group may still take."""
        return self._room

    def next_action(self) -> Action:
        """What to do now. After a ``Feed`` the token sampled must be given to ``accept`` first."""
        assert not self._awaits_token, "the last token sampled was not accepted"
        if self._done:
            return Done()
        if not self._in_final:
            self._place_prompt()
            if self._room == 0 and self._prompt_placed and self._take_text_group():
                self._room = self._group_speech
            if not self._prompt_placed or self._room == 0:
                if not self._finished:
                    return WaitForText()
                self._start_final()
        feed = Feed(tuple(self._pending), self._in_final)
        self._pending.clear()
        self._awaits_token = True
        return feed

    def accept(self, token: int) -> int | None:
        """Take the sampled token; returns it if it is speech, None for fill or end of sequence."""
        config = self._config
        assert self._awaits_token, "no token was asked for"
        self._awaits_token = False
        self.history.append(token)
        if token < config.speech_token_size:
            self._pending.append(Piece("speech", (token,)))
            if not self._in_final:
                self._room -= 1
                if self._room == 0:
                    # The group is full, so the next token must be fill, whatever the model would say. It is
                    # recorded without a draw; the last speech token is fed together with the text to come.
                    self.history.append(config.fill_id)
            return token
        expected = config.eos_id if self._in_final else config.fill_id
        assert token == expected, "a special token that the mask of this step forbids"
        self._room = 0
        self._done = self._in_final
        return None

    def _place_prompt(self) -> None:
        """Pair the prompt's speech with text groups, as far as the text reaches."""
        while not self._prompt_placed and self._take_text_group():
            group = self._prompt_speech[: self._group_speech]
            del self._prompt_speech[: self._group_speech]
            self._pending.append(Piece("speech", tuple(group)))
            self._room = self._group_speech - len(group)
            self._prompt_placed = not self._prompt_speech
        if self._prompt_placed and not self.history and self._room == 0 and self._as_reference:
            self._room = self._group_speech

    def _take_text_group(self) -> bool:
        """Move one text group to the input, if there is a full one."""
        if len(self._text) < self._group_text:
            return False
        self._pending.append(Piece("text", tuple(self._text[: self._group_text])))
        del self._text[: self._group_text]
        return True

    def _start_final(self) -> None:
        """The last part: the text that is left, the task token, and prompt speech not placed yet."""
        if self._as_reference and self.history:
            spoken = [token for token in self.history if token != self._config.fill_id]
            self._pending.append(Piece("speech", tuple(spoken[-1:])))
        if self._text:
            self._pending.append(Piece("text", tuple(self._text)))
            self._text.clear()
        self._pending.append(Piece("speech", (self._config.task_id, *self._prompt_speech)))
        self._prompt_speech.clear()
        self._prompt_placed = True
        self._in_final = True
