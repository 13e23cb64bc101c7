"""Host memory for pages that leave the device for a while: frames of one size, locked in memory for a GPU to reach.

All of it is taken at once, when it is made: locking takes time, which no stream should wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vivace.errors import SynthesisError

SLAB_BYTES = 2 * 1024**3
"""Memory is locked in pieces of at most this size: PyTorch rounds each up to a power of two."""


class HostFrames:
    """Hands out frames by number.

    Args:
        num_frames: how many. frame_bytes: of each.
        is_pinned: locked, so that copies to and from a GPU go on beside other work.
    """

    def __init__(self, num_frames: int, frame_bytes: int, *, is_pinned: bool) -> None:
        self.num_frames, self.frame_bytes = num_frames, frame_bytes
        self._per_slab = max(1, SLAB_BYTES // frame_bytes)
        self._slabs = [
            torch.empty(
                min(self._per_slab, num_frames - first), frame_bytes, dtype=torch.uint8, pin_memory=is_pinned
            )
            for first in range(0, num_frames, self._per_slab)
        ]
        self._free = list(range(num_frames - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_many(self, count: int) -> list[int]:
        """All of them or none. What is in them has no meaning.

        Raises:
            SynthesisError: so many are not free.
        """
        if count > len(self._free):
            raise SynthesisError("there is no host memory left for another page", code="out_of_memory")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, frames: Iterable[int]) -> None:
        """The frames are free."""
        self._free.extend(frames)
        assert len(self._free) <= self.num_frames, "a frame came back twice"

    def store(self, frame: int, parts: Sequence[Tensor]) -> None:
        """Copies ``parts`` into a frame, one behind the other; on the current CUDA stream, without waiting for it."""
        for part, place in self._places(frame, parts):
            place.copy_(part, non_blocking=True)

    def load(self, frame: int, parts: Sequence[Tensor]) -> None:
        """Copies what ``store`` wrote back into ``parts`` of the same sizes, likewise."""
        for part, place in self._places(frame, parts):
            part.copy_(place, non_blocking=True)

    def _places(self, frame: int, parts: Sequence[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
        memory, start = self._slabs[frame // self._per_slab][frame % self._per_slab], 0
        for part in parts:
            assert part.is_contiguous(), "pages lie in one piece, or in several"
            flat = part.view(-1).view(torch.uint8)
            assert start + flat.numel() <= self.frame_bytes, "a frame is too small for a page"
            yield flat, memory[start : start + flat.numel()]
            start += flat.numel()
