"""The embedded model for a long while, with clients that leave, dawdle, or listen."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.load.client import speak
from benchmarks.load.phases import percentiles

if TYPE_CHECKING:
    from benchmarks.load.server import ServerProcess

TEXTS = (
    "Hello there.",
    "It is 8:05, and the answer is 42.",
    "A fox sang in the rain.",
    "Would you like to hear three more sentences? Here is the second one.",
)
NUM_SEEDS = 3
SAMPLE_SECONDS = 5.0
LEAVES, DAWDLES = 0.25, 0.1
"""Shares of the clients that go away in the midst, and that read slowly."""


class Soak:
    """Counts what the clients see."""

    def __init__(self, server: ServerProcess, rng: random.Random) -> None:
        self._server = server
        self._rng = rng
        self._outcomes: Counter[str] = Counter()
        self._ttfb_ms: list[float] = []
        self._digests: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self._samples: list[tuple[float, dict[str, float]]] = []

    async def run(self, num_clients: int, seconds: float) -> dict[str, Any]:
        """So many clients at once."""
        stop = asyncio.Event()
        clients = [asyncio.create_task(self._client(stop)) for _ in range(num_clients)]
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            await asyncio.sleep(min(SAMPLE_SECONDS, seconds / 10))
            self._samples.append((time.monotonic() - started, self._server.take()))
        stop.set()
        await asyncio.gather(*clients)
        await asyncio.sleep(1.0)
        return self._report(num_clients, seconds)

    async def _client(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            rng = self._rng
            text, seed = rng.choice(TEXTS), rng.randrange(NUM_SEEDS)
            way = rng.random()
            leave_after = rng.randrange(1, 60_000) if way < LEAVES else None
            pause_s = 0.2 if LEAVES <= way < LEAVES + DAWDLES else 0.0
            heard = await speak(self._server.port, text, seed, leave_after=leave_after, pause_s=pause_s)
            if heard.is_whole:
                self._digests[text, seed].add(heard.digest)
            is_good = heard.is_whole or heard.was_left
            kind = "left" if heard.was_left else "whole" if is_good else f"failed ({heard.status})"
            self._outcomes[kind] += 1
            if heard.ttfb_ms:
                self._ttfb_ms.append(heard.ttfb_ms)

    def _report(self, num_clients: int, seconds: float) -> dict[str, Any]:
        return {
            "clients": num_clients,
            "minutes": round(seconds / 60, 1),
            "outcomes": dict(self._outcomes),
            "texts_with_one_answer": sum(len(found) == 1 for found in self._digests.values()),
            "texts": len(self._digests),
            "ttfb_ms": percentiles(self._ttfb_ms),
            "server_mb_per_hour": self._slope("server_mb"),
            "engine_mb_per_hour": self._slope("engine_mb"),
            "start": self._samples[len(self._samples) // 4][1],
            "end": self._samples[-1][1],
            "after": self._server.take(),
        }

    def _slope(self, name: str) -> dict[str, float]:
        """Of a straight line through all but the first quarter; and twice its standard error, taking samples a
        minute apart as independent."""
        kept = self._samples[len(self._samples) // 4 :]
        x = np.array([at for at, _ in kept]) / 3600
        y = np.array([taken[name] for _, taken in kept])
        if len(x) < 3:
            return {}
        slope, level = np.polyfit(x, y, 1)
        num_independent = max(3.0, 60 * (x[-1] - x[0]))
        error = np.std(y - slope * x - level) / (np.std(x) * num_independent**0.5)
        return {"slope": round(float(slope), 2), "twice_error": round(float(2 * error), 2)}
