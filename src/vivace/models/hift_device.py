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

BUCKETS = (8, 16, 32, 56, 108, 216, 456, 808)
"""Frames of a graph: small first chunks, a chunk of one second with what waited before it, two seconds, and 4, 9 and 16
for one stream or few."""

COMMON_FRAMES = 108
"""Most frames of a bucket for as many streams as a launch may have; longer ones are for few."""

_LONG_ROWS = 4  # streams of a launch of longer pieces: more are as fast in short ones


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
        common_frames: most of a bucket for ``max_rows`` streams.
        use_kernels: Triton; the plain versions otherwise. None chooses by the device.
        use_graphs: capture; None chooses by the device.
        max_rows: streams of one launch; more at once are several launches of nearly equal size.
        max_bytes: memory for what the streams of a launch work on. Where it is too small for ``max_rows``, that becomes
            the largest power of two that fits, one at least. Longer buckets lie in the same memory: they are for as few
            streams as fit, and left out where one alone neither does nor takes less than a quarter of ``max_bytes``.

    Attributes:
        rows: by bucket, the most streams of a launch.
    """

    takes_long_pieces = True

    def __init__(
        self,
        model: CausalHiFT,
        slots: int = 8,
        precision: str | None = None,
        buckets: Sequence[int] = BUCKETS,
        common_frames: int = COMMON_FRAMES,
        use_kernels: bool | None = None,
        use_graphs: bool | None = None,
        max_rows: int = 1,
        max_bytes: int | None = None,
    ) -> None:
        self.device = model.conv_pre.weight.device
        on_gpu, has_kernels = self.device.type == "cuda", gpu_of(self.device) is not None
        self.precision = precision or ("half" if has_kernels else "ieee")
        self._lookahead = model.conv_pre.lookahead
        self._hop = model.hop_samples
        self._behind = model.fourier.n_fft // 2 - model.fourier.hop
        common, *longer = self._layouts(model, sorted(buckets), common_frames)
        self.max_rows = max_rows if max_bytes is None else _fitting(max_rows, common, max_bytes)
        self._common = common.frames
        self.rows = {bucket: self.max_rows for bucket in sorted(buckets) if bucket <= self._common}
        self.rows |= _fitting_beside(common, self.max_rows, longer, max_bytes)
        self.buckets = tuple(self.rows)
        layouts = [(own, self.rows[own.frames]) for own in (common, *longer) if own.frames in self.rows]
        self.runner = PieceRunner(
            layouts,
            self.device,
            slots,
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
        width = self.runner.width
        self._long_host = HostBuffers(width(self.buckets[-1]), HEADER, on_gpu)
        super().__init__(
            slots, self._common - self._lookahead, HostBuffers(width(self._common), HEADER, on_gpu)
        )

    def _layouts(self, model: CausalHiFT, buckets: list[int], common_frames: int) -> list[Layout]:
        """One for all common buckets, and one for each longer one; with the same weights."""
        common = max((bucket for bucket in buckets if bucket <= common_frames), default=buckets[0])
        if common <= self._lookahead:
            raise ValueError(f"a bucket of more than {self._lookahead} frames is needed")
        layouts: list[Layout] = []
        with torch.no_grad():
            for frames in (bucket for bucket in buckets if bucket >= common):
                layout = LayoutBuilder(model, frames, half=self.precision == "half").build()
                if layouts:
                    layout.share_weights(layouts[0])
                elif self.precision == "tf32":
                    layout.round_weights()
                elif self.precision == "half":
                    layout.halve_weights()
                layouts.append(layout)
        return layouts

    def _next_pieces(self, lengths: list[int]) -> tuple[list[int], int]:
        """Few streams that bring much take long pieces, behind those that bring little; many take short ones."""
        is_long = [length > self._most_frames for length in lengths]
        bucket = max(bucket for bucket, rows in self.rows.items() if rows >= min(sum(is_long), self.max_rows))
        if bucket == self._common or not any(is_long):
            return list(range(len(lengths))), self._most_frames
        if not all(is_long):
            return [index for index, long in enumerate(is_long) if not long], self._most_frames
        return list(range(len(lengths))), bucket - self._lookahead

    def _split(self, work: list[Row]) -> list[list[Row]]:
        count = -(-len(work) // self.max_rows)
        ends = [len(work) * index // count for index in range(count + 1)]
        return [work[start:end] for start, end in itertools.pairwise(ends)]

    def warm_up(self, rows: Sequence[int] = (1,)) -> None:
        """Compiles the kernels and captures every graph. Open streams keep their state."""
        for bucket, count in self._graphs(rows):
            self.runner.prepare(bucket, count)
        if self.device.type == "cuda":
            for bucket, count in self._graphs(rows):
                self._host_of(bucket).reserve(count, 2)

    @torch.no_grad()
    def rehearse(self, rows: Sequence[int] = (1,)) -> None:
        """Runs once, without memory, what ``warm_up`` compiles; see ``vivace.kernels.launches``."""
        for bucket, count in self._graphs(rows):
            self.runner.launch(bucket, count)

    def _graphs(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        return [(bucket, count) for bucket, most in self.rows.items() for count in rows if count <= most]

    def _host_of(self, bucket: int) -> HostBuffers:
        return self._host if bucket <= self._common else self._long_host

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
        if rows == 1:  # of one stream no more than there is; of several one stretch of memory
            outputs = outputs[:, : max(end for _, end in ranges)]
        copy = self._host_of(bucket).take(rows, outputs.shape[1], readers) if readers else None
        self.runner.params[:rows].copy_(pinned[:rows], non_blocking=True)
        self._params_events[which] = record_event(self.device)
        for row, (_, mel, _, _) in enumerate(work):
            if mel.shape[1]:
                self.runner.mel_rows(bucket, row, mel.shape[1]).copy_(mel.T, non_blocking=True)
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


def _fitting_beside(common: Layout, rows: int, longer: list[Layout], max_bytes: int | None) -> dict[int, int]:
    """Rows of longer layouts, by their frames, in the memory of so many common ones; of those that fit at all."""
    result = {}
    for layout in longer:
        fits_alone = max_bytes is None or 4 * layout.size <= max_bytes // 4
        count = rows * common.size // layout.size or int(fits_alone)
        if count:
            result[layout.frames] = min(rows, _LONG_ROWS, 1 << (count.bit_length() - 1))
    return result


def _fitting(rows: int, layout: Layout, max_bytes: int) -> int:
    most = max(1, max_bytes // (4 * layout.size))
    return min(rows, 1 << (most.bit_length() - 1))
