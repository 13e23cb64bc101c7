"""The engine on paged stages: same tokens, same audio, everything given back; on a CPU with plain kernels."""

import re

import numpy as np
import pytest
import torch

from vivace import Engine, SamplingParams, SynthesisRequest
from vivace.engine import device_stages
from vivace.engine.device_stages import DeviceStages
from vivace.engine.lm_device import LMDevice
from vivace.errors import CancelledRequestError, OverloadedError
from vivace.models import flow_device
from vivace.models.device_kinds import make_device_flow

TEXT = "Hello there. It is five past eight."


@pytest.fixture(scope="module")
def plain():
    with Engine.open("mini", warm_up=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def paged():
    with Engine.open("mini", warm_up=False) as engine:
        stages = DeviceStages.build(engine._assets.model, engine._assets.limits, max_rows=3)
        engine.use_device(stages)
        yield engine, stages


def held(stages):
    """Pages and slots that requests hold, the kept prompts of voices left out."""
    prompts = sum(len(prompt.pages) for prompt in stages.flow._prompts.values())
    return (
        stages.lm.rows.num_open_rows,
        stages.flow._flow.pages_in_use - prompts,
        3 - len(stages.vocoder._free),
    )


@pytest.mark.parametrize("runs_beside", [True, False])
def test_the_scheduler_knows_how_much_audio_a_chunk_of_a_wave_needs(paged, monkeypatch, runs_beside):
    """As the flow says; where tokens are made beside its work, a stream does not wait for more chunks."""
    assets = paged[0]._assets
    costs = {1: 6.2, 2: 8.4, 4: 10.4, 8: 13.4}
    monkeypatch.setattr(flow_device, "launch_costs", lambda *_: costs)
    monkeypatch.setattr(flow_device, "_MEASURED_WAVE_MS", 321)
    monkeypatch.setattr(LMDevice, "runs_beside", property(lambda _: runs_beside))
    monkeypatch.setattr(
        device_stages, "make_device_flow", lambda flow, *_, **__: make_device_flow(flow, None, 8)
    )
    capacity = DeviceStages.build(assets.model, assets.limits, max_rows=3).capacity
    assert capacity.wave == (1 if runs_beside else 16)
    assert capacity.batch >= capacity.wave
    assert runs_beside or capacity.wave_ms == 321
    assert capacity.quiet_tokens == (32 if runs_beside else 0)


def test_deterministic_means_one_chunk_a_launch(paged, monkeypatch):
    """Also where launches of several are known to cost less, for streams and for chunks of one."""
    assets = paged[0]._assets
    monkeypatch.setattr(flow_device, "launch_costs", lambda *_: {1: 6.2, 2: 8.4, 4: 10.4, 8: 13.4})
    monkeypatch.setattr(LMDevice, "runs_beside", property(lambda _: False))
    found = DeviceStages.build(assets.model, assets.limits, max_rows=4, deterministic=True)
    assert (found.capacity.wave, found.capacity.pack, found.capacity.takes_turns) == (1, 1, False)
    flow = found.flow.paged
    flow.warm_up(4 * 50)
    stream = flow.open(torch.ones(192), torch.zeros(0, 80))
    flow.step(stream, [1] * 100, True)
    flow.close(stream)
    assert list(flow._solvers) == [1]


def test_same_tokens_and_audio_as_the_plain_stages(plain, paged):
    engine, stages = paged
    request = SynthesisRequest(TEXT, sampling=SamplingParams(seed=5))
    want, got = plain.synthesize(request), engine.synthesize(request)
    assert got.num_speech_tokens == want.num_speech_tokens
    assert got.samples.shape == want.samples.shape
    assert np.abs(got.samples - want.samples).max() < 2e-3
    assert held(stages) == (0, 0, 0)


@pytest.mark.parametrize("options", [{"stream": False}, {"speed": 1.3}, {"speed": 0.7}])
def test_offline_mode_and_speed(plain, paged, options):
    request = SynthesisRequest("Good morning.", **options)
    want, got = plain.synthesize(request), paged[0].synthesize(request)
    assert got.samples.shape == want.samples.shape
    assert np.abs(got.samples - want.samples).max() < 2e-3


def test_streamed_text(plain, paged):
    pieces = ["Hel", "lo the", "re, how are", " you to", "day?"]
    want, got = (engine.synthesize(SynthesisRequest(iter(pieces))) for engine in (plain, paged[0]))
    assert got.num_speech_tokens == want.num_speech_tokens
    assert np.abs(got.samples - want.samples).max() < 2e-3


def test_given_tokens(plain, paged):
    voice = plain._assets.default_voice
    tokens = list(range(60))
    want, got = (engine.render_tokens(tokens, voice).collect() for engine in (plain, paged[0]))
    assert np.abs(got.samples - want.samples).max() < 2e-3
    assert held(paged[1]) == (0, 0, 0)


def test_requests_side_by_side_equal_each_alone(paged):
    engine, stages = paged
    requests = [SynthesisRequest(TEXT, sampling=SamplingParams(seed=seed)) for seed in (1, 2)]
    alone = [engine.synthesize(request).samples for request in requests]
    streams = [engine.stream(request) for request in requests]
    together = [[], []]
    running = {0, 1}
    while running:
        for index in sorted(running):
            chunk = next(streams[index], None)
            if chunk is None:
                running.discard(index)
            else:
                together[index].append(chunk.samples)
    for one, parts in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, np.concatenate(parts))
    assert held(stages) == (0, 0, 0)


def test_a_cancelled_request_gives_everything_back(paged):
    engine, stages = paged
    stream = engine.stream(SynthesisRequest(TEXT))
    next(stream)
    assert held(stages) != (0, 0, 0)
    stream.close()
    assert held(stages) == (0, 0, 0)
    with pytest.raises(CancelledRequestError):
        next(stream)


def test_more_utterances_than_slots_wait_and_too_many_are_refused(paged):
    engine, stages = paged
    running, queued = stages.capacity.running, stages.capacity.queue
    streams = [engine.stream(SynthesisRequest(TEXT)) for _ in range(running + queued)]
    with pytest.raises(OverloadedError) as caught:
        engine.stream(SynthesisRequest(TEXT))
    assert caught.value.retry_after_s >= 1
    assert engine.gauges()["queue_length"] == queued
    for stream in streams[:3]:
        stream.close()
    assert engine.gauges()["queue_length"] == queued - 3
    assert streams[3].collect().finish_reason in ("stop", "length")
    for stream in streams:
        stream.close()
    assert held(stages) == (0, 0, 0)
    assert engine.synthesize(SynthesisRequest("Yes.")).audio_seconds > 0


def test_the_next_tokens_are_queued_while_audio_is_made(paged, monkeypatch):
    engine, stages = paged
    queued = []
    launch = stages.vocoder.launch_batch

    def note(*arguments):
        pending = launch(*arguments)
        queued.append(("vocoder", None))
        return pending

    monkeypatch.setattr(stages.vocoder, "launch_batch", note)
    step = stages.lm.launch
    monkeypatch.setattr(stages.lm, "launch", lambda work: queued.append(("lm", None)) or step(work))
    collect = stages.vocoder.collect
    monkeypatch.setattr(
        stages.vocoder, "collect", lambda pending: queued.append(("take", None)) or collect(pending)
    )
    engine.synthesize(SynthesisRequest(TEXT))
    order = "".join({"vocoder": "v", "lm": "l", "take": "t"}[name] for name, _ in queued)
    # The speech LM's work lies between a chunk's launch and the wait for it.
    assert re.search("vl+t", order)
