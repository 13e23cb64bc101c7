"""Memory of flow streams on a device: pages with reference counts, one page for each finished chunk.

A page holds all that later chunks need of a chunk: per Euler step and guidance branch one *block*, with keys and
values of every layer and what the two position convolutions look back on. The unconditional branch at step 0 is not in
it: without a condition its values depend on the absolute frame alone, so they are kept once for all streams.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vivace.config import FlowConfig
from vivace.errors import SynthesisError
from vivace.models.dit_stream import POSITION_CONTEXT

SLAB_BYTES = 200 * 1024**2
"""Memory is asked for in pieces of about this size."""


class PageLayout(NamedTuple):
    """Sizes in elements. A page begins with step 0 with condition; then come step 1 without, step 1 with, and so on.
    So the block of step ``i`` with condition is at ``i * step_stride``, the other one a block before it.

    Attributes:
        layer: keys, then values of one layer, each ``[heads, chunk, dim_head]``.
        context: offset in a block of what the convolutions look back on, ``[2, look back, dim]``.
        block: one Euler step of one branch.
        page: all blocks but that of step 0 without condition.
    """

    layer: int
    context: int
    block: int
    page: int

    @classmethod
    def of(cls, config: FlowConfig) -> PageLayout:
        dit = config.dit
        layer = 2 * dit.heads * dit.static_chunk_frames * dit.dim_head
        context = dit.depth * layer
        block = context + 2 * POSITION_CONTEXT * dit.dim
        return cls(layer, context, block, (2 * config.num_steps - 1) * block)

    @property
    def step_stride(self) -> int:
        """From the block of one step to that of the next."""
        return 2 * self.block


def padded(elements: int) -> int:
    """What is taken for so many elements."""
    return -(-elements // 256) * 256


def pages_within(max_bytes: int, page_bytes: int, block_bytes: int, longest: int) -> int:
    """Pages that fit beside the blocks that all streams share: one per chunk of the longest stream, which has
    ``longest`` chunks or as many as there are pages."""
    pages = max_bytes // (page_bytes + block_bytes)
    return pages if pages <= longest else (max_bytes - longest * block_bytes) // page_bytes


class PagePool:
    """Hands out pages of one size. A page is named by its offset from ``arena`` in elements.

    Args:
        page_elements: size of a page.
        max_bytes: no more than this is taken from the device; None: all that there is.
        arena: from where offsets count; None: the pool's own.
    """

    def __init__(
        self,
        page_elements: int,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int | None = None,
        arena: Tensor | None = None,
    ) -> None:
        # Pages start at multiples of 256 elements, as all allocations do on a GPU.
        self._size = padded(page_elements)
        self.arena = torch.empty(256, dtype=dtype, device=device) if arena is None else arena
        self._page_bytes = self._size * self.arena.element_size()
        self._max_pages = None if max_bytes is None else max_bytes // self._page_bytes
        self._slabs: list[tuple[int, Tensor]] = []
        self._free: list[int] = []
        self._users: dict[int, int] = {}

    @property
    def pages_in_use(self) -> int:
        """Pages that someone holds."""
        return len(self._users)

    @property
    def num_pages(self) -> int:
        """Pages that memory was taken for."""
        return len(self._free) + len(self._users)

    @property
    def most_pages(self) -> int | None:
        """Pages that there may be; None: as many as there is memory for."""
        return self._max_pages

    @property
    def page_bytes(self) -> int:
        """Memory of one page."""
        return self._page_bytes

    @property
    def frame_bytes(self) -> int:
        """What ``parts`` of a page hold together."""
        return self._page_bytes

    @property
    def pages_per_slab(self) -> int:
        """Pages that memory is taken for at once."""
        return max(1, SLAB_BYTES // self._page_bytes)

    def take(self) -> int:
        """A page with one user. What is in it has no meaning.

        Raises:
            SynthesisError: the limit or the device's memory is reached.
        """
        if not self._free:
            self.reserve(self.num_pages + 1)
        page = self._free.pop()
        self._users[page] = 1
        return page

    def take_many(self, count: int) -> list[int]:
        """All of them or none.

        Raises:
            SynthesisError: as ``take``.
        """
        self.reserve(len(self._users) + count)
        return [self.take() for _ in range(count)]

    def share(self, page: int) -> int:
        """One more user of a page."""
        self._users[page] += 1
        return page

    def drop(self, page: int) -> None:
        """One user less; the last one frees the page."""
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]
            self._free.append(page)

    def reserve(self, pages: int) -> None:
        """Takes memory until there are ``pages`` of them, in use or free.

        Raises:
            SynthesisError: the limit or the device's memory is reached.
        """
        while self.num_pages < pages:
            count = self.pages_per_slab
            if self._max_pages is not None:
                count = min(count, self._max_pages - self.num_pages)
            self._add_slab(count)

    def resolve(self, offset: int) -> Tensor | None:
        """The elements from ``offset`` to the end of what was taken with them; None if that is not here."""
        for start, slab in self._slabs:
            if start <= offset < start + slab.numel():
                return slab[offset - start :]
        return None

    def parts(self, page: int) -> list[Tensor]:
        """What a page holds, in pieces without gaps."""
        found = self.resolve(page)
        assert found is not None, "no such page"
        return [found[: self._size]]

    def _add_slab(self, count: int) -> None:
        full = SynthesisError(
            "there is no memory left for another second of audio; use fewer streams at once or shorter texts",
            code="out_of_memory",
        )
        if count <= 0:
            raise full
        try:
            slab = self.arena.new_empty(count * self._size)
        except torch.OutOfMemoryError as error:
            raise full from error
        distance = slab.data_ptr() - self.arena.data_ptr()
        start = distance // self.arena.element_size()
        assert start * self.arena.element_size() == distance, "memory is not aligned"
        self._slabs.append((start, slab))
        self._free.extend(start + index * self._size for index in reversed(range(count)))


class StartBranch:
    """The unconditional branch at Euler step 0, shared by all streams: it sees noise alone, so it depends on the
    absolute frame only. A chunk's block and velocities are computed by the first stream that gets there.

    Args:
        pool: of blocks.
        velocities: float32 ``[noise frames, mel]``.
    """

    def __init__(self, pool: PagePool, velocities: Tensor) -> None:
        self.pool, self.velocities = pool, velocities
        self._blocks: list[int] = []
        self._known = 0
        self._scratch: list[int] = []
        self._used = 0

    def reserve(self, chunks: int) -> None:
        """Takes memory for the first ``chunks`` chunks of a stream.

        Raises:
            SynthesisError: there is none left.
        """
        self._blocks.extend(self.pool.take_many(max(0, chunks - len(self._blocks))))
        if not self._scratch:
            self._scratch.append(self.pool.take())

    @property
    def known(self) -> int:
        """Chunks that have been computed, or are being computed by a launch that was queued."""
        return self._known

    def forget(self, known: int) -> None:
        """A launch failed: only the first ``known`` chunks may be relied on."""
        self._known = min(self._known, known)

    def begin(self) -> None:
        """Before the chunks of each launch."""
        self._used = 0

    def blocks(self, chunks: int, is_shared: bool) -> list[int]:
        """Blocks of a stream's ``chunks`` chunks.

        Args:
            is_shared: the last one's is that of all streams, known or computed for them now. Otherwise what is computed
                is thrown away afterwards, as for a chunk that is not whole: it sees fewer frames.
        """
        before = self._blocks[: chunks - 1]
        if not is_shared:
            return [*before, self._next_scratch()]
        assert chunks <= self._known + 1
        self._known = max(self._known, chunks)
        return [*before, self._blocks[chunks - 1]]

    def _next_scratch(self) -> int:
        self._used += 1
        if self._used > len(self._scratch):
            self._scratch.append(self.pool.take())
        return self._scratch[self._used - 1]
