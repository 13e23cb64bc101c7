"""The engine in a thread of the server's own process: the simplest ``SpeechService``.

    service = LocalService(await AsyncEngine.open("mini"))

A fault that takes the process down takes the server with it; ``process`` keeps them apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING

from vivace.errors import OverloadedError
from vivace.server.running import RunningStreams

if TYPE_CHECKING:
    from vivace.datatypes import AudioChunk, SynthesisResult
    from vivace.engine import AsyncEngine, EngineRouter, SynthesisRequest
    from vivace.engine.async_stream import AsyncSpeechStream
    from vivace.server.service import ServiceState
    from vivace.voice import Voice, VoiceRegistry


class LocalService:
    """Speaks with an ``AsyncEngine`` or several, which it owns: ``close`` closes it.

    Args:
        model: name for ``/v1/models``.
    """

    def __init__(self, engine: AsyncEngine | EngineRouter, model: str = "vivace-mini") -> None:
        self._engine = engine
        self._model = model
        self._running = RunningStreams()
        self._is_draining = False

    @property
    def state(self) -> ServiceState:
        if self._is_draining:
            return "draining"
        return "ready" if self._engine.is_running else "failed"

    @property
    def model(self) -> str:
        return self._model

    @property
    def sample_rate_hz(self) -> int:
        return self._engine.sample_rate_hz

    @property
    def voices(self) -> VoiceRegistry:
        return self._engine.voices

    @property
    def num_running(self) -> int:
        return len(self._running)

    def gauges(self) -> dict[str, float]:
        """Figures for ``/metrics``."""
        return self._engine.gauges()

    def stream(self, request: SynthesisRequest, text: AsyncIterable[str] | None = None) -> LocalStream:
        """Speaks. Errors, also that the service takes no requests, come with the first chunk asked for."""
        return LocalStream(self, self._engine.stream(request, text))

    def transform(
        self, source: bytes, voice: str | Voice | None = None, *, speed: float = 1.0
    ) -> LocalStream:
        return LocalStream(self, self._engine.transform(source, voice, speed=speed))

    async def make_voice(
        self, prompt_audio: bytes, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice:
        self.check_ready()
        return await self._engine.make_voice(prompt_audio, prompt_text, name=name, consent=consent)

    async def drain(self, timeout_s: float) -> None:
        self._is_draining = True
        await self._running.wait_until_none(timeout_s)

    async def close(self) -> None:
        self._is_draining = True
        await self._engine.close()

    def check_ready(self) -> None:
        """Raises ``OverloadedError`` unless new requests are taken."""
        state = self.state
        if state != "ready":
            code = "draining" if state == "draining" else "engine_restarting"
            raise OverloadedError(f"The server takes no requests: it is {state}.", code=code)


class LocalStream:
    """The audio of one request; counted as running from its first chunk asked for until its end."""

    def __init__(self, service: LocalService, inner: AsyncSpeechStream) -> None:
        self._service = service
        self._inner = inner
        self._loop: asyncio.AbstractEventLoop | None = None

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> AudioChunk:
        if self._loop is None:
            self._service.check_ready()
            self._loop = asyncio.get_running_loop()
            self._service._running.add(id(self))
        try:
            return await anext(self._inner)
        except BaseException:  # the end, an error, or the task was cancelled
            self._end()
            raise

    async def __aenter__(self) -> LocalStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            # The garbage collector may run in any thread.
            self._loop.call_soon_threadsafe(self._service._running.discard, id(self))

    async def aclose(self) -> None:
        """Cancels the request if it still runs."""
        self._inner.close()
        self._end()

    def summary(self) -> SynthesisResult:
        return self._inner.summary()

    def _end(self) -> None:
        self._service._running.discard(id(self))
