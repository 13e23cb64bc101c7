"""What a caller asks for, and its checks. No tensors.

Settings are copied in at submit: nothing that a request does can change another, and nothing that the caller
changes afterwards can change the request.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vivace.config import Limits
from vivace.datatypes import SamplingParams, plain_number
from vivace.errors import InvalidRequestError, InvalidTextError
from vivace.text.language import is_language

if TYPE_CHECKING:
    from vivace.voice import Voice

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SynthesisRequest:
    """One utterance to speak.

    Attributes:
        text: what to say; an iterable of pieces is spoken while it still arrives, pieces may be cut anywhere.
        voice: name of a stored or built-in voice, a ``Voice``, or None for the model's default.
        instruction: how to say it, in words the model understands ("Speak in Sichuan dialect."). Never spoken.
        cross_lingual: the text is in another language than the voice's prompt: the speech LM then sees neither
            the prompt's text nor its speech, only the flow keeps the voice.
        language: language code of the text for normalisation ("en", "zh", "de" …); None detects it.
        speed: 0.25 … 4; above 1 speaks faster. Works while streaming. A number of any kind, kept as int or float.
        stream: False renders each segment with full attention in one piece (the reference's offline mode).
        sampling: seed and nucleus.
    """

    text: str | Iterable[str]
    voice: str | Voice | None = None
    instruction: str | None = None
    cross_lingual: bool = False
    language: str | None = None
    speed: float = 1.0
    stream: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        object.__setattr__(self, "speed", plain_number(self.speed))


def check_request(request: SynthesisRequest, limits: Limits) -> None:
    """Raises ``InvalidRequestError`` that names the field; the text itself is checked where it is normalised."""
    given: object = request
    if not isinstance(given, SynthesisRequest):
        raise InvalidRequestError(
            "give a SynthesisRequest: SynthesisRequest(text)", code="invalid_type", param="request"
        )
    text: object = request.text
    if isinstance(text, str):
        if len(text) > limits.text_characters:
            raise InvalidTextError(
                f"text is longer than {limits.text_characters} characters; split it into several requests",
                code="input_too_long",
                param="text",
            )
    elif isinstance(text, AsyncIterable):
        raise InvalidTextError(
            "text comes asynchronously: give it to AsyncEngine.stream(request, text=pieces)",
            code="invalid_type",
            param="text",
        )
    elif isinstance(text, bytes) or not isinstance(text, Iterable):
        raise InvalidTextError("text must be a str or an iterable of str", code="invalid_type", param="text")
    check_speed(request.speed, limits)
    for name in ("instruction", "language"):
        value: object = getattr(request, name)
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be a str", code="invalid_type", param=name)
    for name in ("cross_lingual", "stream"):
        if not isinstance(getattr(request, name), bool):
            raise InvalidRequestError(f"{name} must be True or False", code="invalid_type", param=name)
    if request.language is not None and not is_language(request.language):
        raise InvalidRequestError(
            "language must be a code such as en, zh or de", code="unsupported_value", param="language"
        )
    if request.instruction is not None and len(request.instruction) > limits.instruction_characters:
        raise InvalidRequestError(
            f"instruction is longer than {limits.instruction_characters} characters; shorten it",
            code="input_too_long",
            param="instruction",
        )
    check_sampling(request.sampling)


def check_speed(speed: float, limits: Limits) -> float:
    """The speed as an int or float. Raises ``InvalidRequestError`` if it is out of range."""
    plain: float = plain_number(speed)
    _check_number("speed", plain, limits.speed_min, limits.speed_max)
    return plain


def check_sampling(sampling: SamplingParams) -> None:
    """Raises ``InvalidRequestError`` for a seed, nucleus or temperature that is out of range."""
    given: object = sampling
    if not isinstance(given, SamplingParams):
        raise InvalidRequestError("sampling must be SamplingParams", code="invalid_type", param="sampling")
    seed = sampling.seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise InvalidRequestError("seed must be an integer from 0 to 2**63 - 1", param="seed")
    _check_number("temperature", sampling.temperature, 0.0, 10.0)
    if sampling.top_p is not None:
        _check_number("top_p", sampling.top_p, 1e-6, 1.0)
    if sampling.tau_r is not None:
        _check_number("tau_r", sampling.tau_r, 0.0, 1e6)
    for name, value, top in (("top_k", sampling.top_k, 100_000), ("win_size", sampling.win_size, 1_000)):
        low = 1 if name == "top_k" else 0
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not low <= value <= top
        ):
            raise InvalidRequestError(f"{name} must be an integer from {low} to {top}", param=name)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number", code="invalid_type", param=name)
    if not low <= value <= high:  # true of NaN and of integers that no float holds
        raise InvalidRequestError(f"{name} must lie between {low:g} and {high:g}", param=name)
