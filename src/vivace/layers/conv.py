"""Causal one-dimensional convolutions whose streaming state is a plain tensor that the caller holds.

Every class has two entries that share one weight: ``forward`` runs a whole sequence from its beginning, and
``step`` runs a piece and takes and returns the state. Any split of a sequence into pieces gives what
``forward`` gives. A state is a copy: it does not keep the piece alive that it was cut from. Shapes are
``[batch, channels, time]``; a piece may have zero time steps. The layers do the arithmetic of the
reference's ``CausalConv1d`` family and keep its parameter names (``weight``, ``bias``).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalConv1d(nn.Conv1d):
    """Convolution that sees the past only; the past of the first step is zero.

    The state is the last ``(kernel_size - 1) * dilation`` inputs.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, dilation: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel_size, dilation=dilation)
        self.context = (kernel_size - 1) * dilation

    def initial_state(self, batch: int) -> Tensor:
        """Zeros ``[batch, in_channels, context]``."""
        return self.weight.new_zeros(batch, self.in_channels, self.context)

    def forward(self, x: Tensor) -> Tensor:
        """Whole sequence: ``[B, in, T] -> [B, out, T]``."""
        return self._convolve(F.pad(x, (self.context, 0)))

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Next piece: ``[B, in, n] -> [B, out, n]`` and the new state."""
        if x.shape[-1] == 0:
            return x.new_zeros(x.shape[0], self.out_channels, 0), state
        if self.context == 0:
            return self._convolve(x), state
        joined = torch.cat((state, x), dim=-1)
        return self._convolve(joined), joined[..., -self.context :].clone()

    def _convolve(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight, self.bias, dilation=self.dilation)


class LookaheadConv1d(nn.Conv1d):
    """Convolution that sees the present and ``kernel_size - 1`` future inputs; zeros follow the last one.

    The state holds the inputs that still wait for their future.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size)
        self.lookahead = kernel_size - 1

    def initial_state(self, batch: int) -> Tensor:
        """Nothing waits yet: ``[batch, in_channels, 0]``."""
        return self.weight.new_zeros(batch, self.in_channels, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Whole sequence: ``[B, in, T] -> [B, out, T]``."""
        return F.conv1d(F.pad(x, (0, self.lookahead)), self.weight, self.bias)

    def step(self, x: Tensor, state: Tensor, is_last: bool) -> tuple[Tensor, Tensor]:
        """Next piece: outputs for every input whose future is known, all of them when ``is_last``."""
        joined = torch.cat((state, x), dim=-1)
        ready = joined.shape[-1] if is_last else max(joined.shape[-1] - self.lookahead, 0)
        waiting = joined[..., ready:].clone()
        if ready == 0:
            return x.new_zeros(x.shape[0], self.out_channels, 0), waiting
        padded = F.pad(joined, (0, self.lookahead)) if is_last else joined
        return F.conv1d(padded, self.weight, self.bias), waiting


class CausalUpsampleConv1d(CausalConv1d):
    """Repeats every input ``rate`` times, then convolves causally.

    Repeated inputs make neighbouring taps multiply the same number, so each of the ``rate`` output phases is
    a short convolution at the input rate whose taps are sums of the stored ones: ``taps`` multiplications
    per output instead of ``kernel_size``. ``[B, in, T] -> [B, out, T * rate]``; the state is the last
    ``taps - 1`` inputs.
    """

    tap_sums: Tensor

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, rate: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size)
        self.rate = rate
        self.context = -(-(kernel_size - 1) // rate)
        self.register_buffer("tap_sums", _tap_sums(kernel_size, rate), persistent=False)

    def _convolve(self, x: Tensor) -> Tensor:
        # [out, in, kernel] x [rate, kernel, taps] -> one kernel of `taps` per output channel and phase
        weight = torch.einsum("oik,rkt->orit", self.weight, self.tap_sums).flatten(0, 1)
        phases = F.conv1d(x, weight)
        batch, _, frames = phases.shape
        y = phases.view(batch, self.out_channels, self.rate, frames).transpose(2, 3)
        return y.reshape(batch, self.out_channels, frames * self.rate) + cast(Tensor, self.bias)[:, None]


class CausalDownsampleConv1d(nn.Conv1d):
    """Convolution with stride ``rate`` and kernel ``2 * rate`` after ``rate - 1`` zeros.

    Output ``j`` needs inputs up to ``(j + 1) * rate``, one more than a whole number of strides: an input of
    ``n * rate + 1`` steps gives ``n`` outputs. The state is the inputs that later outputs still need.
    """

    def __init__(self, in_channels: int, out_channels: int, rate: int) -> None:
        super().__init__(in_channels, out_channels, 2 * rate, stride=rate)
        self.rate = rate

    def initial_state(self, batch: int) -> Tensor:
        """Zeros ``[batch, in_channels, rate - 1]``."""
        return self.weight.new_zeros(batch, self.in_channels, self.rate - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Whole sequence: ``[B, in, T] -> [B, out, (T - 1) // rate]``."""
        return F.conv1d(F.pad(x, (self.rate - 1, 0)), self.weight, self.bias, stride=self.rate)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Next piece: every output whose inputs are complete, and the new state."""
        joined = torch.cat((state, x), dim=-1)
        ready = max(joined.shape[-1] // self.rate - 1, 0)
        rest = joined[..., ready * self.rate :].clone()
        if ready == 0:
            return x.new_zeros(x.shape[0], self.out_channels, 0), rest
        return F.conv1d(joined, self.weight, self.bias, stride=self.rate), rest


def _tap_sums(kernel_size: int, rate: int) -> Tensor:
    """Zeros and ones ``[rate, kernel_size, taps]``: which stored taps fall on which input, per phase."""
    context = -(-(kernel_size - 1) // rate)
    sums = torch.zeros(rate, kernel_size, context + 1)
    for phase in range(rate):
        for tap in range(kernel_size):
            # The tap reads repeated position phase + tap - (kernel_size - 1), relative to the present input.
            sums[phase, tap, context + (phase + tap - kernel_size + 1) // rate] = 1.0
    return sums
