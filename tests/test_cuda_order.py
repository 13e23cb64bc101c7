"""Stages on a simulated device whose streams run at any moment: the results are those of the host."""

from __future__ import annotations

import copy

import pytest

import tests.interpreter  # noqa: F401  (before anything that imports Triton)

import torch  # isort: skip

from tests.simulated_cuda import simulated_cuda
from vivace.datatypes import SamplingParams
from vivace.engine.lm_device import LMDevice
from vivace.engine.lm_runner import PlainSequence
from vivace.models.capture import before_capture
from vivace.models.kinds import make_lm
from vivace.random_checkpoint import tiny_config

if torch.cuda.is_available():
    pytest.skip("there is a real one", allow_module_level=True)

RULES = {"token_text_ratio": (9.0, 9.0), "max_tokens": 20, "max_equal_tokens": 50}


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    return make_lm(tiny_config().lm).eval().requires_grad_(False)


@torch.inference_mode()
def spoken(lm):
    """Tokens of two sessions side by side, whose first launches nobody has made ready."""
    device = LMDevice(lm, max_rows=2, cache_tokens=256, max_positions=100, use_kernels=False)
    if lm.llm_decoder.weight.is_cuda:
        torch.cuda.synchronize()
    sessions = [
        device.open(PlainSequence(lm, (1, 2), text, (7,)), SamplingParams(seed=5), segment=0, **RULES)
        for text in ((3, 4), (5, 6, 8))
    ]
    made = [[], []]
    for count in (2, 4):
        assert not device.launch([(session, count) for session in sessions])
        for own, session in zip(made, sessions, strict=True):
            own += session.collect()
    return made


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_speech_lm(lm, seed):
    wanted = spoken(lm)
    assert all(len(set(own)) > 2 for own in wanted)
    with simulated_cuda(seed=seed):
        assert spoken(copy.deepcopy(lm).to("cuda")) == wanted


@torch.inference_mode()
def test_work_that_is_held_back_begins_behind_the_tokens_under_way(lm):
    with simulated_cuda():
        device = LMDevice(
            copy.deepcopy(lm).to("cuda"), max_rows=1, cache_tokens=256, max_positions=100, use_kernels=False
        )
        torch.cuda.synchronize()
        own = torch.cuda.current_stream()
        for is_held_back in (False, True):
            session = device.open(
                PlainSequence(lm, (1, 2), (3, 4), (7,)), SamplingParams(), segment=0, **RULES
            )
            assert session.launch(2)
            assert session.launch(2)
            if is_held_back:
                device.hold_back()
            own.synchronize()
            stream = device.paged.stream
            assert (stream.done == stream.number) == is_held_back
            assert len(session.collect()) == 4
            session.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_run_before_a_capture_is_in_order(seed):
    """Behind what was queued, before what comes; and on the stream of the captures, not on one of its own each time."""
    with simulated_cuda(seed=seed):
        device, streams = torch.device("cuda", 0), set()
        x = torch.zeros(4, device=device)
        torch.cuda.synchronize()
        for _ in range(3):
            x.add_(1.0)
            with before_capture(device):
                streams.add(id(torch.cuda.current_stream(device)))
                x.mul_(3.0)
        x.add_(1.0)
        assert len(streams) == 1
        assert x.tolist() == [40.0] * 4
