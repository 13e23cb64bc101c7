"""CosyVoice 2 and CosyVoice-300M on a device's stages: the samples of a request that has the engine to itself do not
depend on how many of its chunks share a launch, nor on how many tokens are under way when its speech ends.

On the CPU with plain kernels, on a clock that stands still: what is launched together does not depend on the machine.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers import quiet_engine
from vivace import SamplingParams, SynthesisRequest
from vivace.engine import loop
from vivace.engine.decoder import LEAD_TOKENS
from vivace.engine.device_stages import DeviceFlowRunner, DeviceStages
from vivace.engine.scheduler import Policy, Scheduler
from vivace.engine.swapper import cache_page_bytes
from vivace.models.piece_device import DevicePieceFlow
from vivace.models.unet_device import DeviceUNetFlow
from vivace.random_checkpoint import write_random_checkpoint

LEAST_RATIO = {1: 12.0, 2: 6.0}  # tokens for one of text: four seconds in all
TEXT = "A fox sang in the rain. "


@pytest.fixture(scope="module", params=[1, 2])
def engine(request, tmp_path_factory):
    """Random weights seldom end speech by themselves: here they do soon after the shortest length."""
    folder = tmp_path_factory.mktemp("random") / "model"
    write_random_checkpoint(folder, "tiny", dtype="float32", generation=request.param)
    voices = tmp_path_factory.mktemp("voices")
    options = {"num_steps": 1, "token_text_ratio": (LEAST_RATIO[request.param], 40.0)}
    with quiet_engine(folder, voices=voices, scheduler=Scheduler(Policy(wave_ms=250)), **options) as engine:
        lm = engine._assets.model.lm
        with torch.no_grad():
            lm.llm_decoder.bias[lm.config.eos_id] += 2
        yield engine


@pytest.fixture(scope="module")
def plain(engine):
    """What stages without a device make of it."""
    found = engine.synthesize(ask())
    assert found.finish_reason == "stop"
    return found


@pytest.fixture(scope="module")
def stages(engine, plain):
    """After ``plain``: the engine runs with them from the first test on."""
    found = DeviceStages.build(engine._assets.model, engine._assets.limits, max_rows=4)
    found.flow.open(engine._assets.default_voice)  # its prompt is not counted among the launches
    return found


def ask(seed=4):
    return SynthesisRequest(TEXT, sampling=SamplingParams(seed=seed))


def use(engine, stages, wave, beside_chunks):
    beside = beside_chunks * stages.capacity.chunk_tokens
    engine.use_device(replace(stages, capacity=replace(stages.capacity, wave=wave, beside_tokens=beside)))


@pytest.fixture
def launched(monkeypatch):
    """Chunks of each launch of the flow."""
    found = []

    def watch(kind, name):
        run = getattr(kind, name)

        def counted(self, *arguments):
            found.append(len(arguments[-1]))
            run(self, *arguments)

        monkeypatch.setattr(kind, name, counted)

    watch(DeviceUNetFlow, "_run")
    watch(DevicePieceFlow, "_run_rows")
    return found


@pytest.fixture
def under_way(engine, stages, monkeypatch):
    """Tokens that are on their way while the samples of a chunk are waited for."""
    collect, found = stages.vocoder.collect, []

    def note(pending):
        found.extend(session.tokens_under_way for session in engine._stages._batch.decoder._decoding)
        return collect(pending)

    monkeypatch.setattr(stages.vocoder, "collect", note)
    return found


@pytest.fixture(autouse=True)
def _clock_stands_still(monkeypatch):
    monkeypatch.setattr(loop, "now_ms", lambda: 0)


def nothing_is_held(stages):
    assert stages.lm.rows.num_open_rows == stages.vocoder.num_open == 0


@pytest.mark.parametrize(("wave", "beside_chunks"), [(1, 0), (4, 0), (1, 2), (4, 2)])
def test_samples_are_those_of_plain_stages(engine, plain, stages, launched, under_way, wave, beside_chunks):
    use(engine, stages, wave, beside_chunks)
    result = engine.synthesize(ask())
    assert result.num_speech_tokens == plain.num_speech_tokens
    np.testing.assert_allclose(result.samples, plain.samples, atol=1e-4)
    assert max(launched) == (1 if wave == 1 else 3)
    chunk = stages.capacity.chunk_tokens
    assert (max(under_way) > chunk + LEAD_TOKENS) == bool(beside_chunks)
    nothing_is_held(stages)


def test_who_leaves_takes_the_tokens_under_way_along(engine, plain, stages, under_way):
    """The pages of a row that goes while its tokens are made are another one's at once."""
    use(engine, stages, 4, 2)
    with engine.stream(ask(seed=1)) as leaving:
        for _ in range(2):
            next(leaving)
        assert under_way[-1] > stages.capacity.chunk_tokens + LEAD_TOKENS
    nothing_is_held(stages)
    np.testing.assert_allclose(engine.synthesize(ask()).samples, plain.samples, atol=1e-4)


