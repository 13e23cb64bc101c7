"""Who owns which pages and which row slot of the speech LM's cache. Plain Python, no tensors.

A row's pages are all reserved when it opens, as many as its longest outcome takes: a row that runs never stops for
want of memory. Page 0 is scratch and belongs to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from vivace.errors import OverloadedError


@dataclass(slots=True)
class RowLease:
    """A slot and its pages, in the order of the row's positions.

    Attributes:
        num_away: pages that it has given back for a while.
    """

    slot: int
    pages: list[int]
    is_open: bool = True
    num_away: int = 0


class RowPool:
    """Slots and pages of one cache.

    Args:
        num_slots: rows that may be open at once.
        num_pages: pages there are, the scratch page included.
        page_tokens: positions of a page.
    """

    def __init__(self, num_slots: int, num_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._num_slots, self._num_pages = num_slots, num_pages
        # The end is taken first: lowest numbers, as long as they are free.
        self._slots = list(range(num_slots - 1, -1, -1))
        self._pages = list(range(num_pages - 1, 0, -1))
        self._leases: dict[int, RowLease] = {}

    @property
    def num_free_pages(self) -> int:
        return len(self._pages)

    @property
    def num_open_rows(self) -> int:
        return len(self._leases)

    def open(self, positions: int) -> RowLease:
        """A slot with room for ``positions``.

        Raises:
            OverloadedError: no slot or too few pages are free at present.
        """
        needed = -(-positions // self.page_tokens)
        if not self._slots or needed > len(self._pages):
            raise _full()
        lease = RowLease(self._slots.pop(), [self._pages.pop() for _ in range(needed)])
        self._leases[lease.slot] = lease
        return lease

    def close(self, lease: RowLease) -> None:
        """Takes slot and pages back; a second time does nothing."""
        if not lease.is_open:
            return
        lease.is_open = False
        del self._leases[lease.slot]
        self._slots.append(lease.slot)
        self._pages.extend(reversed(lease.pages))

    def lend(self, lease: RowLease) -> None:
        """Takes the pages back but not the slot; ``return_to`` gives as many again."""
        assert lease.is_open, "the row is closed"
        lease.num_away = len(lease.pages)
        self._pages.extend(reversed(lease.pages))
        lease.pages = []

    def return_to(self, lease: RowLease) -> None:
        """Gives a row as many pages as it had before ``lend``.

        Raises:
            OverloadedError: so many are not free.
        """
        if lease.num_away > len(self._pages):
            raise _full()
        lease.pages = [self._pages.pop() for _ in range(lease.num_away)]
        lease.num_away = 0

    def check(self) -> None:
        """Every slot and page is free or leased, and none twice."""
        leased = [page for lease in self._leases.values() for page in lease.pages]
        assert sorted([*leased, *self._pages]) == list(range(1, self._num_pages)), "pages lost or shared"
        assert sorted([*self._leases, *self._slots]) == list(range(self._num_slots)), "slots lost or shared"


def _full() -> OverloadedError:
    return OverloadedError(
        "the speech LM's cache is full; try again when a request has finished", retry_after_s=1.0
    )
