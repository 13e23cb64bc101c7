"""A million steps of the scheduler among callers who come, leave, stall and fail; and bugs that must be found by it.
A good quarter of the steps has host memory, where pages go and come back.

What is checked after every step is told in ``simulation.World.check``.
"""

from dataclasses import replace

import pytest

from tests.simulation import NORMAL, PLAIN, POLICY, TIGHT, Violation, World, run
from tests.simulation_swaps import CACHE_SWAPS, NORMAL_SWAPS, SWAPS, TIGHT_SWAPS, SwapWorld
from vivace.engine import admission, scheduler, swap_plan
from vivace.engine.admission import Admission
from vivace.engine.kv_cache import RowPool
from vivace.engine.ticket import Capacity, Place
from vivace.models.flow_pages import PagePool
from vivace.models.host_pages import HostFrames

STEPS, SWAP_STEPS = 120_000, 70_000
AHEAD = replace(POLICY, max_ahead_ms=3000, max_pending_chunks=50)


@pytest.mark.parametrize(
    ("seed", "capacity", "policy"),
    [
        (1, NORMAL, POLICY),
        (4, TIGHT, POLICY),
        (6, TIGHT, AHEAD),
        (7, PLAIN, POLICY),
        (8, replace(NORMAL, running=3, queue=1), POLICY),
        (9, replace(NORMAL, running=2, wave=4), POLICY),
        (10, replace(TIGHT, batch=16, running=3, wave=8, wave_ms=200), POLICY),
        (11, NORMAL, replace(POLICY, first_rows=1, crowd_rows=2)),
    ],
)
def test_a_million_steps(seed, capacity, policy):
    world = run(World(seed, capacity, policy), STEPS)
    assert world.steps >= STEPS
    # All that can happen did.
    assert min(world.ends[end] for end in ("audio", "error", "cancelled")) > 50
    if policy is POLICY:
        assert world.ends["consumer"] > 10
    assert world.refused > 10


def test_the_same_seed_is_the_same_run():
    one, other = run(World(5, TIGHT), 3000), run(World(5, TIGHT), 3000)
    assert (one.ends, one.now, one.refused) == (other.ends, other.now, other.refused)


# -- planted bugs: each must be found ---------------------------------------------------------------------------


@pytest.fixture(params=[1, 2, 3])
def seed(request):
    """Nearly every seed finds every bug."""
    return request.param


def found_by(world, steps=20_000):
    with pytest.raises((Violation, AssertionError)) as caught:
        run(world, steps)
    return str(caught.value)


def test_a_leaked_flow_page_is_found(monkeypatch, seed):
    drop, dropped = PagePool.drop, []

    def leaky(self, page):
        dropped.append(page)
        if len(dropped) % 1000:
            drop(self, page)

    monkeypatch.setattr(PagePool, "drop", leaky)
    assert "flow pages lost" in found_by(World(seed))


def test_a_leaked_cache_page_is_found(monkeypatch, seed):
    close, closed = RowPool.close, []

    def leaky(self, lease):
        if lease.is_open:
            closed.append(lease)
            if len(closed) % 50 == 0:
                lease.pages.pop()
        close(self, lease)

    monkeypatch.setattr(RowPool, "close", leaky)
    assert "pages lost" in found_by(World(seed))


def test_a_reservation_that_is_never_given_back_is_found(monkeypatch, seed):
    remove = Admission.remove

    def forgetful(self, request_id, finished_ms=None):
        before = self.kv_used
        remove(self, request_id, finished_ms)
        if request_id % 100 == 0:
            self.kv_used = before

    monkeypatch.setattr(Admission, "remove", forgetful)
    assert "lost" in found_by(World(seed))


def test_a_token_in_another_stream_is_found(monkeypatch, seed):
    class Mixing(World):
        strayed = 0

        def receive(self, caller, token):
            others = [other for other in self.live.values() if other is not caller and other.is_open]
            if others and self.random.random() < 0.001:
                caller = others[0]
            super().receive(caller, token)

    assert "another request's tokens" in found_by(Mixing(seed))


