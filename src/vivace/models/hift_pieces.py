"""One piece of the vocoder on a device: every launch in its order, on buffers at fixed addresses, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from vivace.kernels import hift_reference
from vivace.kernels.gpu import gpu_of
from vivace.kernels.hift_plan import Conv, Param, States
from vivace.models.capture import before_capture, capturing
from vivace.models.hift_layout import Layout

HEADER = 4  # values before the samples of a row; the first one is the flag
_ALIGNMENT = 16  # values: kernels are compiled once for all widths of output rows
_BLOCK = 1024  # values that one program copies between arena and pool


@dataclass(frozen=True, slots=True)
class Place:
    """Where pieces of up to ``layout.frames`` frames are computed.

    Attributes:
        arena: ``[rows, layout.size]``; rows: most pieces at once.
        states: of all slots, which pieces of any length share.
    """

    layout: Layout
    arena: Tensor
    states: States


class PieceRunner:
    """Computes the pieces that ``params`` describes.

    Args:
        layouts: the launches for pieces of some length or another, and how many such pieces at once; the longer, the
            fewer. They lie in the same memory, so that nothing but ``states`` outlasts a run.
        device: where.
        slots: states that are kept.
        samples: most samples of a row, for so many frames.
        precision: of the convolutions.
        use_kernels: Triton; the plain versions otherwise.
        use_graphs: capture once, then replay.

    Attributes:
        places: one for each layout, that of the shortest pieces first.
        states: of the first one; its pool is that of all.
        params: what the pieces are, ``[rows, len(Param)]``; to be written before ``run``.
    """

    def __init__(
        self,
        layouts: Sequence[tuple[Layout, int]],
        device: torch.device,
        slots: int,
        samples: Callable[[int], int],
        precision: str,
        use_kernels: bool,
        use_graphs: bool,
    ) -> None:
        self.precision = precision
        self._device, self._use_graphs = device, use_graphs
        self._kernels = _kernels(use_kernels)
        on_gpu = device.type == "cuda"
        # Programmatic dependent launch: a launch begins while the one before it ends.
        gpu = gpu_of(device)
        self.pdl = use_kernels and gpu is not None and gpu.has_overlap
        self._samples = samples
        layouts = sorted(layouts, key=lambda pair: pair[0].frames)
        most_rows = max(rows for _, rows in layouts)
        memory = torch.zeros(max(rows * layout.size for layout, rows in layouts), device=device)
        self.params = torch.zeros(most_rows, len(Param), dtype=torch.int64, device=device)
        self._out = torch.zeros(
            max(rows * self.width(layout.frames) for layout, rows in layouts), device=device
        )
        slot_values = _state_table(layouts[0][0])[1]
        pool = torch.zeros(slots + 1, slot_values, device=device)
        phases = torch.zeros(slots + 1, 16, dtype=torch.float64, device=device)
        self.places: list[Place] = []
        for layout, rows in layouts:
            table, values = _state_table(layout)
            assert values == slot_values
            arena = memory[: rows * layout.size].view(rows, layout.size)
            states = States(pool, phases, torch.tensor(table, dtype=torch.int64, device=device), _BLOCK)
            self.places.append(Place(layout, arena, states))
        self.states = self.places[0].states
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._sides = [_stream(device) for _ in layouts[0][0].stages] if on_gpu else []

    @property
    def spare_slot(self) -> int:
        """Of pieces without frames, which compute nothing."""
        return self.states.pool.shape[0] - 1

    def place(self, frames: int) -> Place:
        """Of ``run(frames, …)``."""
        return next(place for place in self.places if place.layout.frames >= frames)

    def mel_rows(self, frames: int, row: int, count: int) -> Tensor:
        """Where the new mel frames of a row go, before ``run(frames, …)``: ``[count, 80]``."""
        place = self.place(frames)
        mel = place.layout.mel
        return place.arena[row, mel.origin : mel.origin + count * mel.channels].view(count, mel.channels)

    def outputs(self, frames: int, rows: int) -> Tensor:
        """What ``run(frames, rows)`` writes: a header and the samples of every row, in one stretch of memory.

        Valid until the next run.
        """
        width = self.width(frames)
        return self._out[: rows * width].view(rows, width)

    def run(self, frames: int, rows: int) -> None:
        """The first ``rows`` pieces, none of more than ``frames`` frames."""
        graph = self.graphs.get((frames, rows))
        if graph is not None:
            graph.replay()
        else:
            self.launch(frames, rows)

    @torch.no_grad()
    def prepare(self, frames: int, rows: int) -> None:
        """Captures the graph of ``run(frames, rows)`` unless it is there. Overwrites ``params``."""
        if not self._use_graphs or (frames, rows) in self.graphs:
            return
        # A piece without frames computes nothing, but compiles and loads the kernels before the capture.
        self.params.zero_()
        self.params[:, Param.SLOT] = self.spare_slot
        with before_capture(self._device):
            self.launch(frames, rows)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._device):
            self.launch(frames, rows)
        self.graphs[frames, rows] = graph

    def launch(self, frames: int, rows: int) -> None:
        """All launches of ``run``, one by one."""
        kernels, precision, pdl, place = self._kernels, self.precision, self.pdl, self.place(frames)
        layout, states = place.layout, place.states
        arena, params = place.arena[:rows], self.params[:rows]
        out = self.outputs(frames, rows)

        def convs(ops: Sequence[Conv], chained: bool = True) -> None:
            for op in ops:
                kernels.conv(op, arena, params, frames, precision, pdl and (chained or op is not ops[0]))

        kernels.load_states(states, arena, params)
        with self._aside(0):
            convs([layout.pre, layout.stages[0].up], chained=False)
        convs(layout.f0)
        kernels.readout(layout.source, arena, params, frames, pdl)
        kernels.phases(layout.source, arena, params, states, out.view(torch.int32), pdl)
        kernels.samples(layout.source, arena, params, frames, pdl)
        kernels.spectrum(layout.spectrum, arena, params, frames, precision, pdl)
        for stage in range(1, len(layout.stages)):
            with self._aside(stage):
                convs(layout.stages[stage].source, chained=False)
        convs(layout.stages[0].source)
        for stage, plan in enumerate(layout.stages):
            if stage:
                convs([plan.up])
            self._wait_for(stage)
            kernels.join(plan.join, arena, params, frames, precision)
            convs(plan.blocks)
            kernels.mean(plan.mean, arena, params, frames, precision, pdl)
        last = "ieee" if precision == "ieee" else "tf32x3"
        kernels.post(layout.post, arena, params, frames, last, pdl)
        kernels.inverse(layout.post, arena, params, frames, out, HEADER, pdl)
        kernels.save_states(states, arena, params, pdl)

    def width(self, frames: int) -> int:
        """Values of an output row of ``run(frames, …)``."""
        return -(-(HEADER + self._samples(frames)) // _ALIGNMENT) * _ALIGNMENT

    def _aside(self, index: int) -> AbstractContextManager[object]:
        """Launches inside run beside those that follow, until ``_wait_for(index)``."""
        if not self._sides:
            return nullcontext()
        self._sides[index].wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._sides[index])

    def _wait_for(self, index: int) -> None:
        if self._sides:
            torch.cuda.current_stream(self._device).wait_stream(self._sides[index])


def _state_table(layout: Layout) -> tuple[list[list[int]], int]:
    """Rows of ``States.table``, and the values of a slot: the same whatever the layout's frames are."""
    table, size = [], 0
    for history in layout.histories:
        for start in range(0, history.count, _BLOCK):
            count = min(_BLOCK, history.count - start)
            table.append([history.start + start, size, count, int(history.field), history.per_frame])
            size += -(-count // 4) * 4
    return table, size


def _kernels(use_triton: bool) -> ModuleType:
    if not use_triton:
        return hift_reference
    from vivace.kernels import hift

    return hift


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
