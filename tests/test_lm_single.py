"""Single positions in NumPy against the torch model, which defines them."""

from __future__ import annotations

import copy

import pytest
import torch

from vivace.config import SpeechLMConfig
from vivace.models.lm_single import SingleStep
from vivace.models.speech_lm import SpeechLM

CONFIG = SpeechLMConfig(48, 64, 3, 6, 2, 16, 30, speech_token_size=20)


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    lm = SpeechLM(CONFIG).eval()
    for weight in lm.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    return lm


@torch.inference_mode()
def test_positions_and_cache_equal_the_models(lm):
    step = SingleStep(lm)
    mine, theirs = lm.new_cache(1, 4), lm.new_cache(1, 4)
    start = torch.randn(1, 5, CONFIG.hidden_size)
    lm(start, mine)
    lm(start, theirs)
    for token in [3, 0, 19, 7, 7, CONFIG.task_id, 12]:  # the cache grows on the way
        want = lm.logits(lm(lm.embed_speech(torch.tensor([[token]])), theirs))[0, 0]
        got = lm.logits(step.hidden(token, mine))
        # The same sums in another order, float32.
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert mine.length == theirs.length == 12
    end = mine.length
    torch.testing.assert_close(mine.storage[..., :end, :], theirs.storage[..., :end, :], rtol=1e-4, atol=1e-4)
    # The model itself goes on from this cache.
    last = torch.randn(1, 3, CONFIG.hidden_size)
    torch.testing.assert_close(lm(last, mine), lm(last, theirs), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_positions_beyond_the_first_tables(lm):
    step = SingleStep(lm)
    mine, theirs = lm.new_cache(1, 1), lm.new_cache(1, 1)
    start = torch.randn(1, 1030, CONFIG.hidden_size)
    lm(start, mine)
    lm(start, theirs)
    want = lm.logits(lm(lm.embed_speech(torch.tensor([[4]])), theirs))[0, 0]
    torch.testing.assert_close(lm.logits(step.hidden(4, mine)), want, rtol=1e-4, atol=1e-4)


def test_only_small_float32_models_on_a_cpu(lm):
    assert SingleStep.fits(lm)
    assert not SingleStep.fits(SpeechLM(CONFIG))  # training mode
    assert not SingleStep.fits(SpeechLM(CONFIG).eval().bfloat16())
    wide = SpeechLMConfig(1024, 32, 1, 2, 1, 64, 30, speech_token_size=20)
    assert not SingleStep.fits(SpeechLM(wide).eval())


@torch.inference_mode()
def test_gates_far_below_zero_are_shut_without_a_warning(lm):
    steep = copy.deepcopy(lm)
    for layer in steep.layers:
        layer.mlp.gate_proj.weight.mul_(1000)
    mine, theirs = steep.new_cache(1, 4), steep.new_cache(1, 4)
    start = torch.randn(1, 5, CONFIG.hidden_size)
    steep(start, mine)
    steep(start, theirs)
    want = steep(steep.embed_speech(torch.tensor([[3]])), theirs)[0, 0]
    torch.testing.assert_close(SingleStep(steep).hidden(3, mine), want, rtol=1e-3, atol=1e-3)
