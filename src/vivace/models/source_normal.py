"""Harmonic source of CosyVoice 2 and CosyVoice-300M: sines at multiples of F0, plus normal noise.

``SineGen2`` and ``SineGen`` of the reference. The phase of CosyVoice 2 moves in a straight line from the middle of one
frame to the middle of the next and stands still before the first and behind the last; that of CosyVoice-300M is summed
from sample to sample. The noise is a function of (seed, absolute position), as in ``source``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vivace.config import VocoderConfig
from vivace.models.source import NoiseSource

HALF = 2.0**-25
"""Half of the smallest step of the uniform noise: keeps the normal noise finite."""


@dataclass(slots=True)
class SourceState:
    """What the source of one utterance remembers.

    Attributes:
        phase: before the frame that waits, in cycles, float64 ``[B, harmonics]``.
        waiting: F0 of the last frame ``[B, 0 or 1]``: with a phase that moves in lines, its second half needs the next
            frame.
        frames: absolute number of the next frame, for the noise.
        started: a frame came before it.
    """

    phase: Tensor
    waiting: Tensor
    frames: int = 0
    started: bool = False


class NormalSource(nn.Module):
    """F0 to the excitation that the generator shapes."""

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__()
        self.harmonics = config.nb_harmonics + 1
        self.hop = config.hop_samples
        self.rate_hz = config.sampling_rate
        self.amplitude = config.nsf_alpha
        self.voiced_noise = config.nsf_sigma
        self.threshold_hz = config.nsf_voiced_threshold
        self.linear = config.source_phase == "linear"
        self.l_linear = nn.Linear(self.harmonics, 1)

    def initial_state(self, batch: int) -> SourceState:
        weight = self.l_linear.weight
        phase = torch.zeros(batch, self.harmonics, dtype=torch.float64, device=weight.device)
        return SourceState(phase, weight.new_zeros(batch, 0))

    def forward(self, f0: Tensor, noise: NoiseSource, start_frame: int = 0) -> Tensor:
        """Source of a whole utterance: ``[B, T]`` in Hz to samples ``[B, T * hop]``; the noise is that of the frames
        from ``start_frame``."""
        state = self.initial_state(f0.shape[0])
        state.frames = start_frame
        return self.step(f0, state, noise, is_last=True)

    def step(self, f0: Tensor, state: SourceState, noise: NoiseSource, is_last: bool) -> Tensor:
        """Next frames ``[B, n]``: the samples that they complete, ``[B, m * hop]``. Changes ``state``."""
        with torch.no_grad():
            frames = torch.cat((state.waiting, f0), dim=1)
            count = frames.shape[1] if is_last or not self.linear else max(frames.shape[1] - 1, 0)
            state.waiting = frames[:, count:].clone()
            if count == 0:
                return f0.new_zeros(f0.shape[0], 0)
            waves = self._lines(frames, count, state) if self.linear else self._sums(frames, state, noise)
            frames = frames[:, :count]
            voiced = (frames > self.threshold_hz).to(frames.dtype)[:, None].repeat_interleave(self.hop, dim=2)
            level = voiced * self.voiced_noise + (1 - voiced) * (self.amplitude / 3)
            draws = noise.uniform(state.frames * self.hop, voiced.shape[-1], self.harmonics, f0.device)
            normal = torch.erfinv(2 * draws.double() - 1 + HALF).to(f0.dtype) * math.sqrt(2)
            waves = torch.addcmul(waves * voiced, level, normal)
            state.frames, state.started = state.frames + count, True
        mixed = torch.einsum("bht,h->bt", waves, self.l_linear.weight[0]) + self.l_linear.bias
        return torch.tanh(mixed)

    def cycles_per_sample(self, frames: Tensor) -> Tensor:
        """Cycles per sample of every harmonic, float64 ``[B, harmonics, n]``."""
        multiples = torch.arange(1, self.harmonics + 1, device=frames.device, dtype=frames.dtype)
        return torch.remainder(frames[:, None] * multiples[:, None] / self.rate_hz, 1.0).double()

    def _sums(self, frames: Tensor, state: SourceState, noise: NoiseSource) -> Tensor:
        """The phase runs on at every sample from one that is drawn (0 for the fundamental)."""
        steps = self.cycles_per_sample(frames)
        ends = torch.remainder(state.phase[..., None] + torch.cumsum(steps * self.hop, dim=-1), 1.0)
        starts = torch.cat((state.phase[..., None], ends[..., :-1]), dim=-1)
        state.phase = ends[..., -1].clone()
        inside = torch.arange(1, self.hop + 1, device=frames.device, dtype=torch.float64)
        drawn = noise.uniform(0, 1, self.harmonics, frames.device).double() - 0.5
        drawn = torch.where(torch.arange(self.harmonics, device=frames.device)[:, None] == 0, 0.0, drawn)
        cycles = (starts[..., None] + steps[..., None] * inside).flatten(-2) + drawn
        return self._wave(cycles, frames.dtype)

    def _lines(self, frames: Tensor, count: int, state: SourceState) -> Tensor:
        """The phase moves in lines between the middles of the first ``count`` frames and of the one behind them."""
        moves = self.cycles_per_sample(frames) * self.hop
        middles = torch.remainder(state.phase[..., None] + torch.cumsum(moves, dim=-1), 1.0)
        before = torch.cat((state.phase[..., None], middles[..., :-1]), dim=-1)
        into = moves.clone()
        if not state.started:  # the phase stands still before the first middle
            before[..., 0], into[..., 0] = middles[..., 0], 0.0
        out = torch.cat((moves[..., 1:], torch.zeros_like(moves[..., :1])), dim=-1)
        state.phase = middles[..., count - 1].clone()
        place = (torch.arange(self.hop, device=frames.device, dtype=torch.float64) + 0.5) / self.hop
        first, second = place[: self.hop // 2] + 0.5, place[self.hop // 2 :] - 0.5
        before, middles, into, out = (part[..., :count, None] for part in (before, middles, into, out))
        cycles = torch.cat((before + into * first, middles + out * second), dim=-1)
        return self._wave(cycles.flatten(-2), frames.dtype)

    def _wave(self, cycles: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.sin(torch.remainder(cycles, 1.0) * (2 * math.pi)).to(dtype) * self.amplitude
