"""What the scheduler plans: who comes first, how much at once, who may start, and when it wants to be asked again."""

from dataclasses import replace

import pytest

from vivace.engine.admission import LEARNED_FROM, Admission, is_safe
from vivace.engine.batch_limit import BatchLimit
from vivace.engine.scheduler import Capacity, Policy, Scheduler, Ticket
from vivace.engine.stages import FAR
from vivace.errors import InvalidRequestError, OverloadedError

DEVICE = Capacity(batch=8, running=16, queue=2, kv_pages=100, flow_pages=50)


def make(capacity=DEVICE, **policy):
    scheduler = Scheduler(Policy(**policy))
    scheduler.use(capacity)
    return scheduler


def playing(request_id, credit_ms, now_ms=10_000, **state):
    """A stream whose playback runs dry in so many milliseconds; its next chunk could be rendered."""
    state = {"tokens_until_audio": 0, "opens_segment": False, "submitted_ms": 0, **state}
    return Ticket(request_id, first_ms=now_ms - 1000, audio_ms=1000 + credit_ms, **state)


def rendered(plan):
    return [request_id for request_id, _ in plan.render]


def decoded(plan):
    return [request_id for request_id, _ in plan.decode]


# -- order --------------------------------------------------------------------------------------------------------


def test_who_is_about_to_run_dry_comes_first_then_first_chunks_then_the_earliest_deadline():
    scheduler = make()
    for ticket in (
        playing(1, 2000),
        playing(2, 900),
        Ticket(3, tokens_until_audio=0, opens_segment=False, submitted_ms=9_950),
        playing(4, 100),
        playing(5, -300),
    ):
        scheduler.add(ticket)
    assert rendered(scheduler.plan(10_000)) == [5, 4, 3, 2, 1]


def test_a_first_chunk_that_is_late_does_not_wait_for_streams_that_run_dry():
    scheduler = make()
    scheduler.add(playing(1, 100))
    scheduler.add(Ticket(2, tokens_until_audio=0, opens_segment=False, submitted_ms=9_000))
    assert rendered(scheduler.plan(10_000)) == [2, 1]


def test_the_limit_cuts_the_least_urgent():
    scheduler = make(Capacity(batch=2))
    for request_id, credit in ((1, 500), (2, 400), (3, 600)):
        scheduler.add(playing(request_id, credit))
    assert rendered(scheduler.plan(10_000)) == [2, 1]


def test_plain_stages_do_one_thing_a_step_in_turn():
    scheduler = Scheduler()
    for request_id in (1, 2):
        scheduler.add(Ticket(request_id, tokens_until_audio=40))
    plans = [scheduler.plan(0) for _ in range(3)]
    assert [plan.decode for plan in plans] == [((1, 16),), ((2, 16),), ((1, 16),)]


# -- how much at once ------------------------------------------------------------------------------------------------


def test_all_rows_decode_together_and_behind_what_is_rendered():
    scheduler = make()
    scheduler.add(playing(1, 500, spare_tokens=5))
    scheduler.add(playing(2, 500, tokens_until_audio=9))
    scheduler.add(playing(3, 500, is_complete=True))
    scheduler.add(playing(4, 500, tokens_until_audio=9, waits_for_text=True))
    plan = scheduler.plan(10_000)
    assert set(rendered(plan)) == {1, 3}
    assert set(decoded(plan)) == {1, 2}


@pytest.mark.parametrize(("credit_ms", "chunks"), [(0, 1), (2900, 1), (3100, 2), (9000, 4)])
def test_hops_grow_while_playback_is_safe(credit_ms, chunks):
    scheduler = make()
    scheduler.add(playing(1, credit_ms, spare_tokens=200))
    assert scheduler.plan(10_000).render == ((1, chunks),)


def test_a_safe_stream_waits_for_the_tokens_of_a_larger_hop_unless_none_will_come():
    scheduler = make(quiet_rows=0)
    scheduler.add(playing(1, 9000, spare_tokens=30))
    plan = scheduler.plan(10_000)
    assert plan.render == ()
    assert decoded(plan) == [1]
    scheduler = make(quiet_rows=0)
    scheduler.add(playing(1, 9000, spare_tokens=30, is_complete=True))
    assert scheduler.plan(10_000).render == ((1, 2),)