def test_text_in_pieces(engine, stages):
    """What is known of it ends with tokens under way, and while a stream waits for more chunks."""
    samples = []
    for wave, beside_chunks in ((1, 0), (4, 2)):
        use(engine, stages, wave, beside_chunks)
        live, parts = engine.submit(SynthesisRequest((), sampling=SamplingParams(seed=4)), is_pushed=True), []
        for piece in ("A fox ", "sang in ", "the rain."):
            engine.push_text(live, piece)
            while engine.step():
                parts += take(engine, live)
        engine.finish_text(live)
        while not live.is_done:
            engine.step()
            parts += take(engine, live)
        samples.append(np.concatenate(parts))
    np.testing.assert_allclose(*samples, atol=1e-4)
    nothing_is_held(stages)


def take(engine, live):
    found = []
    while (chunk := engine.take(live)) is not None:
        found.append(chunk.samples)
    return found


def test_pages_that_were_away_between_launches(engine, plain, stages):
    """They come back as others; what is in those that are nobody's reaches no stream."""
    if not isinstance(stages.flow, DeviceFlowRunner):
        pytest.skip("this flow has no pages")
    pool = stages.flow.paged.pool
    engine.use_device(stages, 100 * (pool.frame_bytes + cache_page_bytes(stages.lm)))
    swapper, live, parts, moves = engine._stages.swapper, engine.submit(ask()), [], 0
    while not live.is_done:
        with torch.inference_mode():
            while engine._loop._emit_all(engine._stages.collect(), ()):
                pass  # until nothing is under way
            if live.segment is not None:
                before = list(live.segment.flow.pages)
                swapper.leave(live)
                assert swapper.arrived() == [live]
                taken = pool.take(1)
                for page in (*taken, *pool._free, pool.spare):
                    for part in pool.parts(page):
                        part.fill_(float("nan"))
                swapper.come_back(live)
                assert swapper.arrived() == [live]
                pool.drop(*taken)
                moves += live.segment.flow.pages != before
        engine.step()
        parts += take(engine, live)
    np.testing.assert_allclose(np.concatenate(parts), plain.samples, atol=1e-4)
    assert moves >= 3
    nothing_is_held(stages)


def test_deterministic_means_one_chunk_a_launch(engine, launched):
    """The bytes of a request are then those that it has alone."""
    model, limits = engine._assets.model, engine._assets.limits
    found = DeviceStages.build(model, limits, max_rows=4, deterministic=True)
    engine.use_device(found)
    assert found.capacity.pack == found.capacity.wave == 1
    alone = engine.synthesize(ask()).samples.tobytes()
    lives, parts = [engine.submit(ask(seed)) for seed in (1, 4)], [[], []]
    while not all(live.is_done for live in lives):
        engine.step()
        parts = [own + take(engine, live) for own, live in zip(parts, lives, strict=True)]
    assert set(launched) == {1}
    assert np.concatenate(parts[1]).tobytes() == alone
    nothing_is_held(found)
