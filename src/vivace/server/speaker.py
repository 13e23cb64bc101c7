"""Speaks the utterances of one WebSocket session, one after the other."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.audio.encoders import open_encoder
from vivace.server.connection import CloseError, PeerGoneError
from vivace.server.errors import SESSION_PARAMS, describe
from vivace.server.events import skipped, timing
from vivace.server.playback import Playback
from vivace.server.session_config import SessionConfig
from vivace.server.utterance import Utterance, encode

if TYPE_CHECKING:
    from vivace.config import ServerConfig
    from vivace.datatypes import AudioChunk, SynthesisResult
    from vivace.server.connection import Connection
    from vivace.server.metrics import Metrics
    from vivace.server.service import ServiceStream, SpeechService

_FIGURES = ("ttfb_ms", "rtf", "tps", "audio_seconds", "finish_reason")


@dataclass(eq=False, slots=True, kw_only=True)
class ConfiguredUtterance(Utterance):
    """An utterance with the settings that held when it began."""

    settings: SessionConfig


class Speaker:
    """The queue of utterances; the first is being spoken.

    Attributes:
        pending_bytes: text that has come and is not spoken yet.
        last_sent: when audio was sent, ``time.monotonic``.
    """

    def __init__(
        self, connection: Connection, service: SpeechService, config: ServerConfig, metrics: Metrics
    ) -> None:
        self.pending_bytes = 0
        self.last_sent = time.monotonic()
        self._connection = connection
        self._service = service
        self._config = config
        self._metrics = metrics
        self._utterances: deque[ConfiguredUtterance] = deque()
        self._is_closing = False
        self._work = asyncio.Event()
        self._job: asyncio.Task[None] | None = None
        self._is_telling_end = False

    @property
    def is_busy(self) -> bool:
        """The engine works on an utterance whose text is complete."""
        return bool(self._utterances) and self._utterances[0].text.is_finished

    async def run(self) -> None:
        """Speaks until ``close`` was called and everything has been said."""
        try:
            while True:
                while self._utterances:
                    await self._speak_first()
                if self._is_closing:
                    return
                self._work.clear()
                await self._work.wait()
        finally:
            await self._stop(at_once=True)

    def add(self, utterance: ConfiguredUtterance) -> None:
        """Speaks it after all others, while its text still comes."""
        self._utterances.append(utterance)
        self._work.set()

    def close(self) -> None:
        """Nothing more will be added."""
        self._is_closing = True
        self._work.set()

    async def cancel(self) -> list[ConfiguredUtterance]:
        """Stops at once and forgets everything; after it returns no more audio is sent. Returns what there was."""
        utterances = [utterance for utterance in self._utterances if not utterance.has_ended]
        self._utterances.clear()
        await self._stop()
        for utterance in utterances:
            self._end(utterance)
        return utterances

    async def drop(self, utterance: ConfiguredUtterance, error: Exception) -> None:
        """Ends one utterance with an error, unless it has ended."""
        if utterance.has_ended:
            return
        is_spoken = utterance is self._utterances[0]
        self._utterances.remove(utterance)
        self._end(utterance)
        if is_spoken:
            await self._stop()
        await self.report(error, utterance)

    async def report(self, error: Exception, utterance: Utterance | None) -> None:
        """Tells the client of an error, of one utterance or of its last message."""
        answer = describe(error, SESSION_PARAMS)
        self._metrics.errors.labels(answer.code).inc()
        await self._connection.send_json(
            {
                "type": "error",
                "code": answer.code,
                "message": answer.message,
                "param": answer.param,
                "utterance": None if utterance is None else utterance.number,
            }
        )

    async def _speak_first(self) -> None:
        utterance = self._utterances[0]
        self._is_telling_end = False
        job = self._job = asyncio.create_task(self._speak(utterance))
        job.add_done_callback(_note_exception)
        await asyncio.wait([job])
        self._job = None
        if not job.cancelled():
            job.result()
        if self._utterances and self._utterances[0] is utterance:
            self._utterances.popleft()
        self._end(utterance)

    async def _stop(self, *, at_once: bool = False) -> None:
        """Stops the utterance that is spoken; one that is just telling its end may do so, unless ``at_once``."""
        job = self._job
        if job is None or job.done():
            return
        if at_once or not self._is_telling_end:
            job.cancel()
        await asyncio.wait([job])

    def _begin_end(self, utterance: ConfiguredUtterance) -> None:
        """From here on the utterance ends as it does, and nothing else ends it."""
        self._is_telling_end = True
        self._end(utterance)

    def _end(self, utterance: ConfiguredUtterance) -> None:
        if not utterance.has_ended:
            utterance.has_ended = True
            self.pending_bytes -= utterance.text.num_bytes

    async def _speak(self, utterance: ConfiguredUtterance) -> None:
        playback = Playback(self._metrics, "websocket")
        try:
            async with self._service.stream(utterance.settings.request(), utterance.text) as stream:
                await self._send_audio(utterance, stream, playback)
                playback.end("done", stream.summary())
        except (PeerGoneError, CloseError):
            raise
        except Exception as error:
            playback.end("failed")
            self._begin_end(utterance)
            await self.report(error, utterance)
            if getattr(error, "code", None) == "draining":
                raise CloseError(1012, "draining") from None
        finally:
            playback.end("cancelled")

    async def _send_audio(
        self, utterance: ConfiguredUtterance, stream: ServiceStream, playback: Playback
    ) -> None:
        settings, started, ttfb_ms = utterance.settings, time.monotonic(), 0.0
        encoder = open_encoder(settings.format, self._service.sample_rate_hz)
        async for chunk in utterance.chunks(stream, self._config.request_seconds):
            data = await encode(encoder, chunk.samples)
            playback.note(chunk)
            if not ttfb_ms:
                ttfb_ms = (time.monotonic() - started) * 1e3
                await self._connection.send_json(self._start_message(utterance))
            await self._send_data(data)
            if settings.timing:
                await self._connection.send_json(_timing_message(utterance, chunk, stream.summary()))
        await self._send_data(await asyncio.to_thread(encoder.finish))
        self._begin_end(utterance)
        summary = stream.summary()
        figures = {**timing(summary), "ttfb_ms": round(ttfb_ms, 1)}
        await self._connection.send_json(
            {
                "type": "audio.done",
                "utterance": utterance.number,
                **{name: figures[name] for name in _FIGURES},
                **skipped(summary),
            }
        )

    def _start_message(self, utterance: ConfiguredUtterance) -> dict[str, Any]:
        return {
            "type": "audio.start",
            "utterance": utterance.number,
            "sample_rate": self._service.sample_rate_hz,
            "format": utterance.settings.format,
        }

    async def _send_data(self, data: bytes) -> None:
        if data:
            await self._connection.send_bytes(data)
            self.last_sent = time.monotonic()


def _note_exception(job: asyncio.Task[None]) -> None:
    """A job may end while nobody waits for it any more: a peer that has gone is noticed by whoever reads, too."""
    if not job.cancelled():
        job.exception()


def _timing_message(utterance: Utterance, chunk: AudioChunk, so_far: SynthesisResult) -> dict[str, Any]:
    times = chunk.times
    return {
        "type": "audio.timing",
        "utterance": utterance.number,
        "index": chunk.index,
        "start_s": round(chunk.start_s, 4),
        "duration_s": round(len(chunk.samples) / chunk.sample_rate_hz, 4),
        "elapsed_ms": round(chunk.elapsed_ms, 2),
        "times": {name: round(getattr(times, name), 2) for name in times.__slots__},
        "text_tokens": so_far.num_text_tokens,
        "speech_tokens": so_far.num_speech_tokens,
    }
