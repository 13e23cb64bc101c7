"""One piece of the vocoder on a device: every launch in its order, on buffers at fixed addresses, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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


class PieceRunner:
    """Computes the pieces that ``params`` describes.

    Args:
        layout: the launches.
        device: where.
        slots: states that are kept.
        rows: most pieces at once.
        samples: most samples of a row, for so many frames.
        precision: of the convolutions.
        use_kernels: Triton; the plain versions otherwise.
        use_graphs: capture once, then replay.

    Attributes:
        params: what the pieces are, ``[rows, len(Param)]``; to be written before ``run``.
        row_values: most values of an output row.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        slots: int,
        rows: int,
        samples: Callable[[int], int],
        precision: str,
        use_kernels: bool,
        use_graphs: bool,
    ) -> None:
        self.layout, self.precision = layout, precision
        self._device, self._use_graphs = device, use_graphs
        self._kernels = _kernels(use_kernels)
        on_gpu = device.type == "cuda"
        # Programmatic dependent launch: a launch begins while the one before it ends.
        gpu = gpu_of(device)
        self.pdl = use_kernels and gpu is not None and gpu.has_overlap
        self.arena = torch.zeros(rows, layout.size, device=device)
        self.params = torch.zeros(rows, len(Param), dtype=torch.int64, device=device)
        self._samples = samples
        self.row_values = self._width(layout.frames)
        self._out = torch.zeros(rows * self.row_values, device=device)
        self.states = self._state_pool(slots)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._sides = [_stream(device) for _ in layout.stages] if on_gpu else []

    @property
    def spare_slot(self) -> int:
        """Of pieces without frames, which compute nothing."""
        return self.states.pool.shape[0] - 1

    def mel_rows(self, row: int, count: int) -> Tensor:
        """Where the new mel frames of a row go: ``[count, 80]``."""
        mel = self.layout.mel
        return self.arena[row, mel.origin : mel.origin + count * mel.channels].view(count, mel.channels)

    def outputs(self, frames: int, rows: int) -> Tensor:
        """What ``run(frames, rows)`` writes: a header and the samples of every row, in one stretch of memory.

        Valid until the next run.
        """
        width = self._width(frames)
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
        kernels, layout, precision, pdl = self._kernels, self.layout, self.precision, self.pdl
        arena, params, states = self.arena[:rows], self.params[:rows], self.states
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

    def _width(self, frames: int) -> int:
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

    def _state_pool(self, slots: int) -> States:
        table, size = [], 0
        for history in self.layout.histories:
            for start in range(0, history.count, _BLOCK):
                count = min(_BLOCK, history.count - start)
                table.append([history.start + start, size, count, int(history.field), history.per_frame])
                size += -(-count // 4) * 4
        return States(
            torch.zeros(slots + 1, size, device=self._device),
            torch.zeros(slots + 1, 16, dtype=torch.float64, device=self._device),
            torch.tensor(table, dtype=torch.int64, device=self._device),
            _BLOCK,
        )


def _kernels(use_triton: bool) -> ModuleType:
    if not use_triton:
        return hift_reference
    from vivace.kernels import hift

    return hift


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
