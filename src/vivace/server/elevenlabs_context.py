"""One stream of speech on an ElevenLabs WebSocket; several may speak on one connection."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vivace.server.alignment import SegmentClock, SpokenSegment
from vivace.server.connection import CloseError, PeerGoneError
from vivace.server.elevenlabs_format import open_output
from vivace.server.errors import ServerError, describe
from vivace.server.playback import Playback
from vivace.server.utterance import Utterance, encode

if TYPE_CHECKING:
    from vivace.config import ServerConfig
    from vivace.server.connection import Connection
    from vivace.server.elevenlabs_call import VoiceCall
    from vivace.server.metrics import Metrics
    from vivace.server.service import SpeechService

MAX_MESSAGE_AUDIO_BYTES = 96 * 1024
"""Clients take messages of 1 MiB at most, some of less."""


class Context:
    """Text up to a flush is one utterance; utterances are spoken one after the other, in one stream of audio.

    Attributes:
        name: the client's; None where there is only one.
        pending_bytes: text not yet spoken.
        is_closing: no more text will come. has_ended: nor any audio. has_failed: it ended with an error.
        last_sent: when audio was sent, ``time.monotonic``.
    """

    def __init__(
        self,
        name: str | None,
        call: VoiceCall,
        connection: Connection,
        service: SpeechService,
        config: ServerConfig,
        metrics: Metrics,
    ) -> None:
        self.name = name
        self.call = call
        self.pending_bytes = 0
        self.is_closing = False
        self.has_ended = self.has_failed = False
        self.last_sent = 0.0
        self._connection, self._service, self._config, self._metrics = connection, service, config, metrics
        self._open: Utterance | None = None
        self._utterances: deque[Utterance] = deque()
        self._num_utterances = 0
        self._work = asyncio.Event()
        self._encoder = open_output(call.format, service.sample_rate_hz)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """The engine works on text that is complete."""
        return bool(self._utterances) and self._utterances[0].text.is_finished

    @property
    def has_open_text(self) -> bool:
        """Text has come that no flush has followed yet."""
        return self._open is not None

    def start(self) -> asyncio.Task[None]:
        """Begins to speak; the task ends with the context."""
        self._task = asyncio.create_task(self._run())
        return self._task

    def add_text(self, text: str) -> None:
        """More text. Raises ``invalid_utf8`` for half a character."""
        if self.has_ended or self.is_closing:
            return
        if self._open is None:
            text = text.lstrip()
            if not text:
                return
            self._num_utterances += 1
            self._open = Utterance(self._num_utterances)
            self._utterances.append(self._open)
            self._work.set()
        self.pending_bytes += self._open.text.push(text)

    def flush(self) -> None:
        """What has come is all of a sentence: it is spoken to its end."""
        utterance, self._open = self._open, None
        if utterance is not None:
            with suppress(ServerError):  # half a character at the end says nothing
                utterance.finish_text()

    def close(self) -> None:
        """No more text will come; what has come is spoken."""
        self.flush()
        self.is_closing = True
        self._work.set()

    async def stop(self) -> None:
        """Stops at once; no audio is sent after this returns. One that is just telling its end may do so."""
        if self._task is not None and not self._task.done():
            if not self.has_ended:
                self._task.cancel()
            await asyncio.wait([self._task])
        self._end()

    async def fail(self, error: Exception) -> None:
        """Ends with an error."""
        await self.stop()
        await self._tell_error(error)

    async def tell_final(self) -> None:
        """Says that nothing more will come."""
        self._end()
        await self._tell({"audio": None, "isFinal": True, "alignment": None, "normalizedAlignment": None})

    async def _run(self) -> None:
        try:
            while not (self.is_closing and not self._utterances):
                self._work.clear()
                while self._utterances:
                    await self._speak(self._utterances[0])
                    self.pending_bytes -= self._utterances.popleft().text.num_bytes
                if not self.is_closing:
                    await self._work.wait()
            await self._send_audio(await asyncio.to_thread(self._encoder.finish))
            await self.tell_final()
        except (PeerGoneError, CloseError):
            self._end()
            raise
        except Exception as error:
            self._end()
            await self._tell_error(error)

    async def _speak(self, utterance: Utterance) -> None:
        playback, clock = Playback(self._metrics, "elevenlabs"), SegmentClock()
        try:
            async with self._service.stream(self.call.request, utterance.text) as stream:
                async for chunk in utterance.chunks(stream, self._config.request_seconds):
                    data = await encode(self._encoder, chunk.samples)
                    playback.note(chunk)
                    await self._send_audio(data, clock.note(chunk, stream.summary()))
                await self._send_audio(b"", clock.finish(stream.summary()))
                playback.end("done", stream.summary())
        except (PeerGoneError, CloseError):
            raise
        except Exception:
            playback.end("failed")
            raise
        finally:
            playback.end("cancelled")

    async def _send_audio(self, data: bytes, spoken: SpokenSegment | None = None) -> None:
        if not self.call.has_alignment:
            spoken = None
        if not data and spoken is None:
            return
        times = None if spoken is None else spoken.milliseconds()
        for start in range(0, max(1, len(data)), MAX_MESSAGE_AUDIO_BYTES):
            piece = data[start : start + MAX_MESSAGE_AUDIO_BYTES]
            await self._tell(
                {
                    "audio": base64.b64encode(piece).decode(),
                    "isFinal": False if self.name is not None else None,
                    "alignment": times,
                    "normalizedAlignment": times,
                }
            )
            times = None
        self.last_sent = time.monotonic()
        await asyncio.sleep(0)

    async def _tell_error(self, error: Exception) -> None:
        self.has_failed = True
        answer = describe(error)
        self._metrics.errors.labels(answer.code).inc()
        await self._tell({"error": answer.code, "message": answer.message, "code": answer.status})

    async def _tell(self, message: dict[str, Any]) -> None:
        if self.name is not None:
            message["contextId"] = self.name
        await self._connection.send_json(message)

    def _end(self) -> None:
        self.has_ended = True
        self.pending_bytes = 0
