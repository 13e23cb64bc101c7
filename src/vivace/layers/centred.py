"""Convolutions that look to both sides, with their streaming state.

``forward`` runs a whole sequence. ``step`` takes pieces: it returns the outputs whose inputs have all come, and at the
end the rest (zeros follow the last input, as in ``forward``), so outputs come later than inputs but equal the
whole run's at any split. ``Pending`` and ``Joint`` hold what has to wait where two paths of different delay meet.
Shapes are ``[batch, channels, time]``; a piece may have zero time steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CentredConv1d(nn.Conv1d):
    """Convolution with ``padding`` zeros at both ends. The state is the inputs that later outputs still need."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        dilation: int = 1,
        stride: int = 1,
        padding: int | None = None,
    ) -> None:
        side = dilation * (kernel_size - 1) // 2 if padding is None else padding
        super().__init__(
            in_channels, out_channels, kernel_size, stride=stride, padding=side, dilation=dilation
        )
        self.side, self.rate, self.span = side, stride, dilation * (kernel_size - 1) + 1

    def initial_state(self, batch: int) -> Tensor:
        """The zeros before the first input."""
        return self.weight.new_zeros(batch, self.in_channels, self.side)

    def step(self, x: Tensor, state: Tensor, is_last: bool) -> tuple[Tensor, Tensor]:
        """Next piece: the outputs that are complete, and the new state."""
        joined = torch.cat((state, x), dim=-1)
        if is_last:
            joined = F.pad(joined, (0, self.side))
        ready = max((joined.shape[-1] - self.span) // self.rate + 1, 0)
        rest = joined[..., ready * self.rate :].clone()
        if ready == 0:
            return x.new_zeros(x.shape[0], self.out_channels, 0), rest
        out = F.conv1d(joined, self.weight, self.bias, stride=self.stride, dilation=self.dilation)
        return out, rest


@dataclass(slots=True)
class UpsampleState:
    """Sums that later inputs still change, and outputs of the beginning that are still to be dropped."""

    sums: Tensor
    skip: int


class CentredUpsampleConv1d(nn.ConvTranspose1d):
    """Transposed convolution to ``rate`` times the length; ``kernel_size - rate`` must be even."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, rate: int) -> None:
        self.rate, self.side = rate, (kernel_size - rate) // 2
        super().__init__(in_channels, out_channels, kernel_size, rate, padding=self.side)

    def initial_state(self, batch: int) -> UpsampleState:
        """Nothing came yet."""
        return UpsampleState(self.weight.new_zeros(batch, self.out_channels, 2 * self.side), self.side)

    def step(self, x: Tensor, state: UpsampleState, is_last: bool) -> Tensor:
        """Next piece ``[B, in, n]``: the outputs that no later input changes. Changes ``state``."""
        overlap, ready = 2 * self.side, x.shape[-1] * self.rate
        sums = state.sums
        if ready:
            spread = F.conv_transpose1d(x, self.weight, stride=self.rate)
            sums = torch.cat((spread[..., :overlap] + sums, spread[..., overlap:]), dim=-1)
        state.sums = sums[..., ready:].clone()
        end = sums.shape[-1] - self.side if is_last else ready
        start = min(state.skip, end)
        state.skip -= start
        assert self.bias is not None
        return sums[..., start:end] + self.bias[:, None]


class Pending:
    """What came on one path and was not yet taken."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def add(self, x: Tensor) -> None:
        self.held = torch.cat((self.held, x), dim=-1)

    def take(self, count: int) -> Tensor:
        """The oldest ``count`` steps."""
        taken, self.held = self.held[..., :count], self.held[..., count:].clone()
        return taken

    @property
    def length(self) -> int:
        return self.held.shape[-1]


class Joint:
    """Several paths that are added up, each as far as it has come."""

    def __init__(self, empty: Tensor, count: int) -> None:
        self._paths = [Pending(empty) for _ in range(count)]

    def add(self, parts: Sequence[Tensor]) -> Tensor:
        """New pieces of every path; the sum of what all of them have."""
        for path, part in zip(self._paths, parts, strict=True):
            path.add(part)
        ready = min(path.length for path in self._paths)
        return torch.stack([path.take(ready) for path in self._paths]).sum(dim=0)