def test_rows_of_two_streams_mixed_up_are_found(seed):
    class Swapped(World):
        def collect(self):
            if self.steps > 500 and len(self.decoding) > 1:
                one, other = self.decoding[:2]
                one.seed, other.seed = other.seed, one.seed
            super().collect()

    assert "another request's tokens" in found_by(Swapped(seed))


def test_a_lost_wake_up_of_a_request_is_found(seed):
    """Text comes, and nobody tells the scheduler."""

    class Deaf(World):
        def add_text(self, caller):
            if self.is_draining:
                super().add_text(caller)

        def step(self):
            done = super().step()
            for caller in self.live.values():  # what the engine would have known
                waits = caller.ticket.waits_for_text
                if waits and caller.made < caller.text_known and caller not in self.decoding:
                    self.deaf = getattr(self, "deaf", 0) + 1
                    if self.deaf > 200:
                        raise Violation("a lost wake-up: text has come")
            return done

    assert "wake-up" in found_by(Deaf(seed))


def test_a_lost_wake_up_of_the_queue_is_found(monkeypatch, seed):
    start, ends = Admission.start, []

    def sleepy(self):
        ends.append(self)
        if len(ends) < 3000:
            start(self)

    monkeypatch.setattr(Admission, "start", sleepy)
    assert "waits" in found_by(World(seed))


def test_a_scheduler_that_forgets_who_is_ready_is_found(monkeypatch, seed):
    plan = scheduler.Scheduler.plan

    def forgetful(self, now_ms=0):
        found = plan(self, now_ms)
        if found is None or not found.render:
            return found
        kept = tuple(entry for entry in found.render if entry[0] % 7)
        return replace(found, render=kept)

    monkeypatch.setattr(scheduler.Scheduler, "plan", forgetful)
    assert "starved" in found_by(World(seed))


def test_the_latest_deadline_first_is_found(monkeypatch, seed):
    monkeypatch.setattr(scheduler, "_order", lambda entry: tuple(-part for part in entry[:3]))
    crowd = Capacity(running=20, queue=3, kv_pages=400, flow_pages=400)
    assert "starved" in found_by(World(seed, crowd, replace(POLICY, max_pending_chunks=1000)))


def test_pages_promised_twice_are_found(monkeypatch, seed):
    """Without the look at what others may still need, streams stop each other for ever or run out."""
    monkeypatch.setattr(Admission, "may_take", lambda self, free, ticket, pages: pages <= free)
    monkeypatch.setattr(
        Admission, "fits", lambda self, ticket, aside=(): len(self.running) < self.capacity.running
    )
    found = found_by(World(seed, replace(TIGHT, kv_pages=10_000)))
    assert "for ever" in found or "starved" in found


def test_an_end_that_comes_twice_is_found(seed):
    class Double(World):
        def finish(self, caller, end):
            super().finish(caller, end)
            if end == "cancelled" and self.accepted > 100:
                super().finish(caller, end)

    assert "ended twice" in found_by(Double(seed))


# -- pages that go to host memory and come back ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "capacity", "policy"),
    [
        (11, NORMAL_SWAPS, SWAPS),
        (12, TIGHT_SWAPS, SWAPS),
        (13, TIGHT_SWAPS, replace(SWAPS, swap_out_ms=500, swap_in_ms=250, swap_after_ms=0)),
        (14, CACHE_SWAPS, SWAPS),
    ],
)
def test_as_many_steps_with_host_memory(seed, capacity, policy):
    world = run(SwapWorld(seed, capacity, policy), SWAP_STEPS)
    requests = world.scheduler.requests
    assert min(world.ends[end] for end in ("audio", "error", "cancelled", "consumer")) > 10
    assert 300 < requests.swaps_in < requests.swaps_out  # some ended while they were away
    assert world.most_away > 2
    assert world.kept_waiting > 1000


