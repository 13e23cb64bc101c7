"""Streams of what is not causal: CosyVoice-300M's flow and the older vocoders, in our way and in the reference's.

The driver's audio is stored in half precision: samples under 0.5 are rounded by up to 2**-13.
"""

import dataclasses

import numpy as np
import pytest
import torch

from tests.conftest import GOLDEN
from tests.test_flow_regulated import TINY, golden_flow, golden_noise, inputs
from tests.test_hift_centred import CONFIGS, NoNoise, golden_vocoder
from vivace.models.flow_pieces import FadingFlow, PieceFlow
from vivace.models.hift_fade import FadingHiFT

HALF_PRECISION = 2**-12


def load(generation):
    with np.load(GOLDEN / f"cosyvoice{generation}-tiny" / "vectors.npz") as data:
        return {key: torch.from_numpy(data[key]) for key in data.files}


@pytest.fixture(scope="module")
def first():
    return load(1)


@pytest.fixture(scope="module")
def second():
    return load(2)


def built(kind, seams="context"):
    flow = kind(dataclasses.replace(TINY, seams=seams)).eval()
    flow.load_state_dict(golden_flow().state_dict())
    flow.noise = golden_noise()
    return flow


def fading_vocoder(generation):
    frames = {2: 8, 1: 20}[generation]
    vocoder = FadingHiFT(dataclasses.replace(CONFIGS[generation], seams="fade", fade_frames=frames)).eval()
    vocoder.load_state_dict(golden_vocoder(generation).state_dict())
    return vocoder


def run(flow, vectors, sizes):
    tokens, prompt_mel, embedding = inputs(vectors)
    stream = flow.new_stream(embedding, prompt_mel)
    pieces = [piece.tolist() for piece in tokens.split(list(sizes))]
    return [flow.step(stream, piece, index == len(pieces) - 1) for index, piece in enumerate(pieces)]


@torch.inference_mode()
def test_the_reference_stream_of_cosyvoice1(first):
    flow, vocoder = built(FadingFlow), fading_vocoder(1)
    tokens, prompt_mel, embedding = inputs(first)
    stream, audio = flow.new_stream(embedding, prompt_mel), vocoder.new_stream(noise=NoNoise())
    flow.step(stream, tokens[:60].tolist(), is_last=False)
    new = tokens[60:].tolist()
    parts = []
    for start, end in ((0, 120), (120, 220), (220, 260)):
        mel = flow.step(stream, new[start:end], is_last=end == 260)
        parts.append(vocoder.step(audio, mel, is_last=end == 260))
    assert [len(part) for part in parts] == first["stream.chunk_samples"].tolist()
    torch.testing.assert_close(torch.cat(parts), first["stream.audio"], atol=HALF_PRECISION, rtol=0)


@torch.inference_mode()
def test_the_offline_audio_of_cosyvoice1(first):
    mel = built(PieceFlow).generate(*inputs(first))
    samples = golden_vocoder(1)(mel[None], noise=NoNoise())[0]
    torch.testing.assert_close(samples, first["offline.audio"], atol=HALF_PRECISION, rtol=0)


@torch.inference_mode()
def test_the_reference_stream_of_cosyvoice2(second):
    """Its pieces are 90, 100 and 16 frames; the last one comes from a mel with the offline mask."""
    chunked, offline = second["flow.mel_streaming_final"][0], second["flow.mel_full"][0]
    vocoder = fading_vocoder(2)
    stream = vocoder.new_stream(noise=NoNoise())
    mels = (chunked[:, :90], chunked[:, 90:190], offline[:, 190:])
    parts = [vocoder.step(stream, mel, is_last=index == 2) for index, mel in enumerate(mels)]
    assert [len(part) for part in parts] == second["stream.chunk_samples"].tolist()
    torch.testing.assert_close(torch.cat(parts), second["stream.audio"], atol=HALF_PRECISION, rtol=0)


