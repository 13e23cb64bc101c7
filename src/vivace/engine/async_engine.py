"""The engine for asyncio: one thread runs the loop, any number of coroutines consume.

    async with await AsyncEngine.open("mini") as engine:
        async for chunk in engine.stream(SynthesisRequest("Hello!")):
            await play(chunk.samples)

The engine's thread never waits for a consumer: a stream whose chunks are not taken pauses alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vivace.datatypes import AudioChunk, SynthesisResult
from vivace.engine.engine import Engine
from vivace.engine.request import SynthesisRequest

if TYPE_CHECKING:
    from types import TracebackType

    from vivace.audio.decode import AudioSource
    from vivace.engine.live import LiveRequest
    from vivace.voice import Voice, VoiceRegistry


class AsyncEngine:
    """Wraps an ``Engine`` and runs it in a thread of its own until ``close``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = threading.Thread(target=engine.run_forever, name="vivace-engine", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, *args: Any, **options: Any) -> AsyncEngine:
        """As ``Engine.open``, without holding up the event loop."""
        return cls(await asyncio.to_thread(Engine.open, *args, **options))

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def sample_rate_hz(self) -> int:
        return self._engine.sample_rate_hz

    @property
    def voices(self) -> VoiceRegistry:
        return self._engine.voices

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    async def stream(
        self, request: SynthesisRequest, text: AsyncIterable[str] | None = None
    ) -> AsyncIterator[AudioChunk]:
        """Speaks; leaving the loop early (``aclose``) cancels the request.

        Args:
            text: pieces of text as they arrive; they replace ``request.text``.
        """
        async for chunk in self._follow(lambda: self._submit(request, text is not None), text):
            yield chunk

    async def transform(
        self, source: AudioSource, voice: str | Voice | None = None, *, speed: float = 1.0
    ) -> AsyncIterator[AudioChunk]:
        """Voice conversion, as ``Engine.transform``."""
        async for chunk in self._follow(
            lambda: self._engine.submit_transform(source, voice, speed=speed), None
        ):
            yield chunk

    async def synthesize(self, request: SynthesisRequest) -> SynthesisResult:
        """Speaks and returns everything at once."""
        return await asyncio.to_thread(self._engine.synthesize, request)

    async def make_voice(
        self, prompt_audio: AudioSource, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice:
        """As ``Engine.make_voice``."""
        return await asyncio.to_thread(
            self._engine.make_voice, prompt_audio, prompt_text, name=name, consent=consent
        )

    async def close(self) -> None:
        """Cancels everything and ends the thread."""
        self._engine.close()
        await asyncio.to_thread(self._thread.join)

    def _submit(self, request: SynthesisRequest, is_pushed: bool) -> LiveRequest:
        return self._engine.submit(replace(request, text=()) if is_pushed else request, is_pushed=is_pushed)

    async def _follow(
        self, submit: Callable[[], LiveRequest], text: AsyncIterable[str] | None
    ) -> AsyncIterator[AudioChunk]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        live = await asyncio.to_thread(submit)
        self._engine.listen(live, lambda: loop.call_soon_threadsafe(news.set))
        tasks = [asyncio.create_task(self._pump(live, text))] if text is not None else []
        if live.pieces is not None:
            tasks.append(asyncio.create_task(asyncio.to_thread(self._engine.pull_all_text, live)))
        try:
            while True:
                news.clear()
                chunk = self._engine.take(live)
                if chunk is not None:
                    yield chunk
                elif live.is_done:
                    return
                else:
                    await news.wait()
        finally:
            self._engine.cancel(live)
            for task in tasks:
                task.cancel()

    async def _pump(self, live: LiveRequest, text: AsyncIterable[str]) -> None:
        """Feeds streamed text. An error of the caller's iterator ends the request with that error."""
        try:
            async for piece in text:
                await asyncio.to_thread(self._engine.push_text, live, piece)
                if live.is_done:
                    return
            await asyncio.to_thread(self._engine.finish_text, live)
        except Exception as error:
            self._engine.abort(live, error)
