"""The vocoders of CosyVoice 2 and CosyVoice-300M against the golden vectors, and their streams against the whole."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import GOLDEN
from tests.test_hift import fold_weight_norm
from vivace.config import VocoderConfig
from vivace.models.hift_centred import CentredHiFT

CONFIGS = {
    2: VocoderConfig(base_channels=64, f0_cond_channels=32, causal=False, source_phase="linear"),
    1: VocoderConfig(
        base_channels=64,
        f0_cond_channels=32,
        causal=False,
        source_phase="sample",
        sampling_rate=22_050,
        upsample_rates=(8, 8),
        upsample_kernel_sizes=(16, 16),
        source_resblock_kernel_sizes=(7, 11),
        source_resblock_dilation_sizes=((1, 3, 5), (1, 3, 5)),
    ),
}
# The reference sums phases in float32: CosyVoice 2 one per frame (then times 480), 300M one per sample.
SOURCE_TOLERANCE = {2: 1e-4, 1: 1e-4}
AUDIO_TOLERANCE = 1e-5
# F0 of a split mel differs by float32 rounding (1e-4 Hz), which adds up in the phase over the frames.
SPLIT_TOLERANCE = 2e-5


@dataclass(frozen=True)
class NoNoise:
    """Every random draw is in the middle of its range, as in the recorded vectors."""

    def uniform(self, start: int, count: int, channels: int, device: torch.device) -> Tensor:
        return torch.full((channels, count), 0.5, device=device)


def golden_vocoder(generation: int) -> CentredHiFT:
    with np.load(GOLDEN / f"cosyvoice{generation}-tiny" / "weights.npz") as data:
        state = {k[5:]: torch.from_numpy(data[k]) for k in data.files if k.startswith("hift/")}
    model = CentredHiFT(CONFIGS[generation]).eval()
    model.load_state_dict(fold_weight_norm(state))
    return model


@pytest.fixture(scope="module", params=[2, 1])
def generation(request):
    return request.param


@pytest.fixture(scope="module")
def vectors(generation):
    with np.load(GOLDEN / f"cosyvoice{generation}-tiny" / "vectors.npz") as data:
        return {key: torch.from_numpy(data[key]) for key in data.files if key.startswith("hift.")}


@pytest.fixture(scope="module")
def vocoder(generation):
    return golden_vocoder(generation)


@torch.inference_mode()
def test_f0(vocoder, vectors):
    f0 = vocoder.f0_predictor(vectors["hift.mel"])
    torch.testing.assert_close(f0, vectors["hift.f0"], atol=2e-4, rtol=0)


@torch.inference_mode()
def test_source(vocoder, vectors, generation):
    source = vocoder.source(vectors["hift.mel"], vectors["hift.f0"], NoNoise())
    tolerance = SOURCE_TOLERANCE[generation]
    torch.testing.assert_close(source[0], vectors["hift.source"], atol=tolerance, rtol=0)


@torch.inference_mode()
def test_audio_of_the_recorded_source(vocoder, vectors):
    samples = vocoder.decode(vectors["hift.mel"], vectors["hift.source"][None])
    torch.testing.assert_close(samples, vectors["hift.audio"], atol=AUDIO_TOLERANCE, rtol=0)


@torch.inference_mode()
def test_audio(vocoder, vectors, generation):
    samples = vocoder(vectors["hift.mel"], noise=NoNoise())
    tolerance = AUDIO_TOLERANCE + SOURCE_TOLERANCE[generation]
    torch.testing.assert_close(samples, vectors["hift.audio"], atol=tolerance, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [(60,), (1,) * 60, (7, 0, 30, 1, 22), (59, 1), (40, 20, 0)])
def test_any_split_equals_the_whole(vocoder, vectors, sizes):
    mel = vectors["hift.mel"][0]
    whole = vocoder(mel[None])[0]
    stream = vocoder.new_stream()
    pieces = mel.split(list(sizes), dim=1)
    parts = [vocoder.step(stream, piece, index == len(pieces) - 1) for index, piece in enumerate(pieces)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=SPLIT_TOLERANCE, rtol=0)


@torch.inference_mode()
def test_an_end_without_frames_flushes(vocoder, vectors):
    mel = vectors["hift.mel"][0, :, :30]
    stream = vocoder.new_stream()
    parts = [vocoder.step(stream, mel, is_last=False), vocoder.step(stream, mel[:, :0], is_last=True)]
    torch.testing.assert_close(torch.cat(parts), vocoder(mel[None])[0], atol=SPLIT_TOLERANCE, rtol=0)
    empty = vocoder.new_stream()
    assert len(vocoder.step(empty, mel[:, :0], is_last=True)) == 0


@torch.inference_mode()
def test_samples_follow_the_mel_by_the_lookahead_of_all_layers(vocoder, vectors, generation):
    mel = vectors["hift.mel"][0]
    samples = vocoder.step(vocoder.new_stream(), mel, is_last=False)
    assert mel.shape[1] - len(samples) / vocoder.hop_samples == {2: 20.25, 1: 18.1875}[generation]
    changed = mel.clone()
    changed[:, -1] += 1.0
    difference = (vocoder(mel[None]) - vocoder(changed[None]))[0].abs()
    assert difference[: len(samples)].max() < 1e-6
    assert difference[len(samples) :].max() > 1e-3


def test_noise_is_normal_and_a_function_of_the_position(vocoder):
    f0 = torch.zeros(1, 40)
    with torch.inference_mode():
        vocoder.m_source.l_linear.weight.data, kept = torch.eye(1, 9), vocoder.m_source.l_linear.weight.data
        try:
            source = torch.atanh(vocoder.m_source(f0, vocoder.new_stream().noise))
        finally:
            vocoder.m_source.l_linear.weight.data = kept
        draws = (source - vocoder.m_source.l_linear.bias) / (0.1 / 3)
    assert abs(float(draws.mean())) < 0.05
    assert abs(float(draws.std()) - 1) < 0.05