def test_few_streams_render_what_is_ready():
    scheduler = make()
    scheduler.add(playing(1, 9000, spare_tokens=30))
    plan = scheduler.plan(10_000)
    assert plan.render == ((1, 2),)
    assert decoded(plan) == [1]


def test_where_streams_share_launches_one_chunk_of_each_comes_before_several_of_one():
    scheduler = make(Capacity(batch=8, pack=4), quiet_rows=1)
    for request_id in (1, 2, 3):
        scheduler.add(playing(request_id, 9000, spare_tokens=200))
    assert scheduler.plan(10_000).render == ((1, 1), (2, 1), (3, 1))
    scheduler = make(Capacity(batch=8, pack=4), quiet_rows=1)
    scheduler.add(playing(1, 9000, spare_tokens=200))
    assert scheduler.plan(10_000).render == ((1, 4),)


ALONE = Capacity(batch=4, pack=1, wave=4)


@pytest.mark.parametrize(
    ("audio_ms", "spent_ms", "spare", "chunks"),
    [
        (920, 10, 100, 1),
        (1920, 10, 24, 0),
        (1920, 10, 25, 2),
        (2720, 10, 49, 0),
        (2720, 10, 100, 3),
        (3920, 10, 74, 0),
        (3920, 10, 75, 4),
        (3920, 3300, 75, 1),
        (9000, 10, 200, 4),
    ],
)
def test_a_stream_alone_waits_for_the_chunks_of_a_launch(audio_ms, spent_ms, spare, chunks):
    """The more audio was handed over the more; with little left to play it takes the next one."""
    scheduler = make(ALONE)
    ticket = playing(1, 0, spare_tokens=spare)
    ticket.first_ms, ticket.audio_ms = 10_000, audio_ms
    scheduler.add(ticket)
    plan = scheduler.plan(10_000 + spent_ms)
    assert plan.render == (((1, chunks),) if chunks else ())
    assert chunks or decoded(plan) == [1]


FAST = Capacity(batch=64, pack=32, wave=16, wave_ms=60)


def handed_over(audio_ms, spare, **state):
    """A stream that has just got so much audio, its first chunk at 10 s."""
    return Ticket(
        1, 0, spare, opens_segment=False, submitted_ms=9_990, first_ms=10_000, audio_ms=audio_ms, **state
    )


@pytest.mark.parametrize(
    ("audio_ms", "spare", "chunks"),
    [
        (920, 349, 0),
        (920, 350, 15),
        (920, 400, 15),
        (960, 400, 16),
        (300, 100, 5),
        (40, 100, 1),
        (9920, 500, 16),
    ],
)
def test_fast_stages_share_launches_from_the_second_chunk_on(audio_ms, spare, chunks):
    """Any number of chunks, as many as are there long before the first one has been played."""
    scheduler = make(FAST)
    scheduler.add(handed_over(audio_ms, spare))
    plan = scheduler.plan(10_010)
    assert plan.render == (((1, chunks),) if chunks else ())


@pytest.mark.parametrize("pack", [1, 32])
def test_slow_steps_make_no_launch_of_a_stream_alone_smaller(pack):
    """The same request has the same launches, however many streams the engine is for."""
    scheduler = make(replace(FAST, batch=16, pack=pack))
    scheduler.add(handed_over(960, 400))
    run_steps(scheduler.limit, 1000, 300, 300)
    assert scheduler.plan(10_010).render == ((1, 16),)


def test_all_that_is_left_of_a_short_utterance_is_one_launch():
    scheduler = make(FAST)
    scheduler.add(handed_over(920, 222, is_complete=True))
    assert scheduler.plan(10_080).render == ((1, 9),)


