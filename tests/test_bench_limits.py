"""``vivace limits``: floors that follow from the model's sizes and the measured rates."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import pictures
from benchmarks.steps import ROOT
from vivace.bench import floors, limits, limits_measure
from vivace.bench.floors import Ceilings
from vivace.bench.limits_measure import Spoken, Together
from vivace.bench.progress import Count
from vivace.bench.single import Bench
from vivace.bench.throughput import Load, serve
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


RATES = ("tps", "audio_seconds_per_second")


def test_command_measures_the_engine_beside_its_floors(random_model_folder):
    done = CliRunner().invoke(app, ["limits", "-m", str(random_model_folder), "--measure"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout.splitlines()[-1])
    assert [row["format"] for row in document["formats"]] == ["float32", "float16", "int8", "int4"]
    measured = document["measured"]
    figures = measured["figures"]
    memory = figures.pop("memory_per_stream_bytes")
    assert memory["floor"] > 0
    assert (memory["measured"], memory["percent_of_floor"]) == (None, None)  # a CPU has no such figure
    for name, entry in figures.items():
        share = entry["measured"] / entry["floor"] if name in RATES else entry["floor"] / entry["measured"]
        assert entry["percent_of_floor"] == pytest.approx(100 * share, rel=0.05, abs=0.02)
    assert (measured["streams"], measured["audio_seconds"]) == (4, 5.0)
    assert any("4 side by side" in line for line in done.stdout.splitlines())


def test_throughput_is_that_of_the_streams_side_by_side(random_model_folder, monkeypatch):
    """By an engine for so many; the lone figures by one for one stream."""
    opened, served = [], []

    class Noted(Bench):
        def __init__(self, model, device, dtype, seconds, max_streams=1):
            opened.append(max_streams)
            super().__init__(model, device, dtype, seconds, max_streams)

    def noted(bench, batch, sentences, **options):
        load = serve(bench, batch, sentences, **options)
        served.append((batch, sentences, load.audio_seconds_per_second))
        return load

    monkeypatch.setattr(limits_measure, "Bench", Noted)
    monkeypatch.setattr(limits_measure, "serve", noted)
    told = []
    document = limits.run(
        str(random_model_folder),
        measure=True,
        seconds=1.0,
        requests=1,
        streams=3,
        progress=lambda *step: told.append(step),
    )
    measured = document["measured"]
    assert opened == [1, 3]
    assert [(batch, sentences) for batch, sentences, _ in served] == [(3, 3), (3, 6)]
    rate = measured["figures"]["audio_seconds_per_second"]
    assert rate["measured"] == served[-1][2]
    assert rate["floor"] > 0
    assert next(title for title, _, _ in told if title != told[0][0]) == "one stream"
    assert told[-1] == ("3 side by side", 12, 12)
    assert {total for _, _, total in told} == {12}
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_floors_are_counted_at_the_length_that_was_spoken(random_model_folder):
    short, long = (
        limits.run(str(random_model_folder), measure=True, seconds=seconds, requests=1, streams=1)
        for seconds in (1.0, 3.0)
    )
    text = short["measured"]["context_tokens"] - short["prompt_tokens"] - 12
    assert 0 < text < 200
    assert long["measured"]["context_tokens"] == short["prompt_tokens"] + text + 37
    assert long["measured"]["context_frames"] == 2 * (short["prompt_tokens"] + 37)
    kept = [document["measured"]["figures"]["memory_per_stream_bytes"]["floor"] for document in (short, long)]
    work = limits.Work(**short["work"])
    assert kept[1] - kept[0] == 4 * 2 * (50 * work.flow_kept + 25 * work.lm_kept)


def test_each_figure_has_the_floor_of_what_was_spoken():
    """The streams' throughput is bounded by their number, first audio by its tokens and the voice's frames."""
    spoken = Spoken(
        text_tokens=20,
        prompt_tokens=75,
        prompt_frames=150,
        first_tokens=28,
        context_tokens=157,
        context_frames=274,
    )
    best = limits_measure._best(H200, spoken, 32, 5.0)
    context = {"context": 157, "context_frames": 274}
    first_s = H200.ttfb_s(28, 75, text_tokens=20, context_frames=150)
    assert best["audio_seconds_per_second"] == pytest.approx(H200.throughput(32, **context), abs=0.01)
    assert best["rtf"] == pytest.approx(1 / H200.throughput(1, **context), abs=1e-6)
    assert best["ttfb_ms"] == pytest.approx(1e3 * first_s, abs=1e-3)
    assert best["tps"] == pytest.approx(1 / H200.lm_step_s(context=157), abs=0.1)
    assert best["flow_ms_per_second"] == pytest.approx(1e3 * H200.flow_s(context_frames=274), abs=1e-4)
    assert best["memory_per_stream_bytes"] == H200.stream_bytes(75, text_tokens=20, seconds=5.0)


def test_times_of_stages_are_for_a_second_of_audio():
    def result(times, tps):
        stages = SimpleNamespace(flow_ms=times, vocoder_ms=times / 10)
        return SimpleNamespace(audio_seconds=4.0, tps=tps, ttfb_ms=times, rtf=times, times=stages)

    results = [result(20.0, 1000.0), result(40.0, 3000.0), result(400.0, 2000.0)]
    found = limits_measure._found(results, Together(286.0, None))
    assert found == {
        "tps": 2000.0,
        "flow_ms_per_second": 10.0,
        "vocoder_ms_per_second": 1.0,
        "ttfb_ms": 40.0,
        "rtf": 40.0,
        "audio_seconds_per_second": 286.0,
        "memory_per_stream_bytes": None,
    }


def test_what_is_spoken_is_told_by_the_models_own_borders(random_model_folder):
    """The utterance that warms up does not count."""
    told = []
    bench = Bench(str(random_model_folder), "cpu", torch.float32, 1.0)
    config, voice = bench.assets.model.config, bench.assets.default_voice
    results, spoken = limits_measure._one_by_one(bench, 2, Count(lambda *step: told.append(step), 3))
    assert (len(results), told[-1]) == (2, ("one stream", 3, 3))
    prompt = len(voice.speech_tokens)
    border = config.chunk_tokens - prompt % config.chunk_tokens
    assert spoken.first_tokens == border + config.flow.lookahead_tokens
    assert (spoken.prompt_tokens, spoken.prompt_frames) == (prompt, config.flow.num_frames(prompt))


def test_a_shorter_context_lowers_the_floors():
    work = H200.work
    assert H200.flow_s(context_frames=100) < H200.flow_s()
    bare = work.flow_flops - limits.CONTEXT_FRAMES * work.flow_attention_flops
    arithmetic = replace(H200, bandwidth=1e30)
    assert arithmetic.flow_s(context_frames=0) == pytest.approx(bare / 790e12)
    assert work.flow_attention_flops == 2 * 50 * 10 * 4 * 22 * 1024
    assert H200.throughput(32, context=100, context_frames=100) > H200.throughput(32)
    assert H200.rtf() == pytest.approx(25 * H200.lm_step_s() + H200.flow_s() + H200.vocoder_s())
    assert H200.ttfb_s(13, 75, text_tokens=20, context_frames=150) < H200.ttfb_s(13, 75)


def test_memory_of_a_stream_is_what_came_on_top_of_the_model():
    load = Load(32, 32, *[1.0] * 9, peak_memory_bytes=1000 + 32 * 7)
    assert limits_measure.memory_per_stream(load, 1000) == 7
    assert limits_measure.memory_per_stream(load, 0) is None  # no CUDA device
    assert limits_measure.memory_per_stream(replace(load, peak_memory_bytes=None), 1000) is None
    assert limits_measure.beside("memory_per_stream_bytes", 20, 5)["percent_of_floor"] == 25.0
    assert limits_measure.beside("audio_seconds_per_second", 5.0, 20)["percent_of_floor"] == 25.0


def test_every_step_of_an_unknown_estimator_would_read_something(monkeypatch):
    """Renamed weights must not count as none."""
    config = full_config(2)
    known = limits.count_work(config).flow_weights
    shapes = floors.weight_shapes

    def renamed(config, stage):
        return {name.replace("unet.", "estimator."): shape for name, shape in shapes(config, stage).items()}

    monkeypatch.setattr(floors, "weight_shapes", renamed)
    with pytest.raises(AssertionError, match="name its estimator"):
        limits.count_work(config)
    assert 0 < known < sum(math.prod(shape) for shape in shapes(config, "flow").values())


def test_weights_that_depend_on_time_alone_are_not_read_again():
    shapes = {"unet.time_mlp.linear_1.weight": (7, 5), "unet.mid_blocks.0.0.mlp.1.weight": (11, 3)}
    own = {"unet.final_proj.weight": (2, 3, 1), "unet.mid_blocks.0.1.0.ff.net.2.weight": (4, 4)}
    assert floors._estimator_weights(shapes | own | {"encoder.weight": (100, 100)}) == 6 + 16


def test_rows_of_older_commits_are_still_drawn():
    """They lack throughput and memory."""
    for row in pictures.read_rows(ROOT / "benchmarks" / "results" / "limits.jsonl"):
        figures = {
            name: entry
            for name, entry in row["measured"]["figures"].items()
            if name not in ("audio_seconds_per_second", "memory_per_stream_bytes")
        }
        assert "real-time factor" in pictures.limits(
            row | {"measured": row["measured"] | {"figures": figures}}
        )


def test_requests_out_of_range():
    with pytest.raises(InvalidRequestError):
        limits.run("mini", requests=0)
    with pytest.raises(InvalidRequestError):
        limits.run("mini", streams=65)


def test_full_sizes_need_no_weights():
    document = limits.run("random")
    assert document["work"]["lm_weights"] == 24 * 14_909_440 + 6761 * 896
    assert document["measured"] is None
    assert torch.get_num_threads() == document["threads"]
