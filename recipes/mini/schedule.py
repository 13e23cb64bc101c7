"""What the time-boxed trainings share: batches, a clock that sets the rate, averaged weights."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def batches(
    seconds: Tensor, items: Tensor, batch_seconds: float, generator: torch.Generator
) -> Iterator[Tensor]:
    """Endless batches of utterances of like length, each about ``batch_seconds`` long with its padding.

    Args:
        seconds: length of every utterance of the corpus.
        items: the ones to draw from, int64.
    """
    lengths = seconds[items].double()
    while True:
        jitter = 1.0 + 0.1 * torch.rand(len(items), generator=generator, dtype=torch.float64)
        order = (lengths * jitter).argsort()
        sorted_lengths = lengths[order].tolist()
        parts: list[Tensor] = []
        begin, longest = 0, 0.0
        for place, length in enumerate(sorted_lengths):
            longest = max(longest, length)
            if place > begin and longest * (place + 1 - begin) > batch_seconds:
                parts.append(items[order[begin:place]])
                begin, longest = place, length
        parts.append(items[order[begin:]])
        for index in torch.randperm(len(parts), generator=generator).tolist():
            yield parts[index]


class Progress:
    """Knows how much of a training is over, by time or by steps, and prints a line now and then."""

    def __init__(self, minutes: float, steps: int, begun: float | None = None, warmup: float = 0.03) -> None:
        self.seconds, self.most_steps, self.warmup = minutes * 60.0, steps, warmup
        self.begun = time.monotonic() if begun is None else begun
        self.steps = 0
        self._sums: dict[str, Tensor] = {}
        self._since, self._printed = 0, time.monotonic()

    def fraction(self) -> float:
        """0 at the start, 1 at the end."""
        return min(1.0, max((time.monotonic() - self.begun) / self.seconds, self.steps / self.most_steps))

    def over(self) -> bool:
        return self.fraction() >= 1.0

    def rate(self, highest: float) -> float:
        """A short rise, then half a cosine down to 1 % of ``highest``."""
        done = self.fraction()
        rise = min(1.0, (done + 1e-3) / self.warmup)
        fall = 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return highest * rise * fall

    def set_rate(self, optimizer: torch.optim.Optimizer, highest: float) -> None:
        """Give the optimizer the ``rate`` of this moment."""
        for group in optimizer.param_groups:
            group["lr"] = self.rate(highest)

    def step(self, losses: dict[str, Tensor], every_seconds: float = 5.0) -> None:
        """Count a step and print the mean losses at times.

        Waits for the device every 20 steps, so the clock is true.
        """
        self.steps += 1
        self._since += 1
        for name, value in losses.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value
        if self.steps % 20 and self.steps < self.most_steps and self.steps > 3:
            return
        means = {name: float(value) / self._since for name, value in self._sums.items()}
        if any(not math.isfinite(mean) for mean in means.values()):
            raise FloatingPointError(f"step {self.steps}: the loss is not finite: {means}")
        now = time.monotonic()
        if now - self._printed >= every_seconds or self.steps >= self.most_steps:
            shown = " ".join(f"{name} {mean:.4f}" for name, mean in means.items())
            rate = self._since / (now - self._printed)
            print(f"{self.fraction():6.1%} step {self.steps} {shown} {rate:.1f} it/s", flush=True)
            self._sums, self._since, self._printed = {}, 0, now


class Ema:
    """A running mean of the weights; short at first, then about ``span`` steps long."""

    def __init__(self, model: nn.Module, span: float = 1000.0) -> None:
        self.model = copy.deepcopy(model)
        self.span, self.steps = span, 0
        self._mine = [value for value in self.model.state_dict().values() if value.is_floating_point()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards the weights (and running statistics) of ``model``."""
        self.steps += 1
        share = 1.0 - min(1.0 - 1.0 / self.span, (1.0 + self.steps) / (10.0 + self.steps))
        theirs = [value for value in model.state_dict().values() if value.is_floating_point()]
        torch._foreach_lerp_(self._mine, theirs, share)
