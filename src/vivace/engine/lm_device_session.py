"""One segment's decoding on a device that runs many rows at once: ``LMSession`` for a row of an ``LMDevice``.

A session's work has two halves: ``launch`` queues steps and returns, ``collect`` waits for them and applies the rules,
so that the caller may do other work in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vivace.datatypes import FinishReason, SamplingParams
from vivace.engine.interleave import Done, Feed, Interleaver, Piece, WaitForText
from vivace.engine.kv_cache import RowLease
from vivace.engine.lm_rules import SegmentRules
from vivace.engine.lm_runner import NOT_FINITE_MESSAGE, SEGMENT_STRIDE, PlainSequence
from vivace.engine.sampler import OneRow, SamplingRows, TokenKind
from vivace.errors import SynthesisError
from vivace.kernels.row_state import NOT_FINITE, RING
from vivace.models.lm_launches import PAGE_TOKENS, Launch, RowCommand, RowPrompt

if TYPE_CHECKING:
    from vivace.engine.lm_device import LMDevice

_SPARE_POSITIONS = 256  # text, task and fill of a streamed row beyond its share of the speech

_NOTHING = -1


class DeviceLMSession:
    """Made by ``LMDevice.open``; ``close`` it.

    Attributes:
        waits_for_text: streamed text is used up.
        tokens_under_way: launched and not collected yet, at most.
        spent_ms: what its launches took on the device, those of others that it was part of included.
    """

    def __init__(
        self,
        device: LMDevice,
        sequence: PlainSequence | Interleaver,
        sampling: SamplingParams,
        *,
        segment: int,
        token_text_ratio: tuple[float, float],
        max_tokens: int,
        max_equal_tokens: int,
        attempt: int,
    ) -> None:
        self._device = device
        self._config = device.lm.config
        self._sequence = sequence
        self._speaker = sequence.speaker if isinstance(sequence, PlainSequence) else None
        self._rules = SegmentRules(
            sequence,
            token_text_ratio=token_text_ratio,
            max_tokens=max_tokens,
            max_equal_tokens=max_equal_tokens,
            attempt=attempt,
        )
        self._max_tokens = max_tokens
        self._row = OneRow.of(SamplingRows.from_params([sampling], self._config.sampling))
        self._offset = (segment * 4 + attempt) * SEGMENT_STRIDE
        # The input that the next drawn token answers; the sequence must hear of that token before it says more.
        self._feed: Feed | None = None
        self._prompt_launch: Launch | None = None
        self._launches: deque[tuple[Launch, int]] = deque()
        self.tokens_under_way = 0
        self.spent_ms = 0.0
        self._length = 0
        self._drawn = _NOTHING  # the speech token drawn last, if it is to be fed next
        self.waits_for_text = False
        self._take_feed()
        self._capacity = min(self._longest(), device.max_positions)
        self._lease = device.rows.open(self._capacity)
        try:
            device.paged.set_pages(self._lease.slot, self._lease.pages)
            device.paged.set_speaker(self._lease.slot, self._speaker)
        except BaseException:  # nobody has the session, so nobody closes it
            device.rows.close(self._lease)
            raise

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs; "stop" at the end of sequence, "length" as ``SegmentRules`` says."""
        return self._rules.finish_reason

    @property
    def num_speech_tokens(self) -> int:
        return self._rules.num_speech_tokens

    @property
    def lease(self) -> RowLease:
        """The row's slot and pages."""
        return self._lease

    @property
    def num_positions(self) -> int:
        """Positions that its pages hold, once nothing is under way."""
        return self._length

    @property
    def num_cached_pages(self) -> int:
        """Pages that hold them, wherever they are."""
        lease = self._lease
        return min(len(lease.pages) + lease.num_away, self._length // PAGE_TOKENS + 1)

    @property
    def next_launch(self) -> int:
        """Number of the launch that ``collect`` waits for first; 0: there is none."""
        return self._launches[0][0].number if self._launches else 0

    @property
    def may_run_ahead(self) -> bool:
        """Whether tokens can be queued behind others: all text is fed."""
        feed = self._take_feed()
        return feed is not None and feed.final

    def decode(self, count: int) -> list[int]:
        """Make up to ``count`` speech tokens; fewer at the end or when text is missing.

        Raises:
            SynthesisError: the logits of this request hold NaN, or nothing could be drawn.
        """
        made: list[int] = []
        while len(made) < count and self.launch(count - len(made)):
            made += self.collect()
        return made

    def launch(self, count: int) -> bool:
        """Queues up to ``count`` tokens, none beyond what the rules allow; whether there is any to collect."""
        for _, error in self._device.launch([(self, count)]):
            raise error
        return bool(self._launches)

    def collect(self, enough: int | None = None) -> list[int]:
        """Waits for what was launched; its speech tokens, as far as the rules let them count.

        Args:
            enough: with so many tokens, what was launched later is left for the next call. At least one launch is
                waited for. None: all.

        Raises:
            SynthesisError: the logits of this request hold NaN, or nothing could be drawn.
        """
        made: list[int] = []
        failed = False
        while self._launches:
            launch, count = self._launches.popleft()
            self.tokens_under_way -= count
            result = self._device.paged.collect(launch)[self._lease.slot]
            self.spent_ms += launch.spent_ms
            failed |= result.stop == NOT_FINITE
            if launch is not self._prompt_launch:
                self._length += len(result.ids)
            made += self._accept_all(result.ids)
            if self.finish_reason is not None:  # what comes behind the end is nothing
                self._launches.clear()
                self.tokens_under_way = 0
            if enough is not None and len(made) >= enough:
                break
        if failed and self.finish_reason is None:
            raise SynthesisError(NOT_FINITE_MESSAGE)
        return made

    def close(self) -> None:
        """Gives slot and pages back. What is still under way comes to nothing: it ends before the next one begins."""
        self._launches.clear()
        self.tokens_under_way = 0
        self._device.rows.close(self._lease)

    # -- what LMDevice asks ----------------------------------------------------------------------------------

    def start(self, count: int) -> int:
        """Begins a burst: queues the prompt that is due; returns how many further tokens may step.

        Behind tokens that are under way only steps can follow: when all text is fed, nothing else comes.
        """
        if count <= 0 or self.finish_reason is not None:
            return 0
        feed = self._take_feed()
        if feed is None or (self._launches and not feed.final):
            return 0
        budget = min(count, self._wanted(feed) - self.tokens_under_way)
        ids = [] if self._launches else self._ids(feed.pieces)
        if self._length + len(ids) + self.tokens_under_way + budget > self._capacity:
            raise SynthesisError("the text is too long for one segment of speech; split it")
        held = self._config.text_vocab_size + self._drawn
        if self._launches or (self._drawn != _NOTHING and ids == [held]):  # the row holds it already
            return max(0, budget)
        self._prompt_launch = self._prompt(feed, ids)
        self.follow(self._prompt_launch, 1)
        self._length += len(ids)
        return budget - 1

    def command(self, left: int, steps: int) -> RowCommand:
        """What the row does in the next launch."""
        assert self._feed is not None
        return RowCommand(self._lease.slot, min(left, steps), *self._kind(self._feed))

    def follow(self, launch: Launch, count: int) -> None:
        """A launch that the row is part of, for ``count`` tokens at most."""
        self._launches.append((launch, count))
        self.tokens_under_way += count

    # -- the sequence ----------------------------------------------------------------------------------------

    def _take_feed(self) -> Feed | None:
        """The input that is due; None where text is missing or the end has come."""
        if self._feed is None:
            action = self._sequence.next_action()
            self.waits_for_text = isinstance(action, WaitForText)
            if isinstance(action, Done):
                self._rules.finish_reason = "stop"
            self._feed = action if isinstance(action, Feed) else None
        return self._feed

    def _accept_all(self, ids: list[int]) -> list[int]:
        """Drawn ids, one after the other until the end; the speech tokens among them."""
        made: list[int] = []
        if isinstance(self._sequence, PlainSequence) and self.finish_reason is None:
            made = self._accept_speech(self._sequence, ids)
        for token in ids[len(made) :]:
            if self.finish_reason is None:
                made += self._accept(token)
        return made

    def _accept_speech(self, sequence: PlainSequence, ids: list[int]) -> list[int]:
        """The speech tokens that ``ids`` begins with, as far as the rules let them count: where the sequence cannot
        change between two of them, there is no need to ask it each time."""
        size = self._config.speech_token_size
        count = next((place for place, token in enumerate(ids) if token >= size), len(ids))
        if not count:
            return []
        assert self._take_feed() is not None, "tokens beyond what was wanted"
        self._feed = None
        tokens = ids[: self._rules.count_run(ids[:count], text_is_known=True)]
        sequence.accept_run(tokens)
        self._drawn = tokens[-1]
        return tokens

    def _accept(self, token: int) -> list[int]:
        """One drawn id through the sequence and the rules."""
        feed = self._take_feed()
        assert feed is not None, "a token beyond what was wanted"
        self._feed = None
        accepted = self._sequence.accept(token)
        self._drawn = _NOTHING if accepted is None else accepted
        if accepted is None:
            if feed.final:
                self._rules.finish_reason = "stop"
            return []
        self._rules.count(accepted, text_is_known=feed.final)
        return [accepted]

    def _wanted(self, feed: Feed) -> int:
        """Tokens that may be drawn before the host must look: up to the length limit or the end of a group."""
        most = self._rules.limit(text_is_known=feed.final) - self.num_speech_tokens
        if not feed.final and isinstance(self._sequence, Interleaver):
            most = min(most, self._sequence.group_room)
        return most

    def _kind(self, feed: Feed) -> tuple[int, int]:
        """Which rows may be drawn, and the sampling position before which only speech may."""
        if not feed.final:
            return TokenKind.SPEECH_OR_FILL, 0
        place = self._offset + len(self._sequence.history)
        kind = TokenKind.ANY if isinstance(self._sequence, PlainSequence) else TokenKind.SPEECH_OR_EOS
        return kind, place + self._rules.missing()

    def _prompt(self, feed: Feed, ids: list[int]) -> Launch:
        history, row = self._sequence.history, self._row
        prompt = RowPrompt(
            RowCommand(self._lease.slot, 1, *self._kind(feed)),
            ids,
            past=self._length,
            place=self._offset + len(history),
            history=history[-RING:],
            decoded=len(history),
            seed=row.seed,
            top_p=row.top_p,
            top_k=row.top_k,
            win_size=row.win_size,
            tau_r=row.tau_r,
            temperature=row.temperature,
        )
        return self._device.paged.prompt(prompt)

    def _ids(self, pieces: Sequence[Piece]) -> list[int]:
        """One numbering of both vocabularies: speech rows follow the text, and behind them comes the speaker."""
        config = self._config
        shift = config.text_vocab_size
        ids = [token + (shift if piece.kind == "speech" else 0) for piece in pieces for token in piece.ids]
        if self._speaker is not None and ids[0] == shift + config.sos_id:
            ids.insert(1, shift + config.num_embedding_rows)
        return ids

    def _longest(self) -> int:
        """Positions that the segment takes at most."""
        fed = sum(len(piece.ids) for piece in self._feed.pieces) if self._feed is not None else 0
        if isinstance(self._sequence, PlainSequence):
            return fed + int(self._speaker is not None) + self._rules.limit(text_is_known=True) + 1
        assert self._config.mix_ratio is not None, "only models that interleave stream text"
        text, speech = self._config.mix_ratio
        return fed + self._max_tokens * (text + speech) // speech + _SPARE_POSITIONS
