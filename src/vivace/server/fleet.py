"""Several engines of one host, each in a process of its own on its own device, as one service.

    service = await Fleet.open([EngineSettings("folder", device=device) for device in ("cuda:0", "cuda:1")])

A request goes to an engine when it begins, as ``vivace.engine.routing`` says, and stays there. An engine that is lost
ends its own requests only; it gets no new ones until it has been replaced, and the others serve meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vivace.engine import open_voices
from vivace.engine.routing import MANY_STREAMS, choose_engine, merge_gauges
from vivace.server.channel import ProcessStream
from vivace.server.child import COMMAND
from vivace.server.process import ProcessService, conversion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vivace.engine import SynthesisRequest
    from vivace.server.child import EngineSettings, Watch
    from vivace.server.service import ServiceState
    from vivace.voice import Voice, VoiceRegistry


class Fleet:
    """A ``SpeechService`` of several ``ProcessService``, which it owns; made by ``open``.

    Args:
        engines: at least one; all of the same model, with the same ``voices``.
        devices: of each.
        places: streams that each runs at once.
    """

    def __init__(self, engines: Sequence[ProcessService], devices: Sequence[str], places: int) -> None:
        assert len(engines) == len(devices) > 0
        self.engines, self._devices, self._places = tuple(engines), tuple(devices), places
        self._is_draining = False

    @classmethod
    async def open(
        cls,
        settings: Sequence[EngineSettings],
        *,
        model: str = "vivace-mini",
        watch: Watch | None = None,
        command: Sequence[str] = COMMAND,
    ) -> Fleet:
        """Starts all engine processes; returns once all are ready. If one cannot start, none stays.

        Args:
            settings: of each engine; they differ in the device.
            model: name for ``/v1/models``.
            watch, command: as ``ProcessService.open``.

        Raises:
            ModelFolderError: the folder cannot be used; the message names the file.
        """
        first = settings[0]
        voices = await asyncio.to_thread(
            open_voices, first.model, first.voices_folder, tokenizer=first.tokenizer
        )
        open_one = partial(ProcessService.open, model=model, watch=watch, command=command, voices=voices)
        opening = [asyncio.create_task(open_one(each)) for each in settings]
        try:
            engines = await asyncio.gather(*opening)
        except BaseException:
            for task in opening:
                task.cancel()
            for opened in await asyncio.gather(*opening, return_exceptions=True):
                if isinstance(opened, ProcessService):
                    await opened.close()
            raise
        return cls(engines, [each.device for each in settings], first.max_streams or MANY_STREAMS)

    @property
    def state(self) -> ServiceState:
        """Ready while any engine is."""
        if self._is_draining:
            return "draining"
        states = {engine.state for engine in self.engines}
        if "ready" in states:
            return "ready"
        return "restarting" if "restarting" in states else "failed"

    @property
    def model(self) -> str:
        return self.engines[0].model

    @property
    def sample_rate_hz(self) -> int:
        return self.engines[0].sample_rate_hz

    @property
    def voices(self) -> VoiceRegistry:
        return self.engines[0].voices

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self.engines)

    def gauges(self) -> dict[str, float]:
        """Figures of all engines together; the newest sign of life counts."""
        return merge_gauges(engine.gauges() for engine in self.engines)

    def gauges_by_engine(self) -> list[tuple[Mapping[str, str], Mapping[str, float]]]:
        """Labels and figures of each engine, for ``/metrics``."""
        return [
            ({"engine": str(index), "device": device}, engine.gauges())
            for index, (device, engine) in enumerate(zip(self._devices, self.engines, strict=True))
        ]

    def stream(self, request: SynthesisRequest, text: AsyncIterable[str] | None = None) -> ProcessStream:
        """Speaks, on the engine that suits voice and load when the first chunk is asked for."""
        return ProcessStream(partial(self._choose, request.voice), request, text)

    def transform(
        self, source: bytes, voice: str | Voice | None = None, *, speed: float = 1.0
    ) -> ProcessStream:
        """Voice conversion, on the engine that suits voice and load when the first chunk is asked for."""
        return ProcessStream(partial(self._choose, voice), conversion(voice, speed), source=source)

    async def make_voice(
        self, prompt_audio: bytes, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice:
        """On the engine with the least to do."""
        usable = self._usable()
        engine = self.engines[min(usable, key=usable.__getitem__)]
        return await engine.make_voice(prompt_audio, prompt_text, name=name, consent=consent)

    async def drain(self, timeout_s: float) -> None:
        self._is_draining = True
        for engine in self.engines:
            engine.refuse_new()
        await asyncio.gather(*(engine.drain(timeout_s) for engine in self.engines))

    async def close(self) -> None:
        self._is_draining = True
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _choose(self, voice: object) -> ProcessService:
        return self.engines[choose_engine(voice, self._usable(), self._places)]

    def _usable(self) -> dict[int, int]:
        """Streams of each engine that takes requests; of those that are full, or all, where no other is left."""
        engines = dict(enumerate(self.engines))
        ready = {index: engine for index, engine in engines.items() if engine.state == "ready"}
        open_ones = {index: engine for index, engine in ready.items() if not engine.is_full}
        chosen = open_ones or ready or engines
        return {index: engine.num_running for index, engine in chosen.items()}
