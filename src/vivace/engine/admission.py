"""Who may start: requests that run, and those that wait until there is room, in the order in which they came.

A request starts only when the worst it can take of the speech LM's cache is free, and when afterwards every running
stream can still get its worst of the flow's pages, one after the other (``is_safe``): none ever ends for want of
memory. So that streams seldom have to wait for each other, the sum of what they are likely to take must fit as well;
how much that is, in parts of what the length of the text allows, is learned from the requests that have finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from vivace.engine.ticket import Capacity, Ticket
from vivace.errors import InvalidRequestError, OverloadedError

LEARNED_FROM = 32
"""Finished requests that tell how much of its bound a request takes."""

MARGIN_PERCENT = 10


def is_safe(free: int, streams: Iterable[tuple[int, int]]) -> bool:
    """Whether all streams can get what they may still need, one after the other, each giving back what it holds.

    Args:
        streams: pages still needed at most, and pages held.
    """
    for needed, held in sorted(streams):
        if needed > free:
            return False
        free += held
    return True


class Admission:
    """The table of live requests.

    Args:
        capacity: what there is room for.
        max_requests: live requests beyond which ``add`` refuses; None: as ``capacity`` says.

    Attributes:
        running: requests that may hold state, by id. queue: the others, oldest first.
    """

    def __init__(self, capacity: Capacity, max_requests: int | None = None) -> None:
        self.capacity = capacity
        self.most = capacity.running + capacity.queue if max_requests is None else max_requests
        self.running: dict[int, Ticket] = {}
        self.queue: dict[int, Ticket] = {}
        self.kv_used = 0
        self.typical_used = 0
        self._finishes: deque[int] = deque(maxlen=LEARNED_FROM)
        self._shares: deque[int] = deque(maxlen=LEARNED_FROM)

    def __len__(self) -> int:
        return len(self.running) + len(self.queue)

    @property
    def held(self) -> int:
        """Pages of the flow that running requests hold. May be asked from any thread."""
        return sum(ticket.held_pages for ticket in list(self.running.values()))

    @property
    def share_percent(self) -> int:
        """What requests take, in parts of what the length of their text allows."""
        if len(self._shares) < LEARNED_FROM:
            return 100
        return min(100, max(self._shares) + MARGIN_PERCENT)

    def add(self, ticket: Ticket) -> None:
        """Takes a request in; it starts at once if there is room and nobody waits.

        Raises:
            OverloadedError: the queue is full.
            InvalidRequestError: there will never be room.
        """
        capacity = self.capacity
        if ticket.kv_pages > capacity.kv_pages or ticket.flow_pages > capacity.flow_pages:
            raise InvalidRequestError(
                "this takes more memory than the device has for one request; shorten the text or the voice's prompt",
                code="input_too_long",
            )
        if len(self) >= self.most:
            raise OverloadedError(
                f"{self.most} requests are in work; try again when one has finished",
                retry_after_s=self.retry_after_s(),
            )
        self.queue[ticket.request_id] = ticket
        if len(self.queue) == 1:
            self.start()

    def remove(self, request_id: int, finished_ms: int | None = None) -> None:
        """The request has ended; who waits may start.

        Args:
            finished_ms: when, if it came to its end.
        """
        ticket = self.running.pop(request_id, None)
        if ticket is None:
            self.queue.pop(request_id, None)
        else:
            self.kv_used -= ticket.kv_pages
            self.typical_used -= ticket.typical_pages
            if finished_ms is not None:
                self._finishes.append(finished_ms)
                if ticket.likely_pages:
                    self._shares.append(100 * ticket.most_held // ticket.likely_pages)
        self.start()

    def retry_after_s(self) -> float:
        """Seconds after which a place is likely to be free: from the pace of the latest ends."""
        ends = self._finishes
        if len(ends) < 2:
            return 1.0
        pace_ms = (ends[-1] - ends[0]) / (len(ends) - 1)
        return min(60.0, max(1.0, pace_ms * (1 + len(self.queue)) / 1000))

    def start(self) -> None:
        """Lets the queue's head in, and the next, as long as there is room: nobody overtakes."""
        while self.queue:
            ticket = next(iter(self.queue.values()))
            ticket.typical_pages = max(ticket.held_pages, ticket.likely_pages * self.share_percent // 100)
            if not self._fits(ticket):
                return
            del self.queue[ticket.request_id]
            self.running[ticket.request_id] = ticket
            self.kv_used += ticket.kv_pages
            self.typical_used += ticket.typical_pages

    def overdue(self, before_ms: int) -> tuple[list[int], int | None]:
        """Who has waited since ``before_ms`` or longer, and when the next of the others came."""
        late: list[int] = []
        for ticket in self.queue.values():
            if ticket.submitted_ms > before_ms:
                return late, ticket.submitted_ms
            late.append(ticket.request_id)
        return late, None

    def may_take(self, free: int, ticket: Ticket, pages: int, extra: dict[int, int]) -> bool:
        """Whether every stream can still reach its end when ``ticket`` takes so many pages now.

        Args:
            extra: pages that others will take in the same step, by request; ``free`` is without them.
        """
        if pages > free:
            return False
        streams = []
        for other in self.running.values():
            held = other.held_pages + extra.get(other.request_id, 0) + (pages if other is ticket else 0)
            streams.append((other.flow_pages - held, held))
        return is_safe(free - pages, streams)

    def check(self) -> None:
        """The sums are those of the requests, and nobody waits who could run."""
        running = self.running.values()
        assert self.kv_used == sum(ticket.kv_pages for ticket in running), "cache pages lost"
        assert self.typical_used == sum(ticket.typical_pages for ticket in running), "flow pages lost"
        for ticket in islice(self.queue.values(), 1):
            assert not self._fits(ticket), "a request waits though there is room"

    def _fits(self, ticket: Ticket) -> bool:
        capacity = self.capacity
        if len(self.running) >= capacity.running or self.kv_used + ticket.kv_pages > capacity.kv_pages:
            return False
        if not ticket.flow_pages:
            return True
        if self.running and self.typical_used + ticket.typical_pages > capacity.flow_pages:
            return False
        free = capacity.flow_pages - self.held - ticket.held_pages
        needs = [(other.flow_pages - other.held_pages, other.held_pages) for other in self.running.values()]
        needs.append((ticket.flow_pages - ticket.held_pages, ticket.held_pages))
        return free >= 0 and is_safe(free, needs)
