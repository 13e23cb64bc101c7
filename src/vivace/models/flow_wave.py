"""One launch of the flow for successive chunks of one stream, each an Euler step behind the one before it.

A chunk at step ``s`` looks back on the one before it at step ``s``, and on nothing else of it. So in pass ``i`` chunk
``j`` of a launch can work on step ``i - j``: ``n`` chunks take ``steps + n - 1`` passes that are at most ``n`` chunks
wide, instead of ``n steps`` passes of one chunk. What a narrow pass takes is latency: two cost little more than one.

    pass      0  1  2  ...  9  10  11
    chunk 0   0  1  2  ...  9
    chunk 1      0  1  ...  8   9
    chunk 2         0  ...  7   8   9

The unconditional branch at step 0 is computed again even where it is known: its block is thrown away afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.config import FlowConfig
from vivace.kernels.dit_reference import Rows
from vivace.models.dit import POSITION_KERNEL
from vivace.models.flow_kernels import Kernels
from vivace.models.flow_pages import PageLayout
from vivace.models.flow_solver import Calls, Options, Part, Solver
from vivace.models.flow_weights import FlowWeights

_GROUPS = 4
"""Rows of tables have a multiple of so many entries: kernels are compiled for aligned addresses."""


class Pass(NamedTuple):
    """Which chunks of a launch work: ``first`` up to, not including, ``end``."""

    first: int
    end: int


def passes(chunks: int, steps: int) -> list[Pass]:
    """Those of a launch of ``chunks`` chunks: in pass ``i`` chunk ``j`` is at step ``i - j``."""
    count = steps + chunks - 1
    return [Pass(max(0, index + 1 - steps), min(chunks, index + 1)) for index in range(count)]


def wave_costs(sizes: Mapping[int, float] | None, waves: tuple[int, ...], steps: int) -> dict[int, float]:
    """What launches of one chunk, and of so many as ``waves`` has, cost.

    Args:
        sizes: cost of a launch by its streams; None: the same for any number.
    """
    sizes = sizes or {max(waves, default=1): 1.0}

    def width(count: int) -> float:
        return min(cost for size, cost in sizes.items() if size >= count)

    known = [count for count in (1, *waves) if count <= max(sizes)]
    return {n: sum(width(end - first) for first, end in passes(n, steps)) / steps for n in known}


class WaveSolver(Solver):
    """A ``Solver`` whose chunks are successive ones of one stream, in their order, and known whole but for the last.

    Args:
        choose: gives the kernels for passes of so many chunks.

    All others as for ``Solver``.
    """

    _ways = (False,)

    def __init__(
        self,
        config: FlowConfig,
        weights: FlowWeights,
        arena: Tensor,
        resolve: Callable[[int], Tensor],
        layout: PageLayout,
        shared: Tensor,
        streams: int,
        choose: Callable[[int], Kernels],
        options: Options | None = None,
        use_graphs: bool = False,
    ) -> None:
        super().__init__(
            config, weights, arena, resolve, layout, shared, streams, choose(streams), options, use_graphs
        )
        chunk, device, steps = config.dit.static_chunk_frames, self.x.device, config.num_steps
        self._passes = passes(streams, steps)
        self._faults = self.fault.new_zeros(len(self._passes), -(-streams // _GROUPS) * _GROUPS)
        calls = {width: Calls(choose(width), weights, options) for width in range(1, streams)}
        calls[streams] = self._part.calls
        self._parts = []
        for index, (first, end) in enumerate(self._passes):
            # What comes behind a condition is that of the other branch: only the last chunks have it there already.
            at = self._condition[first * chunk :]
            if end < streams:
                at = weights.bias.repeat(2 * (end - first) * chunk, 1)
            part = Part(calls[end - first], self.x[first:end], at, self._faults[index, : end - first])
            self._parts.append(part)
        width = -(-2 * streams // _GROUPS) * _GROUPS
        slots, at_steps = torch.zeros(2, len(self._passes), width, dtype=torch.int64)
        for index, (first, end) in enumerate(self._passes):
            chunks = [*range(first, end)]
            groups = len(chunks) * 2
            slots[index, :groups] = torch.tensor(chunks + [streams + number for number in chunks])
            at_steps[index, :groups] = index - slots[index, :groups] % streams
        self._slots, self._later = slots.to(device), at_steps.clamp(max=1).to(device)
        self._pass_steps = at_steps.to(device, torch.int32)

    @torch.no_grad()
    def solve(self, use_shared: bool = False) -> None:
        """All passes, kernel by kernel."""
        assert not use_shared
        self._prepare()
        all_rows = self._all_rows()
        self._faults.zero_()
        chunk = self._config.dit.static_chunk_frames
        for part, (first, end) in zip(self._parts, self._passes, strict=True):
            if end < self._streams:
                part.condition[: (end - first) * chunk] = self._condition[first * chunk : end * chunk]
        for part, rows in zip(self._parts, all_rows, strict=True):
            self._advance(part, rows)
        # What is not finite stays so: the last pass of a chunk tells, in which it is the first one.
        self.fault.copy_(self._faults[self._config.num_steps - 1 :, 0])

    def _all_rows(self) -> list[Rows]:
        """Of each pass; the tables are made out of the packet."""
        packet = self._packet
        starts, counts = packet.starts[self._slots], packet.counts[self._slots]
        here, before = packet.here[self._later, self._slots], packet.before[self._later, self._slots]
        table = packet.table[self._later, self._slots]
        rows = []
        for index, (first, end) in enumerate(self._passes):
            groups = 2 * (end - first)
            rows.append(
                Rows(
                    chunk=self._config.dit.static_chunk_frames,
                    look_back=POSITION_KERNEL - 1,
                    starts=starts[index, :groups],
                    counts=counts[index, :groups],
                    steps=self._pass_steps[index, :groups],
                    here=here[index, :groups],
                    before=before[index, :groups],
                    table=table[index, :groups],
                    step_stride=self._layout.step_stride,
                    context_offset=self._layout.context,
                    arena=self._arena,
                    resolve=self._resolve,
                    uniform=end - first == 1,
                )
            )
        return rows
