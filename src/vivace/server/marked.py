"""A service whose speech carries a watermark: ``vivace serve --watermark NAME``."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from vivace.audio.watermark import marked
from vivace.server.metrics import GaugeSource, gauges_by_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Mapping, Sequence

    from vivace.audio.watermark import Watermark, WatermarkMaker
    from vivace.datatypes import AudioChunk, SynthesisResult
    from vivace.engine.request import SynthesisRequest
    from vivace.server.service import ServiceState, ServiceStream, SpeechService
    from vivace.voice import Voice, VoiceRegistry


class MarkedService:
    """Another ``SpeechService``, whose every chunk is marked before a front end sees it.

    Attributes:
        watermark: its name.
    """

    def __init__(self, service: SpeechService, watermark: str, make: WatermarkMaker) -> None:
        self.watermark = watermark
        self._service = service
        self._make = make

    @property
    def state(self) -> ServiceState:
        return self._service.state

    @property
    def model(self) -> str:
        return self._service.model

    @property
    def sample_rate_hz(self) -> int:
        return self._service.sample_rate_hz

    @property
    def voices(self) -> VoiceRegistry:
        return self._service.voices

    @property
    def num_running(self) -> int:
        return self._service.num_running

    def gauges(self) -> Mapping[str, float]:
        """Figures for ``/metrics``."""
        return self._service.gauges() if isinstance(self._service, GaugeSource) else {}

    def gauges_by_engine(self) -> Sequence[tuple[Mapping[str, str], Mapping[str, float]]]:
        """Figures of each engine."""
        return gauges_by_engine(self._service)

    def stream(self, request: SynthesisRequest, text: AsyncIterable[str] | None = None) -> MarkedStream:
        """Speaks."""
        return MarkedStream(self._service.stream(request, text), self._make)

    def transform(
        self, source: bytes, voice: str | Voice | None = None, *, speed: float = 1.0
    ) -> MarkedStream:
        return MarkedStream(self._service.transform(source, voice, speed=speed), self._make)

    async def make_voice(
        self, prompt_audio: bytes, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice:
        return await self._service.make_voice(prompt_audio, prompt_text, name=name, consent=consent)

    async def drain(self, timeout_s: float) -> None:
        await self._service.drain(timeout_s)

    async def close(self) -> None:
        await self._service.close()


class MarkedStream:
    """The marked audio of one request. Marking runs in a thread, one piece after the other."""

    def __init__(self, inner: ServiceStream, make: WatermarkMaker) -> None:
        self._inner = inner
        self._make = make
        self._mark: Watermark | None = None

    def __aiter__(self) -> MarkedStream:
        return self

    async def __anext__(self) -> AudioChunk:
        chunk = await anext(self._inner)
        if self._mark is None:
            self._mark = await asyncio.to_thread(self._make, chunk.sample_rate_hz)
        return replace(chunk, samples=await asyncio.to_thread(marked, self._mark, chunk.samples))

    async def __aenter__(self) -> MarkedStream:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._inner.aclose()

    async def aclose(self) -> None:
        await self._inner.aclose()

    def summary(self) -> SynthesisResult:
        return self._inner.summary()
