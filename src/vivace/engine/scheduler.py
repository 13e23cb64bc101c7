"""Decides what the next step runs. Plain Python on integers: no tensors, and the time is given.

A step serves many requests: rows that decode, chunks that are rendered. Who comes first: streams whose playback is
about to run dry and first chunks that are late, then first chunks, then the earliest deadline (``_rank``). A
deadline is when a stream's playback runs dry, or when a request's first audio is due. Who may start at all is told in
``admission``. All times are milliseconds of one clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from vivace.engine.admission import Admission
from vivace.engine.batch_limit import BatchLimit
from vivace.engine.swap_plan import is_moving, is_paused, plan_leaves, plan_returns, waits_for_text
from vivace.engine.ticket import Capacity, Place, Policy, Ticket

__all__ = ["Capacity", "Overdue", "Place", "Policy", "Scheduler", "StepPlan", "Ticket"]

Overdue = Literal["queue", "consumer"]

FULL_CHUNKS = 48
"""Chunks of a step that make up for what a step costs whatever is in it: with fewer each costs more."""

_MOVE_MS = 2  # how soon to look again whether pages have arrived
_URGENT, _FIRST, _LATER = 0, 1, 2

_Ready = tuple[int, int, int, Ticket]
"""Class, deadline and last turn of a request that could be served."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    Attributes:
        render: requests and how many chunks of each; most urgent first.
        decode: requests and how many tokens each may make; those that are rendered too decode behind it.
        overdue: requests to end, and why.
        swap_out, swap_in: requests whose pages go to host memory or come back; ``moved`` is told when they are there.
    """

    render: tuple[tuple[int, int], ...] = ()
    decode: tuple[tuple[int, int], ...] = ()
    overdue: tuple[tuple[int, Overdue], ...] = ()
    swap_out: tuple[int, ...] = ()
    swap_in: tuple[int, ...] = ()

    @property
    def requests(self) -> list[int]:
        """All requests that run in it."""
        return [request_id for request_id, _ in (*self.render, *self.decode)]


class Scheduler:
    """All live requests: those that run, and those that wait until there is room, in the order in which they came.

    Args:
        policy: settings; keyword arguments replace single ones.

    Attributes:
        capacity: set by ``use`` when the engine knows its stages.
        requests: those that run, and those that wait.
        wake_ms: when ``plan`` may have more to say though nothing happens; None: never.
        limit: how many chunks a step may render at present.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        max_requests: int | None = None,
        burst_tokens: int | None = None,
        max_pending_chunks: int | None = None,
        max_stall_ms: int | None = None,
    ) -> None:
        own = Policy() if policy is None else policy
        given = {
            "max_requests": max_requests,
            "burst_tokens": burst_tokens,
            "max_pending_chunks": max_pending_chunks,
            "max_stall_ms": max_stall_ms,
        }
        self.policy = replace(own, **{name: value for name, value in given.items() if value is not None})
        self.wake_ms: int | None = None
        self._step = 0
        self._blocked: Ticket | None = None
        self.use(Capacity())

    def use(self, capacity: Capacity) -> None:
        """Plans for other stages from now on. No request may be live."""
        self.capacity = capacity
        least = min(max(2 * capacity.pack, capacity.wave), FULL_CHUNKS, capacity.batch)
        self.limit = BatchLimit(capacity.batch, least=least)
        self.requests = Admission(capacity, self.policy.max_requests)
        self._blocked = None

    def end_stalled_after(self, stall_ms: int) -> None:
        """Sets ``Policy.max_stall_ms``."""
        self.policy = replace(self.policy, max_stall_ms=stall_ms)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, ticket: Ticket) -> None:
        """Takes a request in; it starts when there is room. Raises as ``Admission.add``."""
        self.requests.add(ticket)

    def remove(self, request_id: int, finished_ms: int | None = None) -> None:
        """The request has ended, whatever the reason; ``finished_ms``: it came to its end then."""
        self.requests.remove(request_id, finished_ms)

    def moved(self, ticket: Ticket) -> None:
        """All its pages have arrived where a plan sent them."""
        self.requests.moved(ticket)

    def stop_swapping(self, ticket: Ticket) -> None:
        """Host memory cannot be used: ``ticket``'s pages stay where they are, and nothing more is sent there."""
        self.requests.stay(ticket)
        self.capacity = replace(self.capacity, host_pages=0)

    # -- one step ------------------------------------------------------------------------------------------------

    def plan(self, now_ms: int = 0) -> StepPlan | None:
        """What the next step runs, or None when every request waits for text, for its consumer or for time."""
        self.wake_ms = None
        overdue: list[tuple[int, Overdue]] = []
        requests = self.requests
        swap_in = self._swaps(plan_returns, now_ms) if requests.num_away or requests.num_due else []
        if requests.queue:
            requests.start()  # pages may have come back in the middle of a request
            overdue = self._overdue_in_queue(now_ms)
            if requests.num_away and not requests.queue:  # nobody waits any more
                swap_in += self._swaps(plan_returns, now_ms)
        swap_out = (
            self._swaps(partial(plan_leaves, self._blocked), now_ms) if self.capacity.host_pages else []
        )
        if any(is_moving(ticket) for ticket in requests.running.values()):
            self._wake_at(now_ms + _MOVE_MS)
        ready = self._ready(now_ms, overdue)
        if not ready and not (overdue or swap_in or swap_out):
            return None
        self._step += 1
        ready.sort(key=_order)
        if self.capacity.batch == 1:
            render, decode = self._one(ready)
        else:
            served = self._in_turn(ready)
            render, decode = self._together(served, now_ms)
            if not render and not decode and len(served) < len(ready):  # they wait for memory
                render, decode = self._together(ready, now_ms)
        if not (render or decode or overdue or swap_in or swap_out):
            return None
        return StepPlan(tuple(render), tuple(decode), tuple(overdue), tuple(swap_out), tuple(swap_in))

    def _ready(self, now_ms: int, overdue: list[tuple[int, Overdue]]) -> list[_Ready]:
        """Who could be served; notes whose consumer has taken nothing for too long."""
        ready: list[_Ready] = []
        policy = self.policy
        for ticket in self.requests.running.values():
            if is_paused(ticket, policy):
                if self._is_stalled(ticket, now_ms):
                    overdue.append((ticket.request_id, "consumer"))
                continue
            ticket.lagging_ms = -1
            if ticket.place is not Place.DEVICE or waits_for_text(ticket):
                continue
            rank, deadline = self._rank(ticket, now_ms)
            if policy.max_ahead_ms is not None and deadline - now_ms > policy.max_ahead_ms:
                self._wake_at(deadline - policy.max_ahead_ms)
                continue
            ready.append((rank, deadline, ticket.served, ticket))
        return ready

    def _rank(self, ticket: Ticket, now_ms: int) -> tuple[int, int]:
        """Which class a request is in, and when it must be served."""
        if ticket.first_ms < 0:
            due = ticket.submitted_ms + self.policy.first_ms
            return (_URGENT if due <= now_ms else _FIRST), due
        dry = ticket.first_ms + ticket.audio_ms
        return (_URGENT if dry - now_ms < self.policy.urgent_ms else _LATER), dry

    def _one(self, ready: list[_Ready]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """One unit of work, of the most urgent request."""
        if not ready:
            return [], []
        ticket = ready[0][3]
        ticket.served = self._step
        if ticket.tokens_until_audio == 0:
            return [(ticket.request_id, 1)], []
        return [], [(ticket.request_id, min(self.policy.burst_tokens, ticket.tokens_until_audio))]

    def _in_turn(self, ready: list[_Ready]) -> list[_Ready]:
        """Whom the step serves. Where one row steps faster than two and a stream's chunks cost less together, few
        streams get their large launches one after the other, and first chunks and those that run dry before them."""
        policy = self.policy
        if not self.capacity.takes_turns or not 1 < len(ready) <= policy.turn_rows:
            return ready
        served = [entry for entry in ready if entry[0] != _LATER] or ready[:1]
        first = self._bursts(ready)[1]
        is_soon = all(ticket.opens_segment or ticket.tokens_until_audio <= first for *_, ticket in served)
        return served if is_soon else ready

    def _together(
        self, ready: list[_Ready], now_ms: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Chunks and tokens of one step."""
        render = self._renderings(ready, now_ms)
        return render, self._decodings(ready, dict(render), now_ms)

    def _renderings(self, ready: list[_Ready], now_ms: int) -> list[tuple[int, int]]:
        """Chunks of the most urgent streams, as many as the step may have and the pages allow."""
        render: list[tuple[int, int]] = []
        most = self.capacity.flow_pages
        used, later = 0, self._room_for_later()
        is_quiet = len(ready) <= self.policy.quiet_rows
        is_alone = len(ready) == 1 and self.capacity.wave > 1
        waiting = self._waiting(ready, now_ms) if self.capacity.takes_turns else set()
        running = self.requests.running.values()
        free = most - sum([ticket.held_pages for ticket in running])
        scarce = free < sum([ticket.flow_pages - ticket.held_pages for ticket in running])
        self._blocked = None
        self.limit.was_cut = False
        for rank, _, _, ticket in ready:
            if ticket.tokens_until_audio or ticket in waiting:
                continue
            room = (later if rank == _LATER else self.capacity.batch) - used
            if room <= 0:
                self.limit.was_cut = True
                break
            hop = self._wave(ticket, now_ms, room) if is_alone else self._hop(ticket, now_ms, is_quiet)
            hop = min(hop, room)
            left = max(0, ticket.flow_pages - ticket.held_pages)
            # When pages are scarce fewer chunks may do where many do not.
            wanted = hop
            while scarce and hop and not self.requests.may_take(free, ticket, min(hop, left)):
                hop -= 1
            if hop <= 0:
                self._blocked = self._blocked or (ticket if wanted else None)
                continue
            # Counted from now on: somebody may start before they are taken, when another one ends in this step.
            ticket.held_pages += min(hop, left)
            free -= min(hop, left)
            ticket.served = self._step
            render.append((ticket.request_id, hop))
            # The first one may bring the last chunk of the prompt with it, where chunks have pages.
            used += hop + (ticket.first_ms < 0 < ticket.flow_pages)
        return render

    def _room_for_later(self) -> int:
        """Chunks of a step beyond which no stream is served that has time. Who waits for memory is helped by nothing
        but the end of others: then as many as there may be."""
        return self.capacity.batch if self.requests.queue else self.limit.chunks

    def _hop(self, ticket: Ticket, now_ms: int, is_quiet: bool) -> int:
        """Chunks to render at once; 0: more tokens first, for the playback is safe meanwhile.

        With few others there is nothing to wait for: a chunk of one stream costs the same alone. Where streams share
        launches, one chunk of each costs less than several of one.
        """
        if self.capacity.pack > 1 and not is_quiet:
            return 1
        known = 1 + ticket.spare_tokens // self.capacity.chunk_tokens
        wanted = self.wanted_hop(ticket, now_ms)
        is_enough = known >= wanted or is_quiet or ticket.is_complete or ticket.waits_for_text
        return min(known, wanted) if is_enough else 0

    def _wave(self, ticket: Ticket, now_ms: int, room: int) -> int:
        """``_hop`` of a stream that has the step to itself, whose chunks cost less together."""
        wanted = min(room, self._wanted_wave(ticket, now_ms))
        known = 1 + ticket.spare_tokens // self.capacity.chunk_tokens
        is_enough = known >= wanted or ticket.is_complete or ticket.waits_for_text
        return min(known, wanted) if is_enough else 0

    def _wanted_wave(self, ticket: Ticket, now_ms: int) -> int:
        """Chunks of the next launch of a stream that has the step to itself.

        The more audio was handed over the more, so that the same request has the same launches every time; but one, and
        at once, where it takes so long that little is left to play.
        """
        policy = self.policy
        wave_ms = self.capacity.wave_ms if policy.wave_ms is None else policy.wave_ms
        little_ms = max(wave_ms, min(policy.urgent_ms, ticket.audio_ms // 2))
        if ticket.first_ms < 0 or ticket.credit_ms(now_ms) < little_ms:
            return 1
        return max(1, min(self.capacity.wave, ticket.audio_ms // wave_ms))

    def wanted_hop(self, ticket: Ticket, now_ms: int) -> int:
        """How many chunks a stream is to make at once: more the longer its playback lasts without them."""
        policy = self.policy
        return max(1, min(policy.max_hop_chunks, ticket.credit_ms(now_ms) // policy.safe_ms))

    def _decodings(self, ready: list[_Ready], render: dict[int, int], now_ms: int) -> list[tuple[int, int]]:
        """Rows that step together: all that may, up to the tokens that their next hop needs.

        A first chunk gets all its tokens in one step. Few rows step faster than many, so that others who have something
        to play wait for that step where they are few; a crowd steps along, since the step lasts as long anyway.
        """
        policy, chunk = self.policy, self.capacity.chunk_tokens
        burst, first = self._bursts(ready)
        if len(ready) > policy.crowd_rows and any(_misses_first(ticket, first) for *_, ticket in ready):
            burst = first
        waiting = self._waiting(ready, now_ms)
        prompts = policy.max_prompts
        decode: list[tuple[int, int]] = []
        for _, _, _, ticket in ready:
            if ticket.is_complete or ticket.waits_for_text or ticket in waiting:
                continue
            if ticket.opens_segment:
                if prompts == 0 or ticket.tokens_until_audio == 0:
                    continue
                prompts -= 1
            hop = render.get(ticket.request_id, 0)
            # Behind what is known, one hop beyond the one that is rendered now.
            next_hop = max(policy.max_hop_chunks, self.capacity.wave if len(ready) == 1 else 1)
            if len(ready) == 1 and self.capacity.takes_turns and not hop:
                # Its launch waits for every token that is queued.
                next_hop = self._wanted_wave(ticket, now_ms)
            ahead = (hop + next_hop - 1) * chunk if ticket.first_ms >= 0 or hop else 0
            most = ticket.tokens_until_audio + ahead - ticket.spare_tokens
            if most > 0:
                decode.append(
                    (ticket.request_id, min(first if _misses_first(ticket, first) else burst, most))
                )
                ticket.served = self._step
        return decode

    def _bursts(self, ready: list[_Ready]) -> tuple[int, int]:
        """Tokens that a row may decode in a step, and before its first audio."""
        policy, capacity = self.policy, self.capacity
        burst = policy.burst_tokens
        if len(ready) <= policy.quiet_rows:
            burst = max(burst, capacity.quiet_tokens, capacity.beside_tokens)
        return burst, max(burst, policy.first_tokens)

    def _waiting(self, ready: list[_Ready], now_ms: int) -> set[Ticket]:
        """Those among few who have something to play while a first chunk's tokens are decoded."""
        policy = self.policy
        first = self._bursts(ready)[1]
        if len(ready) > policy.first_rows or not any(_misses_first(ticket, first) for *_, ticket in ready):
            return set()
        return {ticket for *_, ticket in ready if ticket.credit_ms(now_ms) > policy.urgent_ms}

    def _swaps(
        self, planner: Callable[[Admission, Policy, int], tuple[list[int], int | None]], now_ms: int
    ) -> list[int]:
        found, next_ms = planner(self.requests, self.policy, now_ms)
        if next_ms is not None:
            self._wake_at(next_ms)
        return found

    # -- what time brings --------------------------------------------------------------------------------------

    def _overdue_in_queue(self, now_ms: int) -> list[tuple[int, Overdue]]:
        longest = self.policy.max_queue_ms
        late, next_ms = self.requests.overdue(now_ms - longest)
        if next_ms is not None:
            self._wake_at(next_ms + longest)
        return [(request_id, "queue") for request_id in late]

    def _is_stalled(self, ticket: Ticket, now_ms: int) -> bool:
        """Whether the consumer has taken nothing for too long."""
        if ticket.lagging_ms < 0:
            ticket.lagging_ms = now_ms
        longest = self.policy.max_stall_ms
        if longest is None:
            return False
        if now_ms - ticket.lagging_ms >= longest:
            return True
        self._wake_at(ticket.lagging_ms + longest)
        return False

    def _wake_at(self, time_ms: int) -> None:
        self.wake_ms = time_ms if self.wake_ms is None else min(self.wake_ms, time_ms)


def _misses_first(ticket: Ticket, tokens: int) -> bool:
    """Whether so many tokens bring a request to its first audio, as far as that is known before its prompt."""
    is_near = ticket.opens_segment or ticket.tokens_until_audio <= tokens
    return is_near and ticket.first_ms < 0 < ticket.tokens_until_audio


def _order(entry: _Ready) -> tuple[int, int, int]:
    return entry[:3]
