"""Linear layers of 8-bit products, and the stages and engines made of them.

Rounding moves a value by half a step at most, so bounds are sums over the inputs, not measured tolerances. What a
whole stage loses is held to the figures of the exactness contract (docs/architecture.md).
"""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import GOLDEN, unpack_golden
from vivace.bench import single
from vivace.bench.ladder_quality import kl_mean, lm_scores, snr_db, streamed_mel, whole_mel
from vivace.bench.llm import load_lm
from vivace.checkpoint import open_model
from vivace.datatypes import SamplingParams
from vivace.engine.engine import Engine
from vivace.engine.loading import Assets, load_assets
from vivace.engine.request import SynthesisRequest
from vivace.errors import InvalidRequestError, ModelFolderError
from vivace.layers.int8 import LEVELS, FineInt8Linear, Int8Linear, products_are_exact, to_int8
from vivace.models import int8_stages
from vivace.models.int8_stages import check_int8, quantize, quantize_lm
from vivace.models.lm_single import SingleStep

needs_exact = pytest.mark.skipif(not products_are_exact(), reason="this processor cuts off 8-bit products")

SHAPES = [(1, 1, 1), (1, 896, 128), (2, 3, 5), (7, 31, 17), (16, 64, 33), (101, 257, 65)]
"""Rows, inputs, outputs."""


def linear(inputs, outputs, *, bias=True, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    layer.weight.mul_(torch.logspace(-2, 2, outputs)[:, None])  # rows of very different size
    return layer


def uneven_rows(rows, inputs, seed=1):
    torch.manual_seed(seed)
    x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
    x[:, 0] *= 50  # one channel that is far larger than the others
    return x


def test_rounding_is_half_a_step_at_most():
    rows = torch.cat((uneven_rows(9, 33), torch.zeros(1, 33), torch.full((1, 33), -4.0)))
    values, scales = to_int8(rows)
    assert values.dtype == torch.int8
    assert int(values.min()) == -LEVELS
    assert bool(((values * scales - rows).abs() <= scales * 0.5001).all())
    assert not values[-2].any()
    torch.testing.assert_close(scales[:-2, 0], rows.abs().amax(1)[:-2] / LEVELS)


@needs_exact
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_product_is_that_of_the_integers(rows, inputs, outputs, bias):
    layer, x = linear(inputs, outputs, bias=bias), uneven_rows(rows, inputs)
    small = Int8Linear.of(layer)
    values, scales = to_int8(x)
    sums = values.numpy().astype(np.int64) @ small.weight.numpy().astype(np.int64).T
    want = torch.from_numpy(sums).double() * scales.double() * small.scales.double()
    if bias:
        want = want + layer.bias.double()
    # Two float32 products and a sum behind exact integers.
    torch.testing.assert_close(small(x).double(), want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))


@needs_exact
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_error_is_within_what_rounding_may_do(rows, inputs, outputs):
    layer, x = linear(inputs, outputs), uneven_rows(rows, inputs)
    exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    _, x_step = to_int8(x)
    _, w_step = to_int8(layer.weight)
    of_weights = x.abs().sum(1, keepdim=True) * w_step.T / 2
    sizes = layer.weight.abs().sum(1) + inputs * w_step[:, 0] / 2
    slack = 1e-5 * exact.abs().max()
    error = (Int8Linear.of(layer)(x) - exact).abs()
    assert bool((error <= of_weights + x_step / 2 * sizes + slack).all())
    fine = (FineInt8Linear.of(layer)(x) - exact).abs()
    assert bool((fine <= of_weights + x_step / (4 * LEVELS) * sizes + slack).all())
    if inputs > 100:
        assert fine.norm() < 0.8 * error.norm()


