"""How a WebSocket session speaks: what ``session.config`` sets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vivace.audio.encoders import StreamFormat, check_stream_format
from vivace.datatypes import SamplingParams
from vivace.engine.request import MAX_SEED, SynthesisRequest
from vivace.errors import InvalidRequestError
from vivace.server.json_body import Fields, missing
from vivace.server.models import check_model
from vivace.server.voice_names import find_voice_name
from vivace.text.language import is_language

if TYPE_CHECKING:
    from vivace.config import ServerConfig
    from vivace.server.service import SpeechService

MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of the utterances that begin after it.

    Attributes:
        voice: name of a voice that exists; None is the model's default.
        timing: send ``audio.timing`` after each chunk.
    """

    voice: str | None = None
    format: StreamFormat = "pcm"
    speed: float = 1.0
    instruction: str | None = None
    language: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timing: bool = False

    def request(self) -> SynthesisRequest:
        """A request whose text is streamed."""
        return SynthesisRequest(
            text="",
            voice=self.voice,
            instruction=self.instruction,
            language=self.language,
            speed=self.speed,
            sampling=self.sampling,
        )


async def changed(
    settings: SessionConfig, message: Fields, service: SpeechService, config: ServerConfig
) -> SessionConfig:
    """The settings with those that the message names; the others stay. All of it, or nothing.

    Raises:
        VivaceError: with the code of the contract and the name of the member at fault.
    """
    check_model(service, config, message.text("model", max_characters=MAX_NAME_CHARACTERS))
    changes = _changes(settings, message, config)
    if "voice" in message:
        asked = _voice(message)
        changes["voice"] = await asyncio.to_thread(find_voice_name, service.voices, config, asked)
    return replace(settings, **changes)


def _changes(settings: SessionConfig, message: Fields, config: ServerConfig) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    name = message.text("response_format", max_characters=MAX_NAME_CHARACTERS)
    if name is not None:
        changes["format"] = check_stream_format(name)
    speed = message.number("speed", 0.25, 4.0)
    if speed is not None:
        changes["speed"] = speed
    instructions = message.text("instructions", max_characters=config.instruction_characters)
    if instructions is not None:
        changes["instruction"] = instructions or None
    language = message.text("language", max_characters=MAX_NAME_CHARACTERS)
    if language is not None:
        if language and not is_language(language):
            raise InvalidRequestError(
                "language must be a code such as en, zh or de", code="unsupported_value", param="language"
            )
        changes["language"] = language or None
    changes["sampling"] = _sampling(settings.sampling, message)
    changes["timing"] = message.flag("timing", default=settings.timing)
    return changes


def _sampling(sampling: SamplingParams, message: Fields) -> SamplingParams:
    given: dict[str, Any] = {
        "seed": message.integer("seed", 0, MAX_SEED),
        "temperature": message.number("temperature", 0.0, 10.0),
        "top_p": message.number("top_p", 1e-6, 1.0),
        "top_k": message.integer("top_k", 1, 100_000),
    }
    return replace(sampling, **{name: value for name, value in given.items() if value is not None})


def _voice(message: Fields) -> str | None:
    """A name, or OpenAI's object with an ``id``; empty for the default."""
    value = message.raw("voice")
    if isinstance(value, dict):
        name = Fields(value).text("id", max_characters=MAX_NAME_CHARACTERS)
        if not name:
            raise missing("voice")
        return name
    return message.text("voice", max_characters=MAX_NAME_CHARACTERS) or None
