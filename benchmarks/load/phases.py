"""What is done to the server, one phase after the other. Each returns its figures."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.load.client import Heard, get, open_websocket, speak, speech_request, until_closed
from benchmarks.load.engine import chunk_samples
from vivace.audio.pcm import pcm16

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from benchmarks.load.server import ServerProcess

NUM_NEIGHBOURS = 8
MOST_CHUNKS = 30
"""Of a stream."""
IDLE_SECONDS = 100.0
"""How long to wait for the server to close silent WebSockets."""


@cache
def _expected(seed: int, num_chunks: int) -> str:
    parts = [pcm16(chunk_samples(seed, index)) for index in range(num_chunks)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p99 and the largest, rounded."""
    if not values:
        return {}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": round(p50, 1), "p99": round(p99, 1), "max": round(max(values), 1)}


def _figures(heard: list[Heard], num_wrong: int) -> dict[str, Any]:
    statuses = Counter(answer.status for answer in heard)
    return {
        "requests": len(heard),
        "failed": sum(not answer.is_whole and not answer.was_left for answer in heard),
        "wrong_bytes": num_wrong,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "ttfb_ms": percentiles([answer.ttfb_ms for answer in heard if answer.status == 200]),
        "gap_ms": percentiles([gap for answer in heard for gap in answer.gaps_ms]),
        "underruns": sum(answer.underruns for answer in heard),
    }


async def _speaker(port: int, stop: asyncio.Event, rng: random.Random, heard: list[Heard]) -> int:
    """One listener after another until ``stop``; how many heard something else than they should."""
    num_wrong = 0
    while not stop.is_set():
        seed, num_chunks = rng.randrange(1000), rng.randint(5, MOST_CHUNKS)
        answer = await speak(port, f"chunks={num_chunks}", seed)
        heard.append(answer)
        num_wrong += answer.is_whole and answer.digest != _expected(seed, num_chunks)
    return num_wrong


async def beside(server: ServerProcess, count: int, work: Awaitable[Any]) -> tuple[Any, Any]:
    """``work`` while ``count`` streams are heard without a pause; its result, and what they heard."""
    stop, heard = asyncio.Event(), list[Heard]()
    rng = random.Random(0)
    speakers = [
        asyncio.create_task(_speaker(server.port, stop, random.Random(rng.random()), heard))
        for _ in range(count)
    ]
    try:
        result = await work
    finally:
        stop.set()
        num_wrong = sum(await asyncio.gather(*speakers))
    return result, _figures(heard, num_wrong)


async def streams(server: ServerProcess, count: int, seconds: float) -> dict[str, Any]:
    """So many streams at once, each at the pace of a player."""
    before = server.take()
    _, figures = await beside(server, count, asyncio.sleep(seconds))
    return {"streams": count, **figures, "before": before, "after": server.take()}


async def idle_websockets(server: ServerProcess, count: int, seconds: float) -> dict[str, Any]:
    """So many silent sessions, and streams beside them."""

    async def hold() -> dict[str, Any]:
        warm = [await open_websocket(server.port) for _ in range(10)]
        before = server.take()
        held = [await open_websocket(server.port) for _ in range(count)]
        during = server.take()
        await asyncio.sleep(seconds)
        readers = [reader for reader, _ in held]
        closed = await asyncio.gather(*(until_closed(reader, IDLE_SECONDS) for reader in readers))
        for _, writer in [*warm, *held]:
            writer.transport.abort()
        await asyncio.sleep(1.0)
        return {
            "sockets": count,
            "kb_per_socket": round(1e3 * (during["server_mb"] - before["server_mb"]) / count, 1),
            "closed_by_server": sum(after is not None for after in closed),
            "before": before,
            "during": during,
            "after": server.take(),
        }

    result, neighbours = await beside(server, NUM_NEIGHBOURS, hold())
    return {**result, "neighbours": neighbours}


async def half_open(server: ServerProcess, count: int) -> dict[str, Any]:
    """Peers that have asked for a long answer and take nothing of it any more: half of them WebSockets."""

    async def hold() -> dict[str, Any]:
        writers = []
        for number in range(count):
            if number % 2:
                _, writer = await open_websocket(server.port)
            else:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4096)
                writer.write(speech_request("chunks=2000"))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writers.append(writer)
        held = server.take()
        started = time.monotonic()
        while server.take()["open_files"] > held["open_files"] - count and time.monotonic() < started + 240:
            await asyncio.sleep(1.0)
        seconds = time.monotonic() - started
        after = server.take()
        for writer in writers:
            writer.transport.abort()
        return {"peers": count, "gone_after_s": round(seconds, 1), "during": held, "after": after}

    result, neighbours = await beside(server, NUM_NEIGHBOURS, hold())
    return {**result, "neighbours": neighbours}


async def slow_loris(server: ServerProcess, count: int) -> dict[str, Any]:
    """Peers that send a byte of their header now and then."""

    async def drip() -> float | None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        ended = asyncio.create_task(until_closed(reader, 60.0))
        for byte in b"POST /v1/audio/speech HTTP/1.1\r\nHost: 127.0.0.1\r\n":
            writer.write(bytes([byte]))
            done, _ = await asyncio.wait([ended], timeout=1.0)
            if done:
                break
        writer.transport.abort()
        return await ended

    ended, neighbours = await beside(server, NUM_NEIGHBOURS, asyncio.gather(*(drip() for _ in range(count))))
    closed = [seconds for seconds in ended if seconds is not None]
    return {
        "peers": count,
        "closed": len(closed),
        "closed_after_s": percentiles(closed),
        "after": server.take(),
        "neighbours": neighbours,
    }


async def keep_alive(server: ServerProcess, count: int) -> dict[str, Any]:
    """So many connections that stay open, each used twice."""

    async def hold() -> dict[str, Any]:
        before = server.take()
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(count)]
        statuses: Counter[int] = Counter()
        for _ in range(2):
            for first in range(0, count, 100):
                some = held[first : first + 100]
                statuses.update(await asyncio.gather(*(get(*pair, "/health/live") for pair in some)))
        during = server.take()
        for _, writer in held:
            writer.transport.abort()
        await asyncio.sleep(2.0)
        return {
            "connections": count,
            "statuses": {str(status): number for status, number in statuses.items()},
            "kb_per_connection": round(1e3 * (during["server_mb"] - before["server_mb"]) / count, 1),
            "before": before,
            "during": during,
            "after": server.take(),
        }

    result, neighbours = await beside(server, NUM_NEIGHBOURS, hold())
    return {**result, "neighbours": neighbours}
