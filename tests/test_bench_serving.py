"""``vivace bench serving``: players, windows, loads on an engine that is made up, and the command on a real one."""

from __future__ import annotations

import json
import math
from itertools import islice
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from tests.serving_fake import FakeEngine, VirtualLoop
from vivace.bench import serving_load
from vivace.bench.serving import Settings, most_in_real_time, run
from vivace.bench.serving_chart import Axis, broken_percent, serving_svg
from vivace.bench.serving_count import CountingScheduler, Steps
from vivace.bench.serving_figures import figures
from vivace.bench.serving_load import Load, poisson_gaps
from vivace.bench.serving_player import Record, Window, play
from vivace.bench.serving_published import PUBLISHED
from vivace.bench.serving_table import line_of, parse_numbers
from vivace.cli import app
from vivace.engine.scheduler import StepPlan
from vivace.engine.ticket import Ticket
from vivace.errors import InvalidRequestError

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def loop(monkeypatch):
    """Loads run on its clock, in no time."""
    loop = VirtualLoop()
    monkeypatch.setattr(serving_load, "_now", loop.time)
    yield loop
    loop.close()


def record_of(submitted_s, arrivals, ended_s=None, error=None):
    record = Record(submitted_s)
    for arrived_s, audio_s in arrivals:
        record.note(arrived_s, audio_s)
        record.delivery_ms.append(1.0)
    record.ended_s, record.error = ended_s, error
    return record


# -- player ------------------------------------------------------------------------------------------------------


def test_player_begins_with_the_first_chunk_and_runs_dry_when_the_next_is_late():
    heard = play([(10.0, 1.0), (10.5, 1.0), (13.0, 1.0)], 20.0, is_open=False)
    assert heard.gaps == ((12.0, 13.0),)
    assert (heard.start_s, heard.end_s) == (10.0, 14.0)


def test_player_of_an_open_stream_is_in_an_underrun_until_now():
    arrivals = [(10.0, 1.0)]
    assert play(arrivals, 10.5, is_open=True).gaps == ()
    assert play(arrivals, 12.0, is_open=True).gaps == ((11.0, 12.0),)
    assert play(arrivals, 12.0, is_open=False).gaps == ()
    assert play([], 12.0, is_open=True) is None


def test_record_knows_when_its_player_is_done():
    record = record_of(0.0, [(1.0, 1.0), (1.5, 1.0), (5.0, 1.0)])
    assert record.dry_s == 6.0
    assert record.first_s == 1.0
    assert record.dry_s == play(record.arrivals, 99.0, is_open=False).end_s


# -- figures -----------------------------------------------------------------------------------------------------


def test_only_what_happens_inside_the_window_counts():
    window = Window(10.0, 20.0)
    records = [
        record_of(5.0, [(5.1, 1.0), (12.0, 9.0)], ended_s=12.0),  # dry from 6.1 on: 2 s of it inside
        record_of(11.0, [(11.2, 10.0)], ended_s=11.2),
        record_of(19.0, [(19.3, 1.0), (21.0, 1.0)]),  # its second chunk comes behind the window
        record_of(20.5, [(20.6, 1.0)]),
    ]
    found = figures(records, window, 22.0)
    assert found["requests"] == 2
    assert found["ttfb_ms_p50"] == pytest.approx(200)
    assert found["ttfb_ms_p99"] == pytest.approx(300)
    assert (found["underruns"], found["underrun_ms_total"], found["underrun_ms_max"]) == (1, 2000.0, 2000.0)
    assert (found["streams_heard"], found["streams_in_real_time"]) == (3, 2)
    assert found["audio_seconds_per_second"] == pytest.approx((9 + 10 + 1) / 10)
    assert found["playing_mean"] == pytest.approx((10 + 8.8 + 0.7) / 10)
    assert found["latency_ms_p50"] == pytest.approx(200)


def test_requests_without_an_answer_count_with_their_wait_so_far():
    window = Window(0.0, 10.0)
    records = [record_of(1.0, [(1.1, 1.0)], ended_s=1.1), record_of(2.0, [])]
    found = figures(records, window, 12.0)
    assert found["unanswered"] == 1
    assert found["ttfb_ms_p99"] == pytest.approx(10_000)


