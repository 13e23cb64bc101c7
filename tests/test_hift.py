"""The whole-sequence vocoder against the golden vectors of the reference."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vivace.config import VocoderConfig
from vivace.layers.stft import ShortTimeFourier
from vivace.models.hift import CausalHiFT

GOLDEN = Path(__file__).parent / "golden" / "cosyvoice3-tiny"

# The reference sums phase steps in float32 and multiplies by 480 · 2 pi: after 60 frames its phase is off by
# about 1e-3 rad, and its float32 samples pass through 70 convolutions.
SOURCE_TOLERANCE = 3e-5
AUDIO_TOLERANCE = 1e-5
# The driver's audio is stored in half precision: samples under 0.25 are rounded by up to 2**-13 / 2.
DRIVER_TOLERANCE = 2**-14 + AUDIO_TOLERANCE


@dataclass(frozen=True)
class GoldenNoise:
    """The deterministic sequence that replaced the reference's random buffers."""

    def uniform(self, start: int, count: int, channels: int, device: torch.device) -> Tensor:
        index = torch.arange(start * channels, (start + count) * channels, device=device)
        values = torch.remainder(index * 1103515245 + 12345, 2**31).double() / 2**31
        return values.float().view(count, channels).T


def fold_weight_norm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    folded = {}
    for key, value in state.items():
        name = key.replace("parametrizations.weight.original1", "weight")
        if key.endswith("original0"):
            continue
        if key.endswith("original1"):
            norm = value.flatten(1).norm(dim=1)[:, None, None]
            value = value * (state[key[:-1] + "0"] / norm)
        folded[name] = value
    return folded


@pytest.fixture(scope="module")
def vectors() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "vectors.npz") as data:
        return {
            key: data[key]
            for key in data.files
            if key.startswith(("hift.", "offline.", "stream.", "flow.mel"))
        }


@pytest.fixture(scope="module")
def golden_hift() -> CausalHiFT:
    with np.load(GOLDEN / "weights.npz") as data:
        state = {k[5:]: torch.from_numpy(data[k]) for k in data.files if k.startswith("hift/")}
    model = CausalHiFT(VocoderConfig(base_channels=64, f0_cond_channels=32)).eval()
    model.load_state_dict(fold_weight_norm(state))
    return model


@torch.inference_mode()
def test_f0(golden_hift: CausalHiFT, vectors: dict[str, np.ndarray]) -> None:
    f0 = golden_hift.f0_predictor(torch.from_numpy(vectors["hift.mel"]))
    # Float32 against the reference's float64, values up to 180 Hz.
    np.testing.assert_allclose(f0.numpy(), vectors["hift.f0"], atol=2e-4, rtol=0)


@torch.inference_mode()
def test_source(golden_hift: CausalHiFT, vectors: dict[str, np.ndarray]) -> None:
    f0 = torch.from_numpy(vectors["hift.f0"]).float()
    source, _ = golden_hift.m_source(f0, golden_hift.m_source.initial_phase(1), 0, GoldenNoise())
    head = vectors["hift.source_head"]
    np.testing.assert_allclose(source[0, : len(head)].numpy(), head, atol=SOURCE_TOLERANCE, rtol=0)


@torch.inference_mode()
def test_audio_of_a_whole_mel(golden_hift: CausalHiFT, vectors: dict[str, np.ndarray]) -> None:
    samples = golden_hift(torch.from_numpy(vectors["hift.mel"]), noise=GoldenNoise())
    np.testing.assert_allclose(samples.numpy(), vectors["hift.audio_final"], atol=AUDIO_TOLERANCE, rtol=0)


@torch.inference_mode()
def test_audio_of_a_partial_mel(golden_hift: CausalHiFT, vectors: dict[str, np.ndarray]) -> None:
    expected = vectors["hift.audio_partial"]  # 40 frames in, 32 out: the reference holds back eight
    stream = golden_hift.new_stream(noise=GoldenNoise())
    samples = golden_hift.step(stream, torch.from_numpy(vectors["hift.mel"][0, :, :40]), is_last=False)
    assert len(samples) == (40 - 4) * 480 - 4
    partial = samples[None, : expected.shape[1]].numpy()
    np.testing.assert_allclose(partial, expected, atol=AUDIO_TOLERANCE, rtol=0)


@torch.inference_mode()
def test_audio_of_the_offline_driver(golden_hift: CausalHiFT, vectors: dict[str, np.ndarray]) -> None:
    samples = golden_hift(torch.from_numpy(vectors["flow.mel_full"]), noise=GoldenNoise())
    np.testing.assert_allclose(samples[0].numpy(), vectors["offline.audio"], atol=DRIVER_TOLERANCE, rtol=0)


@torch.inference_mode()
def test_audio_of_the_streaming_driver(golden_hift: CausalHiFT, vectors: dict[str, np.ndarray]) -> None:
    """All but the driver's last chunk, which comes from a mel with the offline mask."""
    mel = torch.from_numpy(vectors["flow.mel_streaming_final"][0])
    stream, sizes = golden_hift.new_stream(noise=GoldenNoise()), (40, 50, 0, 77, 39)
    assert sum(sizes) == mel.shape[1]
    parts = [golden_hift.step(stream, part, is_last=False) for part in mel.split(list(sizes), dim=1)]
    samples = torch.cat([*parts, golden_hift.step(stream, mel[:, :0], is_last=True)])
    expected = vectors["stream.audio"]
    assert len(samples) == len(expected) == vectors["stream.chunk_samples"].sum()
    count = vectors["stream.chunk_samples"][:-1].sum()
    np.testing.assert_allclose(samples[:count].numpy(), expected[:count], atol=DRIVER_TOLERANCE, rtol=0)


def test_fourier_equals_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(2, 400, generator=generator)
    fourier, window = ShortTimeFourier(16, 4), torch.hann_window(16)
    expected = torch.stft(samples, 16, 4, window=window, return_complex=True)
    spectrum = fourier.analyse(samples)
    torch.testing.assert_close(spectrum, torch.cat((expected.real, expected.imag), 1), atol=1e-5, rtol=0)
    spectrum = torch.randn(2, 18, 101, generator=generator)
    inverse = torch.istft(torch.complex(*spectrum.chunk(2, dim=1)), 16, 4, window=window)
    torch.testing.assert_close(fourier.synthesise(spectrum), inverse, atol=1e-5, rtol=0)
