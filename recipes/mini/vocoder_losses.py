"""Discriminators and losses of the vocoder's training (used in training only).

Multi-period discriminators (HiFi-GAN) see every ``period``-th sample; spectrogram discriminators (UnivNet,
DAC) see complex spectra at three resolutions. Both are small: quality per second of training counts.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from recipes.mini.mel_gpu import slaney_filters

Features = list[Tensor]
_SLOPE = 0.1


class PeriodDiscriminator(nn.Module):
    """Convolutions along every ``period``-th sample."""

    def __init__(self, period: int, channels: tuple[int, ...] = (1, 16, 48, 128, 192)) -> None:
        super().__init__()
        self.period = period
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv2d(before, after, (5, 1), (3, 1), padding=(2, 0)))
            for before, after in pairwise(channels)
        )
        self.convs.append(weight_norm(nn.Conv2d(channels[-1], channels[-1], (5, 1), padding=(2, 0))))
        self.last = weight_norm(nn.Conv2d(channels[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, samples: Tensor) -> Features:
        """``[B, L]`` to the features of every layer, the verdict last."""
        rest = -samples.shape[1] % self.period
        x = F.pad(samples[:, None], (0, rest), mode="reflect")
        x = x.view(len(samples), 1, -1, self.period)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), _SLOPE)
            features.append(x)
        return [*features, self.last(x)]


class SpectrumDiscriminator(nn.Module):
    """Two-dimensional convolutions on the complex spectrogram."""

    window: Tensor

    def __init__(self, n_fft: int, channels: tuple[int, ...] = (2, 16, 24, 32, 32)) -> None:
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv2d(before, after, (3, 9), (1, 1 if before == 2 else 2), padding=(1, 4)))
            for before, after in pairwise(channels)
        )
        self.convs.append(weight_norm(nn.Conv2d(channels[-1], channels[-1], 3, padding=1)))
        self.last = weight_norm(nn.Conv2d(channels[-1], 1, 3, padding=1))

    def forward(self, samples: Tensor) -> Features:
        """``[B, L]`` to the features of every layer, the verdict last."""
        with torch.autocast(samples.device.type, enabled=False):
            spectrum = torch.stft(
                samples.float(), self.n_fft, self.n_fft // 4, window=self.window, return_complex=True
            )
            # Speech spectra span five decades; a root brings weak bins within reach of the first layer.
            size = (spectrum.real.square() + spectrum.imag.square() + 1e-5).sqrt()
            x = torch.view_as_real(spectrum * size.rsqrt()).permute(0, 3, 2, 1)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), _SLOPE)
            features.append(x)
        return [*features, self.last(x)]


class Discriminators(nn.Module):
    """All of them: 1.9 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.periods = nn.ModuleList(PeriodDiscriminator(p) for p in (2, 3, 5, 7, 11))
        self.spectra = nn.ModuleList(SpectrumDiscriminator(n) for n in (2048, 1024, 512))

    def forward(self, samples: Tensor) -> list[Features]:
        return [one(samples) for one in [*self.periods, *self.spectra]]


def discriminator_loss(true: list[Features], made: list[Features]) -> Tensor:
    """Least squares: true speech is 1, generated speech 0."""
    losses = [
        (1.0 - yes[-1].float()).square().mean() + no[-1].float().square().mean()
        for yes, no in zip(true, made, strict=True)
    ]
    return torch.stack(losses).mean()


def generator_losses(true: list[Features], made: list[Features]) -> tuple[Tensor, Tensor]:
    """Adversarial loss, and relative distance of the features from those of true speech."""
    adversarial = torch.stack([(1.0 - no[-1].float()).square().mean() for no in made])
    matching = [
        (wanted.float() - found.float()).abs().mean() / wanted.float().abs().mean().clamp_min(1e-3)
        for yes, no in zip(true, made, strict=True)
        for wanted, found in zip(yes[:-1], no[:-1], strict=True)
    ]
    return adversarial.mean(), torch.stack(matching).mean()


class SpectralLoss(nn.Module):
    """L1 between log-mels at six resolutions, and between log-magnitudes at three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = ((2048, 128), (1024, 80), (512, 40), (256, 20), (128, 10), (64, 5))
        for n_fft, bins in self.scales:
            self.register_buffer(f"window{n_fft}", torch.hann_window(n_fft), persistent=False)
            self.register_buffer(f"mel{n_fft}", slaney_filters(bins, n_fft).T.contiguous(), persistent=False)

    def forward(self, made: Tensor, true: Tensor) -> Tensor:
        """``[B, L]`` each."""
        loss = made.new_zeros(())
        for n_fft, _ in self.scales:
            window = self.get_buffer(f"window{n_fft}")
            spectrum = torch.stft(
                torch.cat((made, true)), n_fft, n_fft // 4, window=window, return_complex=True
            )
            size = (spectrum.real.square() + spectrum.imag.square() + 1e-8).sqrt().transpose(1, 2)
            mel_made, mel_true = (size @ self.get_buffer(f"mel{n_fft}")).clamp_min(1e-5).log().chunk(2)
            loss = loss + (mel_made - mel_true).abs().mean()
            if n_fft in (2048, 512, 128):
                size_made, size_true = size.clamp_min(1e-3).log().chunk(2)
                loss = loss + 0.3 * (size_made - size_true).abs().mean()
        return loss / len(self.scales)