@pytest.mark.parametrize(
    ("audio_ms", "spent_ms", "chunks"),
    [(920, 619, 0), (920, 621, 1), (400, 199, 0), (400, 201, 1), (100, 41, 1)],
)
def test_a_stream_alone_that_runs_dry_waits_for_no_more_chunks(audio_ms, spent_ms, chunks):
    """Below 300 ms, or half of a short first chunk."""
    scheduler = make(FAST)
    scheduler.add(handed_over(audio_ms, 60))
    assert scheduler.plan(10_000 + spent_ms).render == (((1, chunks),) if chunks else ())


def test_a_stream_alone_may_decode_all_that_its_next_launch_needs():
    scheduler = make(Capacity(batch=16, pack=16, wave=8, wave_ms=240))
    scheduler.add(handed_over(1920, 160))
    assert scheduler.plan(10_010).decode == ((1, 15),)


def test_a_stream_in_company_decodes_no_further_ahead_than_its_next_hop():
    """However many chunks of a lone one share a launch: the others wait for tokens that nobody needs yet."""
    scheduler = make(Capacity(batch=16, pack=16, wave=8, wave_ms=240), turn_rows=1)
    for request_id in (1, 2):
        scheduler.add(playing(request_id, 5000, tokens_until_audio=5, spare_tokens=0))
    assert scheduler.plan(10_000).decode == ((1, 16), (2, 16))
    scheduler = make(Capacity(batch=16, pack=16, wave=8, wave_ms=240), turn_rows=1)
    for request_id in (1, 2):
        scheduler.add(playing(request_id, 5000, spare_tokens=150))
    assert scheduler.plan(10_000).decode == ()


def test_the_policys_own_audio_of_a_chunk_counts_before_that_of_the_stages():
    scheduler = make(Capacity(batch=16, pack=16, wave=4, wave_ms=5000), wave_ms=300)
    scheduler.add(handed_over(920, 100))
    assert scheduler.plan(10_010).render == ((1, 3),)


# -- few streams, where one row steps faster than two ----------------------------------------------------------------


@pytest.mark.parametrize(("rows", "expected"), [(2, [2]), (3, [3, 2, 1])])
def test_two_streams_get_their_waves_one_after_the_other(rows, expected):
    """Whoever runs dry first; more of them step and are rendered together."""
    scheduler = make(FAST)
    for request_id in range(1, rows + 1):
        scheduler.add(playing(request_id, 5000 - request_id, tokens_until_audio=5))
    assert decoded(scheduler.plan(10_000)) == expected


def test_first_chunks_and_who_runs_dry_come_before_the_waves_of_others():
    scheduler = make(FAST, turn_rows=3)
    for ticket in (playing(1, 5000), playing(2, 200), Ticket(3, tokens_until_audio=28, submitted_ms=9_990)):
        scheduler.add(ticket)
    plan = scheduler.plan(10_000)
    assert rendered(plan) == [2]
    assert decoded(plan) == [2, 3]


@pytest.mark.parametrize("capacity", [DEVICE, Capacity(batch=8, wave=4, beside_tokens=50)])
def test_where_two_rows_cost_no_more_than_one_they_step_together(capacity):
    scheduler = make(capacity)
    for request_id in (1, 2):
        scheduler.add(playing(request_id, 5000, tokens_until_audio=5))
    assert sorted(decoded(scheduler.plan(10_000))) == [1, 2]


def test_a_request_that_is_spoken_as_a_whole_holds_up_nobody():
    """Its first audio is far away."""
    scheduler = make(FAST)
    scheduler.add(playing(1, 5000, tokens_until_audio=5))
    scheduler.add(Ticket(2, tokens_until_audio=FAR, opens_segment=False, submitted_ms=9_990))
    assert sorted(decoded(scheduler.plan(10_000))) == [1, 2]


@pytest.mark.parametrize(("rows", "expected"), [(8, []), (9, [*range(1, 9)])])
def test_few_streams_that_have_time_are_not_rendered_before_a_first_chunks_tokens(rows, expected):
    scheduler = make(Capacity(batch=64, pack=32, wave=16))
    for request_id in range(1, rows):
        scheduler.add(playing(request_id, 5000 + request_id))
    scheduler.add(Ticket(rows, tokens_until_audio=28, submitted_ms=9_990))
    assert rendered(scheduler.plan(10_000)) == expected


