"""The vocoder of CosyVoice 2 and CosyVoice-300M for many streams on a device, each launch as one CUDA graph.

The interface is that of ``DeviceVocoder``. A launch computes a window of each stream (``hift_window``): samples come in
whole frames, ``reach`` frames behind the mel, until its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vivace.models.capture import before_capture, capturing
from vivace.models.hift_window import Column, WindowVocoder
from vivace.models.host_samples import HostBuffers, HostCopy, SamplePart, record_event
from vivace.models.vocoder_slots import DeviceStream, Row, SlotVocoder

if TYPE_CHECKING:
    from vivace.models.hift_centred import CentredHiFT

BUCKETS = (28, 56, 112, 224)
"""New frames of a launch: half a second to four seconds at 50 Hz."""

MOST_ROWS = 16
"""Of one launch: more cost memory and graphs."""

_COMMON = 56  # new frames that ``max_rows`` streams may bring together; more at once are several launches


class CentredDeviceVocoder(SlotVocoder):
    """Runs the streams of a ``CentredHiFT``. One thread at a time, all launches on one CUDA stream.

    Args:
        model: lives on the device that is to be used; its weights must not change afterwards.
        slots: streams that may be open at once.
        max_rows: streams of one launch.
        buckets: new frames of the graphs.
        use_graphs: None: on a GPU.
    """

    def __init__(
        self,
        model: CentredHiFT,
        slots: int = 8,
        max_rows: int = 1,
        buckets: Sequence[int] = BUCKETS,
        use_graphs: bool | None = None,
    ) -> None:
        self.windows = WindowVocoder(model, slots)
        self.device, self.max_rows, self.buckets = self.windows.device, max_rows, tuple(sorted(buckets))
        self._hop = model.hop_samples
        self._channels = model.config.in_channels
        self._on_gpu = self.device.type == "cuda"
        self._use_graphs = self._on_gpu if use_graphs is None else use_graphs
        self._launches: dict[tuple[int, int], _Launch] = {}
        self._memory: Any = None
        host = HostBuffers((self.buckets[-1] + self.windows.reach) * self._hop, 0, self._on_gpu)
        super().__init__(slots, self.buckets[-1], host)

    def _split(self, work: list[Row]) -> list[list[Row]]:
        count = self._rows(self._bucket(work))
        return [work[start : start + count] for start in range(0, len(work), count)]

    def _bucket(self, work: list[Row]) -> int:
        return next(size for size in self.buckets if size >= max(mel.shape[1] for _, mel, _, _ in work))

    def warm_up(self, rows: Sequence[int] = (1,)) -> None:
        """Captures every graph. Open streams keep their state."""
        for bucket in self.buckets:
            for count in rows:
                self._prepare(min(count, self._rows(bucket)), bucket)
        if self._on_gpu:
            self._host.reserve(1, 2 * self.max_rows)

    def _rows(self, bucket: int) -> int:
        """Streams of one launch of so many new frames: the longer, the fewer, so that memory stays in bounds."""
        return max(1, min(self.max_rows, self.max_rows * _COMMON // bucket))

    def _prepare(self, rows: int, bucket: int) -> _Launch:
        launch = self._launches.get((rows, bucket))
        if launch is None:
            launch = self._launches[rows, bucket] = _Launch(
                self.windows, self._slots, rows, bucket, self._channels
            )
            if self._use_graphs:
                self._memory = launch.capture(self._memory)
        return launch

    def _launch_rows(self, work: list[Row]) -> None:
        bucket = self._bucket(work)
        rows = min(self._rows(bucket), 1 << (len(work) - 1).bit_length())
        launch = self._prepare(rows, bucket)
        launch.send([(stream.slot, stream.frames, mel, stream.noise_key) for stream, mel, _, _ in work])
        launch.run()
        copies: list[HostCopy] = []
        for row, (stream, mel, is_last, pending) in enumerate(work):
            start, end = self._move(stream, mel.shape[1], is_last)
            if end > start:
                copy = self._host.take(1, end - start, readers=1)
                copy.values[0].copy_(launch.samples[row, start:end], non_blocking=True)
                pending.parts.append(SamplePart(copy, 0, 0, end - start))
                copies.append(copy)
        event = record_event(self.device)
        for copy in copies:
            copy.event = event

    def _move(self, stream: DeviceStream, new: int, is_last: bool) -> tuple[int, int]:
        """Counts the new frames; where in its window the samples begin and end that they complete."""
        assert stream.slot >= 0, "the stream is closed"
        assert not stream.is_finished, "nothing follows the end of a stream"
        reach, before, after = self.windows.reach, stream.frames, stream.frames + new
        first = before - min(before, self.windows.kept)
        done, ready = max(0, before - reach), after if is_last else max(0, after - reach)
        stream.frames, stream.is_finished = after, is_last
        return (done - first) * self._hop, (ready - first) * self._hop


class _Launch:
    """Buffers and graph of windows of one size.

    Attributes:
        samples: ``[rows, window]`` after ``run``, until the next.
    """

    def __init__(self, windows: WindowVocoder, scratch: int, rows: int, bucket: int, channels: int) -> None:
        self._windows, self._scratch = windows, scratch
        device, on_gpu = windows.device, windows.device.type == "cuda"
        shape = rows, len(Column)
        self._host = [torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._numbers = torch.zeros(shape, dtype=torch.int64, device=device)
        self._new = torch.zeros(rows, channels, bucket, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.samples = torch.zeros(0)

    def send(self, rows: Sequence[tuple[int, int, Tensor, int]]) -> None:
        """Slot, frames before, new mel ``[80, n]`` and noise key of each row; rows that are left over do nothing."""
        self._turn ^= 1
        event, host = self._sent[self._turn], self._host[self._turn]
        if event is not None:  # the copy from two launches ago has read this buffer long since
            event.synchronize()
        numbers = host.numpy()
        numbers[:] = self._scratch, 0, 0, 0
        for row, (slot, before, mel, key) in enumerate(rows):
            numbers[row] = slot, before, mel.shape[1], key
            self._new[row, :, : mel.shape[1]].copy_(mel, non_blocking=True)
        self._numbers.copy_(host, non_blocking=True)
        if self._numbers.is_cuda:
            event = self._sent[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()

    def run(self) -> None:
        """Computes ``samples`` of what was sent."""
        if self._graph is None:
            self.samples = self._windows.run(self._numbers, self._new)
        else:
            self._graph.replay()

    def capture(self, memory: Any) -> Any:
        """Makes the graph; ``memory`` is what the other graphs of the vocoder share, returned where there is none."""
        self.send([])
        with before_capture(self._windows.device):
            self.run()
        torch.cuda.synchronize(self._windows.device)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._windows.device, memory):
            self.run()
        self._graph = graph
        return memory or graph.pool()
