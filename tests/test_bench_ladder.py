"""``vivace bench ladder``: every rung speaks the same amount, says what it changes, and a second run goes on."""

from __future__ import annotations

import csv
import io
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import pictures
from tests.test_bench_llm import random_lm
from vivace.bench import ladder, ladder_measure
from vivace.bench.ladder_compare import compared
from vivace.bench.ladder_lm import DecodeTimes, EagerDecoder, LMInput, StaticDecoder, draw_in_loop
from vivace.bench.ladder_measure import Measurer
from vivace.bench.ladder_quality import BEST_SNR_DB, snr_db
from vivace.bench.ladder_rungs import RUNGS, Plan, Switches, plan_ladder
from vivace.bench.ladder_setup import open_setup
from vivace.bench.ladder_speech import Hops, Stages, TokenBox, WholeFlow
from vivace.bench.ladder_store import FIGURES, Store
from vivace.bench.ladder_table import print_ladder
from vivace.bench.report import ladder_page
from vivace.bench.report_charts import Stack, Step, picture, stack_chart, step_chart
from vivace.cli import app
from vivace.config import SamplingConfig, SpeechLMConfig
from vivace.engine.flow_runner import FlowRunner
from vivace.errors import InvalidRequestError
from vivace.layers.int8 import products_are_exact
from vivace.random_checkpoint import tiny_config

SOME = ("reference", "half-flow", "compile", "early-border", "kernels", "int8", "int4")


@pytest.fixture(scope="module")
def setup(random_model_folder):
    opened = open_setup(str(random_model_folder), "cpu", (40,))
    yield opened
    opened.close()


def judge(texts, spoken, rate_hz):
    """As many errors as seconds."""
    assert len(texts) == len(spoken) == 1
    return len(spoken[0]) / rate_hz