def test_who_waits_for_memory_does_not_hold_up_the_others():
    """Their turns come when it could be given nothing."""
    scheduler = make(replace(FAST, flow_pages=20))
    first = playing(1, 5000, flow_pages=18)
    second = playing(2, 6000, tokens_until_audio=5, flow_pages=18)
    for ticket in (first, second):
        scheduler.add(ticket)
    first.is_complete = True
    first.held_pages, second.held_pages = 9, 11
    plan = scheduler.plan(10_000)
    assert rendered(plan) == []
    assert decoded(plan) == [2]


def test_a_stream_alone_has_its_first_chunk_at_once():
    scheduler = make(ALONE)
    scheduler.add(Ticket(1, tokens_until_audio=0, spare_tokens=200, opens_segment=False))
    assert scheduler.plan(0).render == ((1, 1),)


@pytest.mark.parametrize("state", [{"is_complete": True}, {"waits_for_text": True}])
def test_a_stream_alone_waits_for_no_tokens_that_will_not_come(state):
    scheduler = make(ALONE)
    scheduler.add(playing(1, 9000, spare_tokens=60, **state))
    assert scheduler.plan(10_000).render == ((1, 3),)


def test_in_company_nobody_waits_for_the_chunks_of_a_launch():
    scheduler = make(ALONE, turn_rows=1)
    for request_id in (1, 2):
        scheduler.add(playing(request_id, 1900))
    assert scheduler.plan(10_000).render == ((1, 1), (2, 1))


def test_the_limit_holds_for_streams_that_have_time_and_not_for_the_others():
    scheduler = make(Capacity(batch=8, pack=2))
    for request_id in range(1, 9):
        scheduler.add(playing(request_id, 100 if request_id <= 6 else 9000))
    scheduler.limit.chunks = 4
    assert rendered(scheduler.plan(10_000)) == [1, 2, 3, 4, 5, 6]
    assert scheduler.limit.was_cut


@pytest.mark.parametrize(("flow_pages", "expected"), [(2, [1, 2, 3]), (0, [1, 2, 3, 4])])
def test_a_first_chunk_counts_for_the_prompts_last_one_too_where_chunks_have_pages(flow_pages, expected):
    scheduler = make(Capacity(batch=8, pack=2))
    scheduler.add(
        Ticket(1, tokens_until_audio=0, opens_segment=False, submitted_ms=9_950, flow_pages=flow_pages)
    )
    for request_id in range(2, 7):
        scheduler.add(playing(request_id, 9000))
    scheduler.limit.chunks = 4
    assert rendered(scheduler.plan(10_000)) == expected


def test_whoever_waits_for_room_gets_it_sooner_when_steps_are_full():
    scheduler = make(Capacity(batch=8, pack=2, running=6, queue=2))
    for request_id in range(1, 7):
        scheduler.add(playing(request_id, 9000))
    scheduler.limit.chunks = 4
    scheduler.add(Ticket(7, submitted_ms=9_990))
    assert rendered(scheduler.plan(10_000)) == [1, 2, 3, 4, 5, 6]


def test_all_tokens_of_a_first_chunk_in_one_step_and_the_others_step_along():
    scheduler = make(quiet_rows=0, first_rows=0, crowd_rows=1)
    scheduler.add(playing(1, 500, tokens_until_audio=25))
    assert scheduler.plan(10_000).decode == ((1, 16),)
    scheduler.add(Ticket(2, tokens_until_audio=28, submitted_ms=9_990))
    assert dict(scheduler.plan(10_000).decode) == {1: 32, 2: 28}