@needs_exact
@pytest.mark.parametrize("kind", [Int8Linear, FineInt8Linear])
def test_a_row_does_not_depend_on_its_company(kind):
    small, x = kind.of(linear(96, 40)), uneven_rows(33, 96)
    together = small(x)
    assert all(torch.equal(small(x[index : index + 1])[0], together[index]) for index in range(33))
    torch.testing.assert_close(small(x.view(3, 11, 96)), together.view(3, 11, 40), rtol=0, atol=0)
    x[5, 7], x[6, 0] = torch.nan, torch.inf
    damaged = small(x)
    assert not bool(damaged[5:7].isfinite().any())
    keep = [index for index in range(33) if index not in (5, 6)]
    assert torch.equal(damaged[keep], together[keep])


@needs_exact
def test_joined_layers_give_what_each_gives():
    layers, x = [linear(48, size, seed=size) for size in (48, 16, 8)], uneven_rows(5, 48)
    apart = [Int8Linear.of(layer) for layer in layers]
    want = torch.cat([small(x) for small in apart], dim=1)
    assert torch.equal(Int8Linear.of(*layers)(x), want)
    assert torch.equal(Int8Linear.joined(apart)(x), want)
    with pytest.raises(AssertionError, match="either all"):
        Int8Linear.of(layers[0], linear(48, 8, bias=False))


@pytest.fixture(scope="module")
def embedded():
    """The embedded model, whose weights are trained: exact, and in 8 bits."""
    if not products_are_exact():
        pytest.skip("this processor cuts off 8-bit products")
    return load_assets("mini"), load_assets("mini", dtype=torch.int8)


@pytest.fixture(scope="module")
def small_lm(embedded):
    lm = copy.deepcopy(embedded[0].model.lm)
    quantize_lm(lm)
    return lm


def test_a_narrow_speech_lm_stays_exact(embedded):
    exact, small = (assets.model.lm for assets in embedded)
    assert SingleStep.fits(small)
    assert torch.equal(lm_scores(exact), lm_scores(small))


def test_speech_lm_keeps_to_the_contract(embedded, small_lm):
    exact, small = embedded[0].model.lm, small_lm
    assert not SingleStep.fits(small)
    weights = [module.weight for module in small.modules() if isinstance(module, Int8Linear)]
    assert len(weights) == 4 * small.config.num_layers + 1
    assert all(weight.dtype == torch.int8 for weight in weights)
    assert small.new_cache(1, 8).storage.dtype == torch.float32
    found = [kl_mean(lm_scores(exact, seed=seed), lm_scores(small, seed=seed)) for seed in range(3)]
    assert 1e-5 < sum(found) / 3 < 2e-3


@torch.inference_mode()
def test_steps_of_the_speech_lm_equal_the_whole(small_lm):
    lm = small_lm
    ids = torch.arange(3, 43)[None]
    whole = lm.logits(lm(lm.embed_speech(ids)))[0]
    cache = lm.new_cache(1, 4)
    steps = [lm.logits(lm(lm.embed_speech(ids[:, :20]), cache))[0]]
    steps += [lm.logits(lm(lm.embed_speech(ids[:, at : at + 1]), cache))[0] for at in range(20, 40)]
    # Attention adds in another order; where that moves a value over the edge of a step, a whole step shows.
    assert kl_mean(whole, torch.cat(steps)) < 1e-3


def test_flow_keeps_to_the_contract(embedded):
    exact, small = (assets.model.flow for assets in embedded)
    voice, tokens = embedded[0].default_voice, [(7 * index) % 240 for index in range(75)]
    expected = whole_mel(exact, voice, tokens)
    assert 30 < snr_db(expected, whole_mel(small, voice, tokens)) < 60
    assert 30 < snr_db(expected, streamed_mel(small, voice, tokens)) < 60