def test_refusals_and_failures_are_counted_apart_and_not_as_fast_answers():
    window = Window(0.0, 10.0)
    records = [
        record_of(1.0, [], ended_s=1.0, error="overloaded"),
        record_of(-2.0, [(-1.0, 20.0)], ended_s=3.0, error="non_finite"),
        record_of(2.0, [(2.5, 1.0)], ended_s=3.0),
    ]
    found = figures(records, window, 10.0)
    assert (found["refused"], found["failed"], found["failed_of_ramp"]) == (1, {}, 1)
    assert found["ttfb_ms_p50"] == found["ttfb_ms_max"] == pytest.approx(500)
    assert found["latency_ms_p99"] == pytest.approx(1000)


def test_every_request_of_the_window_is_counted_once():
    """Also one that fails behind it, without audio or with some."""
    window = Window(0.0, 10.0)
    mine = [
        record_of(1.0, [(1.5, 1.0)], ended_s=2.0),
        record_of(2.0, [(9.0, 1.0)], ended_s=10.5),
        record_of(3.0, [], ended_s=3.0, error="overloaded"),
        record_of(4.0, [], ended_s=11.0, error="overloaded"),
        record_of(5.0, [], ended_s=11.0, error="non_finite"),
        record_of(6.0, [(6.5, 1.0)], ended_s=11.5, error="synthesis_failed"),
        record_of(7.0, [], ended_s=8.0, error="non_finite"),
        record_of(8.0, [(8.5, 1.0)]),
        record_of(9.0, []),
    ]
    others = [record_of(-1.0, [], ended_s=-0.5, error="overloaded"), record_of(10.5, [], 11.0, "non_finite")]
    found = figures([*mine, *others], window, 12.0)
    assert found["failed"] == {"non_finite": 2, "synthesis_failed": 1}
    assert (found["finished"], found["refused"], found["cancelled"], found["unanswered"]) == (2, 2, 2, 1)
    lost = found["refused"] + sum(found["failed"].values()) + found["cancelled"]
    assert found["requests"] == found["finished"] + lost == len(mine)
    assert found["failed_of_ramp"] == 0


def test_an_empty_window_has_no_percentiles():
    found = figures([], Window(0.0, 1.0), 1.0)
    assert found["ttfb_ms_p99"] is None
    assert found["audio_seconds_per_second"] == 0
    assert figures([], Window(0.0, 1.0), 1.0, plays=False)["underruns"] is None


# -- loads -------------------------------------------------------------------------------------------------------


def test_listeners_ask_again_when_they_have_heard_all(loop):
    engine = FakeEngine(chunk_s=0.2, arrive_s=(0.01, 0.02))
    load = Load(engine)
    window = loop.run(load.closed(3, 0.3, 0.9, listens=True))
    found = figures(load.records, window, loop.time())
    assert engine.most_live <= 3
    assert found["playing_mean"] == pytest.approx(3, rel=0.05)  # all three, but for 0.01 s of 0.41
    assert found["underruns"] == 0
    assert found["audio_seconds_per_second"] == pytest.approx(3, rel=0.4)


def test_clients_that_wait_for_the_reply_alone_ask_sooner(loop):
    engine = FakeEngine(chunk_s=1.0, arrive_s=(0.01, 0.02))
    load = Load(engine)
    window = loop.run(load.closed(2, 0.1, 0.5, listens=False))
    assert window.seconds == pytest.approx(0.5)
    assert len(load.records) > 20
    assert [request.sampling.seed for request in engine.submitted[:4]] == [0, 1, 2, 3]


def test_underruns_of_a_slow_engine_are_seen(loop):
    load = Load(FakeEngine(chunk_s=0.1, arrive_s=(0.01, 0.4)))
    window = loop.run(load.closed(2, 0.0, 1.0, listens=True))
    found = figures(load.records, window, loop.time())
    assert found["underruns"] >= 2
    assert found["underrun_ms_max"] > 250


def test_arrivals_at_random_times_do_not_wait_for_answers(loop):
    engine = FakeEngine(arrive_s=(30.0,))
    load = Load(engine, seed=7)
    window = loop.run(load.poisson(200.0, 0.0, 1.0))
    found = figures(load.records, window, loop.time())
    assert 150 <= found["requests"] <= 250
    assert found["unanswered"] == found["requests"]
    assert found["ttfb_ms_p50"] >= 2000  # the tail was awaited, and counts
    assert engine.live == 0
    assert engine.cancelled == len(engine.submitted)


