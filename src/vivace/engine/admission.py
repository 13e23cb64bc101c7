"""Who may start: requests that run, and those that wait until there is room, in the order in which they came.

A request starts only when the worst it can take of the speech LM's cache is free, and when afterwards every running
stream can still get its worst of the flow's pages, one after the other (``is_safe``): none ever ends for want of
memory. So that streams seldom have to wait for each other, the sum of what they are likely to take must fit as well;
how much that is, in parts of what the length of the text allows, is learned from the requests that have finished.

Requests whose pages are in host memory (``swap_plan``) run on in this table, but count only with what they left on the
device. They come back when there is room as for a new request. So that there will be, the running ones must be able
to end without them, and they behind those, one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice

from vivace.engine.ticket import Capacity, Place, Ticket
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
        num_due: requests that cannot come back from host memory for want of room: nobody starts before them.
        host_used: pages of the flow in host memory, or promised a place there; host_cache_used: of the cache.
        num_away: requests whose pages are there, or on the way there or back.
        swaps_out, swaps_in: requests whose pages have gone there, and come back, so far.
    """

    def __init__(self, capacity: Capacity, max_requests: int | None = None) -> None:
        self.capacity = capacity
        self.most = capacity.running + capacity.queue if max_requests is None else max_requests
        self.running: dict[int, Ticket] = {}
        self.queue: dict[int, Ticket] = {}
        self.kv_used = 0
        self.typical_used = 0
        self.num_due = self.num_away = self.host_used = self.host_cache_used = 0
        self.swaps_out = self.swaps_in = 0
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
            if ticket.place is not Place.HOST:
                self.kv_used -= ticket.kv_pages
                self.typical_used -= ticket.typical_pages
            self._leave_host(ticket)
            self.num_away -= ticket.place is not Place.DEVICE
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
        while self.queue and not self.num_due:
            ticket = next(iter(self.queue.values()))
            ticket.typical_pages = max(ticket.held_pages, ticket.likely_pages * self.share_percent // 100)
            if not self.fits(ticket):
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

    def may_take(self, free: int, ticket: Ticket, pages: int) -> bool:
        """Whether every stream can still reach its end when ``ticket`` takes so many of the ``free`` pages now."""
        if pages > free:
            return False
        streams = []
        for other in self.running.values():
            if not _may_run(other):
                continue
            held = other.held_pages + (pages if other is ticket else 0)
            streams.append((other.flow_pages - held, held))
        return is_safe(free - pages, streams)

    def check(self) -> None:
        """The sums are those of the requests, and nobody waits who could run."""
        here = [ticket for ticket in self.running.values() if ticket.place is not Place.HOST]
        away = [ticket.swapped_pages for ticket in self.running.values() if ticket.place is not Place.DEVICE]
        assert self.num_away == len(away), "requests lost in host memory"
        assert self.kv_used == sum(ticket.kv_pages for ticket in here), "cache pages lost"
        assert self.typical_used == sum(ticket.typical_pages for ticket in here), "flow pages lost"
        assert self.host_used == sum(away) <= self.capacity.host_pages, "host pages lost"
        cached = sum(ticket.swapped_cache for ticket in self.running.values())
        assert self.host_cache_used == cached <= self.capacity.host_cache, "cache pages lost in host memory"
        for ticket in islice(self.queue.values(), 0 if self.num_due else 1):
            assert not self.fits(ticket), "a request waits though there is room"

    def fits(self, ticket: Ticket, aside: Collection[Ticket] = ()) -> bool:
        """Whether there is room for a request to start, to come back from host memory, or for its next page.

        Args:
            aside: as if the pages of these were in host memory already.
        """
        capacity, is_new = self.capacity, ticket.request_id not in self.running
        if not is_new and ticket.place is Place.DEVICE:
            return self._is_safe(ticket, 1, aside)
        if is_new and len(self.running) >= capacity.running:
            return False
        kv_used = self.kv_used - sum(other.kv_pages for other in aside)
        if kv_used + ticket.kv_pages > capacity.kv_pages:
            return False
        if not ticket.flow_pages:
            return True
        typical_used = self.typical_used - sum(other.typical_pages for other in aside)
        if typical_used and typical_used + ticket.typical_pages > capacity.flow_pages:
            return False
        return self._is_safe(ticket, ticket.held_pages if is_new else ticket.swapped_pages, aside)

    def _is_safe(self, ticket: Ticket, pages: int, aside: Collection[Ticket]) -> bool:
        """Whether all can come to their end when ``ticket`` takes so many pages, as if those ``aside`` were away."""
        free = self.capacity.flow_pages - self.held - pages
        free += sum(other.held_pages - other.prompt_pages for other in aside)
        here = [other for other in self.running.values() if _may_run(other)]
        needs = [
            (other.flow_pages - other.held_pages, other.held_pages)
            for other in here
            if other is not ticket and other not in aside
        ]
        held = pages if ticket.request_id not in self.running else ticket.held_pages + pages
        return free >= 0 and is_safe(free, [*needs, (ticket.flow_pages - held, held)])

    # -- host memory -------------------------------------------------------------------------------------------

    def may_leave(self, tickets: Collection[Ticket]) -> bool:
        """Whether host memory has room for their pages, the others can end without them, and then all that are there
        one after the other."""
        pages = sum(ticket.held_pages - ticket.prompt_pages for ticket in tickets)
        cached = sum(ticket.cached_pages for ticket in tickets)
        if self.host_used + pages > self.capacity.host_pages:
            return False
        if self.host_cache_used + cached > self.capacity.host_cache:
            return False
        here, away = [], []
        for other in self.running.values():
            if _may_run(other) and other not in tickets:
                here.append((other.flow_pages - other.held_pages, other.held_pages))
            else:
                away.append((other.flow_pages - other.prompt_pages, other.prompt_pages))
        left = self.capacity.flow_pages - sum(prompt for _, prompt in away)
        return is_safe(self.capacity.flow_pages - self.held + pages, here) and is_safe(left, away)

    def leave(self, ticket: Ticket) -> None:
        """Its pages begin to leave the device; until ``moved`` they are held there and in host memory."""
        assert ticket.place is Place.DEVICE, "only what is on the device can leave it"
        ticket.place = Place.LEAVING
        self.num_away += 1
        ticket.swapped_pages = ticket.held_pages - ticket.prompt_pages
        self.host_used += ticket.swapped_pages
        ticket.swapped_cache = ticket.cached_pages
        self.host_cache_used += ticket.swapped_cache

    def stay(self, ticket: Ticket) -> None:
        """After ``leave``: its pages could not be sent, and are where they were."""
        assert ticket.place is Place.LEAVING, "it was not about to leave"
        ticket.place = Place.DEVICE
        self.num_away -= 1
        self._leave_host(ticket)

    def _leave_host(self, ticket: Ticket) -> None:
        """What was kept for it there is free."""
        self.host_used -= ticket.swapped_pages
        self.host_cache_used -= ticket.swapped_cache
        ticket.swapped_pages = ticket.swapped_cache = 0

    def come_back(self, ticket: Ticket) -> None:
        """Its pages begin to come back, which ``fits``; until ``moved`` they are held in both places."""
        assert ticket.place is Place.HOST, "only what is in host memory can come back"
        ticket.place = Place.RETURNING
        self.kv_used += ticket.kv_pages
        self.typical_used += ticket.typical_pages
        ticket.hold(ticket.held_pages + ticket.swapped_pages)

    def moved(self, ticket: Ticket) -> None:
        """All its pages have arrived where they were sent."""
        if ticket.place is Place.LEAVING:
            ticket.place = Place.HOST
            ticket.held_pages -= ticket.swapped_pages
            self.kv_used -= ticket.kv_pages
            self.typical_used -= ticket.typical_pages
            self.swaps_out += 1
        else:
            assert ticket.place is Place.RETURNING, "it was not on its way"
            ticket.place = Place.DEVICE
            self.num_away -= 1
            self._leave_host(ticket)
            self.swaps_in += 1


def _may_run(ticket: Ticket) -> bool:
    """Whether others may count on it to come to its end and give its pages back."""
    return ticket.place is Place.DEVICE or ticket.place is Place.RETURNING
