"""Fundamental frequency from mel: five convolutions and a linear layer."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from vivace.config import VocoderConfig
from vivace.layers.conv import CausalConv1d, LookaheadConv1d
from vivace.layers.precision import full_float32

F0State = list[Tensor]
"""State of each convolution, the look-ahead one first."""


class F0Predictor(nn.Module):
    """Mel ``[B, 80, T]`` to F0 ``[B, T]`` in Hz; values under the voicing threshold mean unvoiced.

    The first convolution looks three frames ahead, the others look back. Errors of F0 add up in the phase
    of the harmonic source, so it always runs in true float32 (no TF32, no autocast); the reference uses
    float64.
    """

    lookahead_frames = 3

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__()
        channels = config.f0_cond_channels
        first = LookaheadConv1d(config.in_channels, channels, self.lookahead_frames + 1)
        layers: list[nn.Module] = [first, nn.ELU()]
        for _ in range(4):
            layers += [CausalConv1d(channels, channels, 3), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 1)

    @property
    def _first(self) -> LookaheadConv1d:
        return cast(LookaheadConv1d, self.condnet[0])

    @property
    def _rest(self) -> list[CausalConv1d]:
        return [layer for layer in self.condnet if isinstance(layer, CausalConv1d)]

    def forward(self, mel: Tensor) -> Tensor:
        """Whole sequence: ``[B, 80, T] -> [B, T]``."""
        with full_float32(mel.device):
            x = self.condnet(mel.float())
            return self._read_out(x)

    def initial_state(self, batch: int) -> F0State:
        return [self._first.initial_state(batch), *(layer.initial_state(batch) for layer in self._rest)]

    def step(self, mel: Tensor, state: F0State, is_last: bool) -> Tensor:
        """Next frames ``[B, 80, n]``: F0 of all frames whose look-ahead is complete. Changes ``state``."""
        with full_float32(mel.device):
            x, state[0] = self._first.step(mel.float(), state[0], is_last)
            for index, layer in enumerate(self._rest, start=1):
                x, state[index] = layer.step(F.elu(x), state[index])
            return self._read_out(F.elu(x))

    def _read_out(self, x: Tensor) -> Tensor:
        # In float64, which has no TF32: one output channel costs nothing, and nobody's switches are touched.
        weight, bias = self.classifier.weight.double(), self.classifier.bias.double()
        y = F.linear(x.transpose(1, 2).double(), weight, bias)
        return y.squeeze(-1).abs().float()
