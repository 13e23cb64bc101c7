"""Samples on their way from a device to the host: all rows of a launch in one copy, taken row by row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from vivace.datatypes import Samples


@dataclass(slots=True)
class HostCopy:
    """What one launch gave.

    Attributes:
        values: ``[rows, width]`` on the host, complete after ``event``; rows: the same for NumPy.
        memory: what they lie in.
        readers: parts that nobody has taken yet.
        home: where the memory goes behind the last one.
        event: behind the copy; None where nothing is left to wait for.
    """

    values: Tensor
    memory: Tensor
    readers: int
    home: list[Tensor]
    event: torch.cuda.Event | None = None
    rows: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.values.numpy()

    def wait(self) -> None:
        """Returns when the values are there. Only the first call waits."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None


class SamplePart(NamedTuple):
    """Values ``start`` to ``end`` of one row."""

    copy: HostCopy
    row: int
    start: int
    end: int


@dataclass(slots=True)
class PendingSamples:
    """Samples of one stream, from one launch or several.

    Attributes:
        error: why there are none, or not all; the stream cannot go on.
    """

    parts: list[SamplePart] = field(default_factory=list)
    error: Exception | None = None


class HostBuffers:
    """Memory on the host, used again when all parts of a copy were taken. One thread at a time.

    Args:
        row_values: most values of a row.
        header: values before a row's samples, the first of which is the flag of values that are not finite; 0: there is
            none, and the samples are looked through.
        pinned: memory that a CUDA device copies into by itself. It is slow to get.
    """

    def __init__(self, row_values: int, header: int, pinned: bool) -> None:
        self._row_values, self._header, self._pinned = row_values, header, pinned
        self._free: dict[int, list[Tensor]] = {}

    def reserve(self, rows: int, count: int) -> None:
        """Has memory for ``count`` copies of so many rows."""
        free = self._free.setdefault(rows, [])
        free += [self._new(rows) for _ in range(count - len(free))]

    def take(self, rows: int, width: int, readers: int) -> HostCopy:
        """Memory for ``[rows, width]``, back here when ``readers`` parts of it were collected."""
        assert width <= self._row_values
        assert readers > 0
        free = self._free.setdefault(rows, [])
        memory = free.pop() if free else self._new(rows)
        return HostCopy(memory[: rows * width].view(rows, width), memory, readers, free)

    def collect(self, pending: PendingSamples) -> tuple[Samples, bool]:
        """Waits for what is pending and nothing that came after it; the samples, and whether any are not finite.

        The copies may be of other buffers with as long a header.
        """
        parts, is_bad = [], False
        for copy, row, start, end in pending.parts:
            copy.wait()
            values = copy.rows[row]
            parts.append(values[start:end].copy())
            is_bad |= bool(values.view(np.int32)[0]) if self._header else not np.isfinite(parts[-1]).all()
            copy.readers -= 1
            if copy.readers == 0:
                copy.home.append(copy.memory)
        pending.parts = []
        if len(parts) == 1:
            return parts[0], is_bad
        return np.concatenate([np.zeros(0, dtype=np.float32), *parts]), is_bad

    def _new(self, rows: int) -> Tensor:
        return torch.zeros(rows * self._row_values, pin_memory=self._pinned)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event behind what was queued on a CUDA device's current stream; None on others."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
