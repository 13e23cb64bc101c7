"""The speech LM's side of a step on paged stages: what is queued for which row, and what has come of it.

Where the speech LM runs beside the other stages and few rows decode, a row has a few tokens more under way than its
next chunk needs, so that the device decodes on while the host takes the chunk's tokens and launches the flow. The
tokens of that chunk are then taken without waiting for those.

Where it takes turns with them, the tokens of a row that decodes alone are queued in parts: while the host takes one,
the device makes the next. No token is queued beyond those that the next launch of the flow needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from vivace.engine.lm_device import LMDevice
from vivace.engine.lm_device_session import DeviceLMSession
from vivace.engine.work import Outcome, attempt

if TYPE_CHECKING:
    from vivace.engine.live import LiveRequest, Segment
    from vivace.engine.stages import Stages

FEW_ROWS = 4
"""Up to so many rows, tokens are queued by what their chunks need; beyond, all rows step together."""

LEAD_TOKENS = 4
"""Tokens under way beyond what a chunk needs: the host takes a chunk's tokens and launches its flow meanwhile."""

TURN_TOKENS = 8
"""Of a part. Who comes while a row decodes alone waits for the parts that are under way."""

_Planned = tuple[tuple[int, int], ...]
_Decoding = tuple["LiveRequest", "Segment"]