def test_more_run_at_once_with_host_memory():
    """What it is good for: among callers who do not listen, others are heard."""
    without = run(World(3, replace(TIGHT_SWAPS, host_pages=0), SWAPS), 20_000)
    with_host = run(SwapWorld(3, TIGHT_SWAPS, SWAPS), 20_000)
    heard = [world.ends["audio"] / world.now for world in (without, with_host)]
    assert heard[1] > 1.3 * heard[0]
    assert with_host.ends["queue"] < without.ends["queue"]
    assert with_host.late_chunks <= without.late_chunks


def test_pages_that_leave_while_tokens_are_under_way_are_found(monkeypatch, seed):
    leave = swap_plan._is_idle

    def hasty(ticket, policy, now_ms):
        under_way, ticket.tokens_under_way = ticket.tokens_under_way, 0
        found = leave(ticket, policy, now_ms)
        ticket.tokens_under_way = under_way
        return found

    monkeypatch.setattr(swap_plan, "_is_idle", hasty)
    assert "tokens are under way" in found_by(SwapWorld(seed, TIGHT_SWAPS))


def test_a_request_that_runs_before_its_pages_are_back_is_found(monkeypatch, seed):
    come_back = Admission.come_back

    def early(self, ticket):
        come_back(self, ticket)
        ticket.place = Place.DEVICE

    monkeypatch.setattr(Admission, "come_back", early)
    found = found_by(SwapWorld(seed, TIGHT_SWAPS))
    assert "is not its own" in found or "lost" in found or "step failed" in found


def test_a_frame_that_two_requests_write_to_is_found(monkeypatch, seed):
    take, taken = HostFrames.take_many, []

    def shared(self, count):
        frames = take(self, count)
        if frames:
            taken.append(frames[0])
        if frames and len(taken) % 20 == 19:
            frames[0] = taken[-2]
        return frames

    monkeypatch.setattr(HostFrames, "take_many", shared)
    assert found_by(SwapWorld(seed, TIGHT_SWAPS))


def test_pages_that_come_back_in_another_order_are_found(seed):
    class Turned(SwapWorld):
        def come_back(self, caller):
            super().come_back(caller)
            self.away[caller].frames.reverse()

    assert "is not its own" in found_by(Turned(seed, TIGHT_SWAPS))


def test_nobody_who_looks_after_the_copies_is_found(monkeypatch, seed):
    monkeypatch.setattr(scheduler, "is_moving", lambda ticket: False)
    assert "nobody looks after the copies" in found_by(SwapWorld(seed, TIGHT_SWAPS))


def test_a_return_that_is_never_looked_for_again_is_found(monkeypatch, seed):
    """Somebody waits for room in host memory, and ends: those behind him in the queue must not wait for him."""
    find = scheduler.plan_returns

    def stale(requests, policy, now_ms):
        return find(requests, policy, now_ms) if requests.num_away else ([], None)

    monkeypatch.setattr(scheduler, "plan_returns", stale)
    waits = SwapWorld(seed, TIGHT_SWAPS, replace(SWAPS, swap_out_ms=10**9, swap_in_ms=5000))
    found = found_by(waits)
    assert "who is not there any more" in found or "step failed" in found


def test_counting_on_requests_that_are_away_is_found(monkeypatch, seed):
    """Those on the device must be able to end without them."""
    monkeypatch.setattr(admission, "_may_run", lambda ticket: True)
    few = replace(TIGHT_SWAPS, running=14, flow_pages=16, kv_pages=60, host_pages=40)
    assert "for ever" in found_by(SwapWorld(seed, few, replace(SWAPS, max_stall_ms=None)))


def test_room_that_is_promised_twice_is_found(monkeypatch, seed):
    """To a new request, and to one that comes back."""
    come_back = Admission.come_back

    def forgetful(self, ticket):
        come_back(self, ticket)
        self.kv_used -= ticket.kv_pages

    monkeypatch.setattr(Admission, "come_back", forgetful)
    assert found_by(SwapWorld(seed, CACHE_SWAPS))
