"""The body of ``POST /v1/audio/speech`` as a checked request."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from vivace.audio.encoders import StreamFormat, check_stream_format
from vivace.datatypes import SamplingParams
from vivace.engine.request import MAX_SEED, SynthesisRequest
from vivace.errors import InvalidTextError
from vivace.server.errors import ServerError
from vivace.server.json_body import Fields, missing, parse_json, wrong_type
from vivace.voice.value import MAX_PROMPT_TEXT_CHARACTERS

if TYPE_CHECKING:
    from vivace.config import ServerConfig

Value = TypeVar("Value")

MAX_NAME_CHARACTERS = 256
_DATA_URL = re.compile(r"data:[a-z]+/[a-z0-9.+-]+;base64,", re.IGNORECASE)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


@dataclass(frozen=True, slots=True)
class SpeechCall:
    """What a client asks for.

    Attributes:
        request: complete but for its voice.
        voice: name as the client gave it; None for the default.
        prompt_audio: a recording to speak like, in place of ``voice``, and what it says.
        is_events: server-sent events in place of plain audio.
        is_whole: one body with its length in place of chunks.
    """

    request: SynthesisRequest
    model: str | None
    voice: str | None
    prompt_audio: bytes | None
    prompt_text: str
    format: StreamFormat
    is_events: bool
    is_whole: bool


def parse_speech_call(data: bytes, config: ServerConfig) -> SpeechCall:
    """Reads and checks a body.

    Raises:
        VivaceError: with the code of the contract and the name of the member at fault.
    """
    fields = Fields(parse_json(data))
    model, text = _name(fields, "model"), _input(fields, config)
    instructions = fields.text("instructions", max_characters=config.instruction_characters)
    audio_format, is_events, is_whole = parse_format(fields)
    return SpeechCall(
        request=SynthesisRequest(
            text=text,
            instruction=instructions or None,
            cross_lingual=fields.flag("cross_lingual", default=False),
            language=_name(fields, "language") or None,
            speed=_or(fields.number("speed", 0.25, 4.0), 1.0),
            sampling=_sampling(fields),
        ),
        model=model,
        voice=_voice(fields),
        prompt_audio=_prompt_audio(fields),
        prompt_text=fields.text("ref_text", max_characters=MAX_PROMPT_TEXT_CHARACTERS) or "",
        format=audio_format,
        is_events=is_events,
        is_whole=is_whole,
    )


def parse_format(fields: Fields) -> tuple[StreamFormat, bool, bool]:
    """How the audio is sent: its format, whether as events, whether in one body.

    Raises:
        VivaceError: ``unsupported_value``, ``invalid_type``.
    """
    # A null format is refused: what the client meant by it is heard only once it plays.
    asked = "" if fields.is_null("response_format") else _name(fields, "response_format")
    stream_format = _name(fields, "stream_format") or "audio"
    if stream_format not in ("audio", "sse"):
        raise ServerError(
            "stream_format must be audio or sse.", code="unsupported_value", param="stream_format"
        )
    is_whole = not fields.flag("stream", default=True)
    return check_stream_format("mp3" if asked is None else asked), stream_format == "sse", is_whole


def _input(fields: Fields, config: ServerConfig) -> str:
    text = fields.text("input", max_characters=config.text_characters)
    if text is None:
        raise missing("input")
    if not text:
        raise InvalidTextError("The text is empty.", code="empty_input", param="text")
    return text


def _name(fields: Fields, name: str) -> str | None:
    return fields.text(name, max_characters=MAX_NAME_CHARACTERS)


def _voice(fields: Fields) -> str | None:
    """A name, or OpenAI's object with an ``id``."""
    value = fields.raw("voice")
    if isinstance(value, dict):
        name = _name(Fields(value), "id")
        if not name:
            raise missing("voice")
        return name
    if value is not None and not isinstance(value, str):
        raise wrong_type("voice", 'a string or {"id": …}')
    return _name(fields, "voice") or None


def _sampling(fields: Fields) -> SamplingParams:
    default = SamplingParams()
    return SamplingParams(
        seed=_or(fields.integer("seed", 0, MAX_SEED), default.seed),
        temperature=_or(fields.number("temperature", 0.0, 10.0), default.temperature),
        top_p=fields.number("top_p", 1e-6, 1.0),
        top_k=fields.integer("top_k", 1, 100_000),
    )


def _prompt_audio(fields: Fields) -> bytes | None:
    """A recording within the body: base64, plain or as a ``data:`` URL. Nothing is ever fetched."""
    given = fields.text("ref_audio")
    if given is None:
        return None
    head = _DATA_URL.match(given)
    if head is None and _URL.match(given[:64]):
        raise ServerError(
            "ref_audio must be the recording itself in base64; addresses are not fetched.",
            code="unsupported_value",
            param="ref_audio",
        )
    if not fields.flag("consent", default=False):
        raise consent_required("consent")
    try:
        return base64.b64decode(given[head.end() if head else 0 :], validate=True)
    except (binascii.Error, ValueError):
        raise ServerError("ref_audio is not valid base64.", code="invalid_audio", param="ref_audio") from None


def consent_required(param: str) -> ServerError:
    """The error for a voice whose speaker has not agreed, as far as the client says."""
    return ServerError(
        "Cloning a voice needs the consent of its speaker: send consent=true once you have it.",
        code="consent_required",
        param=param,
    )


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value
