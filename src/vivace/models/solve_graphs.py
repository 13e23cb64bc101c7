"""The Euler solver of a flow as CUDA graphs: thousands of small kernels are started by one call.

A graph has fixed shapes, so utterances are padded to a multiple of ``FRAMES`` with their true lengths beside them, and
one graph serves every utterance up to its size. The least recently used one goes first; long utterances keep the GPU
busy by themselves and run without.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.models.capture import before_capture, capturing

FRAMES = 64
MOST_FRAMES = 2048
MOST_GRAPHS = 24

Solve = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Noise, mu, condition, speakers, lengths to mel."""


@dataclass(slots=True)
class _Captured:
    inputs: tuple[Tensor, ...]
    mel: Tensor
    graph: torch.cuda.CUDAGraph | None


class SolveGraphs:
    """``solve`` for padded shapes. On a CPU everything is the same but the graphs.

    Args:
        solve: must not wait for the device, and must treat frames behind a row's length as padding.
    """

    def __init__(self, solve: Solve) -> None:
        self._solve = solve
        self._captured: OrderedDict[tuple[int, int], _Captured] = OrderedDict()
        self._pool: Any = None

    @staticmethod
    def fits(mu: Tensor) -> bool:
        """Whether an utterance ``[B, 80, T]`` is short enough, and no graph is being made around it."""
        capturing = mu.is_cuda and torch.cuda.is_current_stream_capturing()
        return mu.shape[-1] <= MOST_FRAMES and not capturing

    def run(self, noise: Tensor, mu: Tensor, cond: Tensor, spks: Tensor, lengths: Tensor | None) -> Tensor:
        """Mel, float32 ``[B, 80, T]``; arguments as ``TokenFlow.solve``."""
        batch, _, frames = mu.shape
        if lengths is None:
            lengths = torch.full((batch,), frames, device=mu.device)
        padding = -frames % FRAMES
        padded = (*(F.pad(part, (0, padding)) for part in (noise, mu, cond)), spks, lengths)
        key = batch, frames + padding
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(padded)
            while len(self._captured) > MOST_GRAPHS:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        for buffer, part in zip(captured.inputs, padded, strict=True):
            buffer.copy_(part)
        if captured.graph is None:
            captured.mel = self._solve(*captured.inputs)
        else:
            captured.graph.replay()
        return captured.mel[..., :frames].clone()

    def _capture(self, inputs: tuple[Tensor, ...]) -> _Captured:
        buffers = tuple(part.contiguous().clone() for part in inputs)
        if not buffers[0].is_cuda:
            return _Captured(buffers, buffers[0], None)
        device = buffers[0].device
        with before_capture(device):
            self._solve(*buffers)
        graph = torch.cuda.CUDAGraph()
        # Graphs never run side by side, and what one leaves is copied at once: all of them may share their memory.
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with capturing(graph, device, self._pool):
            mel = self._solve(*buffers)
        return _Captured(buffers, mel, graph)
