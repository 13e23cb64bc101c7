"""``vivace limits``: floors that follow from the model's sizes and the measured rates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from vivace.bench import limits
from vivace.bench.floors import Ceilings
from vivace.cli import app
from vivace.errors import InvalidRequestError
from vivace.random_checkpoint import full_config

HALVES = limits.Format("float16", 2, 2, 790e12)
H200 = limits.Floors(limits.count_work(full_config()), HALVES, 4.23e12, HALVES)


def test_floors_of_the_full_model_on_a_large_gpu():
    """The figures worked out by hand: 171 µs a token, 0.88 ms a chunk, about 6 ms for 28 tokens."""
    assert H200.lm_step_s(context=0) == pytest.approx(172e-6, rel=0.01)
    assert H200.work.flow_steps * H200.work.flow_weights * 2 / 4.23e12 == pytest.approx(0.89e-3, rel=0.02)
    assert H200.ttfb_s(28, 75) == pytest.approx(6.5e-3, rel=0.15)
    assert H200.ttfb_s(13, 75) < 0.65 * H200.ttfb_s(28, 75)


def test_a_batch_shares_the_weights_and_not_the_context():
    one, many = H200.lm_step_s(1, 500), H200.lm_step_s(128, 500)
    shared = H200.lm_step_s(1, 0)
    assert many == pytest.approx(shared + 128 * (one - shared), rel=1e-6)
    assert 128 / many > 20 / one


def test_smaller_weights_lower_what_is_bound_by_memory_only():
    quarter = replace(H200, form=limits.Format("int4", 0.5, 2, 790e12))
    assert quarter.lm_step_s(context=0) == pytest.approx(H200.lm_step_s(context=0) / 4, rel=1e-6)
    assert quarter.lm_prompt_s(4000) == H200.lm_prompt_s(4000)
    slow = replace(quarter, form=replace(quarter.form, matrix_rate=1e9))
    assert slow.lm_step_s() > 100 * quarter.lm_step_s()


def test_a_cold_voice_costs_its_prompt():
    assert H200.ttfb_s(13, 75, cold_chunks=3) == pytest.approx(H200.ttfb_s(13, 75) + 3 * H200.flow_s())


def test_throughput_grows_with_the_batch_up_to_the_arithmetic():
    figures = [H200.throughput(batch) for batch in (1, 8, 32, 128)]
    assert figures == sorted(figures)
    assert figures[-1] < 790e12 / H200.work.flow_flops


def test_a_stream_keeps_what_its_frames_and_positions_say():
    work = H200.work
    assert work.flow_kept == 4 * 10 * 22 * 1024
    assert H200.stream_bytes(75) == 2 * (500 * work.flow_kept + (100 + 75 + 250) * work.lm_kept)


def test_halves_of_every_format_multiply_at_the_measured_rate():
    named = {form.name: form for form in limits.formats(Ceilings(1, 10), Ceilings(1, 20))}
    assert [named[name].matrix_rate for name in ("float32", "float16", "int8", "int4")] == [10, 20, 20, 20]
    named = {form.name: form for form in limits.formats(Ceilings(1, 10), Ceilings(1, 20), Ceilings(1, 40))}
    assert [named[name].matrix_rate for name in ("float32", "float16", "int8", "int4")] == [10, 20, 40, 20]


def test_the_vocoder_multiplies_halves_on_a_gpu():
    forms = limits.formats(Ceilings(1, 10), Ceilings(1, 20))
    assert limits.vocoder_format(torch.device("cuda"), forms) is forms[1]
    assert limits.vocoder_format(torch.device("cpu"), forms) is forms[0]
    in_float32 = replace(H200, vocoder=limits.Format("float32", 4, 4, 60e12))
    measured_s = 0.136e-3  # a second of audio in launches of 32 on an H200
    assert H200.vocoder_s() < measured_s < in_float32.vocoder_s()


@pytest.mark.parametrize("generation", [1, 2])
def test_older_generations_have_floors_too(generation):
    work = limits.count_work(full_config(generation))
    assert min(work.lm_weights, work.flow_weights, work.vocoder_weights, work.lm_kept) > 0


def test_command_measures_the_engine_beside_its_floors(random_model_folder):
    done = CliRunner().invoke(app, ["limits", "-m", str(random_model_folder), "--measure"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output.splitlines()[-1])
    assert [row["format"] for row in document["formats"]] == ["float32", "float16", "int8", "int4"]
    figures = document["measured"]["figures"]
    for name, entry in figures.items():
        share = entry["measured"] / entry["floor"] if name == "tps" else entry["floor"] / entry["measured"]
        assert entry["percent_of_floor"] == pytest.approx(100 * share, rel=0.05, abs=0.02)


def test_requests_out_of_range():
    with pytest.raises(InvalidRequestError):
        limits.run("mini", requests=0)


def test_full_sizes_need_no_weights():
    document = limits.run("random")
    assert document["work"]["lm_weights"] == 24 * 14_909_440 + 6761 * 896
    assert document["measured"] is None
    assert torch.get_num_threads() == document["threads"]
