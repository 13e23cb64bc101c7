"""What the vocoders for a device share: slots, mels cut into pieces, launches in halves where memory is missing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.errors import SynthesisError
from vivace.models.host_samples import HostBuffers, PendingSamples
from vivace.models.source import CounterNoise

if TYPE_CHECKING:
    from vivace.datatypes import Samples


@dataclass(slots=True)
class DeviceStream:
    """One utterance: its slot, how many mel frames went in, and whether its end did."""

    slot: int
    noise_key: int
    frames: int = 0
    is_finished: bool = False


Item = tuple[DeviceStream, Tensor, bool]
"""A stream, its next frames ``[80, n]``, and whether they are the last."""

Row = tuple[DeviceStream, Tensor, bool, PendingSamples]
"""The same for a piece, and where its samples will be."""


class SlotVocoder(ABC):
    """A vocoder for several streams. One thread at a time, all launches on one CUDA stream.

    Args:
        slots: streams that may be open at once.
        most_frames: of a piece.
        host: where samples arrive.

    Attributes:
        launches_halved: for want of memory, so far.
    """

    takes_long_pieces = False
    """Whether many chunks of a stream cost less in one piece."""

    def __init__(self, slots: int, most_frames: int, host: HostBuffers) -> None:
        self._host = host
        self._slots = slots
        self._free = list(range(slots))[::-1]
        self._most_frames = most_frames
        self.launches_halved = 0

    @property
    def num_open(self) -> int:
        """Streams that hold a slot."""
        return self._slots - len(self._free)

    @abstractmethod
    def _split(self, work: list[Row]) -> list[list[Row]]:
        """What goes into one launch each."""

    def _next_pieces(self, lengths: list[int]) -> tuple[list[int], int]:
        """Which of the streams that have so many frames left come first, and the most frames of their pieces."""
        return list(range(len(lengths))), self._most_frames

    @abstractmethod
    def _launch_rows(self, work: list[Row]) -> None:
        """One launch. Wants memory before anything moves a stream on the device."""

    def open(self, seed: int = 0) -> DeviceStream:
        """A new stream.

        Raises:
            RuntimeError: all slots are in use.
        """
        if not self._free:
            raise RuntimeError("every slot of the vocoder is in use")
        return DeviceStream(self._free.pop(), CounterNoise(seed).key)

    def close(self, stream: DeviceStream) -> None:
        """Gives the slot back; nothing of the stream is left for the next one. Closing twice does nothing."""
        if stream.slot >= 0:
            self._free.append(stream.slot)
            stream.slot = -1

    def step(self, stream: DeviceStream, mel: Tensor, is_last: bool) -> Samples:
        """Next frames ``[80, n]`` of a stream, and the samples that they complete, on the host."""
        return self.collect(self.launch(stream, mel, is_last))

    def launch(self, stream: DeviceStream, mel: Tensor, is_last: bool) -> PendingSamples:
        """The first half of ``step``: does not wait for the device."""
        return self.launch_batch([(stream, mel, is_last)])[0]

    @torch.no_grad()
    def launch_batch(self, items: Sequence[Item]) -> list[PendingSamples]:
        """Next frames of several streams, side by side, in as few launches as the lengths of pieces allow.

        Where memory is missing for so many streams at once, half of them are tried, down to one. A stream that does
        not fit alone has an error in what is pending.
        """
        pending = [PendingSamples() for _ in items]
        positions = [0] * len(items)
        going = [
            i
            for i, (stream, mel, is_last) in enumerate(items)
            if mel.shape[1] or (is_last and not stream.is_finished)
        ]
        while going:
            chosen, most = self._next_pieces([items[i][1].shape[1] - positions[i] for i in going])
            work: list[Row] = []
            for i in (going[index] for index in chosen):
                (stream, mel, is_last), start = items[i], positions[i]
                end = positions[i] = min(start + most, mel.shape[1])
                piece = mel if end - start == mel.shape[1] else mel[:, start:end]
                work.append((stream, piece, is_last and end == mel.shape[1], pending[i]))
            for part in self._split(work):
                self._launch_or_halve(part)
            going = [i for i in going if pending[i].error is None and positions[i] < items[i][1].shape[1]]
        return pending

    def _launch_or_halve(self, work: list[Row]) -> None:
        before = [(stream.frames, stream.is_finished) for stream, _, _, _ in work]
        try:
            self._launch_rows(work)
            return
        except torch.OutOfMemoryError as error:  # nothing was started
            fault = error.with_traceback(None)  # which would keep what the launch has taken so far
        for (stream, _, _, _), (frames, is_finished) in zip(work, before, strict=True):
            stream.frames, stream.is_finished = frames, is_finished
        self.launches_halved += 1
        if len(work) == 1:
            work[0][3].error = fault
            return
        half = len(work) // 2
        self._launch_or_halve(work[:half])
        self._launch_or_halve(work[half:])

    def collect(self, pending: PendingSamples) -> Samples:
        """The second half of ``step``: waits for the samples of one launch, and for nothing that came after it.

        Raises:
            SynthesisError: the samples hold non-finite values.
            Exception: what ``pending`` holds.
        """
        if pending.error is not None:
            raise pending.error
        samples, is_bad = self._host.collect(pending)
        if is_bad:
            raise SynthesisError("the vocoder gave values that are not finite; the weights may be damaged")
        return samples
