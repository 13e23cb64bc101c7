"""``vivace bench throughput``: never more side by side than asked for, figures that hang together."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from vivace.bench import throughput
from vivace.bench.single import Bench
from vivace.cli import app
from vivace.engine.request import SynthesisRequest
from vivace.errors import InvalidRequestError


@pytest.fixture(scope="module")
def bench(random_model_folder):
    opened = Bench(str(random_model_folder), "cpu", torch.float32, 1.0, 4)
    yield opened
    opened.close()


def test_no_more_requests_run_side_by_side_than_asked_for(bench, monkeypatch):
    seen = []
    step = bench.engine.step

    def counted():
        seen.append(bench.engine.num_running)
        return step()

    monkeypatch.setattr(bench.engine, "step", counted)
    load = throughput.serve(bench, 3, 7)
    assert max(seen) == 3
    assert load.sentences == 7
    assert bench.engine.num_running == 0


def test_figures_hang_together(bench):
    alone, together = throughput.serve(bench, 1, 4), throughput.serve(bench, 4, 4)
    for load in (alone, together):
        assert 0 < load.ttfb_ms_p50 <= load.ttfb_ms_p99 <= load.latency_ms_p99
        assert load.latency_ms_p50 <= load.latency_ms_p90 <= load.latency_ms_p99
        assert load.audio_seconds_per_second == pytest.approx(load.sentences_per_second, rel=0.01)
        assert 0 <= load.queue_ms_mean < load.latency_ms_mean


def test_command_prints_a_table_a_picture_and_one_document(random_model_folder, tmp_path):
    chart = tmp_path / "chart.svg"
    arguments = ["bench", "throughput", "-m", str(random_model_folder), "--seconds", "1", "--requests", "1"]
    done = CliRunner().invoke(app, [*arguments, "--batch", "1,2", "--chart", str(chart)])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output.splitlines()[-1])
    assert [load["batch"] for load in document["loads"]] == [1, 2]
    assert all(load["sentences"] == 8 for load in document["loads"])
    circles = ElementTree.fromstring(chart.read_text(encoding="utf-8")).iter(
        "{http://www.w3.org/2000/svg}circle"
    )
    assert len(list(circles)) == 2


def test_whole_sentences_and_the_start(random_model_folder, monkeypatch):
    """The start is an engine of its own in float32; every load says how much faster it is."""
    opened, streamed = [], []

    class Noted(Bench):
        def __init__(self, *arguments, **options):
            opened.append((arguments[2], options.get("is_plain", False)))
            super().__init__(*arguments, **options)

    def request(*arguments, **options):
        streamed.append(options["stream"])
        return SynthesisRequest(*arguments, **options)

    monkeypatch.setattr(throughput, "Bench", Noted)
    monkeypatch.setattr(throughput, "SynthesisRequest", request)
    document = throughput.run(
        str(random_model_folder),
        dtype=torch.bfloat16,
        seconds=1.0,
        batches=(2,),
        requests=1,
        whole=True,
        with_start=True,
    )
    assert opened == [(torch.float32, True), (torch.bfloat16, False)]
    assert streamed
    assert not any(streamed)
    assert document["mode"] == "whole"
    load, start = document["loads"][0], document["start"]
    assert start["sentences"] == 4
    assert load["speedup"] == pytest.approx(
        load["sentences_per_second"] / start["sentences_per_second"], abs=0.006
    )


@pytest.mark.parametrize("wrong", [{"batches": ()}, {"batches": (33,)}, {"batches": (0,)}, {"requests": 0}])
def test_numbers_out_of_range(wrong):
    with pytest.raises(InvalidRequestError):
        throughput.run("mini", **wrong)
