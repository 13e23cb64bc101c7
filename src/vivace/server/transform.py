"""``POST /v1/audio/transform``: the words of a recording in another voice, sent while it is made."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from vivace import strict_json
from vivace.engine.request import SynthesisRequest
from vivace.errors import InvalidAudioError, ModelFolderError
from vivace.server.errors import ServerError
from vivace.server.json_body import Fields
from vivace.server.models import check_model
from vivace.server.schema import TRANSFORM_OPERATION
from vivace.server.speech import SpeechAnswer
from vivace.server.speech_call import MAX_NAME_CHARACTERS, SpeechCall, parse_format
from vivace.server.uploads import recording, upload_form
from vivace.server.voice_names import find_voice_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from vivace.config import ServerConfig
    from vivace.datatypes import AudioChunk, SynthesisResult
    from vivace.server.multipart import Form
    from vivace.server.service import ServiceStream, SpeechService
    from vivace.voice import Voice

_PLAIN = ("speed", "stream", "voice_settings")
"""Fields of a form that hold what JSON writes without quotation marks."""


def add_transform_routes(app: FastAPI, service: SpeechService, config: ServerConfig) -> None:
    """Adds the route."""

    @app.post("/v1/audio/transform", openapi_extra=TRANSFORM_OPERATION, response_class=Response)
    async def transform(request: Request) -> Response:
        """Voice conversion: 1 to 30 s of speech in, the same words in another voice out while it is made."""
        async with AsyncExitStack() as upload:
            form = await upload.enter_async_context(upload_form(request))
            call = _call(form)
            check_model(service, config, call.model)
            voice = await asyncio.to_thread(find_voice_name, service.voices, config, call.voice)
            source = recording(form, config, "audio", "file")
            open_stream = open_conversion(service, upload, source, voice, call.request.speed)
            return SpeechAnswer(service, config, app.state.metrics, call, call.request, open_stream)


def form_fields(form: Form, *names: str) -> Fields:
    """Fields of a form, to be read like members of a JSON body; empty ones are left out.

    Raises:
        ServerError: ``invalid_utf8``, ``input_too_long``.
    """
    given = {name: form.text(name) for name in names}
    return Fields({name: _value(name, text) for name, text in given.items() if text})


def _value(name: str, text: str) -> Any:
    if name in _PLAIN:
        with suppress(ValueError, RecursionError):  # then it stays a string, which has the wrong type
            return strict_json.loads(text)
    return text


def _call(form: Form) -> SpeechCall:
    fields = form_fields(form, "model", "voice", "response_format", "speed", "stream_format", "stream")
    speed = fields.number("speed", 0.25, 4.0)
    name = fields.text("voice", max_characters=MAX_NAME_CHARACTERS)
    request = SynthesisRequest("", voice=name, speed=1.0 if speed is None else speed)
    audio_format, is_events, is_whole = parse_format(fields)
    model = fields.text("model", max_characters=MAX_NAME_CHARACTERS)
    return SpeechCall(request, model, name, None, "", audio_format, is_events, is_whole)


def open_conversion(
    service: SpeechService, upload: AsyncExitStack, source: bytes, voice: str | Voice | None, speed: float
) -> Callable[[], ServiceStream]:
    """For an answer: its stream, until whose first audio the request counts as an upload at work."""
    stream = ConversionStream(service.transform(source, voice, speed=speed), upload.pop_all())
    return lambda: stream


class ConversionStream:
    """A stream of ``SpeechService.transform`` whose errors name what clients know.

    Args:
        upload: closed once the recording has been read, or will not be.
    """

    def __init__(self, inner: ServiceStream, upload: AsyncExitStack) -> None:
        self._inner, self._upload = inner, upload

    def __aiter__(self) -> ConversionStream:
        return self

    async def __anext__(self) -> AudioChunk:
        try:
            return await anext(self._inner)
        except InvalidAudioError as error:
            raise InvalidAudioError(error.message, code=error.code, param="audio") from None
        except ModelFolderError:
            raise ServerError(
                "This server's model cannot convert voices: it has no speech tokenizer.",
                code="not_implemented",
            ) from None
        finally:
            await self._upload.aclose()

    async def __aenter__(self) -> ConversionStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels the request if it still runs."""
        await self._upload.aclose()
        await self._inner.aclose()

    def summary(self) -> SynthesisResult:
        return self._inner.summary()