@pytest.mark.parametrize(
    ("rows", "credit_ms", "state", "expected"),
    [
        (2, 5000, {}, [2]),
        (8, 5000, {}, [8]),
        (9, 5000, {}, [*range(1, 10)]),
        (2, 200, {}, [1, 2]),
        (2, 5000, {"tokens_until_audio": FAR}, [2]),
        (2, 5000, {"tokens_until_audio": FAR, "opens_segment": False}, [1, 2]),
        (2, 5000, {"first_ms": 9_500, "audio_ms": 920}, [1, 2]),
        (2, 5000, {"waits_for_text": True}, [1]),
    ],
)
def test_few_who_have_something_to_play_wait_for_a_first_chunk(rows, credit_ms, state, expected):
    """Not longer for a request that is spoken as a whole, or waits for its text, and not where many step along."""
    scheduler = make(quiet_rows=0)
    for request_id in range(1, rows):
        scheduler.add(playing(request_id, credit_ms, tokens_until_audio=25))
    scheduler.add(Ticket(rows, submitted_ms=9_990, **{"tokens_until_audio": 28, **state}))
    assert sorted(decoded(scheduler.plan(10_000))) == expected


@pytest.mark.parametrize(
    ("missing", "expected"), [(32, [3]), (33, [1, 2, 3])], ids=["one step will do", "it takes several"]
)
def test_few_wait_for_who_has_begun_where_one_step_brings_its_tokens(missing, expected):
    scheduler = make(quiet_rows=0)
    for request_id in (1, 2):
        scheduler.add(playing(request_id, 5000, tokens_until_audio=25))
    scheduler.add(Ticket(3, tokens_until_audio=missing, opens_segment=False, submitted_ms=9_990))
    assert sorted(decoded(scheduler.plan(10_000))) == expected


@pytest.mark.parametrize(("rows", "burst"), [(16, 16), (17, 32)])
def test_a_crowd_steps_along_with_a_first_chunk(rows, burst):
    scheduler = make(Capacity(batch=8, running=32))
    for request_id in range(1, rows):
        scheduler.add(playing(request_id, 5000, tokens_until_audio=25))
    scheduler.add(Ticket(rows, tokens_until_audio=28, submitted_ms=9_990))
    counts = dict(scheduler.plan(10_000).decode)
    assert counts.pop(rows) == 28
    assert set(counts.values()) == {burst}


@pytest.mark.parametrize(
    ("is_new", "rows", "burst"), [(False, 4, 50), (True, 4, 50), (True, 5, 28), (False, 5, 16)]
)
def test_few_rows_decode_as_long_as_a_launch_of_the_flow_takes(is_new, rows, burst):
    """With more of them a new one would wait for tokens that nobody needs yet."""
    scheduler = make(Capacity(batch=8, beside_tokens=50), first_rows=0)
    for request_id in range(1, rows):
        scheduler.add(playing(request_id, 2000, tokens_until_audio=10))
    state = {} if is_new else {"first_ms": 9_000, "audio_ms": 3000}
    scheduler.add(Ticket(rows, tokens_until_audio=28, submitted_ms=9_990, **state))
    assert max(count for _, count in scheduler.plan(10_000).decode) == burst


@pytest.mark.parametrize("others", [1, 20])
def test_who_is_spoken_as_a_whole_decodes_as_the_others_do(others):
    """Whoever comes meanwhile does not wait for longer launches."""
    scheduler = make(Capacity(batch=64))
    scheduler.add(Ticket(1, tokens_until_audio=FAR, opens_segment=False))
    for request_id in range(2, 2 + others):
        scheduler.add(playing(request_id, 5000, tokens_until_audio=25))
    assert {count for _, count in scheduler.plan(10_000).decode} == {16}


@pytest.mark.parametrize(("rows", "burst"), [(4, 32), (5, 16)])
def test_few_rows_decode_a_whole_chunk_where_that_is_beside_the_other_stages(rows, burst):
    scheduler = make(Capacity(batch=8, quiet_tokens=32))
    for request_id in range(1, rows + 1):
        scheduler.add(playing(request_id, 2000, tokens_until_audio=25))
    assert {count for _, count in scheduler.plan(10_000).decode} == {burst}


def test_a_first_chunk_takes_as_many_tokens_as_a_burst_may_have():
    scheduler = make(Capacity(batch=8, beside_tokens=50))
    scheduler.add(Ticket(1, tokens_until_audio=40))
    assert scheduler.plan(0).decode == ((1, 40),)


