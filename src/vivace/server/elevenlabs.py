"""The shape of ElevenLabs' interface, for clients that know it: under ``/elevenlabs/v1`` and under ``/v1``.

What has no meaning here (stability, similarity, style, latency hints, pronunciation dictionaries) is taken and left
out. ``/v1/models`` is OpenAI's; ElevenLabs' list stands under the prefix only.
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute

from vivace.audio.pcm import wav_header
from vivace.errors import InvalidTextError
from vivace.server.alignment import SegmentClock, SpokenSegment
from vivace.server.answers import check_content_type, json_answer
from vivace.server.connection import Connection
from vivace.server.elevenlabs_call import VoiceCall, make_call
from vivace.server.elevenlabs_format import media_type_of, open_output
from vivace.server.elevenlabs_session import ElevenLabsSession
from vivace.server.errors import ServerError
from vivace.server.json_body import Fields, missing, parse_json
from vivace.server.playback import Playback
from vivace.server.speech import SpeechAnswer
from vivace.server.speech_call import SpeechCall
from vivace.server.transform import form_fields, open_conversion
from vivace.server.uploads import recording, upload_form

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI
    from starlette.websockets import WebSocket

    from vivace.audio.encoders import StreamEncoder
    from vivace.config import ServerConfig
    from vivace.datatypes import Samples
    from vivace.server.metrics import Metrics
    from vivace.server.multipart import Form
    from vivace.server.service import ServiceStream, SpeechService
    from vivace.voice import VoiceEntry

PREFIX = "/elevenlabs"


def add_elevenlabs_routes(app: FastAPI, service: SpeechService, config: ServerConfig) -> None:
    """Adds the routes."""
    metrics: Metrics = app.state.metrics

    async def speak(request: Request, voice: str) -> Response:
        """Speech while it is made; the complete form differs in nothing."""
        call, text = await _read(request, service, config, voice)
        return ElevenLabsAnswer(service, config, metrics, call, text)

    async def speak_with_times(request: Request, voice: str) -> Response:
        """The whole speech in one document, with the times of its characters."""
        call, text = await _read(request, service, config, voice)
        return await _with_times(service, config, metrics, call, text)

    async def convert(request: Request, voice: str) -> Response:
        """The words of a recording in another voice, while it is made; the complete form differs in nothing."""
        async with AsyncExitStack() as upload:
            form = await upload.enter_async_context(upload_form(request))
            fields = form_fields(form, "model_id", "voice_settings")
            call = await make_call(service, config, voice, request.query_params, fields)
            source = _source(form, config)
            open_stream = open_conversion(service, upload, source, call.request.voice, call.request.speed)
            return ElevenLabsAnswer(service, config, metrics, call, "", open_stream)

    async def list_voices() -> Response:
        entries = await asyncio.to_thread(service.voices.list)
        return json_answer({"voices": [_voice_document(entry) for entry in entries if entry.can_speak]})

    async def list_models() -> Response:
        return json_answer([_model_document(service.model, can_convert=service.voices.takes_recordings)])

    def socket(*, is_multi: bool) -> Any:
        async def stream_input(websocket: WebSocket) -> None:
            await ElevenLabsSession(
                Connection(websocket, config),
                service,
                config,
                metrics,
                voice=websocket.path_params["voice"],
                query=websocket.query_params,
                is_multi=is_multi,
            ).run()

        return stream_input

    for prefix in ("", PREFIX):
        base = f"{prefix}/v1/text-to-speech/{{voice}}"
        for path in (base, f"{base}/stream"):
            app.post(path, response_class=Response, include_in_schema=False)(speak)
        app.post(f"{base}/with-timestamps", response_class=Response, include_in_schema=False)(
            speak_with_times
        )
        for name, end in product(("speech-to-speech", "voice-changer"), ("", "/stream")):
            path = f"{prefix}/v1/{name}/{{voice}}{end}"  # the latter is what their newer package asks for
            app.post(path, response_class=Response, include_in_schema=False)(convert)
        app.get(f"{prefix}/v1/voices", response_class=Response, include_in_schema=False)(list_voices)
        for name, is_multi in (("stream-input", False), ("multi-stream-input", True)):
            app.router.routes.append(WebSocketRoute(f"{base}/{name}", socket(is_multi=is_multi)))
    app.get(f"{PREFIX}/v1/models", response_class=Response, include_in_schema=False)(list_models)


async def _read(
    request: Request, service: SpeechService, config: ServerConfig, voice: str
) -> tuple[VoiceCall, str]:
    check_content_type(request, "application/json")
    fields = Fields(await asyncio.to_thread(parse_json, await request.body()))
    text = fields.text("text", max_characters=config.text_characters)
    if text is None:
        raise missing("text")
    if not text:
        raise InvalidTextError("The text is empty.", code="empty_input", param="text")
    return await make_call(service, config, voice, request.query_params, fields), text


def _source(form: Form, config: ServerConfig) -> bytes:
    """The recording of a form; raw samples of 16 kHz get a header."""
    source = recording(form, config, "audio")
    file_format = form.text("file_format") or "other"
    if file_format not in ("other", "pcm_s16le_16"):
        raise ServerError(
            "file_format must be other or pcm_s16le_16.", code="unsupported_value", param="file_format"
        )
    return source if file_format == "other" else wav_header(16_000, len(source)) + source


class ElevenLabsAnswer(SpeechAnswer):
    """Audio while it is made, in one of their formats."""

    def __init__(
        self,
        service: SpeechService,
        config: ServerConfig,
        metrics: Metrics,
        call: VoiceCall,
        text: str,
        open_stream: Callable[[], ServiceStream] | None = None,
    ) -> None:
        request = replace(call.request, text=text)
        plain = SpeechCall(request, None, None, None, "", "pcm", is_events=False, is_whole=False)
        super().__init__(service, config, metrics, plain, request, open_stream)
        self._media_type = media_type_of(call.format)
        self._output = call.format

    def _encoder(self) -> StreamEncoder:
        return open_output(self._output, self._service.sample_rate_hz)

    def _whole_body(self, samples: Samples, summary: object) -> bytes:
        encoder = self._encoder()
        return encoder.encode(samples) + encoder.finish()


async def _with_times(
    service: SpeechService, config: ServerConfig, metrics: Metrics, call: VoiceCall, text: str
) -> Response:
    playback, clock = Playback(metrics, "elevenlabs"), SegmentClock()
    encoder, audio, spoken = open_output(call.format, service.sample_rate_hz), [], []
    try:
        async with (
            asyncio.timeout(config.request_seconds),
            service.stream(replace(call.request, text=text)) as stream,
        ):
            async for chunk in stream:
                playback.note(chunk)
                audio.append(await asyncio.to_thread(encoder.encode, chunk.samples))
                spoken.append(clock.note(chunk, stream.summary()))
            spoken.append(clock.finish(stream.summary()))
            playback.end("done", stream.summary())
    except TimeoutError:
        raise ServerError("The speech took too long to make.", code="deadline_exceeded") from None
    finally:
        playback.end("failed")
    audio.append(await asyncio.to_thread(encoder.finish))
    times = _alignment([segment for segment in spoken if segment is not None])
    document = {"alignment": times, "normalized_alignment": times}
    return json_answer({"audio_base64": base64.b64encode(b"".join(audio)).decode(), **document})


def _alignment(segments: list[SpokenSegment]) -> dict[str, Any]:
    characters: list[str] = []
    starts: list[float] = []
    ends: list[float] = []
    offset = 0.0
    for segment in segments:
        times = [round(offset + start_s, 3) for start_s in segment.starts_s()]
        characters += segment.characters()
        starts += times[:-1]
        ends += times[1:]
        offset += segment.seconds
    return {
        "characters": characters,
        "character_start_times_seconds": starts,
        "character_end_times_seconds": ends,
    }


def _voice_document(entry: VoiceEntry) -> dict[str, Any]:
    return {
        "voice_id": entry.name,
        "name": entry.name,
        "category": "premade" if entry.kind == "built-in" else "cloned",
        "labels": {},
        "description": None,
        "preview_url": None,
    }


def _model_document(name: str, *, can_convert: bool) -> dict[str, Any]:
    return {
        "model_id": name,
        "name": name,
        "can_do_text_to_speech": True,
        "can_do_voice_conversion": can_convert,
        "can_use_style": False,
        "can_use_speaker_boost": False,
    }
