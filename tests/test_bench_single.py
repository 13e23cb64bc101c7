"""``vivace bench single``: a fixed amount of work, figures that hang together, a picture of the stages."""

import json
import xml.etree.ElementTree as ET
from contextlib import contextmanager

import pytest
import torch
from typer.testing import CliRunner

from vivace.bench import floors, single
from vivace.bench.timeline import timeline_svg
from vivace.cli import app
from vivace.engine.trace import Span
from vivace.errors import InvalidRequestError
from vivace.random_checkpoint import full_config


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    picture = tmp_path_factory.mktemp("single") / "timeline.svg"
    found = single.run("mini", seconds=2, requests=2, runs=2, timeline=picture, long_seconds=4)
    return found, picture.read_text(encoding="utf-8")


def test_every_utterance_has_the_length_asked_for(document):
    figures, _ = document
    assert figures["audio_seconds"] == 2.0
    assert figures["requests"] == 4


def test_figures_hang_together(document):
    figures, _ = document
    assert 0 < figures["ttfb_ms_p50"] <= figures["ttfb_ms_p90"] <= figures["ttfb_ms_p99"]
    assert figures["rtf"] > figures["rtf_floor"] > 0
    # Middles of two runs each: they agree but for what one run took longer than the other.
    assert 0.6 < 50 / figures["tps"] * 1e3 / figures["times_ms"]["lm_ms"] < 1.1
    long = figures["long"]
    assert len(long["chunk_ms"]) == len(long["chunk_seconds"]) >= 4
    costs = [cost / own for cost, own in zip(long["chunk_ms"], long["chunk_seconds"], strict=True)]
    assert long["ratio_last_to_first"] == pytest.approx(costs[-2] / costs[1], rel=0.05)


def test_seconds_are_compared_where_launches_are_few_and_large():
    """A last chunk that is as large as the others counts; a cut one does not."""
    assert single.last_to_first([17.0, 128.0, 135.0], [0.92, 16.0, 15.0]) == pytest.approx(9 / 8)
    assert single.last_to_first([17.0, 10.0, 12.0, 9.0], [0.92, 1.0, 1.0, 0.1]) == pytest.approx(1.2)


def test_timeline_shows_every_stage_that_ran(document):
    _, picture = document
    root = ET.fromstring(picture)
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    for label in ("speech LM", "flow", "vocoder", "prompt", "chunk 0"):
        assert any(title.startswith(label) for title in titles), label


def test_timeline_escapes_its_title_and_orders_the_axis():
    picture = timeline_svg([Span("lm", 0.0, 5.0), Span("flow", 5.0, 7.5)], [8.0], "a < b & c")
    assert "a &lt; b &amp; c" in picture
    ET.fromstring(picture)


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"requests": 0}, {"seconds": 0.5}])
def test_numbers_out_of_range(wrong):
    with pytest.raises(InvalidRequestError):
        single.run("mini", **wrong)


def test_last_line_of_the_command_is_the_document():
    arguments = ["bench", "single", "--seconds", "1", "--requests", "1", "--runs", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    row = json.loads(done.output.splitlines()[-1])
    assert row["bench"] == "single"
    assert row["model"] == "mini"


def test_work_of_the_full_model_is_what_its_parameters_say():
    work = floors.stage_work(full_config(), torch.bfloat16)
    assert work.lm_weight_bytes == 2 * (24 * 14_909_440 + 6761 * 896)
    assert work.flow_weight_bytes / 2 == pytest.approx(189e6, rel=0.01)
    assert work.flow_flops == pytest.approx(423e9, rel=0.02)
    assert floors.floor_rtf(work, floors.Ceilings(4.23e12, 790e12)) == pytest.approx(0.0052, rel=0.02)


def test_percentile_is_a_value_of_the_list():
    ordered = [1.0, 2.0, 3.0, 4.0]
    assert [single.percentile(ordered, percent) for percent in (1, 50, 75, 99)] == [1.0, 2.0, 3.0, 4.0]


def test_an_engine_is_opened_as_by_its_users(monkeypatch):
    """So that the time to ready is theirs: with kernels compiled ahead, but for the plain way, which has none."""
    asked = []

    @contextmanager
    def note(folder, device, dtype, max_streams, *, deterministic):
        asked.append((device, dtype, max_streams, deterministic))
        yield

    monkeypatch.setattr(single, "compile_ahead", note)
    single.Bench("mini", "cpu", torch.float32, 1.0, 3).close()
    single.Bench("mini", "cpu", torch.float32, 1.0, is_plain=True).close()
    assert asked == [("cpu", torch.float32, 3, False)]
