"""What listeners would meet on an H200, by the times of its launches: it is the policy that is tested."""

import pytest

from tests.virtual_time import H200, Clock, Costs

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
