"""An engine process that costs nothing, so that what is measured is the server: chunks of known samples on time.

The text says how long it speaks, in chunks. It is run as ``python -m benchmarks.load.engine SOCKET PARENT``.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from vivace.datatypes import AudioChunk, StageTimes, SynthesisResult
from vivace.errors import InvalidAudioError
from vivace.server import worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from numpy.typing import NDArray

    from vivace.engine import SynthesisRequest

RATE_HZ = 24_000
CHUNK_SECONDS = 0.2
FIRST_SECONDS = 0.02
"""From the request to its first chunk; the others follow every ``CHUNK_SECONDS``, as a player takes them."""


def chunk_samples(seed: int, index: int) -> NDArray[np.float32]:
    """The samples of one chunk; no two seeds share any, so that mixed-up streams are seen."""
    start = (seed % 1000) * 32 + index % 32 + 1
    return np.full(int(CHUNK_SECONDS * RATE_HZ), start / 32767, np.float32)


class PacedStream:
    """The audio of one request."""

    def __init__(self, engine: PacedEngine, request: SynthesisRequest) -> None:
        found = re.fullmatch(r"chunks=(\d+)", str(request.text))
        self._engine = engine
        self._count = int(found[1]) if found else 5
        self._seed = request.sampling.seed
        self._index = 0
        self._due_s = 0.0

    def __aiter__(self) -> PacedStream:
        return self

    async def __anext__(self) -> AudioChunk:
        if self._index == self._count:
            raise StopAsyncIteration
        now = asyncio.get_running_loop().time()
        self._due_s = now + FIRST_SECONDS if self._index == 0 else self._due_s + CHUNK_SECONDS
        await asyncio.sleep(self._due_s - now)
        index, self._index = self._index, self._index + 1
        is_last = self._index == self._count
        samples = chunk_samples(self._seed, index)
        return AudioChunk(
            samples, RATE_HZ, index, 0, index * CHUNK_SECONDS, FIRST_SECONDS * 1e3, StageTimes(), is_last
        )

    async def __aenter__(self) -> PacedStream:
        self._engine.num_running += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.num_running -= 1

    async def aclose(self) -> None:
        self._index = self._count

    def summary(self) -> SynthesisResult:
        seconds = self._index * CHUNK_SECONDS
        nothing = np.zeros(0, np.float32)
        return SynthesisResult(
            nothing, RATE_HZ, seconds, 20.0, 1e3 * seconds, 1.0, 25.0, 5, 25, 1, "stop", StageTimes()
        )


class PacedEngine:
    """What the engine process needs."""

    is_running = True
    sample_rate_hz = RATE_HZ

    def __init__(self) -> None:
        self.num_running = 0

    def stream(self, request: SynthesisRequest, text: AsyncIterator[str] | None = None) -> PacedStream:
        return PacedStream(self, request)

    def transform(self, *_: Any, **__: Any) -> Any:
        raise InvalidAudioError("This engine converts no voices.", param="audio")

    async def make_voice(self, *_: Any, **__: Any) -> Any:
        raise InvalidAudioError("This engine makes no voices.", param="prompt_audio")

    def gauges(self) -> dict[str, float]:
        return {"batch_size": float(self.num_running)}

    def ask_for_sign(self, answer: Callable[[], object]) -> None:
        answer()


async def open_engine(settings: dict[str, Any]) -> PacedEngine:
    return PacedEngine()


if __name__ == "__main__":
    worker.main(open_engine)
