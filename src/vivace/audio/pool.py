"""A bounded pool of threads for work on prompt audio, so that it overlaps the engine's own loop.

Threads suffice: decoding runs in a child process, and the FFTs, matrix products, resampling and ONNX Runtime
calls release the interpreter's lock.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from vivace.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import TracebackType

T = TypeVar("T")


class FeaturePool:
    """Runs tasks on ``num_workers`` threads and refuses more than ``max_pending`` at a time.

    Args:
        num_workers: tasks that run at once, hence decoder processes that exist at once.
        max_pending: tasks running or waiting; one more raises.
    """

    def __init__(self, num_workers: int = 2, max_pending: int = 16) -> None:
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="vivace-features")
        self._slots = threading.BoundedSemaphore(max_pending)

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue ``task``; its result or error arrives in the future. A task must not wait for another task.

        Raises:
            OverloadedError: ``max_pending`` tasks are running or waiting. RuntimeError: the pool is closed.
        """
        if not self._slots.acquire(blocking=False):
            raise OverloadedError("Too many voice prompts are being prepared. Try again in a moment.")

        def run() -> T:
            # Before the result can be seen, so that whoever waited for it finds the slot free.
            try:
                return task()
            finally:
                self._slots.release()

        try:
            future = self._executor.submit(run)
        except RuntimeError:
            self._slots.release()
            raise
        future.add_done_callback(self._release_if_cancelled)
        return future

    def _release_if_cancelled(self, future: Future[Any]) -> None:
        if future.cancelled():
            self._slots.release()

    def close(self) -> None:
        """Drop waiting tasks (their futures are cancelled) and wait for the running ones."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> FeaturePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
