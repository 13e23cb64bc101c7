"""Whose pages go to host memory, and whose come back: single decisions. The simulation has the rest."""

import pytest

from vivace.engine.scheduler import Capacity, Place, Policy, Scheduler, Ticket
from vivace.engine.ticket import Capacity as TicketCapacity

NOW = 100_000
PAUSED = Policy().max_pending_chunks


def stream(request_id, *, credit_ms=1000, held=10, **options):
    """One that plays, with room on the device for all that it may take."""
    settings = {
        "tokens_until_audio": 10,
        "opens_segment": False,
        "kv_pages": 4,
        "flow_pages": held,
        "likely_pages": held,
        "held_pages": held,
        "prompt_pages": 2,
        "first_ms": NOW - 2000,
        "audio_ms": 2000 + credit_ms,
    }
    return Ticket(request_id, **settings | options)


def arrival(request_id, *, waited_ms=1000, pages=10):
    return Ticket(request_id, submitted_ms=NOW - waited_ms, kv_pages=4, flow_pages=pages, likely_pages=pages)


def make(*tickets, host_pages=100, flow_pages=30, **capacity):
    scheduler = Scheduler()
    settings = {"batch": 8, "running": 10, "queue": 10, "kv_pages": 100, "flow_pages": flow_pages}
    scheduler.use(Capacity(**settings | {"host_pages": host_pages} | capacity))
    for ticket in tickets:
        held, ticket.held_pages = ticket.held_pages, min(ticket.held_pages, ticket.prompt_pages)
        scheduler.add(ticket)
        if ticket.request_id in scheduler.requests.running:
            ticket.hold(held)
    return scheduler


def plan(scheduler, now_ms=NOW):
    found = scheduler.plan(now_ms)
    return ((), ()) if found is None else (found.swap_out, found.swap_in)


def arrive(scheduler, *tickets):
    for ticket in tickets:
        scheduler.moved(ticket)


def test_whom_nobody_hears_goes_first_then_who_waits_for_text_then_who_is_furthest_ahead():
    kinds = [
        {"credit_ms": -500, "pending_chunks": PAUSED},
        {"credit_ms": 7000, "waits_for_text": True},
        {"credit_ms": 9000},
        {"credit_ms": 6000},
    ]
    for first in range(len(kinds)):
        # In another order than the one in which they are to go.
        tickets = [stream(number, **kinds[number]) for number in reversed(range(first, len(kinds)))]
        scheduler = make(*tickets, arrival(9, pages=8), flow_pages=10 * len(tickets))
        assert plan(scheduler) == ((first,), ())


def test_nobody_leaves_for_one_who_has_just_come_or_without_room_in_host_memory():
    paused = stream(1, held=25, pending_chunks=PAUSED)
    scheduler = make(paused, arrival(2, waited_ms=10, pages=20))
    assert plan(scheduler) == ((), ())
    assert scheduler.wake_ms == NOW - 10 + Policy().swap_after_ms
    assert plan(scheduler, scheduler.wake_ms) == ((1,), ())
    small = make(stream(1, held=25, pending_chunks=PAUSED), arrival(2, pages=20), host_pages=22)
    assert plan(small) == ((), ())
    assert plan(make(stream(1, held=25, pending_chunks=PAUSED), arrival(2, pages=20), host_pages=23)) == (
        (1,),
        (),
    )


def test_streams_that_are_needed_stay():
    for busy in (
        stream(1, held=25, credit_ms=Policy().swap_out_ms - 1),
        stream(1, held=25, pending_chunks=PAUSED, tokens_under_way=1),
        stream(1, held=25, credit_ms=9000, is_complete=True, tokens_until_audio=0),
    ):
        assert plan(make(busy, arrival(2, pages=20)))[0] == ()


def test_nobody_leaves_in_vain():
    """Where there would be too little room all the same, or places are what is missing."""
    paused = stream(1, held=10, pending_chunks=PAUSED)
    assert plan(make(paused, stream(2, held=18), arrival(3, pages=25)))[0] == ()
    assert plan(make(stream(1, pending_chunks=PAUSED), arrival(2), running=1, flow_pages=100))[0] == ()


def test_as_few_leave_as_will_do():
    small = stream(1, held=3, pending_chunks=PAUSED, audio_ms=9000)
    large = stream(2, held=20, pending_chunks=PAUSED, audio_ms=5000)
    scheduler = make(small, large, arrival(3, pages=20))
    assert plan(scheduler) == ((2,), ())


