"""CosyVoice 2 and CosyVoice-300M on a device's stages, many requests at once; here on the CPU with plain kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers import quiet_engine
from vivace import SamplingParams, SynthesisRequest
from vivace.engine.device_stages import DeviceStages
from vivace.engine.piece_runner import PieceFlowRunner
from vivace.errors import CancelledRequestError
from vivace.models.device_kinds import MOST_KEPT_BYTES, page_bytes_used
from vivace.models.kinds import make_flow
from vivace.models.unet_pages import UNetPages
from vivace.random_checkpoint import full_config, write_random_checkpoint

TEXTS = (
    "A fox sang in the rain.",
    "Two dogs sat. They did not sing at all.",
    "Yes.",
    "It is five past eight.",
)
OPTIONS = {"num_steps": 2, "token_text_ratio": (4.0, 5.0)}
ROWS = 3


@pytest.fixture(scope="module", params=[1, 2])
def engines(request, tmp_path_factory):
    """The plain engine, and one on a device's stages."""
    folder = tmp_path_factory.mktemp("random") / "model"
    write_random_checkpoint(folder, "tiny", dtype="float32", generation=request.param)
    voices = tmp_path_factory.mktemp("voices")
    first, second = (quiet_engine(folder, voices=voices, **OPTIONS) for _ in range(2))
    with first as plain, second as paged:
        stages = DeviceStages.build(paged._assets.model, paged._assets.limits, max_rows=ROWS)
        paged.use_device(stages)
        yield plain, paged, stages


def requests(**options):
    return [
        SynthesisRequest(text, sampling=SamplingParams(seed=seed), **options)
        for seed, text in enumerate(TEXTS)
    ]


def run_together(engine, given):
    """Samples of each, all of them submitted at once."""
    lives = [engine.submit(request) for request in given]
    parts = [[] for _ in lives]
    while not all(live.is_done for live in lives):
        engine.step()
        for live, own in zip(lives, parts, strict=True):
            while not live.is_cancelled and (chunk := engine.take(live)) is not None:
                own.append(chunk.samples)
    return [np.concatenate(own) for own in parts]


def nothing_is_held(stages):
    assert stages.lm.rows.num_open_rows == 0
    assert stages.vocoder.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
def test_requests_side_by_side_sound_as_alone(engines, stream):
    plain, paged, stages = engines
    given = requests(stream=stream)
    for wanted, got in zip(
        (plain.synthesize(each).samples for each in given), run_together(paged, given), strict=True
    ):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    nothing_is_held(stages)


def test_whole_segments_share_a_launch(engines, monkeypatch):
    _, paged, stages = engines
    if not isinstance(stages.flow, PieceFlowRunner):
        pytest.skip("this flow runs offline segments one by one")
    sizes = []
    generate = stages.flow.generate_batch
    monkeypatch.setattr(
        stages.flow, "generate_batch", lambda items: sizes.append(len(items)) or generate(items)
    )
    whole = [SynthesisRequest(TEXTS[0], stream=False) for _ in range(ROWS)]
    run_together(paged, whole)
    assert sizes == [ROWS]
    # What the voice's prompt consists of lies on the device already.
    monkeypatch.setattr(stages.flow._flow, "new_stream", lambda *_, **__: 1 // 0)
    run_together(paged, whole)


@torch.inference_mode()
def test_a_voice_that_cannot_be_opened_is_alone(engines, monkeypatch):
    _, paged, stages = engines
    if not isinstance(stages.flow, PieceFlowRunner):
        pytest.skip("this flow runs offline segments one by one")
    voice, run_prompt = paged._assets.default_voice, stages.flow._run_prompt
    other = replace(voice, name="other")
    tokens = list(range(40))
    wanted = stages.flow.generate(voice, tokens)

    def fail(given):
        if given is other:
            raise torch.OutOfMemoryError("no memory")
        return run_prompt(given)

    monkeypatch.setattr(stages.flow, "_run_prompt", fail)
    handles = stages.flow.generate_batch([(voice, tokens), (other, tokens), (voice, tokens)])
    assert torch.equal(handles[0].check(), handles[2].check())
    torch.testing.assert_close(handles[0].check(), wanted)
    with pytest.raises(torch.OutOfMemoryError):
        handles[1].check()


def test_the_scheduler_knows_how_many_share_a_launch(engines):
    """So that it plans one chunk of each, not several of some; and halved launches make its steps smaller."""
    _, _, stages = engines
    assert stages.capacity.pack == 2  # the largest power of two that three rows allow
    assert stages.capacity.wave == 4  # chunks of a stream alone: waiting for them pays
    assert stages.capacity.beside_tokens == 2 * stages.capacity.chunk_tokens
    flow = stages.flow.pieces if isinstance(stages.flow, PieceFlowRunner) else stages.flow.paged
    before, flow.launches_halved = stages.launches_halved, flow.launches_halved + 1
    assert stages.launches_halved == before + 1


def test_a_cancelled_request_gives_everything_back(engines):
    _, paged, stages = engines
    stream = paged.stream(SynthesisRequest(TEXTS[1]))
    next(stream)
    stream.close()
    with pytest.raises(CancelledRequestError):
        next(stream)
    nothing_is_held(stages)


def test_pages_that_are_taken_at_once_are_no_more_than_the_streams_use():
    """At full size a second takes 115 MB."""
    config = full_config(2)
    with torch.device("meta"):
        flow = make_flow(config.flow).to(torch.bfloat16)
    second, longest = UNetPages.bytes_of(config.flow, torch.bfloat16), 300 * 25
    one, eight, many = (page_bytes_used(flow, config, streams, longest) for streams in (1, 8, 64))
    assert one == 300 * second + 300 * second // 7  # an eighth of all of it is for prompts
    assert eight == 480 * second + 480 * second // 7 < 70 << 30
    assert many == 64 * 60 * second + MOST_KEPT_BYTES
    with torch.device("meta"):
        other = make_flow(full_config(3).flow)
    assert page_bytes_used(other, full_config(3), 1, longest) > 1 << 60