def test_a_stream_alone_waits_for_no_more_chunks_than_a_step_may_have():
    """Steps that take long are made smaller: then a launch of two is better than waiting for eight."""
    scheduler = make(Capacity(batch=16, wave=8, wave_ms=200))
    scheduler.limit.chunks = 2
    ticket = playing(1, 0, spare_tokens=150)
    ticket.first_ms, ticket.audio_ms = 10_000, 5920
    scheduler.add(ticket)
    assert scheduler.plan(10_010).render == ((1, 2),)


def test_the_first_chunk_gets_its_tokens_and_no_more():
    scheduler = make()
    scheduler.add(Ticket(1, tokens_until_audio=13))
    assert scheduler.plan(0).decode == ((1, 13),)


def test_not_all_prompts_at_once():
    scheduler = make(max_prompts=3)
    for request_id in range(1, 7):
        scheduler.add(Ticket(request_id, tokens_until_audio=13))
    scheduler.add(playing(7, 500, tokens_until_audio=9, now_ms=0))
    assert decoded(scheduler.plan(0)) == [1, 2, 3, 7]


# -- pauses -----------------------------------------------------------------------------------------------------------


def test_a_stream_far_ahead_pauses_until_its_time_has_come():
    scheduler = make(max_ahead_ms=3000)
    scheduler.add(playing(1, 5000))
    assert scheduler.plan(10_000) is None
    assert scheduler.wake_ms == 12_000
    assert decoded(scheduler.plan(12_000)) == [1]


def test_a_consumer_that_takes_nothing_is_ended_after_the_stated_time():
    scheduler = make(max_pending_chunks=2, max_stall_ms=5000)
    ticket = playing(1, 500, pending_chunks=2)
    scheduler.add(ticket)
    assert scheduler.plan(10_000) is None
    assert scheduler.wake_ms == 15_000
    ticket.pending_chunks = 1
    assert scheduler.plan(14_000).overdue == ()
    ticket.pending_chunks = 2
    assert scheduler.plan(15_000) is None
    assert scheduler.plan(20_000).overdue == ((1, "consumer"),)


def test_without_a_stated_time_it_waits_for_ever():
    scheduler = make(max_pending_chunks=2)
    scheduler.add(playing(1, 500, pending_chunks=2))
    assert scheduler.plan(10**9) is None
    assert scheduler.wake_ms is None


# -- admission --------------------------------------------------------------------------------------------------------


def test_the_queue_is_bounded_and_goes_in_order():
    scheduler = make(Capacity(batch=4, running=2, queue=2))
    for request_id in range(1, 5):
        scheduler.add(Ticket(request_id))
    with pytest.raises(OverloadedError) as caught:
        scheduler.add(Ticket(5))
    assert caught.value.retry_after_s >= 1
    assert list(scheduler.requests.running) == [1, 2]
    scheduler.remove(2)
    assert list(scheduler.requests.running) == [1, 3]
    scheduler.remove(4)  # one that waits
    scheduler.remove(1)
    assert list(scheduler.requests.running) == [3]


def test_whoever_waits_too_long_is_told():
    scheduler = make(Capacity(batch=4, running=1, queue=2), max_queue_ms=1000)
    for request_id, time_ms in ((1, 0), (2, 100), (3, 900)):
        scheduler.add(Ticket(request_id, submitted_ms=time_ms, waits_for_text=True))
    assert scheduler.plan(1000) is None
    assert scheduler.wake_ms == 1100
    assert scheduler.plan(1100).overdue == ((2, "queue"),)


def test_the_speech_lms_cache_is_reserved_for_the_worst_case():
    requests = Admission(DEVICE)
    for request_id in (1, 2, 3):
        requests.add(Ticket(request_id, kv_pages=40))
    assert list(requests.running) == [1, 2]
    requests.add(Ticket(4, kv_pages=1))
    assert 4 not in requests.running  # nobody overtakes
    requests.remove(1)
    assert list(requests.running) == [2, 3, 4]


