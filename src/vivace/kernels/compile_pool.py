"""Compiles kernels in child processes, several at a time.

Every kernel has a process of its own, forked from one that has everything imported: what fails, hangs or crashes there
concerns nobody else. Only for processes that hold no CUDA context.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

_CHUNK_BYTES = 1 << 16


class Compiles(Protocol):
    """What can be compiled; see ``launches``."""

    @property
    def name(self) -> str: ...

    def compile(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one kernel.

    Attributes:
        seconds: of processor time, that of the compiler's own processes included.
        result: what ``describe`` made of it; None where it failed.
        error: why it failed; None where it did not.
        is_known: the compiler itself has come to an end with it, and would come to the same one again.
    """

    kernel: Compiles
    seconds: float
    result: Any
    error: str | None
    is_known: bool


@dataclass(slots=True)
class _Child:
    kernel: Compiles
    pid: int
    pipe: int
    deadline: float
    data: bytearray = field(default_factory=bytearray)


class CompilePool:
    """Up to ``workers`` kernels at a time. One thread may use it.

    Args:
        describe: runs in the child: plain values that tell what was compiled.
        done: hears of every outcome.
        timeout_s: of one kernel.
        stop: file descriptor whose end of file means that nobody needs the kernels any more.
    """

    def __init__(
        self,
        workers: int,
        describe: Callable[[Compiles, Any], Any],
        *,
        done: Callable[[Outcome], None] = lambda _: None,
        timeout_s: float = 120.0,
        stop: int | None = None,
    ) -> None:
        torch = sys.modules.get("torch")
        assert torch is None or not torch.cuda.is_initialized(), (
            "a process with a CUDA context must not be forked"
        )
        self._workers, self._describe, self._done = workers, describe, done
        self._timeout_s, self._stop = timeout_s, stop
        self._waiting: deque[Compiles] = deque()
        self._running: list[_Child] = []
        self.outcomes: list[Outcome] = []

    def add(self, kernel: Compiles) -> None:
        """Compiles a kernel as soon as there is room for it.

        Raises:
            InterruptedError: nobody needs it any more.
        """
        self._waiting.append(kernel)
        self._advance(0.0)

    def finish(self) -> list[Outcome]:
        """Waits for all of them. Raises as ``add``."""
        while self._waiting or self._running:
            self._advance(1.0)
        return self.outcomes

    def close(self) -> None:
        """Ends what still runs."""
        self._waiting.clear()
        while self._running:
            self._end(self._running[0], "was not waited for")

    def _advance(self, wait_s: float) -> None:
        while self._waiting and len(self._running) < self._workers:
            self._running.append(self._start(self._waiting.popleft()))
        pipes = [child.pipe for child in self._running]
        ready, _, _ = select.select([*pipes, *self._stops()], [], [], wait_s)
        if self._stop in ready and not os.read(self._stop or 0, 1):
            self.close()
            raise InterruptedError("the kernels are not needed any more")
        now = time.monotonic()
        for child in list(self._running):
            if child.pipe in ready:
                part = os.read(child.pipe, _CHUNK_BYTES)
                child.data += part
                if not part:
                    self._end(child, "ended early")
            elif now > child.deadline:
                self._end(child, f"took more than {self._timeout_s:g} s")

    def _stops(self) -> Iterable[int]:
        return () if self._stop is None else (self._stop,)

    def _start(self, kernel: Compiles) -> _Child:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                _report(writer, kernel, self._describe)
            finally:
                os._exit(0)
        os.close(writer)
        with contextlib.suppress(OSError):  # the child may have done it, or may have ended
            os.setpgid(pid, pid)
        return _Child(kernel, pid, reader, time.monotonic() + self._timeout_s)

    def _end(self, child: _Child, problem: str) -> None:
        """Takes the outcome of a child; ``problem`` where it wrote none."""
        self._running.remove(child)
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        os.close(child.pipe)
        os.waitpid(child.pid, 0)
        try:
            seconds, result, error = json.loads(child.data)
            outcome = Outcome(child.kernel, seconds, result, error, is_known=True)
        except ValueError:
            outcome = Outcome(child.kernel, 0.0, None, problem, is_known=False)
        self.outcomes.append(outcome)
        self._done(outcome)


def _report(writer: int, kernel: Compiles, describe: Callable[[Compiles, Any], Any]) -> None:
    result, error = None, None
    try:
        result = describe(kernel, kernel.compile())
    except BaseException as problem:  # whatever it is: the process ends with it
        error = f"{type(problem).__name__}: {problem}"
    used = os.times()
    seconds = used.user + used.system + used.children_user + used.children_system
    with os.fdopen(writer, "w") as stream:
        json.dump((seconds, result, error), stream)
