"""``vivace bench llm`` on a CPU: one table, one document, nothing that is missing ends it."""

from __future__ import annotations

import functools
import json
import signal
import threading
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from vivace.bench import llm
from vivace.bench.llm import divergence, exactness, floor_bytes, parse_batches, random_lm, run
from vivace.bench.llm_steps import CHOICES, EagerSteps, StaticSteps
from vivace.cli import app
from vivace.config import SpeechLMConfig
from vivace.errors import InvalidRequestError
from vivace.random_checkpoint import tiny_config


def test_command_prints_a_table_and_one_document():
    arguments = ["bench", "llm", "-m", "mini", "--batch", "1,3", "--context", "9", "--runs", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert any("tokens/s" in line for line in lines)
    document = json.loads(lines[-1])
    assert (document["bench"], document["context"], document["runs"]) == ("llm", 9, 1)
    rows = {(row["choice"], row["batch"]): row for row in document["rows"]}
    assert set(rows) == {(choice, batch) for choice in CHOICES for batch in (1, 3)}
    eager = rows["eager", 3]
    assert eager["tps"] == pytest.approx(3e6 / eager["us_per_step"], rel=0.01)
    assert eager["floor_share"] == pytest.approx(eager["floor_us"] / eager["us_per_step"], rel=0.02)
    if not torch.cuda.is_available():
        assert rows["kernels", 1]["tps"] is None
        assert "CUDA" in rows["kernels", 1]["reason"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"batches": ()},
        {"batches": (0,)},
        {"batches": (257,)},
        {"context": 0},
        {"runs": 0},
        {"choices": ("warp drive",)},
    ],
)
def test_arguments_out_of_range(arguments):
    with pytest.raises(InvalidRequestError):
        run("mini", **arguments)


def test_a_way_that_fails_or_takes_too_long_is_a_row_with_its_reason(monkeypatch):
    tried = []

    def open_steps(choice, lm, batch, *_):
        tried.append((choice, batch))
        if choice == "graph":
            raise OSError("no compiler")
        try:
            threading.Event().wait(10)
        except TimeoutError:
            raise RuntimeError("the compiler ran into something") from None

    monkeypatch.setattr(llm, "open_steps", open_steps)
    document = run("mini", batches=(1, 2), context=3, runs=1, choices=("compile", "graph"), limit_s=0.05)
    reasons = [row["reason"] for row in document["rows"]]
    assert reasons == [
        "took more than 0.05 s",
        "no compiler",
        "took more than 0.05 s at a smaller batch",
        "no compiler",
    ]
    assert tried == [("compile", 1), ("graph", 1), ("graph", 2)]
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_batches_of_the_command_line():
    assert parse_batches("1, 8,32") == (1, 8, 32)
    for wrong in ("", "1,,2", "-1", "1.5", "many"):
        with pytest.raises(InvalidRequestError):
            parse_batches(wrong)


def test_floor_counts_every_weight_that_a_step_reads():
    config = tiny_config().lm
    assert isinstance(config, SpeechLMConfig)
    lm = random_lm(config, "cpu", torch.float32)
    read = sum(
        parameter.numel()
        for name, parameter in lm.named_parameters()
        if "embed" not in name and parameter.dim() > 1
    )
    assert floor_bytes(config, 0, 500, 2) == 2 * read
    per_row = 2 * 500 * config.num_layers * 2 * config.num_kv_heads * config.head_dim
    assert floor_bytes(config, 3, 500, 2) - floor_bytes(config, 0, 500, 2) == 3 * per_row


@torch.inference_mode()
def test_static_steps_draw_what_eager_steps_draw():
    """Same cache, same tokens: the ways that are compared do the same work."""
    config = tiny_config().lm
    assert isinstance(config, SpeechLMConfig)
    lm = random_lm(config, "cpu", torch.float32)
    eager, static = EagerSteps(lm, 2, 21, 5, "math"), StaticSteps(lm, 2, 21, 5)
    static._cache.copy_(eager._cache.storage)
    for steps in (eager, static):
        steps.reset()
        steps.run()
        steps.finish()
    assert torch.equal(eager._drawing.tokens, static._drawing.tokens)
    assert torch.equal(eager._drawing.recent, static._drawing.recent)


def test_exactness_of_half_precision():
    config = tiny_config().lm
    assert isinstance(config, SpeechLMConfig)
    full = exactness(random_lm(config, "cpu", torch.float32), prompt=8, tokens=6)
    half = exactness(random_lm(config, "cpu", torch.bfloat16), prompt=8, tokens=6)
    assert full[0]["kl_max"] == pytest.approx(0.0, abs=1e-9)
    assert full[0]["argmax_agreement"] == 1.0
    assert 0 < half[0]["kl_mean"] < 1e-2


def test_divergence_of_unlike_scores():
    scores = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    found = divergence(scores, scores.flip(1))
    assert found["argmax_agreement"] == 0.0
    assert found["kl_mean"] > 0.4


def test_what_is_called_compiled_is_compiled_or_an_error(monkeypatch):
    """PyTorch gives up after a few shapes and goes on uncompiled unless it is told not to."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    lm = random_lm(replace(tiny_config().lm, num_layers=1), "cpu", torch.float32)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1), torch.inference_mode():
        StaticSteps(lm, 1, 4, 2, is_compiled=True).run()
        with pytest.raises(Exception, match="fullgraph=True"):
            StaticSteps(lm, 2, 4, 2, is_compiled=True).run()
    torch.compiler.reset()


def test_all_work_happens_on_the_device_named(monkeypatch):
    """Kernels and captures go to the device that is the current one, wherever their tensors lie."""
    pytest.importorskip("triton")
    from tests.simulated_cuda import simulated_cuda

    found = {}

    def on(name, answer):
        def record(*_):
            found[name] = torch.cuda.current_device()
            return answer

        monkeypatch.setattr(llm, name, record)

    on("load_lm", random_lm(replace(tiny_config().lm, num_layers=1), "cpu", torch.float32))
    on("open_steps", "not measured here")
    on("copy_bandwidth", 1e9)
    on("exactness", [])
    with simulated_cuda():
        run("random", device="cuda:1", batches=(1,), choices=("eager",))
        assert torch.cuda.current_device() == 0
    assert found == dict.fromkeys(("load_lm", "open_steps", "copy_bandwidth", "exactness"), 1)
