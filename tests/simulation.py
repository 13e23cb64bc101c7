"""A seeded world around the scheduler: callers, voices, a fake device with real page pools, and all that goes wrong.

``World.step`` does what the engine does in a step and then checks what must hold after every one of them
(``World.check``). The fake device's "audio" is a running hash of a request's own tokens, so that a token which strays
is heard. Nothing here is random but for the seed.
"""

from __future__ import annotations

import random

import torch

from vivace.engine.kv_cache import RowLease, RowPool
from vivace.engine.scheduler import Capacity, Place, Policy, Scheduler, StepPlan, Ticket
from vivace.errors import OverloadedError, VivaceError
from vivace.models.flow_pages import PagePool

CHUNK, LOOKAHEAD, PAGE = 25, 3, 32
MODULUS = (1 << 61) - 1
VOICES = (0, 40, 90)
"""Prompt tokens of each voice."""

PATIENCE_MS = 4000
"""A ready request is served at least so often while pages allow it."""

NORMAL = Capacity(batch=4, running=6, queue=5, kv_pages=90, flow_pages=60)
TIGHT = Capacity(batch=8, running=8, queue=4, kv_pages=90, flow_pages=26)
PLAIN = Capacity(running=5, queue=3, kv_pages=90, flow_pages=90)
POLICY = Policy(max_pending_chunks=3, max_stall_ms=20_000, max_queue_ms=15_000, max_prompts=2)


