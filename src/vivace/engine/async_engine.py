"""The engine for asyncio: one thread runs the loop, any number of coroutines consume.

    async with await AsyncEngine.open("mini") as engine:
        async for chunk in engine.stream(SynthesisRequest("Hello!")):
            await play(chunk.samples)

The engine's thread never waits for a consumer: a stream whose chunks are not taken pauses alone, and ends when nothing
is taken for ``STALL_S``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vivace.checkpoint.loading import resolve_device
from vivace.datatypes import SynthesisResult
from vivace.engine.async_stream import AsyncSpeechStream
from vivace.engine.engine import Engine
from vivace.engine.request import SynthesisRequest
from vivace.engine.routing import MANY_STREAMS

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from vivace.audio.decode import AudioSource
    from vivace.checkpoint import LMVariant
    from vivace.config import Limits
    from vivace.datatypes import Samples
    from vivace.voice import Voice, VoiceRegistry


STALL_S = 60.0
"""How long a paused stream's consumer may take nothing before its request ends with ``consumer_stalled``."""


class AsyncEngine:
    """Wraps an ``Engine`` and runs it in a thread of its own until ``close``.

    Args:
        stall_s: see ``STALL_S``.
    """

    def __init__(self, engine: Engine, *, stall_s: float = STALL_S) -> None:
        self._engine = engine
        engine.end_stalled_after(stall_s)
        self._thread = threading.Thread(target=engine.run_forever, name="vivace-engine", daemon=True)
        self._thread.start()

    @classmethod
    async def open(
        cls,
        model: str | Path = "mini",
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        lm_variant: LMVariant = "base",
        voices_folder: Path | None = None,
        limits: Limits | None = None,
        tokenizer: Path | None = None,
        warm_up: bool = True,
        max_streams: int | None = None,
        deterministic: bool = False,
        host_memory_gb: float = 0.0,
    ) -> AsyncEngine:
        """As ``Engine.open``, without holding up the event loop. On a GPU ``MANY_STREAMS`` run at once by default."""
        if max_streams is None and resolve_device(device).type != "cpu":
            max_streams = MANY_STREAMS
        engine = await asyncio.to_thread(
            Engine.open,
            model,
            device=device,
            dtype=dtype,
            lm_variant=lm_variant,
            voices_folder=voices_folder,
            limits=limits,
            tokenizer=tokenizer,
            warm_up=warm_up,
            max_streams=max_streams,
            deterministic=deterministic,
            host_memory_gb=host_memory_gb,
        )
        return cls(engine)

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

    @property
    def streams_at_once(self) -> int:
        """As ``Engine.streams_at_once``."""
        return self._engine.streams_at_once

    @property
    def is_running(self) -> bool:
        """False after ``close``, and after a fault of the loop itself."""
        return self._thread.is_alive()

    def stream(self, request: SynthesisRequest, text: AsyncIterable[str] | None = None) -> AsyncSpeechStream:
        """Speaks; errors come with the first chunk asked for. Closing or dropping the stream cancels the request.

        Args:
            text: pieces of text as they arrive; they replace ``request.text``.
        """
        if text is None:
            return AsyncSpeechStream(self._engine, lambda: self._engine.submit(request))
        pushed = replace(request, text=())
        return AsyncSpeechStream(self._engine, lambda: self._engine.submit(pushed, is_pushed=True), text)

    def transform(
        self,
        source: AudioSource,
        voice: str | Voice | None = None,
        *,
        speed: float = 1.0,
        stream: bool = True,
    ) -> AsyncSpeechStream:
        """Voice conversion, as ``Engine.transform``."""
        engine = self._engine
        return AsyncSpeechStream(
            engine, lambda: engine.submit_transform(source, voice, speed=speed, stream=stream)
        )

    async def synthesize(self, request: SynthesisRequest) -> SynthesisResult:
        """Speaks and returns everything at once."""
        return await self.stream(request).collect()

    def render_tokens(
        self, tokens: list[int], voice: Voice, *, speed: float = 1.0, stream: bool = True
    ) -> AsyncSpeechStream:
        """Given speech tokens in a voice, as ``Engine.render_tokens``."""
        engine = self._engine
        return AsyncSpeechStream(
            engine, lambda: engine.submit_tokens(tokens, voice, speed=speed, stream=stream)
        )

    async def warm_up(self, voice: str | Voice | None = None) -> None:
        """As ``Engine.warm_up``."""
        await asyncio.to_thread(self._engine.warm_up, voice)

    async def make_voice(
        self, prompt_audio: AudioSource, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice:
        """As ``Engine.make_voice``."""
        return await asyncio.to_thread(
            self._engine.make_voice, prompt_audio, prompt_text, name=name, consent=consent
        )

    def is_near_silent(self, samples: Samples, voice: str | Voice | None = None) -> bool:
        """As ``Engine.is_near_silent``."""
        return self._engine.is_near_silent(samples, voice)

    def ask_for_sign(self, answer: Callable[[], object]) -> None:
        """As ``Engine.ask_for_sign``."""
        self._engine.ask_for_sign(answer)

    def gauges(self) -> dict[str, float]:
        """As ``Engine.gauges``."""
        return self._engine.gauges()

    async def close(self) -> None:
        """Cancels everything and ends the thread."""
        await asyncio.to_thread(self._engine.close)
        await asyncio.to_thread(self._thread.join)
