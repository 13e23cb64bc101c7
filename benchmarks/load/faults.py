"""The engine is killed or stopped while streams run; the server is asked to end, or for ten times what it can."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from benchmarks.load.client import Heard, get, speak
from benchmarks.load.phases import percentiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.load.server import ServerProcess

NUM_STREAMS = 4
LONG = "Once upon a time, a fox sang in the rain, and nobody heard it but the moon and two small owls. " * 8
POLL_SECONDS = 0.01
DRAIN_STREAMS = 32
DRAIN_CHUNKS = 25


class _Readiness:
    """Asks over and over whether the server is ready."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.changes: list[tuple[float, bool]] = []

    async def watch(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            while True:
                is_ready = await get(reader, writer, "/health/ready") == 200
                if not self.changes or self.changes[-1][1] != is_ready:
                    self.changes.append((time.perf_counter(), is_ready))
                await asyncio.sleep(POLL_SECONDS)
        finally:
            writer.transport.abort()

    async def wait_for(self, is_ready: bool, limit_s: float) -> float:
        async with asyncio.timeout(limit_s):
            while not self.changes or self.changes[-1][1] != is_ready:
                await asyncio.sleep(POLL_SECONDS)
        return self.changes[-1][0]


async def engine_lost(server: ServerProcess, number: signal.Signals) -> dict[str, float]:
    """The engine process gets a signal while streams run: when is it noticed, when do they end, when is all well?

    Once for each server: engines that are lost again soon are started later and later.
    """
    readiness = _Readiness(server.port)
    watching = asyncio.create_task(readiness.watch())
    await readiness.wait_for(is_ready=True, limit_s=60)
    streams = [asyncio.create_task(_ending(server.port, seed)) for seed in range(NUM_STREAMS)]
    await asyncio.sleep(2.0)
    struck = time.perf_counter()
    pid = server.engine_pid()
    assert pid is not None
    os.kill(pid, number)
    noticed = await readiness.wait_for(is_ready=False, limit_s=30)
    endings = await asyncio.gather(*streams)
    again = await readiness.wait_for(is_ready=True, limit_s=120)
    heard = await speak(server.port, "Hello there.")
    watching.cancel()
    return {
        "not_ready_after_ms": 1e3 * (noticed - struck),
        "streams_ended_after_ms": 1e3 * (max(at for at, _ in endings) - struck),
        "looked_complete": sum(is_whole for _, is_whole in endings),
        "ready_again_after_s": again - struck,
        "speaks_again": heard.is_whole,
    }


def summary(number: signal.Signals, struck: list[dict[str, float]]) -> dict[str, Any]:
    """Of several servers."""
    times = ("not_ready_after_ms", "streams_ended_after_ms", "ready_again_after_s")
    return {
        "signal": number.name,
        "times": len(struck),
        "streams": NUM_STREAMS,
        **{name: percentiles([one[name] for one in struck]) for name in times},
        "looked_complete": sum(one["looked_complete"] for one in struck),
        "speaks_again": sum(one["speaks_again"] for one in struck),
    }


async def _ending(port: int, seed: int) -> tuple[float, bool]:
    heard = await speak(port, LONG, seed)
    return time.perf_counter(), heard.is_whole


async def drain(server: ServerProcess, terminate: Callable[[], None]) -> dict[str, Any]:
    """The server is asked to end while streams run, and while others knock."""
    streams = [
        asyncio.create_task(speak(server.port, f"chunks={DRAIN_CHUNKS}", seed))
        for seed in range(DRAIN_STREAMS)
    ]
    await asyncio.sleep(1.0)
    terminate()
    started = time.perf_counter()
    await asyncio.sleep(0.1)
    refused = [await speak(server.port, "chunks=1") for _ in range(10)]
    heard = await asyncio.gather(*streams)
    return {
        "streams": DRAIN_STREAMS,
        "whole": sum(answer.is_whole for answer in heard),
        "refused_with": sorted({answer.status for answer in refused}),
        "last_stream_after_s": round(time.perf_counter() - started, 2),
    }


async def overload(server: ServerProcess, capacity_seconds: float, seconds: float) -> dict[str, Any]:
    """First as many requests as keep the engine busy, then ten times as many, at fixed times whatever comes back."""
    text = "Hello there."
    started, num_alone = time.perf_counter(), 0
    while time.perf_counter() - started < capacity_seconds:
        answers = await asyncio.gather(*(speak(server.port, text, seed) for seed in range(NUM_STREAMS)))
        num_alone += sum(answer.is_whole for answer in answers)
    capacity = num_alone / (time.perf_counter() - started)
    requests, refusals = list[asyncio.Task[Heard]](), list[float]()

    async def knock(seed: int) -> Heard:
        before = time.perf_counter()
        heard = await speak(server.port, text, seed)
        if heard.status == 503:
            refusals.append(1e3 * (time.perf_counter() - before))
        return heard

    started = time.perf_counter()
    period = 1 / (10 * capacity)
    while (due := started + len(requests) * period) < started + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        requests.append(asyncio.create_task(knock(len(requests))))
    last_knock = time.perf_counter()
    heard = await asyncio.gather(*requests)
    ended = time.perf_counter()
    whole = [answer for answer in heard if answer.is_whole]
    later = await speak(server.port, text, 0)
    return {
        "capacity_per_s": round(capacity, 2),
        "offered": len(heard),
        "whole": len(whole),
        "refused": len(refusals),
        "other": len(heard) - len(whole) - len(refusals),
        "goodput_share": round(len(whole) / (ended - started) / capacity, 3),
        "refused_after_ms": percentiles(refusals),
        "ttfb_ms": percentiles([answer.ttfb_ms for answer in whole]),
        "all_ended_after_s": round(ended - last_knock, 1),
        "ttfb_afterwards_ms": round(later.ttfb_ms, 1),
        "after": server.take(),
    }
