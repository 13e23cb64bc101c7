"""What listeners would meet on an H200, by the times of its launches: it is the policy that is tested."""

from dataclasses import replace

import pytest

from tests.virtual_time import H200, Clock, Costs
from vivace.engine.scheduler import Policy

BESIDE = Costs(beside=(1.5, 1.8))


@pytest.mark.parametrize(("costs", "streams"), [(Costs(), 250), (BESIDE, 300)])
def test_deadlines_are_kept_well_below_what_the_device_can_do(costs, streams):
    clock = Clock(costs)
    found = clock.closed(streams)
    assert (found["refused"], found["failed"], found["unanswered"]) == (0, {}, 0)
    assert found["underruns"] == 0
    assert found["ttfb_ms_p99"] < 200
    assert found["audio_seconds_per_second"] == pytest.approx(streams, rel=0.03)
    assert clock.running_most < streams / 4  # generation runs ahead of playback, so requests end early


def test_one_listener_waits_for_nothing_but_its_own_launches():
    costs = Costs()
    found = Clock(costs).closed(1)
    own = costs.text + 2 * costs.host[0] + costs.rows_ms([27], 1) + costs.chunks_ms([2]) + costs.emit
    assert found["ttfb_ms_p50"] == pytest.approx(own, abs=1.0)


def test_no_stream_runs_dry_and_nothing_collapses_beyond_what_the_device_can_do():
    """New requests wait then; those that play do not suffer, and no less is spoken than below."""
    most = Clock().offline(400, 200)["audio_seconds_per_second"]
    clock = Clock()
    found = clock.closed(450)
    assert found["underruns"] == 0
    assert found["audio_seconds_per_second"] > 0.9 * most
    assert found["ttfb_ms_p99"] > 200


def test_larger_steps_for_more_listeners():
    few, many = Clock(), Clock()
    few.closed(64)
    many.closed(350)
    sizes = [sum(chunks for _, chunks, _ in clock.steps) / len(clock.steps) for clock in (few, many)]
    assert sizes[1] > 4 * sizes[0]
    assert max(chunks for _, chunks, _ in many.steps) <= H200.batch


def test_a_crowd_that_comes_at_once_lets_nobody_run_dry():
    found = Clock(BESIDE).closed(250, ramp_s=0.5)
    assert (found["underruns"], found["refused"]) == (0, 0)


FAST = replace(H200, wave=16, wave_ms=60)


def test_a_stream_alone_is_done_after_its_first_chunk_and_one_large_launch():
    costs = Costs(wave=16)
    clock = Clock(costs, capacity=FAST)
    clock.closed(1)
    assert {chunks for _, chunks, _ in clock.steps} == {0, 1, 9}
    assert clock.records[0].ended_s - clock.records[0].submitted_s < 0.15


@pytest.mark.parametrize("rate", [5, 10])
def test_two_who_take_turns_hear_their_first_audio_sooner(rate):
    """Nobody runs dry for it, and those who wait longest wait no longer."""
    turns, together = (
        Clock(Costs(wave=16), Policy(turn_rows=rows), FAST).poisson(rate, seconds=200) for rows in (2, 1)
    )
    assert turns["ttfb_ms_p50"] < 0.97 * together["ttfb_ms_p50"]
    assert turns["ttfb_ms_p99"] < 1.1 * together["ttfb_ms_p99"]
    assert turns["underruns"] == 0


@pytest.mark.parametrize("slower", [1, 3, 6])
def test_no_stream_runs_dry_for_a_large_launch(slower):
    """Also not on a device that is several times as slow."""
    costs = Costs(wave=16)
    costs = replace(
        costs,
        flow={size: slower * cost for size, cost in costs.flow.items()},
        step={rows: slower * cost for rows, cost in costs.step.items()},
    )
    assert Clock(costs, capacity=FAST, seconds=30.0).poisson(0.3)["underruns"] == 0