def test_the_cache_of_the_speech_lm_can_be_what_is_missing():
    scheduler = make(
        stream(1, pending_chunks=PAUSED, kv_pages=60), stream(2, kv_pages=30), arrival(3), kv_pages=92
    )
    assert plan(scheduler) == ((1,), ())
    arrive(scheduler, scheduler.requests.running[1])
    assert scheduler.requests.kv_used == 30
    plan(scheduler)
    assert 3 in scheduler.requests.running


def test_pages_count_in_both_places_while_they_move():
    paused = stream(1, held=25, pending_chunks=PAUSED)
    scheduler = make(paused, arrival(2, pages=20))
    plan(scheduler)
    requests = scheduler.requests
    assert (requests.held, requests.host_used, requests.num_away) == (25, 23, 1)
    assert 2 in requests.queue
    assert scheduler.wake_ms is not None  # to look whether they have arrived
    arrive(scheduler, paused)
    assert (requests.held, requests.host_used, paused.place) == (2, 23, Place.HOST)
    plan(scheduler)
    assert 2 in requests.running


def test_it_comes_back_when_half_is_taken_and_nobody_waits():
    paused = stream(1, held=25, pending_chunks=PAUSED, flow_pages=28)
    other = arrival(2, pages=20)
    scheduler = make(paused, other)
    plan(scheduler)
    arrive(scheduler, paused)
    plan(scheduler)
    paused.pending_chunks = PAUSED // 2
    assert plan(scheduler) == ((), ())
    paused.pending_chunks -= 1
    assert plan(scheduler) == ((), ())  # no room
    scheduler.remove(2, NOW)
    assert plan(scheduler) == ((), (1,))
    assert (paused.place, paused.held_pages) == (Place.RETURNING, 25)
    assert plan(scheduler) == ((), ())
    arrive(scheduler, paused)
    assert (paused.place, scheduler.requests.host_used, scheduler.requests.num_away) == (Place.DEVICE, 0, 0)
    assert plan(scheduler) == ((), ())
    assert [request_id for request_id, _ in scheduler.plan(NOW).decode] == [1]


def test_one_who_is_needed_soon_comes_before_all_who_wait():
    far = stream(1, held=25, credit_ms=6000)
    scheduler = make(far, arrival(2, pages=20))
    assert plan(scheduler) == ((1,), ())
    arrive(scheduler, far)
    plan(scheduler)
    scheduler.add(arrival(3, pages=20))
    assert plan(scheduler) == ((), ())
    soon = far.first_ms + far.audio_ms - Policy().swap_in_ms
    assert scheduler.wake_ms is not None
    assert scheduler.wake_ms <= soon
    plan(scheduler, soon)
    assert scheduler.requests.num_due == 1
    scheduler.remove(2, soon)
    assert 3 in scheduler.requests.queue  # there would be room for it
    assert plan(scheduler, soon) == ((), (1,))


def test_when_copies_fail_everything_stays():
    paused = stream(1, held=25, pending_chunks=PAUSED)
    scheduler = make(paused, arrival(2, pages=20))
    plan(scheduler)
    scheduler.stop_swapping(paused)
    assert (paused.place, paused.swapped_pages, scheduler.requests.num_away) == (Place.DEVICE, 0, 0)
    assert plan(scheduler) == ((), ())
    scheduler.requests.check()


@pytest.mark.parametrize("place", [Place.LEAVING, Place.HOST, Place.RETURNING])
def test_one_who_ends_on_the_way_leaves_nothing(place):
    paused = stream(1, held=25, pending_chunks=PAUSED, flow_pages=28)
    scheduler = make(paused, arrival(2, pages=20))
    plan(scheduler)
    if place is not Place.LEAVING:
        arrive(scheduler, paused)
    if place is Place.RETURNING:
        scheduler.remove(2)
        paused.pending_chunks = 0
        plan(scheduler)
    assert paused.place is place
    scheduler.remove(1)
    requests = scheduler.requests
    assert (requests.host_used, requests.num_away) == (0, 0)
    requests.check()
    assert len(requests) == (0 if place is Place.RETURNING else 1)


def test_without_host_memory_nothing_moves():
    assert TicketCapacity().host_pages == 0
    assert plan(make(stream(1, held=25, pending_chunks=PAUSED), arrival(2, pages=20), host_pages=0)) == (
        (),
        (),
    )