@torch.inference_mode()
def test_the_offline_audio_of_cosyvoice2(second):
    samples = golden_vocoder(2)(second["flow.mel_full"], noise=NoNoise())[0]
    torch.testing.assert_close(samples, second["offline.audio"], atol=HALF_PRECISION, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("sizes", [(1,) * 60, (3, 0, 50, 7), (60,)])
def test_fading_gives_every_sample_once(generation, sizes, first, second):
    mel = (first if generation == 1 else second)["hift.mel"][0]
    vocoder = fading_vocoder(generation)
    stream = vocoder.new_stream(noise=NoNoise())
    pieces = mel.split(list(sizes), dim=1)
    parts = [vocoder.step(stream, piece, index == len(pieces) - 1) for index, piece in enumerate(pieces)]
    assert sum(len(part) for part in parts) == 60 * vocoder.hop_samples
    assert len(vocoder.step(vocoder.new_stream(), mel[:, :0], is_last=True)) == 0


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [(60, 260), (60, 70, 1, 0, 189), (1,) * 320])
def test_pieces_do_not_depend_on_the_split(first, sizes):
    flow = built(PieceFlow)
    whole = torch.cat(run(flow, first, (320,)), dim=1)
    assert whole.shape[1] == TINY.num_frames(260)
    torch.testing.assert_close(torch.cat(run(flow, first, sizes), dim=1), whole, atol=2e-4, rtol=0)


@torch.inference_mode()
def test_one_piece_equals_the_whole(first):
    flow = built(PieceFlow)
    tokens, prompt_mel, embedding = inputs(first)
    whole = flow.generate(tokens[:100], prompt_mel, embedding)
    stream = flow.new_stream(embedding, prompt_mel)
    flow.step(stream, tokens[:70].tolist(), is_last=False)
    torch.testing.assert_close(flow.step(stream, tokens[70:100].tolist(), is_last=True), whole)


@torch.inference_mode()
def test_pieces_stay_closer_to_the_whole_than_the_reference(first):
    """The whole run's group norm and attention see the future; 21.6 dB below the mel is what is left of that here. The
    reference draws other noise in each piece, and its mel has nothing in common with the whole run's."""
    whole = first["flow.mel_full"][0]
    errors = {}
    for kind in (PieceFlow, FadingFlow):
        mel = torch.cat(run(built(kind), first, (60, 120, 50, 50, 40)), dim=1)
        assert mel.shape == whole.shape
        errors[kind] = 20 * torch.log10((mel - whole).norm() / whole.norm())
    assert errors[PieceFlow] < errors[FadingFlow] - 15
    assert errors[PieceFlow] < -20


@torch.inference_mode()
def test_a_fork_goes_on_alone(first):
    flow = built(PieceFlow)
    tokens, prompt_mel, embedding = inputs(first)
    stream = flow.new_stream(embedding, prompt_mel)
    flow.step(stream, tokens[:130].tolist(), is_last=False)
    fork = stream.fork()
    rest = flow.step(stream, tokens[130:].tolist(), is_last=True)
    assert torch.equal(rest, flow.step(fork, tokens[130:].tolist(), is_last=True))


@torch.inference_mode()
def test_the_cost_of_a_piece_is_flat(first, monkeypatch):
    sizes = []
    integrate = PieceFlow.integrate

    def counted(flow, noise, *rest):
        sizes.append(noise.shape[2])
        return integrate(flow, noise, *rest)

    monkeypatch.setattr(PieceFlow, "integrate", counted)
    flow = built(PieceFlow)
    _, prompt_mel, embedding = inputs(first)
    stream = flow.new_stream(embedding, prompt_mel)
    for _ in range(10):
        flow.step(stream, [3] * 50, is_last=False)
    # Prompt, two seconds before, one second, look-ahead; the window begins up to five tokens earlier, on the grid of
    # the half rate.
    assert max(sizes) <= 103 + TINY.num_frames(100 + 50 + 20) + 10
    assert max(sizes[4:]) - min(sizes[4:]) <= 10
    assert len(stream.tokens) < 250