def test_speaks_and_repeats_itself(embedded, small_lm):
    small = embedded[1]
    config = replace(small.model.config, token_text_ratio=(1.0, 3.0))
    assets = Assets(
        replace(small.model, lm=small_lm, config=config), small.frontend, small.voices, small.limits
    )
    request = SynthesisRequest("Two short words.", sampling=SamplingParams(seed=3))
    with Engine(assets) as engine:
        first, again = (engine.synthesize(request) for _ in range(2))
        assert not engine.is_near_silent(first.samples)
    assert np.array_equal(first.samples, again.samples)


@needs_exact
def test_official_folder(random_model_folder, monkeypatch):
    monkeypatch.setattr(int8_stages.SingleStep, "fits", lambda _: False)  # as if it were wide
    exact, small = (open_model(random_model_folder, dtype=dtype) for dtype in (torch.float32, torch.int8))
    assert {parameter.dtype for parameter in small.vocoder.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in small.flow.parameters()} == {torch.float32}
    for stage, count in (
        (small.flow, 6 * small.config.flow.depth),
        (small.lm, 4 * small.config.lm.num_layers + 1),
    ):
        assert len([module for module in stage.modules() if isinstance(module, Int8Linear)]) == count
    assert torch.equal(small.lm.embed_tokens.weight, exact.lm.embed_tokens.weight)


@needs_exact
@pytest.mark.parametrize("generation", [1, 2])
def test_older_generations_are_refused(tmp_path, generation):
    folder = unpack_golden(GOLDEN / f"cosyvoice{generation}-tiny", tmp_path)
    with pytest.raises(ModelFolderError, match="use bfloat16"):
        open_model(folder, dtype=torch.int8)


def test_stages_of_another_kind_are_refused():
    with pytest.raises(ModelFolderError, match="no 8-bit products; use bfloat16"):
        quantize(nn.Identity())


def test_a_gpu_is_refused():
    with pytest.raises(ModelFolderError, match="for a CPU; use bfloat16 on cuda:1") as error:
        check_int8(torch.device("cuda:1"))
    assert error.value.param == "dtype"


def test_a_processor_that_cuts_off_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.int() @ b.int()).clamp(-(2**15), 2**15 - 1))
    assert not products_are_exact()
    with pytest.raises(ModelFolderError, match="no VNNI"):
        check_int8(torch.device("cpu"))


@pytest.mark.parametrize(("gain", "lines"), [(0.5, 1), (1.5, 0)])
def test_a_processor_where_it_is_slower_is_named(monkeypatch, caplog, gain, lines):
    monkeypatch.setattr(int8_stages, "products_are_exact", lambda: True)
    monkeypatch.setattr(int8_stages, "gain_over_bfloat16", lambda: gain)
    with caplog.at_level(logging.WARNING):
        check_int8(torch.device("cpu"))
    assert len(caplog.records) == lines
    assert all("2.0 times slower than bfloat16" in record.getMessage() for record in caplog.records)


@needs_exact
def test_bench_single(random_model_folder):
    document = single.run(str(random_model_folder), seconds=1, requests=1, runs=1, dtype=torch.int8)
    assert document["precision"] == "int8"
    assert document["rtf_floor"] > 0
    with pytest.raises(InvalidRequestError, match="bench single takes int8"):
        load_lm(str(random_model_folder), "cpu", torch.int8)


@needs_exact
def test_the_option(vivace, tmp_path):
    code, lines, _ = vivace(
        "say", "Yes.", "--dtype", "int8", "--seed", 1, "-o", tmp_path / "yes.wav", "--json"
    )
    assert code == 0
    assert json.loads(lines[-1])["audio_seconds"] > 0.2
    code, _, errors = vivace("convert", "mini", tmp_path / "small", "--dtype", "int8")
    assert code == 2
    assert any("'int8' is not one of" in line for line in errors)


def test_layers_move_and_copy():
    small = Int8Linear.of(linear(8, 4))
    assert torch.equal(copy.deepcopy(small)(torch.ones(1, 8)), small(torch.ones(1, 8)))
    assert set(small.state_dict()) == {"weight", "scales", "bias"}
