"""An engine that makes silence on time, for the simulated listeners of ``vivace bench serving``, and its clock."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from vivace.datatypes import AudioChunk, StageTimes
from vivace.engine.async_stream import AsyncSpeechStream
from vivace.errors import CancelledRequestError, OverloadedError, SynthesisError

RATE_HZ = 24_000


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: where nothing can be done, its clock moves on to what is due next.

    Its own thread does what would run in others, so that a run is the same each time.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_NeverWaiting(self._pass_time))

    def time(self) -> float:
        return self._now_s

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """As ``asyncio.run``; the loop is closed afterwards, and its clock can still be read."""
        with asyncio.Runner(loop_factory=lambda: self) as runner:
            return runner.run(work)

    def _pass_time(self, seconds: float | None) -> None:
        assert seconds is not None, "everybody waits, and nothing is due"
        self._now_s += seconds


class _NeverWaiting(selectors.DefaultSelector):
    def __init__(self, pass_time: Callable[[float | None], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout=None):
        found = super().select(0)
        if not found and timeout != 0:
            self._pass_time(timeout)
        return found


class FakeLive:
    """What ``AsyncSpeechStream`` looks at."""

    pieces = None

    def __init__(self, number, started_s):
        self.number, self.started_s = number, started_s
        self.chunks, self.listener, self.error = deque(), None, None
        self.is_done = self.is_cancelled = False
        self.made = 0


class FakeEngine:
    """Each request's chunks come at fixed times after its submission, by the clock of the running event loop.

    Args:
        chunk_s: audio of each chunk. arrive_s: when each comes.
        most: requests at once; more are refused. fails: numbers of requests that end with an error behind one chunk.
    """

    def __init__(self, chunk_s=1.0, arrive_s=(0.02, 0.5, 1.5), most=10_000, fails=()):
        self._silence = np.zeros(int(chunk_s * RATE_HZ), np.float32)
        self._arrive_s, self._most, self._fails = arrive_s, most, set(fails)
        self._numbers = itertools.count()
        self.live, self.most_live, self.submitted, self.cancelled = 0, 0, [], 0

    def stream(self, request):
        return AsyncSpeechStream(self, lambda: self.submit(request))

    def submit(self, request):
        if self.live >= self._most:
            raise OverloadedError("full", retry_after_s=0.01)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        live = FakeLive(next(self._numbers), asyncio.get_running_loop().time())
        self.submitted.append(request)
        self._make_next(live)
        return live

    def listen(self, live, listener):
        live.listener = listener
        listener()

    def take(self, live):
        if live.chunks:
            return live.chunks.popleft()
        if live.error is not None:
            raise live.error
        return None

    def cancel(self, live):
        if not live.is_done:
            self.cancelled += 1
            live.is_cancelled = True
            self._end(live, CancelledRequestError("cancelled"))

    def _make_next(self, live):
        loop = asyncio.get_running_loop()
        loop.call_at(live.started_s + self._arrive_s[live.made], self._emit, live, loop)

    def _emit(self, live, loop):
        if live.is_done:
            return
        if live.number in self._fails and live.made == 1:
            self._end(live, SynthesisError("planned"))
            return
        is_last = live.made == len(self._arrive_s) - 1
        elapsed_ms = (loop.time() - live.started_s) * 1e3
        chunk = AudioChunk(
            self._silence, RATE_HZ, live.made, 0, float(live.made), elapsed_ms, StageTimes(), is_last
        )
        live.chunks.append(chunk)
        live.made += 1
        if is_last:
            self._end(live)
        else:
            self._make_next(live)
            live.listener and live.listener()

    def _end(self, live, error=None):
        self.live -= 1
        live.error, live.is_done = error, True
        if live.listener is not None:
            live.listener()
