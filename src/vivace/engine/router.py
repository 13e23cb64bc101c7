"""Several engines, one per GPU, behind the interface of one.

    async with await EngineRouter.open("folder", devices=["cuda:0", "cuda:1"]) as router:
        async for chunk in router.stream(SynthesisRequest("Hello!")):
            await play(chunk.samples)

Requests with one voice go to the same engine, where the voice's prompt is kept on the device, unless that engine has
clearly more to do than another. A request stays where it began.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterable, Callable, Sequence
from typing import TYPE_CHECKING

from vivace.engine.async_engine import AsyncEngine
from vivace.engine.routing import choose_engine, merge_gauges

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Any

    from vivace.audio.decode import AudioSource
    from vivace.datatypes import Samples, SynthesisResult
    from vivace.engine.async_stream import AsyncSpeechStream
    from vivace.engine.request import SynthesisRequest
    from vivace.voice import Voice, VoiceRegistry


class EngineRouter:
    """Spreads requests over engines, which it owns: ``close`` closes them.

    Args:
        engines: at least one; all of the same model, with the same folder of voices.
    """

    def __init__(self, engines: Sequence[AsyncEngine]) -> None:
        if not engines:
            raise ValueError("a router needs at least one engine")
        self._engines = list(engines)
        self._streams: list[weakref.WeakSet[AsyncSpeechStream]] = [weakref.WeakSet() for _ in engines]

    @classmethod
    async def open(
        cls, model: str | Path = "mini", *, devices: Sequence[str], **options: Any
    ) -> EngineRouter:
        """An engine on each device; options as ``AsyncEngine.open``. If one cannot open, none stays open."""
        opened = await asyncio.gather(
            *(AsyncEngine.open(model, device=device, **options) for device in devices), return_exceptions=True
        )
        engines = [engine for engine in opened if isinstance(engine, AsyncEngine)]
        for error in opened:
            if isinstance(error, BaseException):
                await asyncio.gather(*(engine.close() for engine in engines))
                raise error
        return cls(engines)

    async def __aenter__(self) -> EngineRouter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def sample_rate_hz(self) -> int:
        return self._engines[0].sample_rate_hz

    @property
    def voices(self) -> VoiceRegistry:
        """The registry of the first engine; the others read the same folder."""
        return self._engines[0].voices

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self._engines)

    @property
    def streams_at_once(self) -> int:
        """Of all engines together."""
        return sum(engine.streams_at_once for engine in self._engines)

    @property
    def is_running(self) -> bool:
        """Whether any engine takes requests."""
        return any(engine.is_running for engine in self._engines)

    def stream(self, request: SynthesisRequest, text: AsyncIterable[str] | None = None) -> AsyncSpeechStream:
        """As ``AsyncEngine.stream``, on the engine that suits the voice and the load."""
        index = self.choose(request.voice)
        return self._keep(index, self._engines[index].stream(request, text))

    def transform(
        self,
        source: AudioSource,
        voice: str | Voice | None = None,
        *,
        speed: float = 1.0,
        stream: bool = True,
    ) -> AsyncSpeechStream:
        """As ``AsyncEngine.transform``."""
        index = self.choose(voice)
        made = self._engines[index].transform(source, voice, speed=speed, stream=stream)
        return self._keep(index, made)

    def render_tokens(
        self, tokens: list[int], voice: Voice, *, speed: float = 1.0, stream: bool = True
    ) -> AsyncSpeechStream:
        """As ``AsyncEngine.render_tokens``."""
        index = self.choose(voice)
        made = self._engines[index].render_tokens(tokens, voice, speed=speed, stream=stream)
        return self._keep(index, made)

    async def warm_up(self, voice: str | Voice | None = None) -> None:
        """As ``Engine.warm_up``, on every engine."""
        await asyncio.gather(*(engine.warm_up(voice) for engine in self._engines))

    async def synthesize(self, request: SynthesisRequest) -> SynthesisResult:
        """Speaks and returns everything at once."""
        return await self.stream(request).collect()

    async def make_voice(
        self, prompt_audio: AudioSource, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice:
        """As ``AsyncEngine.make_voice``, on the engine with the least to do."""
        engine = self._engines[min(self._usable(), key=self._load)]
        return await engine.make_voice(prompt_audio, prompt_text, name=name, consent=consent)

    def is_near_silent(self, samples: Samples, voice: str | Voice | None = None) -> bool:
        """As ``Engine.is_near_silent``; all engines have the same model."""
        return self._engines[0].is_near_silent(samples, voice)

    def choose(self, voice: str | Voice | None) -> int:
        """Which engine a request with this voice goes to now."""
        return choose_engine(voice, {index: self._load(index) for index in self._usable()})

    def ask_for_sign(self, answer: Callable[[], object]) -> None:
        """Calls ``answer`` once every engine that runs has ended its step."""
        usable = self._usable()
        left, lock = [len(usable)], threading.Lock()

        def one() -> None:
            with lock:
                left[0] -= 1
                is_last = left[0] == 0
            if is_last:
                answer()

        for index in usable:
            self._engines[index].ask_for_sign(one)

    def gauges(self) -> dict[str, float]:
        """Figures of all engines together: sums; of the busy ratio the mean, of latencies the largest."""
        return merge_gauges(engine.gauges() for engine in self._engines)

    async def close(self) -> None:
        """Closes all engines."""
        await asyncio.gather(*(engine.close() for engine in self._engines))

    def _usable(self) -> list[int]:
        """Engines that run; all of them if none does, for the error that they raise."""
        running = [index for index, engine in enumerate(self._engines) if engine.is_running]
        return running or list(range(len(self._engines)))

    def _load(self, index: int) -> int:
        """Streams that were given to the engine and have not ended, those that have not begun included."""
        return sum(stream.is_open for stream in list(self._streams[index]))

    def _keep(self, index: int, stream: AsyncSpeechStream) -> AsyncSpeechStream:
        self._streams[index].add(stream)
        return stream