def test_the_same_seed_gives_the_same_arrivals():
    gaps = list(islice(poisson_gaps(20.0, 3), 2000))
    assert gaps == list(islice(poisson_gaps(20.0, 3), 2000))
    assert gaps != list(islice(poisson_gaps(20.0, 4), 2000))
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert sum(gap > 0.05 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.1)


def test_what_is_refused_is_sent_again_until_all_is_spoken(loop):
    engine = FakeEngine(arrive_s=(0.01, 0.02), most=2)
    load = Load(engine)
    window = loop.run(load.offline(10, 4))
    found = figures(load.records, window, loop.time(), plays=False)
    assert found["refused"] > 0
    assert found["requests"] - found["refused"] == 10
    assert engine.most_live == 2


def test_a_request_that_fails_ends_alone(loop):
    load = Load(FakeEngine(arrive_s=(0.01, 0.02), fails=(1,)))
    window = loop.run(load.offline(4, 2))
    found = figures(load.records, window, loop.time())
    assert sum(found["failed"].values()) == 1
    assert sum(not record.is_open and record.error is None for record in load.records) == 3


def test_a_fault_of_a_client_ends_the_measurement(loop):
    class Broken:
        def stream(self, request):
            raise TypeError("a fault")

    with pytest.raises(TypeError, match="a fault"):
        loop.run(Load(Broken()).closed(2, 0.0, 30.0, listens=True))
    assert loop.time() < 1


# -- steps -------------------------------------------------------------------------------------------------------


def test_scheduler_counts_what_it_plans():
    scheduler = CountingScheduler(burst_tokens=5)
    scheduler.add(Ticket(1, tokens_until_audio=8))
    assert scheduler.plan(0) == StepPlan(decode=((1, 5),))
    scheduler.requests.running[1].tokens_until_audio = 0
    assert scheduler.plan(1) == StepPlan(render=((1, 1),))
    scheduler.limit.note(12, 20)
    steps = scheduler.take()
    assert (steps.steps, steps.lm_steps, steps.lm_rows, steps.lm_tokens) == (2, 1, 1, 5)
    assert (steps.flow_steps, steps.flow_rows, steps.flow_chunks, steps.resident) == (1, 1, 1, 1)
    assert steps.step_ms == [12]
    assert scheduler.take() == Steps()


# -- document, picture, command ----------------------------------------------------------------------------------


def point_of(streams, **changes):
    point = {
        "streams": streams,
        "requests": 10,
        "refused": 0,
        "failed": {},
        "failed_of_ramp": 0,
        "unanswered": 0,
        "underruns": 0,
        "ttfb_ms_p50": 30.0 + streams,
        "ttfb_ms_p90": 40.0 + streams,
        "ttfb_ms_p99": 50.0 + streams,
        "streams_heard": 10,
        "streams_in_real_time": 10,
        "audio_seconds_per_second": float(streams),
    }
    return point | changes


def document_of(points):
    head = {"model": "m", "precision": "float32", "hardware": "<none>", "audio_seconds": 10.0, "voices": 1}
    return head | {"loop": "playback", "points": points}


def test_most_listeners_in_real_time():
    points = [point_of(1), point_of(8), point_of(32, underruns=1), point_of(64, ttfb_ms_p99=250.0)]
    assert most_in_real_time(points) == 8
    assert most_in_real_time([point_of(4, refused=1), point_of(4, unanswered=1)]) == 0
    assert most_in_real_time([point_of(4, failed={"x": 1}), point_of(4, requests=0, ttfb_ms_p99=None)]) == 0
    assert most_in_real_time([point_of(4, failed_of_ramp=1), point_of(4, ttfb_ms_p99=None)]) == 0
    assert most_in_real_time([{"rate": 5.0}]) == 0


def test_picture_shows_every_point_and_marks_those_of_others():
    points = [point_of(1), point_of(16), point_of(256, streams_in_real_time=4)]
    root = ElementTree.fromstring(serving_svg(document_of(points), PUBLISHED))
    shapes = list(root.iter())
    own = [shape for shape in shapes if shape.tag == f"{SVG}circle" and shape.get("class") is None]
    assert len(own) == 5 * len(points)  # three percentiles, underruns, audio
    theirs = [shape for shape in shapes if shape.get("class") == "theirs"]
    published = sum(
        1 + (point.audio_seconds_per_second is not None) + (point.broken_percent is not None)
        for peer in PUBLISHED
        for point in peer.streams
    )
    assert len(theirs) == published + len(PUBLISHED)  # and one each in the legend
    words = " ".join(text.text for text in root.iter(f"{SVG}text"))
    assert "not measured here" in words
    assert all(peer.system in words and source in words for peer in PUBLISHED for source in peer.sources)
    assert "<none>" in words