class BatchDecoder:
    """Queues and takes tokens of all requests.

    Args:
        stages: what is common to all ways of running.
        lm: makes the tokens.
        lead_tokens: see ``LEAD_TOKENS``; more where a launch of the flow takes so long that more are made beside it.
            Before a request's first audio it is the least.
    """

    def __init__(self, stages: Stages, lm: LMDevice, lead_tokens: int = LEAD_TOKENS) -> None:
        self._stages, self._lm, self.lead_tokens = stages, lm, max(LEAD_TOKENS, lead_tokens)
        self._decoding: dict[DeviceLMSession, _Decoding] = {}

    @property
    def runs_beside(self) -> bool:
        """Whether tokens are made while other stages run."""
        return self._lm.runs_beside

    def early_tokens(self, live: LiveRequest, segment: Segment) -> int:
        """Tokens with which the flow can compute the last chunk of the prompt; 0: it has had them, or needs none."""
        if not self.runs_beside or segment.is_whole or segment.flow is None:
            return 0
        if segment.early_tokens or segment.fed_tokens != len(live.voice.speech_tokens):
            return 0
        return self._stages.plan.prompt_lookahead(segment.fed_tokens)

    def collect(self) -> Iterator[Outcome]:
        """Takes tokens that earlier steps queued; an outcome for each row that was planned."""
        decoding, self._decoding = self._decoding, {}
        if len(decoding) > (FEW_ROWS if self.runs_beside else 1):
            yield from self._collect_all(decoding)
            return
        for session, (live, segment) in decoding.items():
            if live.is_done or live.segment is not segment:
                continue
            enough = self._enough(live, segment) if self.runs_beside or _is_first(live, segment) else 1
            outcome = attempt(live, partial(self._take_tokens, live, segment, session, enough))
            if outcome.error is None and session.tokens_under_way:
                self._decoding[session] = live, segment
            yield outcome

    def _collect_all(self, decoding: Mapping[DeviceLMSession, _Decoding]) -> Iterator[Outcome]:
        """All rows launch by launch: what one has made is taken while the device is at the next one."""
        waiting: dict[int, list[DeviceLMSession]] = {}
        for session in decoding:
            waiting.setdefault(session.next_launch, []).append(session)
        while waiting:
            for session in waiting.pop(min(waiting)):
                live, segment = decoding[session]
                if live.is_done or live.segment is not segment:
                    continue
                try:
                    self._take_tokens(live, segment, session, 1)
                except Exception as error:
                    yield Outcome(live, error=error)
                    continue
                if session.tokens_under_way:
                    waiting.setdefault(session.next_launch, []).append(session)
                else:
                    yield Outcome(live)

    def launch(
        self, planned: _Planned, lives: Mapping[int, LiveRequest], failed: set[int]
    ) -> Iterator[Outcome]:
        """All rows together; an outcome for each that has no queue or cannot go on.

        Args:
            failed: requests that have come to their end in this step.
        """
        bursts: dict[DeviceLMSession, list[int]] = {}
        for request_id, count in planned:
            live = lives[request_id]
            if request_id in failed:
                continue
            segment = live.segment
            if segment is None:
                opened = attempt(live, partial(self._open, live))
                segment = live.segment
                if opened.error is not None or segment is None:
                    yield opened
                    continue
            if isinstance(segment.lm, DeviceLMSession):
                self._decoding[segment.lm] = live, segment
                bursts[segment.lm] = self._bursts(live, segment, count, len(planned))
            else:
                yield attempt(live, partial(self._stages.decode, live, count))
        for session, error in self._launch(bursts):
            live, _ = self._decoding.pop(session)
            yield Outcome(live, error=error)

    def _launch(
        self, bursts: dict[DeviceLMSession, list[int]]
    ) -> Iterable[tuple[DeviceLMSession, Exception]]:
        """The first bursts of all rows, then the second ones, and so on. Returns rows that cannot go on."""
        refused: dict[DeviceLMSession, Exception] = {}
        if not bursts:
            return ()
        with self._stages.span("lm", self._lm.paged.stream):
            self._launch_bursts(self._lm, bursts, refused)
        return refused.items()

    @staticmethod
    def _launch_bursts(
        lm: LMDevice, bursts: dict[DeviceLMSession, list[int]], refused: dict[DeviceLMSession, Exception]
    ) -> None:
        for counts in itertools.zip_longest(*bursts.values(), fillvalue=0):
            work = [
                (session, count)
                for session, count in zip(bursts, counts, strict=True)
                if count > 0 and session not in refused
            ]
            try:
                refused.update(lm.launch(work) if work else ())
            except Exception as fault:
                refused.update((session, fault) for session, _ in work)

    def in_turn(self) -> None:
        """What the caller queues next begins behind the tokens that are under way, where they need the whole device."""
        if not self.runs_beside and any(session.tokens_under_way for session in self._decoding):
            self._lm.hold_back()

    def _open(self, live: LiveRequest) -> None:
        self._stages.next_segment(live)

    def _enough(self, live: LiveRequest, segment: Segment) -> int:
        """Tokens with which there is something for the flow to do."""
        early = self.early_tokens(live, segment)
        if early > len(segment.tokens):
            return early - len(segment.tokens)
        return self._stages.plan.tokens_until_audio(segment.done_tokens, segment.known_tokens)

    def _bursts(self, live: LiveRequest, segment: Segment, count: int, rows: int) -> list[int]:
        """Tokens to queue, in parts that are taken one after the other.

        Args:
            count: most that the row may have under way. rows: those that decode in this step.
        """
        session = segment.lm
        assert isinstance(session, DeviceLMSession)
        plan, done, known = self._stages.plan, segment.done_tokens, segment.known_tokens
        under_way = session.tokens_under_way
        is_first = _is_first(live, segment)
        if is_first:
            # The first chunk gets its tokens and not one more: it is the one that is waited for.
            count = min(count, plan.tokens_until_audio(done, known))
        if not self.runs_beside and rows == 1 and not is_first and session.may_run_ahead:
            parts, rest = divmod(max(0, count - under_way), TURN_TOKENS)
            return [TURN_TOKENS] * parts + [rest]
        if segment.is_whole or not self.runs_beside or rows > FEW_ROWS:
            return [count - under_way]
        needed = plan.tokens_until_audio(max(done, plan.ready_border(known)), known)
        needed = max(0, min(count, needed) - under_way)
        early = max(0, self.early_tokens(live, segment) - len(segment.tokens) - under_way)
        most = LEAD_TOKENS if live.ticket.first_ms < 0 else self.lead_tokens
        lead = min(most, count - under_way - needed)
        if lead < LEAD_TOKENS or (not needed and under_way >= most):
            lead = 0
        return [early, needed - early, lead] if 0 < early < needed else [needed, lead]

    def _take_tokens(
        self, live: LiveRequest, segment: Segment, session: DeviceLMSession, enough: int | None
    ) -> None:
        before = session.spent_ms
        made = session.collect(enough)
        live.times.lm_ms += session.spent_ms - before
        self._stages.add_tokens(live, made)


def _is_first(live: LiveRequest, segment: Segment) -> bool:
    """Whether a first chunk's tokens are made: nothing of the request has been rendered."""
    return not segment.is_whole and not segment.index and segment.fed_tokens == len(live.voice.speech_tokens)
