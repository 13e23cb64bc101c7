"""Host memory for pages that leave the device for a while: frames of one size, locked in memory for a GPU to reach.

All of it is taken at once, when it is made: locking takes time, which no stream should wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vivace.errors import SynthesisError

SLAB_BYTES = 2 * 1024**3
"""Memory is locked in pieces of at most this size, each a power of two: PyTorch would round any other up to one."""


def frames_within(num_bytes: int, frame_bytes: int, *, is_pinned: bool) -> int:
    """Frames that no more than ``num_bytes`` are taken for.

    Args:
        is_pinned: locked memory, which comes in powers of two.
    """
    if not is_pinned:
        return num_bytes // frame_bytes
    frames, size = num_bytes // SLAB_BYTES * (SLAB_BYTES // frame_bytes), SLAB_BYTES // 2
    while size >= frame_bytes:
        frames += bool(num_bytes & size) * (size // frame_bytes)
        size //= 2
    return frames


def slab_frames(num_frames: int, frame_bytes: int) -> list[int]:
    """Frames of each slab: as many as a power of two holds, so that none of it is taken for nothing."""
    slabs, size = [], max(SLAB_BYTES, 1 << (frame_bytes - 1).bit_length())
    while num_frames:
        count = size // frame_bytes
        if count and (count <= num_frames or size // 2 < frame_bytes):
            slabs.append(min(count, num_frames))
            num_frames -= slabs[-1]
        else:
            size //= 2
    return slabs


class HostFrames:
    """Hands out frames by number.

    Args:
        num_frames: how many. frame_bytes: of each.
        is_pinned: locked, so that copies to and from a GPU go on beside other work.
    """

    def __init__(self, num_frames: int, frame_bytes: int, *, is_pinned: bool) -> None:
        self.num_frames, self.frame_bytes = num_frames, frame_bytes
        slabs = [
            torch.empty(count, frame_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            for count in slab_frames(num_frames, frame_bytes)
        ]
        self._frames = [frame for slab in slabs for frame in slab]
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
        memory, start = self._frames[frame], 0
        for part in parts:
            assert part.is_contiguous(), "pages lie in one piece, or in several"
            flat = part.view(-1).view(torch.uint8)
            assert start + flat.numel() <= self.frame_bytes, "a frame is too small for a page"
            yield flat, memory[start : start + flat.numel()]
            start += flat.numel()
