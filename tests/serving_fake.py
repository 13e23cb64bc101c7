"""An engine that makes silence on time, for the simulated listeners of ``vivace bench serving``."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque

import numpy as np

from vivace.datatypes import AudioChunk, StageTimes
from vivace.engine.async_stream import AsyncSpeechStream
from vivace.errors import CancelledRequestError, OverloadedError, SynthesisError

RATE_HZ = 24_000


class FakeLive:
    """What ``AsyncSpeechStream`` looks at."""

    pieces = None

    def __init__(self, number):
        self.number, self.started = number, time.perf_counter()
        self.chunks, self.listener, self.error = deque(), None, None
        self.is_done = self.is_cancelled = False
        self.made = 0


class FakeEngine:
    """Each request's chunks come at fixed times after its submission, from a thread as an engine's do.

    Args:
        chunk_s: audio of each chunk. arrive_s: when each comes.
        most: requests at once; more are refused. fails: numbers of requests that end with an error behind one chunk.
    """

    def __init__(self, chunk_s=1.0, arrive_s=(0.02, 0.5, 1.5), most=10_000, fails=()):
        self._silence = np.zeros(int(chunk_s * RATE_HZ), np.float32)
        self._arrive_s, self._most, self._fails = arrive_s, most, set(fails)
        self._due, self._numbers = [], itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self.live, self.most_live, self.submitted, self.cancelled = 0, 0, [], 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stream(self, request):
        return AsyncSpeechStream(self, lambda: self.submit(request))

    def submit(self, request):
        with self._changed:
            if self.live >= self._most:
                raise OverloadedError("full", retry_after_s=0.01)
            self.live += 1
            self.most_live = max(self.most_live, self.live)
            live = FakeLive(next(self._numbers))
            self.submitted.append(request)
            heapq.heappush(self._due, (live.started + self._arrive_s[0], live.number, live))
            self._changed.notify()
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
        with self._changed:
            if not live.is_done:
                self.cancelled += 1
                live.is_cancelled = True
                self._end(live, CancelledRequestError("cancelled"))

    def close(self):
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self):
        with self._changed:
            while not self._closed:
                now = time.perf_counter()
                while self._due and self._due[0][0] <= now:
                    self._emit(heapq.heappop(self._due)[2], now)
                self._changed.wait(max(0.0005, self._due[0][0] - now) if self._due else None)

    def _emit(self, live, now):
        if live.is_done:
            return
        if live.number in self._fails and live.made == 1:
            self._end(live, SynthesisError("planned"))
            return
        is_last = live.made == len(self._arrive_s) - 1
        elapsed_ms = (now - live.started) * 1e3
        chunk = AudioChunk(
            self._silence, RATE_HZ, live.made, 0, float(live.made), elapsed_ms, StageTimes(), is_last
        )
        live.chunks.append(chunk)
        live.made += 1
        if is_last:
            self._end(live)
        else:
            heapq.heappush(self._due, (live.started + self._arrive_s[live.made], live.number, live))
            live.listener and live.listener()

    def _end(self, live, error=None):
        self.live -= 1
        live.error, live.is_done = error, True
        if live.listener is not None:
            live.listener()
