"""The world of ``simulation`` with host memory: pages have contents, copies take time, and everything else goes on.

Every page of a request holds a mark that nobody else's page has. All of them are looked at whenever the request runs,
so that a page which was lost, mixed up or not there yet on the way to host memory and back is seen at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.simulation import CHUNK, NORMAL, POLICY, TIGHT, Caller, World, require
from vivace.engine.scheduler import Place, Policy, StepPlan, Ticket
from vivace.engine.swap_plan import is_moving, is_paused, waits_for_text
from vivace.engine.ticket import Capacity
from vivace.models.host_pages import HostFrames

NORMAL_SWAPS = replace(NORMAL, running=10, flow_pages=40, host_pages=60)
TIGHT_SWAPS = replace(TIGHT, running=10, host_pages=20)
CACHE_SWAPS = replace(TIGHT, running=12, kv_pages=40, flow_pages=200, host_pages=200, host_cache=40)
SWAPS = replace(POLICY, max_pending_chunks=5, swap_out_ms=3000, swap_in_ms=1500)
IMPATIENT = 0.04
"""How likely one of those that cannot come back leaves, in each step."""
NOTHING = -1
"""What is in a page until its contents have come."""


@dataclass
class Away:
    """What of a caller is in host memory, and when a copy that is under way ends."""

    frames: list[int]
    marks: list[int]
    cache: list[int]
    done_ms: int = NOTHING


class SwapWorld(World):
    """``World`` with host memory.

    Attributes:
        most_away: most requests that were away at once. kept_waiting: tokens that were still under way at a plan.
    """

    def __init__(self, seed: int, capacity: Capacity = NORMAL_SWAPS, policy: Policy = SWAPS) -> None:
        super().__init__(seed, capacity, policy)
        self.host = HostFrames(capacity.host_pages, 1, is_pinned=False)
        self.frames = [NOTHING] * capacity.host_pages
        self.flow_memory: dict[int, int] = {}
        self.cache_memory: dict[int, int] = {}
        self.away: dict[Caller, Away] = {}
        self.most_away = self.kept_waiting = 0

    # -- contents ----------------------------------------------------------------------------------------------

    def own_pages(self, caller: Caller) -> list[int]:
        return caller.flow_pages[caller.prompt // CHUNK :]

    @staticmethod
    def mark(caller: Caller, index: int, salt: int) -> int:
        return hash((caller.seed, index, salt))

    def check_contents(self, caller: Caller) -> None:
        require(caller.ticket.place is Place.DEVICE, "it runs while its pages are away")
        for index, page in enumerate(self.own_pages(caller)):
            require(
                self.flow_memory[page] == self.mark(caller, index, 1), "a page of the flow is not its own"
            )
        if caller.lease is not None:
            for index, page in enumerate(caller.lease.pages):
                require(
                    self.cache_memory[page] == self.mark(caller, index, 2),
                    "a page of the cache is not its own",
                )

    def open(self, caller: Caller) -> None:
        super().open(caller)
        for index, page in enumerate(caller.lease.pages):
            self.cache_memory[page] = self.mark(caller, index, 2)

    def launch(self, caller: Caller, count: int) -> None:
        require(caller.ticket.place is Place.DEVICE, "it runs while its pages are away")
        if not caller.ticket.tokens_under_way:
            super().launch(caller, count)
            self.check_contents(caller)

    def render(self, caller: Caller, hop: int) -> None:
        self.check_contents(caller)
        before = len(self.own_pages(caller))
        super().render(caller, hop)
        for index, page in enumerate(self.own_pages(caller)):
            if index >= before:
                self.flow_memory[page] = self.mark(caller, index, 1)

    def collect(self) -> None:
        """Some tokens are still under way when the next step is planned."""
        self.arrivals()
        late = [caller for caller in self.decoding if not caller.end and self.random.random() < 0.1]
        self.decoding = [caller for caller in self.decoding if caller not in late]
        super().collect()
        for caller in late:
            caller.ticket.tokens_under_way = caller.in_flight
            self.kept_waiting += 1
        self.decoding += late

    def update(self, caller: Caller) -> None:
        super().update(caller)
        caller.ticket.tokens_under_way = 0 if caller not in self.decoding else caller.in_flight
        lease = caller.lease
        caller.ticket.cached_pages = 0 if lease is None else len(lease.pages) + lease.num_away

    # -- the world's part --------------------------------------------------------------------------------------

    def surround(self) -> None:
        """Who cannot come back for want of room may lose patience."""
        super().surround()
        if self.scheduler.requests.num_due and not self.is_draining and self.random.random() < IMPATIENT:
            for ticket in self.due(is_urgent=False)[:1]:
                self.finish(self.live[ticket.request_id], "cancelled")

    # -- copies ------------------------------------------------------------------------------------------------

    def swap(self, plan: StepPlan) -> None:
        for request_id in plan.swap_in:
            if request_id in self.live:
                self.come_back(self.live[request_id])
        for request_id in plan.swap_out:
            if request_id in self.live:
                self.leave(self.live[request_id])
        self.most_away = max(self.most_away, len(self.away))

    def leave(self, caller: Caller) -> None:
        require(caller.in_flight == 0, "it leaves while its tokens are under way")
        pages = self.own_pages(caller)
        require(caller.ticket.swapped_pages == len(pages), "pages promised are not those that leave")
        frames = self.host.take_many(len(pages))
        for frame, page in zip(frames, pages, strict=True):
            self.frames[frame] = self.flow_memory[page]
        cache = [] if caller.lease is None else [self.cache_memory[page] for page in caller.lease.pages]
        self.away[caller] = Away(frames, [], cache, self.now + self.random.randint(1, 60))

    def come_back(self, caller: Caller) -> None:
        away = self.away[caller]
        pages = self.pool.take_many(len(away.frames))
        require(self.pool.pages_in_use <= self.capacity.flow_pages + self.num_kept, "out of pages half-way")
        caller.flow_pages += pages
        if caller.lease is not None:
            self.rows.return_to(caller.lease)
        for page in pages:
            self.flow_memory[page] = NOTHING
        away.done_ms = self.now + self.random.randint(1, 60)

    def arrivals(self) -> None:
        for caller, away in list(self.away.items()):
            if away.done_ms == NOTHING or away.done_ms > self.now:
                continue
            away.done_ms = NOTHING
            if caller.ticket.place is Place.LEAVING:
                for page in self.own_pages(caller):
                    self.pool.drop(page)
                del caller.flow_pages[caller.prompt // CHUNK :]
                if caller.lease is not None:
                    self.rows.lend(caller.lease)
            else:
                for frame, page in zip(away.frames, self.own_pages(caller), strict=True):
                    self.flow_memory[page] = self.frames[frame]
                if caller.lease is not None:
                    self.cache_memory.update(zip(caller.lease.pages, away.cache, strict=True))
                self.free_frames(caller)
            self.scheduler.moved(caller.ticket)

    def free_frames(self, caller: Caller) -> None:
        away = self.away.pop(caller, None)
        if away is not None:
            for frame in away.frames:
                self.frames[frame] = NOTHING
            self.host.give_back(away.frames)

    def finish(self, caller: Caller, end: str) -> None:
        self.free_frames(caller)
        super().finish(caller, end)

    # -- what must hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        held = sum(len(away.frames) for away in self.away.values())
        require(self.host.num_free + held == self.capacity.host_pages, "host pages lost")
        requests = self.scheduler.requests
        cached = sum(len(away.cache) for away in self.away.values())
        require(requests.host_used == held, "the scheduler's host pages are not the engine's")
        require(requests.host_cache_used == cached, "the scheduler's pages of the cache are not the engine's")
        require(cached <= self.capacity.host_cache, "more of the cache in host memory than there is room for")
        require(requests.num_away == len(self.away), "requests lost in host memory")
        require(all(caller.end == "" for caller in self.away), "pages of nobody in host memory")

    def due(self, *, is_urgent: bool) -> list[Ticket]:
        """Requests in host memory that could do something, and must do so soon if ``is_urgent``."""
        requests, policy = self.scheduler.requests, self.scheduler.policy
        due = []
        for ticket in requests.running.values():
            if ticket.place is Place.HOST and not is_paused(ticket, policy) and not waits_for_text(ticket):
                dry = (
                    ticket.submitted_ms + policy.first_ms
                    if ticket.first_ms < 0
                    else ticket.first_ms + ticket.audio_ms
                )
                if not is_urgent or dry - policy.swap_in_ms <= self.now:
                    due.append(ticket)
        return due

    def check_due(self) -> None:
        """After every plan."""
        requests = self.scheduler.requests
        away = sum(ticket.place is Place.HOST for ticket in requests.running.values())
        require(requests.num_due <= away, "the queue waits for somebody who is not there any more")

    def check_idle(self) -> None:
        super().check_idle()
        self.check_due()
        requests = self.scheduler.requests
        due = self.due(is_urgent=bool(requests.queue))
        require(not any(requests.fits(ticket) for ticket in due), "a lost wake-up: it could come back")
        if any(is_moving(ticket) for ticket in requests.running.values()):
            require(self.scheduler.wake_ms is not None, "a lost wake-up: nobody looks after the copies")

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        self.check_due()
        fits = self.scheduler.requests.fits
        due = self.due(is_urgent=True)
        require(
            not any(fits(ticket) for ticket in due), "one that is needed soon could come back and does not"
        )
