"""Speaking rate: linear interpolation of the mel along time, streaming.

The reference interpolates the whole mel (``F.interpolate(mode="linear")``) and so cannot stream at another
speed. Here output frame ``i`` reads position ``(i + 0.5) * speed - 0.5``, a function of ``i`` alone, so that any
split of the input gives the same frames.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class MelStretch:
    """Streaming state of one utterance: the last frame seen and two counters.

    Args:
        speed: above 1 speaks faster; 1.0 passes frames through untouched.
    """

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._tail: Tensor | None = None
        self._tail_start = 0
        self._emitted = 0

    def step(self, mel: Tensor, is_last: bool) -> Tensor:
        """Takes ``mel [bands, n]``, returns the output frames ``[bands, m]`` that are now certain."""
        if self.speed == 1.0:
            return mel
        known = mel if self._tail is None else torch.cat([self._tail, mel], dim=1)
        total = self._tail_start + known.shape[1]
        if is_last:
            end = max(int(total / self.speed), 1 if total and not self._emitted else 0)
        else:
            # Frame i needs input frame floor(position) + 1, and must exist also if the input ends here.
            end = min(max(0, math.ceil((total - 0.5) / self.speed - 0.5)), int(total / self.speed))
        count = max(0, end - self._emitted)
        index = torch.arange(self._emitted, self._emitted + count, dtype=torch.float64, device=mel.device)
        position = ((index + 0.5) * self.speed - 0.5).clamp(0, max(0, total - 1))
        left = position.floor().long()
        right = (left + 1).clamp(max=max(0, total - 1))
        weight = (position - left).to(known.dtype)
        left, right = left - self._tail_start, right - self._tail_start
        out = known[:, left] * (1 - weight) + known[:, right] * weight
        self._emitted += count
        keep_from = max(0, math.floor((self._emitted + 0.5) * self.speed - 0.5))
        keep_from = min(keep_from, total - 1) if total else 0
        drop = max(0, keep_from - self._tail_start)
        self._tail = known[:, drop:].clone()
        self._tail_start += drop
        return out