def test_picture_without_peers_names_none():
    svg = serving_svg(document_of([point_of(1)]))
    assert "theirs" not in svg
    assert not any(peer.system in svg for peer in PUBLISHED)


def test_picture_of_rates_alone():
    points = [point_of(1) | {"rate": rate} for rate in (2.0, 8.0)]
    for point in points:
        del point["streams"]
    words = [
        text.text for text in ElementTree.fromstring(serving_svg(document_of(points))).iter(f"{SVG}text")
    ]
    assert "requests per second" in words
    assert "requests come at random times" in " ".join(words)


def test_axes():
    linear = Axis([3.0, 90.0], 0.0, 100.0, is_log=False)
    assert (linear.at(0.0), linear.at(90.0)) == (0.0, 100.0)
    assert linear.ticks() == [0.0, 20.0, 40.0, 60.0, 80.0]
    log = Axis([10.0, 1000.0], 0.0, 100.0, is_log=True)
    assert log.at(100.0) == pytest.approx(50.0)
    assert log.ticks() == [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]
    for high in (0.3, 1.0, 1.9, 5.5, 9.9, 77.0, 100.0):
        assert 3 <= len(Axis([high], 0.0, 1.0, is_log=False).ticks()) <= 6
    assert Axis([], 0.0, 1.0, is_log=True).ticks()


def test_share_of_broken_streams():
    assert broken_percent(point_of(1, streams_in_real_time=9)) == 10.0
    assert broken_percent(point_of(1, streams_heard=0, streams_in_real_time=0)) is None


def test_command_measures_every_load(random_model_folder, tmp_path):
    plot = tmp_path / "serving.svg"
    arguments = ["bench", "serving", "-m", str(random_model_folder), "--streams", "1,3", "--rates", "4"]
    more = ["--seconds", "2", "--utterance-seconds", "1", "--ramp", "0.2", "--offline", "5", "--voices", "2"]
    done = CliRunner().invoke(app, [*arguments, *more, "--plot", str(plot), "--peers"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    document = json.loads(lines[-1])
    closed, crowd, open_loop, offline = document["points"]
    assert (closed["streams"], crowd["streams"], open_loop["rate"], offline["offline"]) == (1, 3, 4.0, 5)
    assert lines[: len(document["points"])] == [line_of(point) for point in document["points"]]
    assert offline["requests"] == 5
    audio_s = offline["audio_seconds_per_second"] * offline["seconds"]
    assert audio_s == pytest.approx(5 * 1.0, rel=0.01)  # every utterance has the length asked for
    assert offline["underruns"] is None
    assert offline["lm_rows_mean"] == offline["flow_chunks_mean"] == 1.0  # a CPU does one thing at a time
    assert 50 < offline["engine_busy_percent"] <= 110
    for point in document["points"]:
        assert point["failed"] == {}
        assert point["steps_per_second"] > 0
        assert point["gpu_busy_percent"] is None
        assert "NVIDIA" in point["gpu_busy_reason"]
    ElementTree.fromstring(plot.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"streams": ()},
        {"streams": (0,)},
        {"rates": (0.0,)},
        {"rates": (float("inf"),)},
        {"offline": -1},
        {"seconds": 0.5},
        {"ramp_s": -1.0},
        {"voices": 0},
        {"max_streams": 100_000},
        {"utterance_seconds": 0.1},
    ],
)
def test_numbers_out_of_range(random_model_folder, wrong):
    with pytest.raises(InvalidRequestError):
        run(str(random_model_folder), settings=Settings(**wrong))


@pytest.mark.parametrize("wrong", ["a", "1,b", "nan", "1.5"])
def test_what_is_not_a_list_of_numbers(wrong):
    with pytest.raises(InvalidRequestError, match="streams must be"):
        parse_numbers(wrong, "streams", is_whole=True)
    assert parse_numbers(" 1, 2.5,", "rates") == (1.0, 2.5)
    assert parse_numbers("", "rates") == ()
