"""Residual blocks of the vocoder."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from vivace.layers.conv import CausalConv1d

BlockState = list[Tensor]
"""State of each convolution of a block, in the order in which they run."""


class Snake(nn.Module):
    """``x + sin²(alpha x) / alpha`` with one ``alpha`` per channel: an activation that keeps periods."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.alpha[:, None]
        sine = torch.sin(x * alpha)
        return torch.addcmul(x, sine / (alpha + 1e-9), sine)


class ResBlock(nn.Module):
    """Pairs of a dilated and a plain causal convolution, each pair around a skip connection."""

    def __init__(self, channels: int, kernel_size: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(CausalConv1d(channels, channels, kernel_size, d) for d in dilations)
        self.convs2 = nn.ModuleList(CausalConv1d(channels, channels, kernel_size) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def pairs(self) -> list[tuple[Snake, CausalConv1d, Snake, CausalConv1d]]:
        rows = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        return [cast(tuple[Snake, CausalConv1d, Snake, CausalConv1d], row) for row in rows]

    def forward(self, x: Tensor) -> Tensor:
        """Whole sequence: ``[B, C, T] -> [B, C, T]``."""
        for snake1, conv1, snake2, conv2 in self.pairs():
            x = x + conv2(snake2(conv1(snake1(x))))
        return x

    def initial_state(self, batch: int) -> BlockState:
        return [conv.initial_state(batch) for _, conv1, _, conv2 in self.pairs() for conv in (conv1, conv2)]

    def step(self, x: Tensor, state: BlockState) -> Tensor:
        """Next piece: ``[B, C, n] -> [B, C, n]``. Changes ``state``."""
        for index, (snake1, conv1, snake2, conv2) in enumerate(self.pairs()):
            y, state[2 * index] = conv1.step(snake1(x), state[2 * index])
            y, state[2 * index + 1] = conv2.step(snake2(y), state[2 * index + 1])
            x = x + y
        return x
