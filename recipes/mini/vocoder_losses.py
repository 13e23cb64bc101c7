"""Discriminators and losses of the vocoder's training (used in training only).

Multi-period discriminators (HiFi-GAN) see every ``period``-th sample; spectrogram discriminators (UnivNet,
DAC) see complex spectra at three resolutions. Both are small, and shaped for the device: channels last, counts that
are multiples of 8, first layers that see several samples or bins at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from recipes.mini.mel_gpu import slaney_filters

Features = list[Tensor]
_SLOPE = 0.1
_VERDICTS = 8
"""A single output channel would be slow; every discriminator gives eight verdicts at each place."""


class Judge(nn.Module):
    """A stack of two-dimensional convolutions; subclasses prepare the image that it sees."""

    def __init__(
        self,
        channels: tuple[int, ...],
        kernels: Sequence[tuple[int, int]],
        strides: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv2d(before, after, kernel, stride, (kernel[0] // 2, kernel[1] // 2)))
            for (before, after), kernel, stride in zip(pairwise(channels), kernels, strides, strict=True)
        )
        self.last = weight_norm(nn.Conv2d(channels[-1], _VERDICTS, (3, 1), padding=(1, 0)))

    def prepare(self, samples: Tensor) -> Tensor:
        """``[B, L]`` to an image ``[B, C, …]`` in channels-last layout."""
        raise NotImplementedError

    def forward(self, samples: Tensor) -> Features:
        """``[B, L]`` to the features of every layer, the verdicts last."""
        x = self.prepare(samples)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), _SLOPE)
            features.append(x)
        return [*features, self.last(x)]


class PeriodDiscriminator(Judge):
    """Convolutions along every ``period``-th sample."""

    def __init__(self, period: int, channels: tuple[int, ...] = (8, 32, 64, 128, 256)) -> None:
        kernels = [(1, 1)] + [(5, 1)] * (len(channels) - 2)
        super().__init__(channels, kernels, [(1, 1)] + [(3, 1)] * (len(channels) - 2))
        self.period = period

    def prepare(self, samples: Tensor) -> Tensor:
        """Five samples at a time (every third place) as channels, and three zeros."""
        rest = -samples.shape[1] % self.period
        x = F.pad(samples[:, None], (0, rest), mode="reflect")[:, 0]
        x = F.pad(x.view(len(samples), -1, self.period), (0, 0, 2, 2))
        return F.pad(x.unfold(1, 5, 3), (0, 3)).permute(0, 3, 1, 2)


class SpectrumDiscriminator(Judge):
    """Convolutions on the complex spectrogram, four neighbouring bins at a time as channels."""

    window: Tensor

    def __init__(self, n_fft: int, channels: tuple[int, ...] = (8, 32, 32, 64, 64, 64)) -> None:
        kernels = [(3, 5), (3, 5), (3, 5), (3, 5), (3, 3)]
        super().__init__(channels, kernels, [(1, 1), (1, 2), (1, 2), (2, 2), (1, 1)])
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)

    def prepare(self, samples: Tensor) -> Tensor:
        with torch.autocast(samples.device.type, enabled=False):
            spectrum = _spectrum(samples.float(), self.window)[..., :-1]
            # Speech spectra span five decades; a root brings weak bins within reach of the first layer.
            size = (spectrum.real.square() + spectrum.imag.square() + 1e-5).sqrt()
            x = torch.view_as_real(spectrum * size.rsqrt())
        return x.reshape(len(x), x.shape[1], -1, 8).permute(0, 3, 1, 2)


class Discriminators(nn.Module):
    """All of them: 1.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.periods = nn.ModuleList(PeriodDiscriminator(p) for p in (2, 3, 5, 7, 11))
        self.spectra = nn.ModuleList(SpectrumDiscriminator(n) for n in (2048, 1024, 512))

    def all(self) -> list[nn.Module]:
        return [*self.periods, *self.spectra]

    def forward(self, samples: Tensor) -> list[Features]:
        return [one(samples) for one in self.all()]


def discriminator_loss(true: list[Tensor], made: list[Tensor]) -> Tensor:
    """Least squares, from the last features of each discriminator: true speech is 1, generated speech 0."""
    losses = [
        (1.0 - yes.float()).square().mean() + no.float().square().mean()
        for yes, no in zip(true, made, strict=True)
    ]
    return torch.stack(losses).mean()


def matching_loss(true: Features, made: Features) -> Tensor:
    """Distance of one discriminator's features from those of true speech, relative to their size."""
    losses = [
        F.l1_loss(found, wanted).float() / wanted.abs().mean().float().clamp_min(1e-3)
        for wanted, found in zip(true[:-1], made[:-1], strict=True)
    ]
    return torch.stack(losses).mean()


def generator_losses(true: list[Features], made: list[Features]) -> tuple[Tensor, Tensor]:
    """Adversarial loss, and relative distance of the features from those of true speech."""
    adversarial = torch.stack([(1.0 - no[-1].float()).square().mean() for no in made])
    matching = [matching_loss(yes, no) for yes, no in zip(true, made, strict=True)]
    return adversarial.mean(), torch.stack(matching).mean()


def _spectrum(samples: Tensor, window: Tensor) -> Tensor:
    """Complex ``[B, frames, n_fft / 2 + 1]`` with a hop of a quarter of the window."""
    n_fft = len(window)
    padded = F.pad(samples[:, None], (n_fft // 2, n_fft // 2), mode="reflect")[:, 0]
    return torch.fft.rfft(padded.unfold(-1, n_fft, n_fft // 4) * window)


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
        return torch.stack([self._one(n_fft, made, true) for n_fft, _ in self.scales]).mean()

    def _one(self, n_fft: int, made: Tensor, true: Tensor) -> Tensor:
        size_made, mel_made = self._logs(n_fft, made)
        with torch.no_grad():
            size_true, mel_true = self._logs(n_fft, true)
        loss = F.l1_loss(mel_made, mel_true)
        if n_fft in (2048, 512, 128):
            loss = loss + 0.3 * F.l1_loss(size_made.clamp_min(1e-3).log(), size_true.clamp_min(1e-3).log())
        return loss

    def _logs(self, n_fft: int, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitudes, and their log-mel."""
        spectrum = _spectrum(samples, self.get_buffer(f"window{n_fft}"))
        size = (spectrum.real.square() + spectrum.imag.square() + 1e-8).sqrt()
        return size, (size @ self.get_buffer(f"mel{n_fft}")).clamp_min(1e-5).log()
