"""``POST /v1/audio/speech``, as OpenAI defines it and a little more."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import FastAPI, Request
from starlette.responses import Response

from vivace.audio.encoders import MEDIA_TYPES, PcmEncoder, WavEncoder, encode_whole, open_encoder
from vivace.server.answers import check_content_type, error_response
from vivace.server.errors import ServerError, describe
from vivace.server.events import delta_event, done_event, error_event, skipped_header, timing_headers
from vivace.server.guard import CUT, WriteStalledError
from vivace.server.marked import MarkedService
from vivace.server.models import check_model
from vivace.server.playback import Playback
from vivace.server.schema import SPEECH_OPERATION
from vivace.server.speech_call import SpeechCall, parse_speech_call
from vivace.server.voice_names import find_voice_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Message, Receive, Scope, Send

    from vivace.audio.encoders import StreamEncoder
    from vivace.config import ServerConfig
    from vivace.datatypes import Samples, SynthesisResult
    from vivace.engine.request import SynthesisRequest
    from vivace.server.metrics import Metrics
    from vivace.server.service import ServiceStream, SpeechService

SMALL_BODY_BYTES = 16 * 1024
"""Up to here a body is read on the event loop; larger ones in a thread."""
PCM_RATE_HZ = 24_000
"""OpenAI's, which its clients take for granted, also where the model's is another (CosyVoice-300M)."""
_PROVENANCE = "x-content-provenance"


def add_speech_routes(app: FastAPI, service: SpeechService, config: ServerConfig) -> None:
    """Adds the route."""

    @app.post("/v1/audio/speech", openapi_extra=SPEECH_OPERATION, response_class=Response)
    async def speech(request: Request) -> Response:
        """Speak: text in, audio out while it is made."""
        check_content_type(request, "application/json")
        body = await request.body()
        parse = asyncio.to_thread if len(body) > SMALL_BODY_BYTES else _at_once
        call = await parse(parse_speech_call, body, config)
        check_model(service, config, call.model)
        prepared = await _with_voice(service, config, call)
        return SpeechAnswer(service, config, app.state.metrics, call, prepared)


async def _at_once(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


async def _with_voice(service: SpeechService, config: ServerConfig, call: SpeechCall) -> SynthesisRequest:
    if call.prompt_audio is not None:
        voice = await service.make_voice(call.prompt_audio, call.prompt_text, consent=True)
        return replace(call.request, voice=voice)
    name = await asyncio.to_thread(find_voice_name, service.voices, config, call.voice)
    return replace(call.request, voice=name)


class ClientGoneError(Exception):
    """Nobody is there to hear the rest."""


class SpeechAnswer(Response):
    """The audio of one request while it is made.

    Errors before the first byte have their status. After it plain audio is cut off, so that it cannot pass for
    complete, and events end with ``speech.audio.error``. A client that leaves ends the request.

    Args:
        open_stream: makes the audio in another way than by speaking ``request``.
    """

    def __init__(
        self,
        service: SpeechService,
        config: ServerConfig,
        metrics: Metrics,
        call: SpeechCall,
        request: SynthesisRequest,
        open_stream: Callable[[], ServiceStream] | None = None,
    ) -> None:
        self.background = None
        self._service, self._config, self._metrics = service, config, metrics
        self._call = call
        self._open_stream = open_stream or partial(service.stream, request)
        self._has_started = False
        self._media_type = "text/event-stream" if call.is_events else MEDIA_TYPES[call.format]

    @property
    def _rate_hz(self) -> int:
        """Of the audio that is sent; a file of Opus may say another one."""
        return PCM_RATE_HZ if self._call.format == "pcm" else self._service.sample_rate_hz

    def _encoder(self) -> StreamEncoder:
        return open_encoder(self._call.format, self._service.sample_rate_hz, self._rate_hz)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        playback = Playback(self._metrics, "sse" if self._call.is_events else "http")
        stream = self._open_stream()
        try:
            async with stream:
                # HTTP/1.0 has no chunks: an answer without a length could be cut off unseen.
                is_whole = self._call.is_whole or scope["http_version"] == "1.0"
                speak = self._send_whole if is_whole else self._send_stream
                await _unless_gone(speak(scope, send, stream, playback), receive)
            playback.end("done", stream.summary())
        except ClientGoneError:
            pass
        except WriteStalledError:
            raise  # nobody takes an error either
        except Exception as error:
            playback.end("failed")
            await self._fail(scope, receive, send, error)
        finally:
            playback.end("cancelled")

    def _provenance(self) -> str:
        mark = f"; watermark={self._service.watermark}" if isinstance(self._service, MarkedService) else ""
        return f"synthetic-speech{mark}"

    async def _fail(self, scope: Scope, receive: Receive, send: Send, error: Exception) -> None:
        if self._has_started and not self._call.is_events and CUT not in scope:
            raise error
        answer = describe(error)
        self._metrics.errors.labels(answer.code).inc()
        if not self._has_started:
            await error_response(answer)(scope, receive, send)
        elif self._call.is_events:
            await send(_body(error_event(answer), more=False))
        else:
            scope[CUT]()
            while (await receive())["type"] != "http.disconnect":
                pass

    async def _send_whole(self, scope: Scope, send: Send, stream: ServiceStream, playback: Playback) -> None:
        parts: list[Samples] = []
        async for chunk in _within(stream, self._config.request_seconds):
            playback.note(chunk)
            parts.append(chunk.samples)
        summary = stream.summary()
        samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        body = await asyncio.to_thread(self._whole_body, samples, summary)
        headers = {"content-length": str(len(body)), **timing_headers(summary), **skipped_header(summary)}
        await self._start(send, headers)
        await send(_body(body, more=False))

    def _whole_body(self, samples: Samples, summary: SynthesisResult) -> bytes:
        audio = encode_whole(self._call.format, self._service.sample_rate_hz, samples, self._rate_hz)
        return audio if not self._call.is_events else delta_event(audio) + done_event(summary)

    async def _send_stream(self, scope: Scope, send: Send, stream: ServiceStream, playback: Playback) -> None:
        encoder = self._encoder()
        async for chunk in _within(stream, self._config.request_seconds):
            data = await _encode(encoder, chunk.samples)
            playback.note(chunk)
            if not self._has_started:
                headers = {"x-vivace-ttfb-ms": f"{chunk.elapsed_ms:.1f}"}
                await self._start(send, headers | skipped_header(stream.summary()))
            if data:
                before = time.monotonic()
                await send(_body(delta_event(data) if self._call.is_events else data))
                playback.held(time.monotonic() - before)
        rest = await asyncio.to_thread(encoder.finish)
        if not self._has_started:
            await self._start(send, {})
        if self._call.is_events:
            rest = (delta_event(rest) if rest else b"") + done_event(stream.summary())
        await send(_body(rest, more=False))

    async def _start(self, send: Send, headers: dict[str, str]) -> None:
        self._has_started = True
        headers = {
            "content-type": self._media_type,
            "cache-control": "no-store",
            "x-accel-buffering": "no",  # or a proxy would hold the audio back
            "x-sample-rate": str(self._rate_hz),
            _PROVENANCE: self._provenance(),
            **headers,
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _unless_gone(work: Any, receive: Receive) -> None:
    """Awaits ``work``, which ends when the client leaves."""

    async def wait_until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_until_gone())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        task.result()
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _within(stream: ServiceStream, seconds: float) -> Any:
    """The chunks; all the waiting for the engine together may take ``seconds``. A slow reader's time is free."""
    while True:
        started = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                chunk = await anext(stream)
        except TimeoutError:
            raise ServerError("The speech took too long to make.", code="deadline_exceeded") from None
        except StopAsyncIteration:
            return
        seconds -= time.monotonic() - started
        yield chunk


async def _encode(encoder: StreamEncoder, samples: Samples) -> bytes:
    if isinstance(encoder, PcmEncoder | WavEncoder):
        return encoder.encode(samples)
    return await asyncio.to_thread(encoder.encode, samples)


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
