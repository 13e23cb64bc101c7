"""Home Assistant's voice protocol, Wyoming: ``vivace serve --wyoming``.

``describe`` is answered with ``info``. ``synthesize`` is answered with ``audio-start``, ``audio-chunk`` … and
``audio-stop``. Streamed text comes as ``synthesize-start``, ``synthesize-chunk`` …, ``synthesize-stop`` and is spoken
while it arrives; ``synthesize-stopped`` follows the audio. The ``synthesize`` that clients send within a stream, for
servers that know no streams, is left out. An error is told with ``error``, and the connection is closed: without
``audio-stop`` the audio is not complete. The protocol has no keys: whoever reaches the port may speak.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from vivace import __version__
from vivace.audio.pcm import pcm16
from vivace.engine.request import SynthesisRequest
from vivace.server.connection import PeerGoneError
from vivace.server.errors import ServerError, describe
from vivace.server.json_body import Fields, missing
from vivace.server.playback import Playback
from vivace.server.utterance import Utterance
from vivace.server.voice_names import find_voice_name
from vivace.server.wyoming_events import MAX_LINE_BYTES, EventPeer
from vivace.text.language import is_language

if TYPE_CHECKING:
    import socket

    from vivace.config import ServerConfig
    from vivace.server.metrics import Metrics
    from vivace.server.service import SpeechService

MAX_CONNECTIONS = 256
MAX_WAITING = 16
"""Requests that one connection may send ahead."""
MAX_NAME_CHARACTERS = 256
LANGUAGES = ("zh", "en", "ja", "ko", "de", "es", "fr", "it", "ru")
MINI_LANGUAGES = ("en",)
_ATTRIBUTION = {"name": "CosyVoice", "url": "https://github.com/FunAudioLLM/CosyVoice"}


@asynccontextmanager
async def wyoming_server(
    listener: socket.socket, service: SpeechService, config: ServerConfig, metrics: Metrics
) -> AsyncIterator[None]:
    """Serves on a bound socket for as long as the block runs; leaving it ends every connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(
            WyomingSession(EventPeer(reader, writer, config), service, config, metrics).run()
        )
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(serve, sock=listener, limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class WyomingSession:
    """One connection: a reader of events beside a speaker of utterances."""

    def __init__(
        self, peer: EventPeer, service: SpeechService, config: ServerConfig, metrics: Metrics
    ) -> None:
        self._peer, self._service, self._config, self._metrics = peer, service, config, metrics
        self._jobs: asyncio.Queue[tuple[SynthesisRequest, Utterance, bool]] = asyncio.Queue()
        self._stream: tuple[SynthesisRequest, Utterance] | None = None
        self._is_queued = False
        self._pending_bytes = 0
        self._is_speaking = False

    async def run(self) -> None:
        """Until the client leaves, or breaks a rule."""
        tasks = [asyncio.create_task(self._read_all()), asyncio.create_task(self._speak_all())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (PeerGoneError, TimeoutError):  # it has left, or is silent
            pass
        except Exception as error:
            await self._tell(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._peer.close()

    async def _tell(self, error: Exception) -> None:
        answer = describe(error)
        self._metrics.errors.labels(answer.code).inc()
        with suppress(PeerGoneError):
            await self._peer.send("error", {"text": answer.message, "code": answer.code})

    async def _read_all(self) -> None:
        while True:
            try:
                event = await self._peer.receive()
            except TimeoutError:
                if not self._is_speaking or self._stream is not None:
                    raise
                continue
            if event.kind == "describe":
                await self._peer.send("info", await asyncio.to_thread(self._info))
            elif event.kind == "ping":
                await self._peer.send("pong", {"text": event.data.text("text", max_characters=1000)})
            elif event.kind == "synthesize" and self._stream is None:
                await self._add(event.data)
            elif event.kind == "synthesize-start":
                self._stream = await self._request(event.data), Utterance(1)
                self._is_queued = False
            elif event.kind == "synthesize-chunk":
                self._add_chunk(event.data)
            elif event.kind == "synthesize-stop":
                await self._end_stream()
            # What other events there are is not for a speaker.

    async def _add(self, data: Fields) -> None:
        request, utterance = await self._request(data), Utterance(1)
        self._push(utterance, _text(data))
        utterance.finish_text()
        self._queue(request, utterance, is_stream=False)

    def _add_chunk(self, data: Fields) -> None:
        text = _text(data)
        if self._stream is None:
            raise ServerError("synthesize-start must come first.", code="unexpected_message", param="type")
        request, utterance = self._stream
        self._push(utterance, text if self._is_queued else text.lstrip())
        if utterance.text.num_bytes and not self._is_queued:
            self._is_queued = True
            self._queue(request, utterance, is_stream=True)

    async def _end_stream(self) -> None:
        if self._stream is None:
            raise ServerError("synthesize-start must come first.", code="unexpected_message", param="type")
        (_, utterance), self._stream = self._stream, None
        utterance.finish_text()
        if not self._is_queued:  # nothing to say
            await self._peer.send("synthesize-stopped")

    def _push(self, utterance: Utterance, text: str) -> None:
        self._pending_bytes += utterance.text.push(text)
        if self._pending_bytes > self._config.websocket_pending_text_bytes:
            raise ServerError("Too much text waits to be spoken.", code="input_too_long", param="text")

    def _queue(self, request: SynthesisRequest, utterance: Utterance, *, is_stream: bool) -> None:
        if self._jobs.qsize() >= MAX_WAITING:
            raise ServerError("Too many requests wait to be spoken.", code="overloaded")
        self._jobs.put_nowait((request, utterance, is_stream))

    async def _request(self, data: Fields) -> SynthesisRequest:
        if (data.text("text_format", max_characters=MAX_NAME_CHARACTERS) or "text") != "text":
            raise ServerError("Send plain text.", code="unsupported_value", param="text_format")
        voice = Fields(data.raw("voice") or {})
        asked = voice.text("name", max_characters=MAX_NAME_CHARACTERS)
        name = await asyncio.to_thread(find_voice_name, self._service.voices, self._config, asked)
        language = (
            (voice.text("language", max_characters=MAX_NAME_CHARACTERS) or "").partition("-")[0].lower()
        )
        return SynthesisRequest("", voice=name, language=language if is_language(language) else None)

    async def _speak_all(self) -> None:
        while True:
            request, utterance, is_stream = await self._jobs.get()
            self._is_speaking = True
            await self._speak(request, utterance)
            self._pending_bytes -= utterance.text.num_bytes
            if is_stream:
                await self._peer.send("synthesize-stopped")
            self._is_speaking = False

    async def _speak(self, request: SynthesisRequest, utterance: Utterance) -> None:
        playback = Playback(self._metrics, "wyoming")
        form = {"rate": self._service.sample_rate_hz, "width": 2, "channels": 1}
        has_started = False
        try:
            async with self._service.stream(request, utterance.text) as stream:
                async for chunk in utterance.chunks(stream, self._config.request_seconds):
                    playback.note(chunk)
                    if not has_started:
                        has_started = True
                        await self._peer.send("audio-start", form)
                    time_ms = round(chunk.start_s * 1000)
                    await self._peer.send("audio-chunk", {**form, "timestamp": time_ms}, pcm16(chunk.samples))
                await self._peer.send("audio-stop", {"timestamp": round(utterance.audio_seconds * 1000)})
                playback.end("done", stream.summary())
        except PeerGoneError:
            raise
        except Exception:
            playback.end("failed")
            raise
        finally:
            playback.end("cancelled")

    def _info(self) -> dict[str, Any]:
        languages = MINI_LANGUAGES if self._service.model == "vivace-mini" else LANGUAGES
        about = {"attribution": _ATTRIBUTION, "installed": True, "version": __version__}
        voices = [
            {"name": name, "description": name, "languages": list(languages), **about}
            for name in self._service.voices.usable_names()
        ]
        program = {
            "name": "vivace",
            "description": "Streaming text to speech with CosyVoice models",
            "supports_synthesize_streaming": True,
            "voices": voices,
            **about,
        }
        return {"tts": [program]}


def _text(data: Fields) -> str:
    text = data.raw("text")
    if text is None:
        raise missing("text")
    if not isinstance(text, str):
        raise ServerError("text must be a string.", code="invalid_type", param="text")
    return text
