"""``/v1/audio/voices``: list, add from a recording, remove. OpenAI's shapes, and Open WebUI's."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from vivace.errors import InvalidTextError, InvalidVoiceError, VoiceExistsError, VoiceNotFoundError
from vivace.server.answers import json_answer
from vivace.server.consents import check_consent
from vivace.server.errors import ServerError
from vivace.server.json_body import missing
from vivace.server.schema import VOICE_OPERATION
from vivace.server.uploads import recording, upload_form
from vivace.server.voice_names import OPENAI_VOICES
from vivace.text.prompts import prepare_transcript
from vivace.voice import VoiceEntry, check_voice_name
from vivace.voice.value import check_prompt_text

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vivace.config import ServerConfig
    from vivace.server.multipart import Form
    from vivace.server.service import SpeechService
    from vivace.voice.consent import ConsentRegistry

PAGE_SIZE = 1_000


def add_voice_routes(
    app: FastAPI, service: SpeechService, config: ServerConfig, consents: ConsentRegistry
) -> None:
    """Adds the routes."""

    @app.get("/v1/audio/voices", response_class=Response)
    async def list_voices(request: Request) -> Response:
        """All voices that can be asked for; ``after`` gives the next page."""
        entries = await asyncio.to_thread(service.voices.list)
        after = request.query_params.get("after", "")
        default = service.voices.default_name
        shown = [_document(entry, default) for entry in entries if entry.can_speak]
        start = next((index + 1 for index, voice in enumerate(shown) if voice["id"] == after), 0)
        page = shown[start : start + PAGE_SIZE]
        names = [*(voice["id"] for voice in page), *(OPENAI_VOICES if not start else ())]
        return json_answer(
            {
                "object": "list",
                "data": page,
                "has_more": start + PAGE_SIZE < len(shown),
                "voices": [{"id": name, "name": name} for name in dict.fromkeys(names)],
            }
        )

    @app.post("/v1/audio/voices", openapi_extra=VOICE_OPERATION, response_class=Response)
    async def add_voice(request: Request) -> Response:
        """A voice from a recording of 1 to 30 s, its text, and the consent of its speaker."""
        async with upload_form(request) as form:
            return json_answer(await _make(service, config, consents, form))

    @app.delete("/v1/audio/voices/{name:path}", response_class=Response)
    async def remove_voice(name: str) -> Response:
        """Removes a stored voice; requests that use it go on."""
        await asyncio.to_thread(service.voices.remove, name)
        return json_answer({"id": name, "object": "audio.voice.deleted", "deleted": True})


async def _make(
    service: SpeechService, config: ServerConfig, consents: ConsentRegistry, form: Form
) -> dict[str, Any]:
    name = form.text("name")
    if name is None:
        raise missing("name")
    name = check_voice_name(name)
    if form.text("type") not in (None, "audio_sample"):
        raise ServerError("Voices are made from recordings only.", code="unsupported_value", param="type")
    consent_id = await asyncio.to_thread(check_consent, consents, form.text("consent"))
    audio = recording(form, config, "audio_sample", "file", "prompt_audio")
    await asyncio.to_thread(_check_free, service, name)
    text = form.text("ref_text", "prompt_text", "transcript") or ""
    await asyncio.to_thread(_check_transcript, text)
    voice = await service.make_voice(audio, text, name=name, consent=True)
    if consent_id is not None:
        voice = replace(voice, meta={**voice.meta, "consent_id": consent_id})
    await asyncio.to_thread(service.voices.add, voice)
    return {
        "id": name,
        "object": "audio.voice",
        "name": name,
        "created_at": int(time.time()),
        "type": "audio_sample",
    }


def _check_free(service: SpeechService, name: str) -> None:
    """Before the work of decoding; ``add`` decides when two want a name at once."""
    try:
        service.voices.get(name)
    except VoiceNotFoundError:
        return
    except InvalidVoiceError:
        pass  # damaged, but the name is taken
    raise VoiceExistsError(
        "There is a voice of this name. Remove it first, or take another name.", param="name"
    )


def _check_transcript(text: str) -> None:
    """Before it is stored: a voice whose text is refused later could never speak."""
    text = check_prompt_text(text)
    try:
        prepare_transcript(text)
    except InvalidTextError as error:
        raise InvalidTextError(error.message, code=error.code, param="prompt_text") from None


def _document(entry: VoiceEntry, default: str | None) -> dict[str, Any]:
    try:
        created = int(datetime.fromisoformat(entry.created).timestamp())
    except ValueError:
        created = 0
    return {
        "id": entry.name,
        "object": "audio.voice",
        "name": entry.name,
        "kind": entry.kind,
        "default": entry.name == default,
        "created_at": created,
        "seconds": round(entry.seconds, 2),
    }
