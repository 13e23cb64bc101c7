"""Clients of one engine in one event loop: closed loop, Poisson arrivals, or everything as fast as possible.

A client does nothing but note when its chunks came, so that hundreds of them leave the engine's thread the processor.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from vivace.bench.serving_player import Record, Window
from vivace.bench.single import TEXT
from vivace.datatypes import AudioChunk, SamplingParams
from vivace.engine.request import SynthesisRequest
from vivace.errors import OverloadedError, VivaceError

if TYPE_CHECKING:
    from vivace.voice import Voice

TAIL_S = 2.0
"""How long the load goes on behind the window for requests of the window that still wait for their first audio."""

LONGEST_PAUSE_S = 1.0
"""A client that was refused comes again after what the engine says, but no later than this."""

_now = time.perf_counter


def poisson_gaps(rate: float, seed: int) -> Iterator[float]:
    """Seconds between arrivals at ``rate`` a second, without end; the same ones for the same seed."""
    numbers = random.Random(seed)
    while True:
        yield numbers.expovariate(rate)


class Speaker(Protocol):
    """What the clients need of an engine: ``AsyncEngine``, ``EngineRouter``, or one that is made up."""

    def stream(self, request: SynthesisRequest) -> AsyncIterator[AudioChunk]: ...


class Load:
    """Sends requests and keeps the records of all of them.

    Args:
        voices: taken in turn; None is the model's own.
        seed: of the first request; the others count on.
        whole: one piece per utterance instead of chunks.
        at_start, at_end: called when the window that counts begins and ends.
    """

    def __init__(
        self,
        engine: Speaker,
        *,
        voices: Sequence[Voice | None] = (None,),
        seed: int = 0,
        whole: bool = False,
        at_start: Callable[[], object] = bool,
        at_end: Callable[[], object] = bool,
    ) -> None:
        self._engine = engine
        self._voices = voices
        self._seed = seed
        self._whole = whole
        self._at_start, self._at_end = at_start, at_end
        self._numbers = itertools.count()
        self.records: list[Record] = []

    async def speak(self) -> Record:
        """One request from start to end. Errors of the engine stand in the record."""
        number = next(self._numbers)
        request = SynthesisRequest(
            TEXT,
            voice=self._voices[number % len(self._voices)],
            stream=not self._whole,
            sampling=SamplingParams(seed=self._seed + number),
        )
        record = Record(_now())
        self.records.append(record)
        try:
            async for chunk in self._engine.stream(request):
                now_s = _now()
                record.note(now_s, len(chunk.samples) / chunk.sample_rate_hz)
                record.delivery_ms.append((now_s - record.submitted_s) * 1e3 - chunk.elapsed_ms)
            record.ended_s = _now()
        except VivaceError as error:
            record.ended_s, record.error = _now(), error.code
            if isinstance(error, OverloadedError):
                await asyncio.sleep(min(LONGEST_PAUSE_S, error.retry_after_s))
        return record

    async def closed(self, streams: int, ramp_s: float, seconds: float, *, listens: bool) -> Window:
        """``streams`` clients, each of which sends its next request when it has heard the one before.

        Args:
            ramp_s: clients begin one after the other in this time, before the window.
            listens: until it has played it to the end; otherwise until its last chunk came.
        """

        async def client(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            while True:
                record = await self.speak()
                if listens:
                    await asyncio.sleep(max(0.0, record.dry_s - _now()))

        return await self._watch(
            [client(ramp_s * index / streams) for index in range(streams)], ramp_s, seconds
        )

    async def poisson(self, rate: float, ramp_s: float, seconds: float) -> Window:
        """``rate`` requests per second at random times, whatever became of those before."""

        async def arrive() -> None:
            due_s = _now()
            async with asyncio.TaskGroup() as group:
                for gap_s in poisson_gaps(rate, self._seed):
                    due_s += gap_s
                    await asyncio.sleep(max(0.0, due_s - _now()))
                    group.create_task(self.speak())

        return await self._watch([arrive()], ramp_s, seconds)

    async def offline(self, requests: int, side_by_side: int) -> Window:
        """``requests`` as fast as possible, ``side_by_side`` at once."""
        left = requests

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                record = await self.speak()
                if record.error == OverloadedError.default_code:
                    left += 1

        self._at_start()
        start_s = _now()
        await asyncio.gather(*(worker() for _ in range(min(requests, side_by_side))))
        window = Window(start_s, _now())
        self._at_end()
        return window

    async def _watch(
        self, loads: Sequence[Coroutine[Any, Any, None]], ramp_s: float, seconds: float
    ) -> Window:
        """Runs the loads, waits for the window and a little longer, ends them."""
        tasks = [asyncio.create_task(load) for load in loads]
        try:
            await self._wait(tasks, ramp_s)
            self._at_start()
            start_s = _now()
            await self._wait(tasks, seconds)
            window = Window(start_s, _now())
            self._at_end()
            while _now() < window.end_s + TAIL_S and self._has_waiting(window):
                await self._wait(tasks, 0.05)
            return window
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    def _has_waiting(self, window: Window) -> bool:
        return any(
            window.holds(record.submitted_s) and record.is_open and not record.arrivals
            for record in self.records
        )

    @staticmethod
    async def _wait(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
        """Sleeps; a fault of a client ends the measurement at once."""
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
