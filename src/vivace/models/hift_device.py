"""The vocoder for a CUDA device: fixed addresses, a pool of streams, one CUDA graph per piece.

``CausalHiFT`` defines the samples; here every intermediate result has its place in an arena, the state of each stream
lies in a slot of a pool, and how many frames a piece has is a value on the device, so that one captured graph serves
every length up to its own. On a CPU the same launches run through the plain versions of the kernels.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vivace.kernels.gpu import NEEDED, gpu_of
from vivace.kernels.hift_plan import Param
from vivace.models.f0 import F0Predictor
from vivace.models.hift_layout import Layout, LayoutBuilder
from vivace.models.hift_pieces import HEADER, PieceRunner
from vivace.models.host_samples import HostBuffers, SamplePart, record_event
from vivace.models.vocoder_slots import DeviceStream, Row, SlotVocoder

if TYPE_CHECKING:
    from vivace.models.hift import CausalHiFT

_FRAMES = (int(Param.F0_FRAMES), int(Param.FRAMES))
_DEPTH = 8  # launches whose parameters may be under way

BUCKETS = (8, 16, 32, 56, 108)
"""Frames of a graph: small first chunks, a chunk of one second with what waited before it, two seconds."""


def is_supported(device: torch.device) -> bool:
    """Whether the kernels run on the device: a CUDA device from compute capability 8.0, and Triton."""
    gpu = gpu_of(device)
    if gpu is None or gpu.capability < NEEDED:
        return False
    return importlib.util.find_spec("triton") is not None


class DeviceVocoder(SlotVocoder):
    """Runs the streams of a ``CausalHiFT``. One thread at a time, all launches on one CUDA stream.

    Args:
        model: whose weights are packed; it lives on the device that is to be used.
        slots: streams that may be open at once.
        precision: of the convolutions: "half" (operands in float16: as many bits as TF32), "tf32", "tf32x3" (float32 as
            the sum of three products) or "ieee" (float32); None: "half" on a GPU, "ieee" elsewhere. F0, the last
            convolution and all sums between the convolutions keep float32's accuracy whatever it is.
        buckets: frames of the graphs.
        use_kernels: Triton; the plain versions otherwise. None chooses by the device.
        use_graphs: capture; None chooses by the device.
        max_rows: streams of one launch; more at once are several launches of nearly equal size.
        max_bytes: memory for what the streams of a launch work on. Where it is too small for ``max_rows``, that becomes
            the largest power of two that fits, one at least.
    """

    def __init__(
        self,
        model: CausalHiFT,
        slots: int = 8,
        precision: str | None = None,
        buckets: Sequence[int] = BUCKETS,
        use_kernels: bool | None = None,
        use_graphs: bool | None = None,
        max_rows: int = 1,
        max_bytes: int | None = None,
    ) -> None:
        self.device = model.conv_pre.weight.device
        on_gpu, has_kernels = self.device.type == "cuda", gpu_of(self.device) is not None
        self.precision = precision or ("half" if has_kernels else "ieee")
        self.buckets = tuple(sorted(buckets))
        self._lookahead = model.conv_pre.lookahead
        self._hop = model.hop_samples
        self._behind = model.fourier.n_fft // 2 - model.fourier.hop
        most = self.buckets[-1]
        if most <= self._lookahead:
            raise ValueError(f"a bucket of more than {self._lookahead} frames is needed")
        with torch.no_grad():
            layout = LayoutBuilder(model, most, half=self.precision == "half").build()
            if self.precision == "tf32":
                layout.round_weights()
            elif self.precision == "half":
                layout.halve_weights()
        self.max_rows = max_rows if max_bytes is None else _fitting(max_rows, layout, max_bytes)
        self.runner = PieceRunner(
            layout,
            self.device,
            slots,
            self.max_rows,
            lambda frames: frames * self._hop + self._behind,
            self.precision,
            has_kernels if use_kernels is None else use_kernels,
            on_gpu if use_graphs is None else use_graphs,
        )
        self._host_params = [
            torch.zeros(self.max_rows, len(Param), dtype=torch.int64, pin_memory=on_gpu)
            for _ in range(_DEPTH)
        ]
        self._params_events: list[torch.cuda.Event | None] = [None] * _DEPTH
        self._launches = 0
        host = HostBuffers(self.runner.row_values, HEADER, on_gpu)
        super().__init__(slots, most - self._lookahead, host)

    def _split(self, work: list[Row]) -> list[list[Row]]:
        count = -(-len(work) // self.max_rows)
        ends = [len(work) * index // count for index in range(count + 1)]
        return [work[start:end] for start, end in itertools.pairwise(ends)]

    def warm_up(self, rows: Sequence[int] = (1,)) -> None:
        """Compiles the kernels and captures every graph. Open streams keep their state."""
        for bucket in self.buckets:
            for count in rows:
                self.runner.prepare(bucket, count)
        if self.device.type == "cuda":
            for count in rows:
                self._host.reserve(count, 2)

    @torch.no_grad()
    def rehearse(self, rows: Sequence[int] = (1,)) -> None:
        """Runs once, without memory, what ``warm_up`` compiles; see ``vivace.kernels.launches``."""
        for bucket in self.buckets:
            for count in rows:
                self.runner.launch(bucket, count)

    def _launch_rows(self, work: list[Row]) -> None:
        which = self._launches % _DEPTH
        self._launches += 1
        event = self._params_events[which]
        if event is not None:  # the copy from some launches ago has read this buffer long since
            event.synchronize()
        pinned = self._host_params[which]
        host = pinned.numpy()
        described = [self.describe(stream, mel.shape[1], is_last) for stream, mel, is_last, _ in work]
        ranges = [samples for _, samples in described]
        host[: len(work)] = [values for values, _ in described]
        frames = max(1, int(host[: len(work), _FRAMES].max()))
        # A power of two, as there is no graph for every number; rows that are left over end at once.
        rows = min(self.max_rows, 1 << (len(work) - 1).bit_length())
        host[len(work) : rows] = 0
        host[len(work) : rows, Param.SLOT] = self.runner.spare_slot
        bucket = next(bucket for bucket in self.buckets if bucket >= frames)
        # What may want memory comes before anything that moves a stream on the device.
        self.runner.prepare(bucket, rows)
        outputs = self.runner.outputs(bucket, rows)
        readers = sum(end > start for start, end in ranges)
        copy = self._host.take(rows, outputs.shape[1], readers) if readers else None
        self.runner.params[:rows].copy_(pinned[:rows], non_blocking=True)
        self._params_events[which] = record_event(self.device)
        for row, (_, mel, _, _) in enumerate(work):
            if mel.shape[1]:
                self.runner.mel_rows(row, mel.shape[1]).copy_(mel.T, non_blocking=True)
        self.runner.run(bucket, rows)
        if copy is None:
            return
        copy.values.copy_(outputs, non_blocking=True)
        copy.event = record_event(self.device)
        for row, ((_, _, _, pending), (start, end)) in enumerate(zip(work, ranges, strict=True)):
            if end > start:
                pending.parts.append(SamplePart(copy, row, start, end))

    def describe(self, stream: DeviceStream, new: int, is_last: bool) -> tuple[list[int], tuple[int, int]]:
        """The parameters of a piece, and where in its output row the samples begin and end. Moves the stream on."""
        assert stream.slot >= 0, "the stream is closed"
        assert not stream.is_finished, "nothing follows the end of a stream"
        before, after = stream.frames, stream.frames + new
        f0_start = max(before - F0Predictor.lookahead_frames, 0)
        start = max(before - self._lookahead, 0)
        f0_end = after if is_last else max(after - F0Predictor.lookahead_frames, 0)
        end = after if is_last else max(after - self._lookahead, 0)
        values = [0] * len(Param)
        values[Param.SLOT] = stream.slot
        values[Param.NEW_FRAMES] = new
        values[Param.F0_FRAMES] = f0_end - f0_start
        values[Param.FRAMES] = end - start
        values[Param.F0_MEL_ROW] = f0_start - before + self._lookahead
        values[Param.MEL_ROW] = start - before + self._lookahead
        values[Param.MEL_ROWS] = new + self._lookahead
        values[Param.F0_START] = f0_start
        values[Param.START] = start
        values[Param.IS_FIRST] = int(before == 0)
        values[Param.IS_LAST] = int(is_last)
        values[Param.NOISE_KEY] = stream.noise_key
        stream.frames, stream.is_finished = after, is_last
        if end == start:
            return values, (0, 0)
        first = HEADER + (self._behind if start == 0 else 0)
        return values, (first, HEADER + (end - start) * self._hop + (self._behind if is_last else 0))


def _fitting(rows: int, layout: Layout, max_bytes: int) -> int:
    most = max(1, max_bytes // (4 * layout.size))
    return min(rows, 1 << (most.bit_length() - 1))
