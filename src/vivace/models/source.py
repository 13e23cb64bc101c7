"""Harmonic source: sine waves at multiples of F0, plus noise, mixed into one signal.

The noise is a function of (seed, absolute position): any piece of it can be computed anywhere, in any
order, with the same values on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from vivace.config import VocoderConfig

_MASK = 0xFFFF_FFFF


class NoiseSource(Protocol):
    """Gives the noise of a stretch of samples."""

    def uniform(self, start: int, count: int, channels: int, device: torch.device) -> Tensor:
        """Values in [0, 1) for samples ``start … start + count - 1``: ``[channels, count]``, or with a
        leading batch dimension."""
        ...


@dataclass(frozen=True, slots=True)
class CounterNoise:
    """Uniform noise: an integer hash of the value's index, ``sample * channels + channel``.

    The reference draws one fixed buffer of uniform values when the model is built; this has the same
    distribution without the buffer (260 MB) and without its limit of 300 seconds.
    """

    seed: int = 0

    @property
    def key(self) -> int:
        """What the seed adds to every index, modulo ``2**32``."""
        return ((self.seed ^ (self.seed >> 32)) * 0x2545_F491 + 0x6A09_E667) & _MASK

    def uniform(self, start: int, count: int, channels: int, device: torch.device) -> Tensor:
        samples = torch.arange(start, start + count, device=device)
        index = samples * channels + torch.arange(channels, device=device)[:, None]
        return hashed_uniform(index.add_(self.key))


def hashed_uniform(index: Tensor) -> Tensor:
    """What ``CounterNoise`` draws for ``sample * channels + channel + key`` (int64, which this overwrites)."""
    value = index.bitwise_and_(_MASK)
    # Two rounds of multiply and shift; both factors are under 2**31, so products fit into int64.
    for shift, factor in ((16, 0x21F0_AAAD), (15, 0x735A_2D97)):
        value = value.bitwise_xor_(value >> shift).mul_(factor).bitwise_and_(_MASK)
    # 24 bits: exact in float32, and 1.0 is never reached.
    return (value.bitwise_xor_(value >> 15) >> 8).to(torch.float32).mul_(2.0**-24)


class HarmonicSource(nn.Module):
    """F0 to the excitation that the generator shapes."""

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__()
        self.harmonics = config.nb_harmonics + 1
        self.hop = config.hop_samples
        self.rate_hz = config.sampling_rate
        self.amplitude = config.nsf_alpha
        self.voiced_noise = config.nsf_sigma
        self.threshold_hz = config.nsf_voiced_threshold
        self.phase_per_sample = config.source_phase == "sample"
        self.l_linear = nn.Linear(self.harmonics, 1)

    def initial_phase(self, batch: int) -> Tensor:
        """Phase before the first frame, in cycles: float64 zeros ``[batch, harmonics]``."""
        return torch.zeros(batch, self.harmonics, dtype=torch.float64, device=self.l_linear.weight.device)

    def forward(
        self, f0: Tensor, phase: Tensor, start_frame: int, noise: NoiseSource
    ) -> tuple[Tensor, Tensor]:
        """Source of the frames ``start_frame …``.

        Args:
            f0: ``[B, n]`` in Hz.
            phase: where the frame before ``start_frame`` ended, ``[B, harmonics]``, cycles in float64.
            start_frame: absolute position, for the noise.
            noise: the noise source.

        Returns:
            Samples ``[B, n * hop]`` and the phase at their end.
        """
        with torch.no_grad():
            waves, phase = self._sines(f0, phase)
            voiced = self._repeat((f0 > self.threshold_hz).to(f0.dtype))[:, None]
            level = voiced * self.voiced_noise + (1 - voiced) * (self.amplitude / 3)
            draws = noise.uniform(start_frame * self.hop, voiced.shape[-1], self.harmonics, f0.device)
            waves = torch.addcmul(waves * voiced, level, draws)
        mixed = torch.einsum("bht,h->bt", waves, self.l_linear.weight[0]) + self.l_linear.bias
        return torch.tanh(mixed), phase

    def _sines(self, f0: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
        """Sine waves ``[B, harmonics, n * hop]`` and the phase at their end.

        The reference resamples the phase step to one value per frame (the middle of the frame, where the
        random initial phases that it adds to the very first sample are not seen), sums it over the frames,
        multiplies by ``hop`` and repeats it: the sine stands still inside a frame. ``source_phase="sample"``
        lets it run on from sample to sample instead, and meets the same phase at the end of each frame.
        """
        multiples = torch.arange(1, self.harmonics + 1, device=f0.device, dtype=f0.dtype)
        step = torch.remainder(f0[:, None] * multiples[:, None] / self.rate_hz, 1.0)  # cycles per sample
        # Summed in float64 and without whole cycles: float32 would lose the phase within seconds.
        ends = phase[..., None] + torch.cumsum(step.double() * self.hop, dim=-1)
        ends = torch.remainder(ends, 1.0)
        last = ends[..., -1].clone() if f0.shape[-1] else phase
        if self.phase_per_sample:
            starts = torch.cat((phase[..., None], ends[..., :-1]), dim=-1).to(f0.dtype)
            inside = torch.arange(1, self.hop + 1, device=f0.device, dtype=f0.dtype)
            cycles = starts[..., None] + step[..., None] * inside
            waves = torch.sin(cycles * (2 * math.pi)).flatten(-2)
        else:
            waves = self._repeat(torch.sin(ends * (2 * math.pi)).to(f0.dtype))
        return waves * self.amplitude, last

    def _repeat(self, frames: Tensor) -> Tensor:
        """``[..., n] -> [..., n * hop]``; an expanded view is much faster than ``repeat_interleave``."""
        return frames[..., None].expand(*frames.shape, self.hop).flatten(-2)