@pytest.fixture(scope="module")
def finished(random_model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("ladder")
    return ladder.run(str(random_model_folder), tokens=(40,), rungs=SOME, out=out, judge=judge), out


def test_every_rung_speaks_the_same_amount(finished):
    document, _ = finished
    measured = [row for row in document["rows"] if row["reason"] is None]
    assert [(row["rung"], row["kind"]) for row in measured] == [
        ("reference", "cumulative"),
        ("half-flow", "cumulative"),
        ("half-flow", "alone"),
        ("early-border", "cumulative"),
        ("early-border", "alone"),
        ("kernels", "cumulative"),
        *([("int8", "cumulative")] if products_are_exact() else []),
    ]
    assert {row["audio_seconds"] for row in measured} == {1.6}
    for row in measured:
        assert 0 < row["ttfb_ms_p50"] <= row["rtf"] * row["audio_seconds"] * 1e3 + 1
        assert row["tps"] == pytest.approx(40e3 / row["lm_ms"], rel=0.01)
        assert row["wer"] == pytest.approx(1.6)


def test_floor_beside_each_rung_has_its_precision(finished):
    document, _ = finished
    full, half, *small = (floor["rtf"] for floor in document["floors"])
    for row in document["rows"]:
        if row["reason"] is None:
            floor = {"half-flow": half, "int8": [half, *small][-1]}.get(row["rung"], full)
            assert row["floor_percent"] == pytest.approx(100 * floor / row["rtf"], abs=0.02)


def test_what_cannot_run_is_a_row_with_a_reason(finished):
    document, _ = finished
    reasons = {row["rung"]: row["reason"] for row in document["rows"]}
    assert reasons["int4"] == "not part of Vivace yet"
    if not torch.cuda.is_available():
        assert reasons["compile"] == "needs a CUDA device"


def test_quality_differs_from_float32_where_precision_does(finished):
    document, _ = finished
    rows = {(row["rung"], row["kind"]): row for row in document["rows"]}
    assert rows["reference", "cumulative"]["mel_snr_db"] == BEST_SNR_DB
    assert 10 < rows["half-flow", "cumulative"]["mel_snr_db"] < 80
    assert rows["kernels", "cumulative"]["mel_snr_db"] > 80
    assert rows["kernels", "cumulative"]["lm_kl"] < 1e-6
    if products_are_exact():
        assert 30 < rows["int8", "cumulative"]["mel_snr_db"] < 120
        assert rows["int8", "cumulative"]["lm_kl"] < 2e-3


def test_a_rung_that_fails_does_not_end_the_run(random_model_folder, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of luck\nsecond line")

    monkeypatch.setattr(ladder.Measurer, "measure", fail)
    found = ladder.run(str(random_model_folder), tokens=(40,), rungs=("reference",))
    assert [(row["reason"], row["rtf"]) for row in found["rows"]] == [("out of luck", None)]


def test_a_rung_that_hangs_is_a_row_with_a_reason(random_model_folder, monkeypatch):
    def hang(*_):
        try:
            threading.Event().wait(20)
        except TimeoutError as error:
            raise ValueError("dressed up") from error

    monkeypatch.setattr(ladder.Measurer, "measure", hang)
    monkeypatch.setitem(ladder.LONGEST_S, "cpu", 0.05)
    found = ladder.run(str(random_model_folder), tokens=(40,), rungs=("reference",))
    assert [row["reason"] for row in found["rows"]] == ["took more than 0.05 s"]


def test_a_lone_first_change_is_the_first_rung_and_measured_once(random_model_folder, monkeypatch):
    measured = []

    def count(self, plan):
        measured.append(plan.key)
        raise RuntimeError("not now")

    monkeypatch.setattr(ladder.Measurer, "measure", count)
    found = ladder.run(str(random_model_folder), tokens=(40,), rungs=("last-state", "vectorised-sampling"))
    assert measured == ["last-state", "vectorised-sampling", "vectorised-sampling-alone"]
    assert [row["kind"] for row in found["rows"]] == ["cumulative", "alone"] * 2


def test_where_time_is_short_the_last_rungs_come_first_and_the_next_run_takes_up_the_rest(
    random_model_folder, tmp_path, monkeypatch
):
    plans = [plan for plan in plan_ladder("cpu", names=SOME) if plan.reason is None]
    order = [plan.key for plan in ladder.Limit(0.0).in_order(plans, None)]
    assert order[:4] == ["int8", "kernels", "early-border", "half-flow"]
    assert order[4:] == ["reference", "early-border-alone", "half-flow-alone"]
    arguments = {"tokens": (30,), "rungs": ("half-flow", "kernels"), "alone": False, "out": tmp_path / "made"}
    none = ladder.run(str(random_model_folder), **arguments, limit_s=0.0)
    assert [row["reason"] for row in none["rows"]] == ["no time was left"] * 2

    def end_the_process(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ladder.Measurer, "measure", end_the_process)
        with pytest.raises(KeyboardInterrupt):
            ladder.run(str(random_model_folder), **arguments, limit_s=100.0)
    titles = []
    progress = lambda title, *_: titles.append(title)  # noqa: E731
    found = ladder.run(str(random_model_folder), **arguments, limit_s=100.0, progress=progress)
    assert titles == ["half-precision flow", "our kernels (the engine)"]  # the one that was cut comes last
    assert [row["reason"] for row in found["rows"]] == [None, None]


def test_a_rung_that_never_ends_is_given_up(tmp_path):
    plans = plan_ladder("cpu", names=("half-flow", "kernels"), alone=False)
    setup = SimpleNamespace(device=torch.device("cpu"))
    begun = []

    def measure(plan):
        begun.append(plan.rung.name)
        if plan.rung.name == "half-flow":
            raise KeyboardInterrupt
        return dict.fromkeys(FIGURES, 1.0) | {"reason": None}

    def run_once():
        store = Store(tmp_path, {})
        limit = ladder.Limit(time.perf_counter() + 100)
        return ladder._measure_all(setup, plans, measure, store, None, limit)

    for _ in range(ladder.MOST_CUTS):
        with pytest.raises(KeyboardInterrupt):
            run_once()
    rows = run_once()
    assert begun == ["kernels", *["half-flow"] * ladder.MOST_CUTS]
    assert [row["reason"] for row in rows] == ["3 runs were ended in the midst of it", None]
    assert [row["rtf"] for row in rows] == [None, 1.0]


def test_files_hold_what_the_document_holds(finished):
    document, out = finished
    assert json.loads((out / "ladder.json").read_text(encoding="utf-8")) == document
    rows = list(csv.DictReader(io.StringIO((out / "ladder.csv").read_text(encoding="utf-8"))))
    assert [row["rung"] for row in rows] == [row["rung"] for row in document["rows"]]
    assert float(rows[0]["rtf"]) == document["rows"][0]["rtf"]


def test_a_second_run_goes_on_where_the_first_one_ended(finished, random_model_folder, monkeypatch):
    document, out = finished

    def refuse(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(ladder.Measurer, "measure", refuse)
    again = ladder.run(str(random_model_folder), tokens=(40,), rungs=SOME, out=out, judge=judge)
    assert again["rows"] == document["rows"]
    with pytest.raises(InvalidRequestError, match=r"another setting \(tokens\)"):
        ladder.run(str(random_model_folder), tokens=(45,), rungs=SOME, out=out, judge=judge)


def test_report_needs_nothing_from_elsewhere(finished):
    page = ladder_page(finished[0])
    for part in (
        "as the reference does it",
        "RTX 3090",
        "NVIDIA T4",
        "needs a CUDA device",
        "floor, float32",
    ):
        assert part in page, part
    assert page.count("<svg") == 4
    last = next(row for row in finished[0]["rows"] if row["rung"] == "kernels")
    reports = page[page.index("What others reported") :]
    assert f"{last['rtf']:.3f}" in reports
    assert f"{finished[0]['rows'][0]['ttfb_ms_p50']:,.0f} ms" in reports
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_report_tells_the_time_of_a_phrase_beside_that_of_a_sentence():
    """Of bottom and top rung, one after the other; batches are not the ladder's."""
    figures = dict.fromkeys(FIGURES, 1.0) | {"half": False, "reason": None, "audio_seconds": 20.0}
    figures |= {"host_us_per_step": None, "wer": None}
    plans = plan_ladder("cpu", names=("reference", "last-state", "kernels", "sdpa"), alone=False)
    rows = [
        figures
        | {"rung": plan.rung.name, "title": plan.rung.title, "about": "", "kind": plan.kind, "rtf": rtf}
        | {"switches": asdict(plan.switches), "reason": plan.reason}
        for plan, rtf in zip(plans, (0.8, 0.5, 9.0, 0.1), strict=True)
    ]
    floors = [{"format": "float32", "ttfb_ms": 1.0, "rtf": 0.5, "tps": 1.0}] * 3
    document = {"rows": compared(rows, floors), "floors": floors, "tokens": [150, 250, 100, 25]}
    document |= {"model": "mini", "hardware": "a machine", "torch": "2", "threads": 1, "runs": 1}
    page = ladder_page(document)
    lines = [line for line in page.splitlines() if "sentence" in line]
    cells_of = [line.replace("</tr>", "").split("<td>")[1:] for line in lines if line.startswith("<tr")]
    assert [[text.removesuffix("</td>") for text in row] for row in cells_of] == [
        ["one sentence, batch 1", "1890 ms", "520 ms", "4,000 ms", "500 ms"],
        ["sentences per second, one after the other", "0.53", "–", "0.25", "2"],
        ["sentences per second, dynamic batches of up to 32", "–", "9.8", "–", "–"],
    ]
    (note,) = (line for line in lines if line.startswith("<p"))
    assert "6.0, 10.0, 4.0, 1.0 s of audio" in note
    assert "vivace bench throughput --batch 1,32" in note


@pytest.mark.skipif(torch.cuda.is_available(), reason="this rung runs on a CUDA device")
def test_where_no_rung_can_run_the_reasons_are_all_there_is(random_model_folder, tmp_path):
    arguments = ["bench", "ladder", "-m", str(random_model_folder), "--rungs", "sdpa", "--tokens", "30"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    first, reason, *_ = done.stdout.splitlines()
    assert first.endswith(": no rung was measured")
    assert reason == "not available: SDPA back end named: needs a CUDA device"
    assert "┃" not in done.stdout
    page = (tmp_path / "ladder.html").read_text(encoding="utf-8")
    assert "No rung was measured." in page
    assert "<svg" not in page


def test_a_change_alone_is_named_where_its_reason_is_its_own():
    row = {"rung": "sdpa", "title": "SDPA", "kind": "cumulative", "reason": "needs a CUDA device"}
    rows = [row, row | {"kind": "alone"}, row | {"kind": "alone", "reason": "out of luck"}]
    document = {"model": "mini", "hardware": "here", "tokens": [25], "rows": rows, "floors": []}
    console = Console(file=io.StringIO(), width=132)
    print_ladder(document, console)
    assert console.file.getvalue().splitlines()[1:] == [
        "not available: SDPA: needs a CUDA device",
        "not available: SDPA (alone): out of luck",
    ]


SVG = "{http://www.w3.org/2000/svg}"


def widths_in(chart):
    return [float(element.get("width")) for element in ElementTree.fromstring(chart).iter(f"{SVG}rect")]


def test_stacks_are_well_formed_and_longer_for_more():
    stacks = [Stack("one & two", ((2.0, "#000"),), "2"), Stack("x", ((3.0, "#000"), (5.0, "#111")), "8")]
    first, *parts = widths_in(stack_chart("a < b", stacks))
    assert sum(parts) == pytest.approx(4 * first, rel=0.01)


def test_steps_stand_on_a_logarithmic_axis_with_their_floor_and_themselves_alone():
    steps = [
        Step("slow", 1000.0, "1,000", floor=10.0),
        Step("faster", 100.0, "100", floor=10.0, alone=1000.0, alone_text="1,000"),
        Step("not here", None, "–"),
    ]
    chart = step_chart("time", steps, "#123456")
    slow, faster, alone = widths_in(chart)
    assert alone == pytest.approx(slow)
    marks = [
        line for line in ElementTree.fromstring(chart).iter(f"{SVG}line") if line.get("stroke-width") == "3"
    ]
    start = float(next(ElementTree.fromstring(chart).iter(f"{SVG}rect")).get("x"))
    floors = [float(line.get("x1")) - start for line in marks]
    assert len(floors) == 2
    assert slow - faster == pytest.approx(faster - floors[0], abs=0.2)


def test_a_picture_stands_alone_with_all_its_charts():
    charts = [stack_chart("one", [Stack("x", ((1.0, "#000"),), "1")]), step_chart("two", [], "#000")]
    tree = ElementTree.fromstring(picture(charts, "where and when"))
    inner = [svg for svg in tree.iter(f"{SVG}svg") if svg is not tree]
    ends = [float(svg.get("y")) + float(svg.get("height")) for svg in inner]
    assert len(inner) == 2
    assert float(inner[1].get("y")) > ends[0]
    assert ends[1] < float(tree.get("height"))
    assert "where and when" in "".join(tree.itertext())


def test_gains_are_over_the_rung_that_a_change_was_made_to(finished):
    rows = {(row["rung"], row["kind"]): row for row in finished[0]["rows"]}
    reference, border = rows["reference", "cumulative"], rows["early-border", "cumulative"]
    for (_, kind), row in rows.items():
        if kind == "alone":
            assert row["rtf_gain"] == pytest.approx(reference["rtf"] / row["rtf"], abs=0.006)
    gain = rows["kernels", "cumulative"]["ttfb_gain"]
    assert gain == pytest.approx(
        border["ttfb_ms_p50"] / rows["kernels", "cumulative"]["ttfb_ms_p50"], abs=0.006
    )
    assert reference["rtf_gain"] is None
    assert border["rtf_gain"] is None  # what it builds on was not measured
    assert rows["int4", "cumulative"]["rtf_gain"] is None


def test_int8_gains_over_the_engine_in_float32():
    figures = dict.fromkeys(FIGURES, 1.0) | {"half": False, "reason": None}
    plans = plan_ladder("cpu", names=("early-border", "kernels", "int8"), alone=False)
    rows = [
        figures | {"rung": plan.rung.name, "kind": plan.kind, "switches": asdict(plan.switches), "rtf": rtf}
        for plan, rtf in zip(plans, (8.0, 4.0, 1.0), strict=True)
    ]
    floors = [{"ttfb_ms": 1.0, "rtf": 0.5, "tps": 1.0}] * 3
    assert [row["rtf_gain"] for row in compared(rows, floors)] == [None, 2.0, 4.0]
    without_engine = [rows[0], rows[2]]
    assert compared(without_engine, floors)[1]["rtf_gain"] == 8.0


def test_command_prints_a_table_and_one_document(random_model_folder):
    arguments = ["bench", "ladder", "-m", str(random_model_folder), "--tokens", "30", "--rungs", "kernels"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert any("TTFB" in line for line in lines)
    assert json.loads(lines[-1])["bench"] == "ladder"


@pytest.mark.parametrize(
    "wrong", [{"runs": 0}, {"tokens": (5,)}, {"tokens": (40, 40, 40, 40)}, {"rungs": ("warp drive",)}]
)
def test_arguments_out_of_range(wrong):
    with pytest.raises(InvalidRequestError):
        ladder.run("mini", **wrong)


def test_lengths_of_the_command_line():
    assert ladder.parse_tokens("150, 200") == (150, 200)
    assert ladder.parse_tokens("") == ()
    with pytest.raises(InvalidRequestError):
        ladder.parse_tokens("150,,200")


# -- rungs -----------------------------------------------------------------------------------------------------


def test_rungs_keep_what_came_before_and_alone_has_one_change():
    plans = plan_ladder("cuda")
    changes = {rung.name: dict(rung.change) for rung in RUNGS}
    expected = Switches()
    for plan in plans:
        if plan.kind == "alone":
            assert plan.switches == replace(Switches(), **changes[plan.rung.name])
        else:
            assert plan.switches == replace(expected, **changes[plan.rung.name])
            if "cuda" in plan.rung.carried_on:
                expected = plan.switches
    assert expected.engine
    assert len({plan.key for plan in plans}) == len(plans)


def test_a_cpu_does_not_carry_half_precision_on():
    last = {plan.rung.name: plan for plan in plan_ladder("cpu", alone=False)}
    assert last["half-flow"].switches.half_flow
    assert not last["early-border"].switches.half_flow
    assert last["cuda-graphs"].reason is not None
    assert not last["early-border"].switches.graphs


def test_every_switch_has_a_rung():
    changed = {name for rung in RUNGS for name, _ in rung.change}
    assert changed == set(asdict(Switches()))


# -- the reference's way -----------------------------------------------------------------------------------------


def hop_list(switches, prompt_tokens, chunks, hops=None):
    hops = hops or Hops(switches, prompt_tokens)
    hops.begin()
    taken = []
    for _ in range(chunks):
        taken.append(hops.take())
        hops.done(taken[-1])
    return taken, hops


def test_hops_grow_and_stay_grown_as_in_the_reference():
    first, hops = hop_list(Switches(), 40, 4)
    assert first == [35, 50, 100, 100]
    assert hop_list(Switches(), 40, 2, hops)[0] == [110, 100]
    own = Switches(borders="own")
    assert hop_list(own, 40, 2, hop_list(own, 40, 4)[1])[0] == [35, 50]
    assert hop_list(Switches(borders="early"), 40, 3)[0] == [10, 25, 25]


def test_whole_flow_gives_the_frames_of_the_stream(setup):
    tokens = list(range(1, 41))
    whole, runner = WholeFlow(setup.flow, setup.voice), FlowRunner(setup.flow)
    stream = runner.open(setup.voice)
    border = 25 - len(setup.voice.speech_tokens) % 25
    with torch.inference_mode():
        first = whole.step(tokens[: border + 3], is_last=False)
        kept = runner.step(stream, tokens[: border + 3], is_last=False)
    assert first.shape == (80, 2 * border)
    assert snr_db(kept, first) > 80


def test_loop_draws_from_the_nucleus_and_breaks_repetition():
    rule = SamplingConfig(top_p=0.8, top_k=25, win_size=10, tau_r=0.1)
    scores = torch.tensor([0.0, 5.0, 9.0, 9.0, -20.0])
    generator = torch.Generator().manual_seed(0)
    drawn = {draw_in_loop(scores.clone(), [], rule, generator) for _ in range(50)}
    assert drawn == {2, 3}
    alone = torch.tensor([0.0, 50.0, 0.0])
    assert draw_in_loop(alone.clone(), [], rule, generator) == 1
    assert draw_in_loop(alone.clone(), [1], rule, generator) in (0, 2)


def test_loop_looks_at_the_candidates_only(monkeypatch):
    """As the reference; a whole vocabulary in pieces costs more than the draw."""
    monkeypatch.setattr(torch.Tensor, "__iter__", None)
    scores = torch.tensor([0.0, 5.0, 9.0])
    assert draw_in_loop(scores, [], SamplingConfig(0.8, 25, 10, 0.1), torch.Generator()) == 2


@pytest.mark.parametrize("sampling", ["vectorised", "device"])
def test_decoders_draw_the_same_tokens(sampling):
    config = tiny_config().lm
    assert isinstance(config, SpeechLMConfig)
    lm, given = random_lm(config, "cpu", torch.float32), LMInput([1, 2, 3], [4, 5])
    times = DecodeTimes()
    static = StaticDecoder(lm, 40, compiled=False, graphs=False).decode(given, 12, DecodeTimes())
    eager = EagerDecoder(lm, keep_states=sampling == "device", sampling=sampling).decode(given, 12, times)
    expected = [token for burst in static for token in burst]
    assert [token for burst in eager for token in burst] == expected
    assert times.steps == len(expected) - 1 == 11


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("compiled", "graphs"), [(True, False), (False, True), (True, True)])
def test_compiled_and_captured_steps_draw_the_same_tokens(compiled, graphs):
    config = tiny_config().lm
    assert isinstance(config, SpeechLMConfig)
    lm, given = random_lm(config, "cuda", torch.float32), LMInput([1, 2, 3], [4, 5])
    found = []
    for ways in ({"compiled": compiled, "graphs": graphs}, {"compiled": False, "graphs": False}):
        decoder = StaticDecoder(lm, 40, **ways)
        for _ in range(2):
            bursts = []
            thread = threading.Thread(
                target=lambda: bursts.extend(decoder.decode(given, 12, DecodeTimes()))  # noqa: B023
            )
            thread.start()
            thread.join()
            found.append([token for burst in bursts for token in burst])
    assert len(found[0]) == 12
    assert all(tokens == found[0] for tokens in found)


def test_the_flow_is_compiled_before_anything_else_runs(setup, monkeypatch):
    """With a thread that decodes beside it, tracing fails at times."""
    order = []
    compiled = [False]

    @contextmanager
    def compiling(flow):
        compiled[0] = True
        yield

    speak, step = Stages.speak, WholeFlow.step
    monkeypatch.setattr(ladder_measure, "compiled_blocks", compiling)
    monkeypatch.setattr(
        ladder_measure, "open_decoder", lambda lm, *_: EagerDecoder(lm, keep_states=False, sampling="device")
    )
    monkeypatch.setattr(Stages, "speak", lambda self, phrase: order.append("speak") or speak(self, phrase))

    def noted(self, tokens, *, is_last):
        order.append("last" if is_last else "first")
        return step(self, tokens, is_last=is_last)

    monkeypatch.setattr(WholeFlow, "step", noted)
    Measurer(setup, 1).measure(Plan(RUNGS[7], "alone", Switches(compiled=True, waiting="event")))
    assert compiled[0]
    assert order[:3] == ["first", "last", "speak"]


def test_who_waits_for_tokens_hears_of_the_end_and_of_faults():
    for polls in (True, False):
        box = TokenBox()
        box.add([1, 2, 3])
        box.wait(2, polls=polls)
        thread = threading.Thread(target=box.end)
        thread.start()
        box.wait(9, polls=polls)
        thread.join()
        box.end(ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            box.wait(9, polls=polls)


def test_a_decoder_that_fails_fails_the_phrase(setup):
    class Broken:
        def decode(self, given, count, times):
            yield [1]
            raise RuntimeError("no more")

    stages = Stages(
        setup.assets.model.config,
        setup.voice,
        Switches(waiting="event"),
        Broken(),
        setup.flow,
        setup.vocoder,
    )
    with pytest.raises(RuntimeError, match="no more"):
        stages.speak(setup.phrases[0])


def test_parallel_vocoder_speaks_what_the_one_in_turn_speaks(setup):
    base = Switches(
        waiting="event", incremental_flow=True, incremental_vocoder=True, borders="early", sampling="device"
    )
    found = []
    for switches in (base, replace(base, parallel=True), replace(base, incremental_vocoder=False)):
        decoder = EagerDecoder(setup.lm, keep_states=False, sampling="device")
        stages = Stages(setup.assets.model.config, setup.voice, switches, decoder, setup.flow, setup.vocoder)
        found.append(torch.from_numpy(stages.speak(setup.phrases[0]).samples))
    assert len(found[0]) == 40 * 960
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[2], atol=1e-4)


def test_pictures_of_result_rows(finished, tmp_path):
    stamp = {"date": "2026-01-01", "commit": "abc1234"}
    row = finished[0] | stamp
    other = row | {"hardware": "NVIDIA H200", "model": "full"}
    (tmp_path / "ladder.jsonl").write_text("\n".join(map(json.dumps, [other, row])), encoding="utf-8")
    profile = {"stages_ms": dict.fromkeys(("text", "prompt", "lm", "flow", "vocoder"), 2.0), "gap_ms": 1.0}
    profile |= {"audio_seconds": 5.0, "wall_ms": 11.0, "hardware": "NVIDIA H200", "model": "full"} | stamp
    older = profile | {"model": "another"}
    (tmp_path / "profile.jsonl").write_text("\n".join(map(json.dumps, [profile, older])), encoding="utf-8")
    made = pictures.draw(tmp_path)
    assert list(made) == ["ladder-h200.svg", "profile-h200.svg", "ladder-cpu.svg"]
    for text in made.values():
        assert "commit abc1234" in "".join(ElementTree.fromstring(text).itertext())
