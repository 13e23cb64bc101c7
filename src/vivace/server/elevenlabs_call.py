"""What a client of ElevenLabs' interface asks for, as a request of ours."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vivace.datatypes import SamplingParams
from vivace.engine.request import MAX_SEED, SynthesisRequest
from vivace.errors import InvalidRequestError
from vivace.server.elevenlabs_format import check_output_format
from vivace.server.json_body import Fields
from vivace.server.models import check_model
from vivace.server.voice_names import find_voice_name
from vivace.text.language import is_language

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vivace.config import ServerConfig
    from vivace.server.service import SpeechService

MAX_NAME_CHARACTERS = 256
THEIR_MODELS = "eleven_"
"""Names that begin so are ElevenLabs' own models; clients cannot do without one. They mean the one we have."""


@dataclass(frozen=True, slots=True)
class VoiceCall:
    """Everything but the text.

    Attributes:
        format: of ``elevenlabs_format``.
        has_alignment: times of characters are wanted.
    """

    request: SynthesisRequest
    format: str
    has_alignment: bool = False

    def with_settings(self, message: Fields) -> VoiceCall:
        """As a message's ``voice_settings`` say; of these the speed has a meaning here, the others are left out."""
        settings = message.raw("voice_settings")
        if settings is None:
            return self
        speed = Fields(settings).number("speed", 0.25, 4.0)
        return self if speed is None else replace(self, request=replace(self.request, speed=speed))


async def make_call(
    service: SpeechService,
    config: ServerConfig,
    voice: str,
    query: Mapping[str, str],
    body: Fields | None = None,
) -> VoiceCall:
    """Checks the address and, over HTTP, the members of the body, which count more.

    Raises:
        VivaceError: with the code of the contract and the name of the parameter at fault.
    """
    given = Fields(
        {name: query[name] for name in ("model_id", "output_format", "language_code") if name in query}
    )
    fields = body or Fields({})
    model = _name(fields, "model_id") or _name(given, "model_id")
    if model is not None and not model.startswith(THEIR_MODELS):
        check_model(service, config, model)
    language = _name(fields, "language_code") or _name(given, "language_code")
    if language is not None and not is_language(language):
        raise InvalidRequestError(
            "language_code must be a code such as en, zh or de",
            code="unsupported_value",
            param="language_code",
        )
    seed = fields.integer("seed", 0, MAX_SEED)
    name = await asyncio.to_thread(find_voice_name, service.voices, config, voice[: MAX_NAME_CHARACTERS + 1])
    call = VoiceCall(
        request=SynthesisRequest("", voice=name, language=language, sampling=SamplingParams(seed=seed or 0)),
        format=check_output_format(_name(given, "output_format")),
        has_alignment=query.get("sync_alignment", "true") != "false",
    )
    return call.with_settings(fields)


def _name(fields: Fields, name: str) -> str | None:
    return fields.text(name, max_characters=MAX_NAME_CHARACTERS) or None
