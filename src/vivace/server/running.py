"""Which streams run, and the moment when none does."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class RunningStreams:
    """A set of keys that one can wait to see empty. For one event loop."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: int) -> None:
        self._keys.add(key)
        self._none.clear()

    def discard(self, key: int) -> None:
        self._keys.discard(key)
        if not self._keys:
            self._none.set()

    async def wait_until_none(self, timeout_s: float) -> None:
        """Returns once no stream runs, or after ``timeout_s``."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._none.wait(), timeout_s)