def test_what_will_never_fit_is_refused_at_once():
    requests = Admission(DEVICE)
    for ticket in (Ticket(1, kv_pages=101), Ticket(2, flow_pages=51)):
        with pytest.raises(InvalidRequestError, match="memory"):
            requests.add(ticket)
    assert len(requests) == 0


def test_safe_means_that_all_can_reach_their_end_one_after_the_other():
    assert is_safe(2, [(5, 4), (2, 3), (9, 0)])  # the second first, then the first, then the third
    assert not is_safe(1, [(5, 4), (2, 3), (9, 0)])
    assert not is_safe(2, [(5, 4), (2, 3), (10, 0)])


def test_a_chunk_waits_when_it_could_stop_others_for_ever():
    """Two streams hold half of the pages each; the last free page goes to the one that can finish with it."""
    scheduler = make(Capacity(batch=8, flow_pages=11))
    long, short = playing(1, 100, flow_pages=8), playing(2, 200, flow_pages=6)
    for ticket in (long, short):
        ticket.likely_pages = 5
        scheduler.add(ticket)
    assert set(scheduler.requests.running) == {1, 2}
    long.hold(5)
    short.hold(5)
    assert rendered(scheduler.plan(10_000)) == [2]


def test_the_likely_use_is_learned_from_those_that_finished():
    requests = Admission(DEVICE)
    assert requests.share_percent == 100
    for request_id in range(LEARNED_FROM):
        ticket = Ticket(request_id, flow_pages=50, likely_pages=40)
        ticket.hold(10)
        requests.add(ticket)
        requests.remove(request_id, finished_ms=request_id)
    assert requests.share_percent == 35
    requests.add(Ticket(100, flow_pages=50, likely_pages=40))
    assert requests.typical_used == 14


def test_the_time_to_come_back_follows_the_pace():
    requests = Admission(Capacity(running=1, queue=5))
    for number in range(5):
        requests.add(Ticket(number))
        requests.remove(number, finished_ms=4000 * number)
    for number in (10, 11):
        requests.add(Ticket(number))
    assert requests.retry_after_s() == 8.0


# -- the batch's size --------------------------------------------------------------------------------------------


def run_steps(limit, count, step_ms, wall_ms, *, was_cut=False):
    for _ in range(count):
        limit.was_cut = was_cut
        limit.note(step_ms, wall_ms)


def test_long_steps_make_batches_smaller_and_idle_time_larger():
    limit = BatchLimit(16, target_ms=100, window=10)
    run_steps(limit, 10, 150, 150)
    assert (limit.chunks, limit.step_ms_p99, limit.busy_percent) == (12, 150, 100)
    run_steps(limit, 10, 80, 100)
    assert limit.chunks == 12
    run_steps(limit, 10, 80, 200)
    assert limit.chunks == 15
    run_steps(limit, 100, 80, 200)
    assert limit.chunks == 16
    run_steps(limit, 1000, 1000, 1000)
    assert limit.chunks == 1


def test_batches_keep_the_size_that_is_cheap_unless_memory_is_missing():
    limit = BatchLimit(64, least=32, target_ms=100, window=10)
    run_steps(limit, 1000, 1000, 1000)
    assert limit.chunks == 32
    limit.shrink()
    assert limit.chunks == 24
    run_steps(limit, 10, 1000, 1000)
    assert limit.chunks == 24


def test_steps_that_are_too_small_for_the_load_do_not_shrink_however_long_they_take():
    limit = BatchLimit(64, target_ms=100, window=10)
    run_steps(limit, 30, 150, 150)
    assert limit.chunks == 27
    run_steps(limit, 10, 150, 150, was_cut=True)
    assert (limit.chunks, limit.full_percent) == (33, 100)
    run_steps(limit, 100, 150, 150, was_cut=True)
    assert limit.chunks == 64
    run_steps(limit, 6, 150, 150)  # between the two shares nothing changes
    run_steps(limit, 4, 150, 150, was_cut=True)
    assert (limit.chunks, limit.full_percent) == (64, 40)
