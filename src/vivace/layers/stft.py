"""Short-time Fourier transform and its inverse for short windows, whole or in pieces.

Same numbers as ``torch.stft(..., center=True, pad_mode="reflect")`` and ``torch.istft`` with a periodic Hann
window, written as products with fixed bases: at 16 samples a window that is faster than an FFT, it never
waits for the device (``torch.istft`` reads its window sum back), and the streaming state is explicit.
Spectra are ``[batch, 2 * bins, columns]``: real parts, then imaginary parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(slots=True)
class AnalysisState:
    """Samples ``[batch, n]`` that later columns need; ``started`` once the mirrored beginning is in them."""

    samples: Tensor
    started: bool = False


@dataclass(slots=True)
class SynthesisState:
    """Overlap-add sums that later columns still change, and how many samples of the beginning to drop."""

    sums: Tensor
    window_sums: Tensor
    skip: int


class ShortTimeFourier(nn.Module):
    """Analysis and synthesis with a periodic Hann window of ``n_fft`` samples every ``hop`` samples."""

    window: Tensor
    analysis: Tensor
    synthesis: Tensor

    def __init__(self, n_fft: int, hop: int) -> None:
        super().__init__()
        self.n_fft, self.hop, self.bins = n_fft, hop, n_fft // 2 + 1
        window = torch.hann_window(n_fft, dtype=torch.float64)
        angle = 2 * math.pi / n_fft * torch.outer(torch.arange(n_fft), torch.arange(self.bins)).double()
        analysis = torch.cat((angle.cos(), -angle.sin()), dim=1) * window[:, None]  # [n_fft, 2 * bins]
        # Each bin stands for itself and its mirror image, except the first and the last, which are real.
        weight = torch.full((self.bins,), 2.0 / n_fft, dtype=torch.float64)
        weight[0] = weight[-1] = 1.0 / n_fft
        synthesis = torch.cat((angle.cos() * weight, -angle.sin() * weight), dim=1).T * window
        synthesis[[self.bins, -1]] = 0.0
        self.register_buffer("window", window.float(), persistent=False)
        self.register_buffer("analysis", analysis.float().contiguous(), persistent=False)
        self.register_buffer("synthesis", synthesis.float().contiguous(), persistent=False)

    def analyse(self, samples: Tensor) -> Tensor:
        """``[B, L] -> [B, 2 * bins, L // hop + 1]``; needs ``L > n_fft / 2``."""
        half = self.n_fft // 2
        return self.columns(F.pad(samples[:, None], (half, half), mode="reflect")[:, 0])

    def analysis_state(self, batch: int) -> AnalysisState:
        return AnalysisState(self.window.new_zeros(batch, 0))

    def analyse_step(self, samples: Tensor, state: AnalysisState, is_last: bool) -> Tensor:
        """Next piece of the samples: the columns that became complete. Changes ``state``."""
        half = self.n_fft // 2
        joined = torch.cat((state.samples, samples), dim=-1)
        if not state.started and joined.shape[-1] > half:
            joined = torch.cat((joined[:, 1 : half + 1].flip(-1), joined), dim=-1)
            state.started = True
        if is_last and state.started:
            joined = torch.cat((joined, joined[:, -half - 1 : -1].flip(-1)), dim=-1)
        ready = max((joined.shape[-1] - self.n_fft) // self.hop + 1, 0) if state.started else 0
        state.samples = joined[:, ready * self.hop :].clone()
        if ready == 0:
            return samples.new_zeros(samples.shape[0], 2 * self.bins, 0)
        return self.columns(joined)

    def synthesise(self, spectrum: Tensor) -> Tensor:
        """``[B, 2 * bins, columns] -> [B, (columns - 1) * hop]``."""
        sums, window_sums = self._overlap_add(spectrum)
        half = self.n_fft // 2
        return sums[:, half:-half] / window_sums[half:-half]

    def synthesis_state(self, batch: int) -> SynthesisState:
        overlap = self.n_fft - self.hop
        return SynthesisState(
            self.window.new_zeros(batch, overlap), self.window.new_zeros(overlap), self.n_fft // 2
        )

    def synthesise_step(self, spectrum: Tensor, state: SynthesisState, is_last: bool) -> Tensor:
        """Next columns: the samples that no later column changes. Changes ``state``."""
        overlap = self.n_fft - self.hop
        sums, window_sums = self._overlap_add(spectrum)
        sums = torch.cat((sums[:, :overlap] + state.sums, sums[:, overlap:]), dim=-1)
        window_sums = torch.cat((window_sums[:overlap] + state.window_sums, window_sums[overlap:]))
        ready = sums.shape[-1] - (self.n_fft // 2 if is_last else overlap)
        start = min(state.skip, ready)
        state.skip -= start
        state.sums, state.window_sums = sums[:, -overlap:].clone(), window_sums[-overlap:].clone()
        return sums[:, start:ready] / window_sums[start:ready]

    def columns(self, padded: Tensor) -> Tensor:
        """Spectra of the windows ``[B, L] -> [B, 2 * bins, (L - n_fft) // hop + 1]``."""
        return (padded.unfold(-1, self.n_fft, self.hop) @ self.analysis).transpose(1, 2)

    def _overlap_add(self, spectrum: Tensor) -> tuple[Tensor, Tensor]:
        """Sums ``[B, columns * hop + n_fft - hop]`` of windowed frames, and of the squared windows."""
        frames = spectrum.transpose(1, 2) @ self.synthesis
        squares = self.window.square().expand(1, frames.shape[1], self.n_fft)
        return self.add_blocks(frames), self.add_blocks(squares)[0]

    def add_blocks(self, frames: Tensor) -> Tensor:
        """Overlap-add: ``[B, columns, n_fft] -> [B, columns * hop + n_fft - hop]``."""
        batch, columns, _ = frames.shape
        count = self.n_fft // self.hop
        blocks = frames.view(batch, columns, count, self.hop)
        parts = [F.pad(blocks[:, :, i], (0, 0, i, count - 1 - i)) for i in range(count)]
        return torch.stack(parts).sum(dim=0).reshape(batch, -1)