class Violation(AssertionError):
    """Something that must never happen did."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)


def token_of(seed: int, index: int) -> int:
    """What the speech LM "says"."""
    return (seed * 1_000_003 + index * 7919) % 6561


def fold(heard: int, token: int) -> int:
    return (heard * 31 + token + 1) % MODULUS


class Caller:
    """One request and its consumer, as the engine and the world outside see them."""

    __slots__ = (
        "alone", "border", "chunks", "end", "fed", "flow_pages", "heard", "in_flight", "is_open", "lease", "made",
        "prompt", "ready_ms", "seed", "segments", "takes", "text_known", "ticket", "tokens", "total", "voice",
    )  # fmt: skip

    def __init__(self, ticket: Ticket, seed: int, voice: int, totals: list[int], is_streamed: bool) -> None:
        self.ticket, self.seed, self.voice = ticket, seed, voice
        self.prompt = VOICES[voice]
        self.segments = totals
        self.total = 0
        self.is_open = False
        self.made = self.fed = self.border = 0
        self.tokens: list[int] = []
        self.in_flight = 0
        self.text_known = 0 if is_streamed else 1 << 30
        self.lease: RowLease | None = None
        self.flow_pages: list[int] = []
        self.chunks = 0
        self.heard = 0
        self.takes = True
        self.end = ""
        self.ready_ms = -1
        self.alone = 0
        for number, total in enumerate(totals):
            for index in range(total):
                self.alone = fold(self.alone, token_of(seed + number, index))


class World:
    """One run.

    Attributes:
        ends: how many requests came to which end; accepted, refused: those that asked.
    """

    def __init__(self, seed: int, capacity: Capacity = NORMAL, policy: Policy = POLICY) -> None:
        self.random = random.Random(seed)
        self.capacity = capacity
        self.scheduler = Scheduler(policy)
        self.scheduler.use(capacity)
        self.rows = RowPool(capacity.running, capacity.kv_pages + 1, PAGE)
        prompts = [prompt // CHUNK for prompt in VOICES]
        size = 256 * 4
        self.pool = PagePool(
            1, torch.float32, torch.device("cpu"), (capacity.flow_pages + sum(prompts)) * size
        )
        self.kept = [self.pool.take_many(count) for count in prompts]
        self.num_kept = sum(prompts)
        self.live: dict[int, Caller] = {}
        self.decoding: list[Caller] = []
        self.now = 0
        self.steps = self.idle = 0
        self.accepted = self.refused = 0
        self.ends = {"audio": 0, "error": 0, "cancelled": 0, "queue": 0, "consumer": 0}
        self.is_draining = False
        self.late_chunks = 0

    # -- the engine's part -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step of the engine, among what happens around it. False if there was nothing to do."""
        self.steps += 1
        self.surround()
        self.collect()
        now, scheduler = self.now, self.scheduler
        plan = scheduler.plan(now)
        if plan is None:
            self.check_idle()
            wake = scheduler.wake_ms
            self.now += 50 if wake is None else max(1, min(2000, wake - now))
            self.idle += 1
            self.check()
            return False
        self.check_plan(plan)
        for request_id, reason in plan.overdue:
            self.finish(self.live[request_id], reason)
        self.swap(plan)
        chunks = 0
        for request_id, hop in plan.render:
            chunks += hop
            self.render(self.live[request_id], hop)
        for request_id, count in plan.decode:
            caller = self.live.get(request_id)
            if caller is not None:
                self.launch(caller, count)
        cost = 2 + 4 * chunks + len(plan.decode)
        self.now += cost
        scheduler.limit.note(cost, self.now - now)
        self.check()
        return True

    def swap(self, plan: StepPlan) -> None:
        """Pages that go to host memory and come back (``simulation_swaps``)."""
        require(not plan.swap_out and not plan.swap_in, "swapped without host memory")

    def collect(self) -> None:
        """Tokens that the last step queued."""
        decoding, self.decoding = self.decoding, []
        for caller in decoding:
            if caller.end:
                continue
            if self.random.random() < 0.002:  # values that are not finite
                self.finish(caller, "error")
                continue
            for _ in range(caller.in_flight):
                if caller.made >= min(caller.total, caller.text_known):
                    break
                self.receive(caller, token_of(caller.seed, caller.made))
                caller.made += 1
            caller.in_flight = 0
            self.update(caller)

    def receive(self, caller: Caller, token: int) -> None:
        caller.tokens.append(token)

    def launch(self, caller: Caller, count: int) -> None:
        require(count > 0, "an empty burst")
        if not caller.is_open:
            self.open(caller)
        caller.in_flight = count
        self.decoding.append(caller)

    def open(self, caller: Caller) -> None:
        """The next segment: a row of the speech LM and a stream of the flow behind the voice's prompt."""
        caller.is_open = True
        caller.total = caller.segments.pop(0)
        caller.made, caller.fed, caller.tokens = 0, caller.prompt, []
        caller.border = caller.prompt
        caller.lease = self.rows.open(caller.ticket.kv_pages * PAGE)
        caller.flow_pages = [self.pool.share(page) for page in self.kept[caller.voice]]

    def render(self, caller: Caller, hop: int) -> None:
        if self.random.random() < 0.002:  # the flow or the vocoder fails, or memory that another program took
            self.finish(caller, "error")
            return
        ticket = caller.ticket
        require(caller.is_open and ticket.tokens_until_audio == 0, "rendered without tokens")
        is_complete = caller.made == caller.total
        border = (caller.border // CHUNK + hop) * CHUNK
        count = len(caller.tokens) if is_complete and len(caller.tokens) + caller.fed <= border + LOOKAHEAD else (
            border + LOOKAHEAD - caller.fed
        )  # fmt: skip
        taken, caller.tokens = caller.tokens[:count], caller.tokens[count:]
        require(bool(taken) or is_complete, "nothing to render")
        for token in taken:
            caller.heard = fold(caller.heard, token)
        caller.fed += len(taken)
        segment_ends = is_complete and not caller.tokens
        pages = -(-caller.fed // CHUNK) if segment_ends else max(0, caller.fed - LOOKAHEAD) // CHUNK
        caller.border = pages * CHUNK
        more = pages - len(caller.flow_pages)
        require(
            self.pool.pages_in_use + more <= self.capacity.flow_pages + self.num_kept, "out of pages half-way"
        )
        caller.flow_pages += self.pool.take_many(more)
        if ticket.first_ms >= 0 and ticket.credit_ms(self.now) < 0:
            self.late_chunks += 1
        ticket.note_chunk(self.now, ticket.audio_ms + 40 * len(taken))
        caller.chunks += 1
        if segment_ends:
            self.close(caller)
            if not caller.segments:
                self.finish(caller, "audio")
                return
        self.update(caller)

    def close(self, caller: Caller) -> None:
        """What a segment holds on the device goes back."""
        if caller.lease is not None:
            self.rows.close(caller.lease)
            caller.lease = None
        while caller.flow_pages:
            self.pool.drop(caller.flow_pages.pop())
        caller.is_open = False
        if caller.text_known < 1 << 30 and caller.segments:
            caller.text_known = 0
        caller.seed += 1

    def finish(self, caller: Caller, end: str) -> None:
        """The one end of a request."""
        require(not caller.end, "ended twice")
        caller.end = end
        if end == "audio":
            require(caller.heard == caller.alone, "another request's tokens")
        self.close(caller)
        self.ends[end] += 1
        self.scheduler.remove(caller.ticket.request_id, self.now if end == "audio" else None)
        del self.live[caller.ticket.request_id]

    def update(self, caller: Caller) -> None:
        """Tells the scheduler what the request can do next."""
        ticket = caller.ticket
        ticket.opens_segment = not caller.is_open
        ticket.hold(max(caller.prompt // CHUNK, len(caller.flow_pages)))
        ticket.spare_tokens = 0
        if not caller.is_open:
            ticket.tokens_until_audio, ticket.is_complete = 1 << 30, False
            ticket.waits_for_text = caller.text_known == 0
            return
        known = len(caller.tokens)
        ticket.is_complete = caller.made == caller.total
        ticket.waits_for_text = not ticket.is_complete and caller.made >= caller.text_known
        needed = max(0, (caller.border // CHUNK + 1) * CHUNK + LOOKAHEAD - caller.fed)
        if ticket.is_complete:
            ticket.tokens_until_audio, ticket.spare_tokens = 0, known
        else:
            ticket.tokens_until_audio = max(0, needed - known)
            ticket.spare_tokens = max(0, known - needed)

    # -- the world's part --------------------------------------------------------------------------------------

    def surround(self) -> None:
        """Arrivals, cancels, readers that stop and go on, text that comes."""
        chance = self.random.random
        if not self.is_draining and chance() < 0.3:
            self.arrive()
        for caller in list(self.live.values()):
            draw = chance()
            if draw < 0.001 and not self.is_draining:
                self.finish(caller, "cancelled")
                continue
            if draw > 0.997 and not self.is_draining:
                caller.takes = not caller.takes
            if caller.chunks and caller.takes and draw < 0.5:
                caller.chunks -= 1
                caller.ticket.pending_chunks -= 1
                caller.ticket.lagging_ms = -1
            if caller.text_known < 1 << 30 and draw > 0.8:
                caller.text_known += 15
                self.add_text(caller)

    def add_text(self, caller: Caller) -> None:
        if caller not in self.decoding:
            self.update(caller)

    def arrive(self) -> None:
        draw = self.random
        voice, is_streamed = draw.randrange(len(VOICES)), draw.random() < 0.2
        texts = [draw.randint(1, 14) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        totals = [max(1, int(text * draw.uniform(2, 20) * draw.random())) for text in texts]
        prompt, most = VOICES[voice], max(CHUNK, 20 * max(texts))
        ticket = Ticket(
            self.accepted + self.refused + 1,
            submitted_ms=self.now,
            kv_pages=-(-(prompt + 20 + most) // PAGE),
            flow_pages=-(-(prompt + most) // CHUNK),
            likely_pages=-(-(prompt + most) // CHUNK),
            prompt_pages=prompt // CHUNK,
        )
        caller = Caller(ticket, draw.getrandbits(40), voice, totals, is_streamed)
        self.update(caller)
        try:
            self.scheduler.add(ticket)
        except OverloadedError as error:
            require(error.retry_after_s >= 1, "no time to come back")
            self.refused += 1
            return
        self.accepted += 1
        self.live[ticket.request_id] = caller

    def drain(self) -> None:
        """No more arrivals; everyone reads and all text comes: every request must come to its end soon."""
        self.is_draining = True
        for caller in self.live.values():
            caller.takes = True
            caller.text_known = 1 << 30
            self.add_text(caller)
        before = self.steps
        while self.live:
            self.step()
            require(self.steps - before < 20_000, "a request never ends")
        self.check()
        require(self.rows.num_open_rows == 0 and self.pool.pages_in_use == self.num_kept, "pages left")

    # -- what must hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every step."""
        rows = pages = leased = 0
        shared = self.num_kept
        for caller in self.live.values():
            if caller.lease is not None:
                rows += 1
                leased += len(caller.lease.pages)
            pages += max(0, len(caller.flow_pages) - VOICES[caller.voice] // CHUNK)
        require(self.pool.pages_in_use == shared + pages, "flow pages lost")
        require(self.rows.num_open_rows == rows, "rows lost")
        require(self.rows.num_free_pages + leased == self.capacity.kv_pages, "cache pages lost")
        require(len(self.scheduler) == len(self.live), "the scheduler's table is not the engine's")
        require(self.accepted == sum(self.ends.values()) + len(self.live), "counters do not add up")
        if not self.steps % 64:
            self.scheduler.requests.start()  # as the next plan does: pages may have come back since this one
            self.scheduler.requests.check()
            self.rows.check()

    def check_idle(self) -> None:
        """Nothing was planned: then there must be nothing that could be done."""
        requests, policy = self.scheduler.requests, self.scheduler.policy
        requests.check()
        free = self.capacity.flow_pages - requests.held
        here = num_blocked = num_moving = 0
        for ticket in requests.running.values():
            is_ready = ticket.pending_chunks < policy.max_pending_chunks and (
                not ticket.tokens_until_audio or not ticket.waits_for_text
            )
            is_ready = is_ready and ticket.place is Place.DEVICE
            if policy.max_ahead_ms is not None and ticket.credit_ms(self.now) > policy.max_ahead_ms:
                is_ready = False
            blocked = not ticket.tokens_until_audio and not requests.may_take(free, ticket, 1)
            require(not is_ready or blocked, "a lost wake-up: it could run, and sleeps")
            here += ticket.place is Place.DEVICE
            num_blocked += is_ready and blocked
            num_moving += ticket.place in (Place.LEAVING, Place.RETURNING)
        require(not here or num_moving or num_blocked < here, "they stop each other for ever")
        require(not requests.queue or bool(requests.running), "the queue waits for nobody")

    def check_plan(self, plan: StepPlan) -> None:
        """Nobody who could be rendered is left out for long."""
        rendered = dict(plan.render)
        decoded = dict(plan.decode)
        limit, most = self.scheduler.limit.chunks, self.scheduler.policy.max_pending_chunks
        require(sum(rendered.values()) <= limit, "more chunks than the limit")
        for caller in self.live.values():
            ticket = caller.ticket
            is_ready = not ticket.tokens_until_audio and ticket.pending_chunks < most
            is_ready = is_ready and ticket.place is Place.DEVICE
            if not is_ready or ticket.request_id in rendered or ticket.request_id in decoded:
                caller.ready_ms = -1
            elif caller.ready_ms < 0:
                caller.ready_ms = self.now
            elif self.now - caller.ready_ms > PATIENCE_MS:
                self.check_starved(ticket)

    def check_starved(self, ticket: Ticket) -> None:
        policy, requests = self.scheduler.policy, self.scheduler.requests
        if policy.max_ahead_ms is not None and ticket.credit_ms(self.now) > policy.max_ahead_ms:
            return
        free = self.capacity.flow_pages - requests.held
        blocked = not requests.may_take(free, ticket, 1)
        require(blocked, "starved past its deadline while there was room")


def run(world: World, steps: int) -> World:
    """So many steps, then to the end of every request."""
    try:
        for _ in range(steps):
            world.step()
        world.drain()
    except (VivaceError, LookupError, ValueError) as error:  # a pool is asked for more than it has
        raise Violation(f"a step failed: {error}") from error
    return world
