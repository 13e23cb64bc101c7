"""Who may change requests: whoever holds the turn, one thread at a time.

Nobody waits for the turn. A thread that finds it taken leaves a message, and the holder delivers it before the
turn ends; a thread with nothing to do sleeps until something changed. So a consumer's thread, an event loop or the
garbage collector may cancel a request at any moment, also in the middle of a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Turn:
    """The engine's only lock, and its mailbox."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._version = 0

    @property
    def version(self) -> int:
        """Grows with every change; read it before looking at anything, then ``wait`` with it."""
        return self._version

    def run(self, work: Callable[[], bool]) -> bool:
        """Does ``work`` if nobody else holds the turn; True if it was done and changed something."""
        if not self._lock.acquire(blocking=False):
            return False
        changed = True  # also if it raises
        try:
            delivered = self._deliver()
            changed = work()
            changed |= self._deliver() or delivered
        finally:
            self._lock.release()
            self._settle()
            if changed:
                self._announce()
        return changed

    def tell(self, message: Callable[[], object]) -> None:
        """Runs ``message`` under the turn: now, or at the end of what its holder does. It must not raise."""
        self._messages.append(message)
        self._settle()

    def ask(self, message: Callable[[], T]) -> T:
        """As ``tell``, but waits for the result. Never from inside a message or ``run``."""
        answer: Future[T] = Future()

        def deliver() -> None:
            try:
                answer.set_result(message())
            except Exception as error:
                answer.set_exception(error)

        self.tell(deliver)
        return answer.result()

    def deliver(self) -> bool:
        """Delivers what has come meanwhile, from inside ``run``'s work; whether there was anything."""
        return self._deliver()

    def wait(self, version: int, timeout_s: float | None = None) -> None:
        """Sleeps until something changed since ``version`` was read, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, timeout_s)

    def _settle(self) -> None:
        """Delivers what lies in the mailbox unless somebody holds the turn: then it is theirs to deliver."""
        while self._messages and self._lock.acquire(blocking=False):
            try:
                self._deliver()
            finally:
                self._lock.release()
                self._announce()

    def _deliver(self) -> bool:
        delivered = False
        while self._messages:
            self._messages.popleft()()
            delivered = True
        return delivered

    def _announce(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()
