"""The engine against the reference driver's audio (``stream.*`` and ``offline.audio`` of the golden vectors).

Tolerance: the recorded audio is rounded to half precision (2**-13 for samples of 0.25 to 0.5), and the reference runs
its F0 predictor in float64 where we use float32.
"""

import numpy as np
import pytest
import torch

from tests.helpers import golden_vectors, quiet_engine
from tests.test_hift import GoldenNoise
from vivace import Voice

HALF_PRECISION = 2e-4


@pytest.fixture(scope="module")
def engine(tiny_model_folder):
    with quiet_engine(tiny_model_folder, vocoder_noise=GoldenNoise()) as engine:
        yield engine


@pytest.fixture(scope="module")
def vectors():
    return golden_vectors()


@pytest.fixture(scope="module")
def voice(vectors):
    return Voice(
        name="golden",
        prompt_text="",
        speech_tokens=vectors["prompt_token"][0].astype(np.int32),
        mel=vectors["prompt_feat"][0],
        embedding=vectors["speaker_embedding"][0],
    )


def test_stream_equals_the_reference_driver_up_to_its_last_chunk(engine, vectors, voice):
    chunks = list(engine.render_tokens(vectors["token"][0].tolist(), voice))
    ours = np.concatenate([chunk.samples for chunk in chunks])
    reference = vectors["stream.audio"]
    assert len(ours) == len(reference) == vectors["stream.chunk_samples"].sum()
    exact = int(vectors["stream.chunk_samples"][:-1].sum())
    np.testing.assert_allclose(ours[:exact], reference[:exact], atol=HALF_PRECISION)
    # The reference recomputes its last chunk with the offline mask; ours keeps the chunk mask.
    assert np.abs(ours[exact:] - reference[exact:]).max() > HALF_PRECISION


def test_offline_equals_the_reference(engine, vectors, voice):
    chunks = list(engine.render_tokens(vectors["token"][0].tolist(), voice, stream=False))
    assert len(chunks) == 1
    np.testing.assert_allclose(chunks[0].samples, vectors["offline.audio"], atol=HALF_PRECISION)


def test_chunks_come_at_absolute_borders_and_carry_their_place(engine, vectors, voice):
    chunks = list(engine.render_tokens(vectors["token"][0].tolist(), voice))
    # Prompt 30 tokens, 103 new: borders at 50, 75, 100, 125 and the end at 133. The vocoder looks four frames ahead
    # and keeps four samples that the next spectrum overlaps.
    assert len(chunks[0].samples) == ((50 - 30) * 2 - 4) * 480 - 4
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    starts = np.cumsum([0, *(len(chunk.samples) for chunk in chunks)])[:-1] / 24_000
    np.testing.assert_allclose([chunk.start_s for chunk in chunks], starts)


def test_nothing_is_left_behind(engine, vectors, voice):
    stream = engine.render_tokens(vectors["token"][0].tolist(), voice)
    next(stream)
    assert engine.num_running == 1
    stream.close()
    assert engine.num_running == 0
    assert torch.is_inference_mode_enabled() is False
