"""``/v1/audio/voice_consents``: recordings in which speakers agree. OpenAI's shapes.

The recording is checked to be audio, and kept; what it says is for people to judge.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from vivace.audio.decode import decode_audio
from vivace.config import Limits
from vivace.errors import InvalidAudioError
from vivace.server.answers import check_content_type, json_answer
from vivace.server.errors import ServerError
from vivace.server.json_body import Fields, missing, parse_json
from vivace.server.schema import CONSENT_OPERATION, CONSENT_UPDATE_OPERATION
from vivace.server.speech_call import consent_required
from vivace.server.uploads import recording, upload_form
from vivace.voice.consent import Consent, ConsentRegistry

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vivace.config import ServerConfig

MAX_LABEL_CHARACTERS = 256
DEFAULT_PAGE, LARGEST_PAGE = 20, 100

_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8}){0,4}")
_YES = frozenset({"true", "yes", "on", "1"})
_NO = frozenset({"", "false", "no", "off", "0", "none", "null"})


def add_consent_routes(app: FastAPI, consents: ConsentRegistry, config: ServerConfig) -> None:
    """Adds the routes."""

    @app.get("/v1/audio/voice_consents", response_class=Response)
    async def list_consents(request: Request) -> Response:
        """All consents, the oldest first, ``limit`` a page; ``after`` gives the next one."""
        limit, after = _limit(request), request.query_params.get("after", "")
        found = [_document(consent) for consent in await asyncio.to_thread(consents.list)]
        start = next((index + 1 for index, consent in enumerate(found) if consent["id"] == after), 0)
        page = found[start : start + limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        return json_answer({"object": "list", "data": page, "has_more": start + limit < len(found), **ends})

    @app.post("/v1/audio/voice_consents", openapi_extra=CONSENT_OPERATION, response_class=Response)
    async def create_consent(request: Request) -> Response:
        """Stores a recording of 1 to 30 s in which a speaker agrees."""
        async with upload_form(request) as form:
            name, language = _label(form.text("name")), _language(form.text("language"))
            audio = recording(form, config, "recording")
            await asyncio.to_thread(_check_audio, audio)
            return json_answer(_document(await asyncio.to_thread(consents.create, name, language, audio)))

    @app.get("/v1/audio/voice_consents/{consent_id:path}", response_class=Response)
    async def retrieve_consent(consent_id: str) -> Response:
        """What is known of a consent; its recording stays here."""
        return json_answer(_document(await asyncio.to_thread(consents.get, consent_id)))

    @app.post(
        "/v1/audio/voice_consents/{consent_id:path}",
        openapi_extra=CONSENT_UPDATE_OPERATION,
        response_class=Response,
    )
    async def update_consent(consent_id: str, request: Request) -> Response:
        """Gives it another label."""
        check_content_type(request, "application/json")
        name = _label(Fields(parse_json(await request.body())).text("name"))
        return json_answer(_document(await asyncio.to_thread(consents.rename, consent_id, name)))

    @app.delete("/v1/audio/voice_consents/{consent_id:path}", response_class=Response)
    async def delete_consent(consent_id: str) -> Response:
        """Deletes the recording; voices made with it stay."""
        await asyncio.to_thread(consents.remove, consent_id)
        return json_answer({"id": consent_id, "object": "audio.voice_consent", "deleted": True})


def check_consent(consents: ConsentRegistry, given: str | None) -> str | None:
    """What a client says of the speaker's consent: the id of a stored one, or None where it declares it itself.

    Raises:
        ServerError: ``consent_required``: there is none. ConsentNotFoundError: no such id.
    """
    word = (given or "").strip().lower()
    if word in _NO:
        raise consent_required("consent")
    if word in _YES:
        return None
    return consents.get(word).id


def _check_audio(data: bytes) -> None:
    try:
        decode_audio(data, Limits())
    except InvalidAudioError as error:
        raise InvalidAudioError(error.message, code=error.code, param="recording") from None


def _label(name: str | None) -> str:
    if name is None:
        raise missing("name")
    label = name.strip()
    if not label or len(label) > MAX_LABEL_CHARACTERS or not label.isprintable():
        raise ServerError(
            f"A label has 1 to {MAX_LABEL_CHARACTERS} printable characters.",
            code="invalid_name",
            param="name",
        )
    return label


def _language(tag: str | None) -> str:
    if tag is None:
        raise missing("language")
    if _LANGUAGE.fullmatch(tag) is None:
        raise ServerError("language must be a tag such as en-US.", code="unsupported_value", param="language")
    return tag


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_PAGE))
    limit = int(text) if re.fullmatch(r"[0-9]{1,4}", text) else 0
    if not 1 <= limit <= LARGEST_PAGE:
        raise ServerError(
            f"limit must lie between 1 and {LARGEST_PAGE}.", code="value_out_of_range", param="limit"
        )
    return limit


def _document(consent: Consent) -> dict[str, Any]:
    return {"object": "audio.voice_consent", **asdict(consent)}
