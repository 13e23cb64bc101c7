"""The voice as a value."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from vivace.errors import InvalidTextError, InvalidVoiceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from vivace.config import ModelConfig

MetaValue = str | int | float | bool | None

MAX_PROMPT_TEXT_CHARACTERS = 2_000
MAX_FRAMES_PER_TOKEN = 16
MAX_PROMPT_TOKENS = 15_000
"""Far above what the model accepts; bounds what a voice file can make us allocate."""

MAX_META_ENTRIES = 100
MAX_META_CHARACTERS = 1_000
MAX_META_NUMBER = 1e15

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
# Device names of Windows, which no file there can have.
_RESERVED = frozenset(
    ["con", "prn", "aux", "nul"] + [f"{device}{digit}" for device in ("com", "lpt") for digit in range(10)]
)


def check_voice_name(name: str) -> str:
    """The name in its one spelling (Unicode NFC, lower case), safe as a file name everywhere.

    Raises:
        InvalidVoiceError: ``invalid_name``: not ``[a-z0-9][a-z0-9_-]{0,63}``, or a device name of Windows.
    """
    # The length first: normalising is for names, not for megabytes.
    normal = unicodedata.normalize("NFC", name).lower() if len(name) <= 256 else ""
    if _NAME.fullmatch(normal) is None or normal in _RESERVED:
        raise InvalidVoiceError(
            "A voice name has 1 to 64 letters a-z, digits, '-' and '_', starting with a letter or digit.",
            param="name",
        )
    return normal


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """A speaker to imitate: the prompt as the model sees it. Compares by identity; the arrays are read-only.

    Attributes:
        name: see ``check_voice_name``.
        prompt_text: what the prompt says; empty if unknown (the voice then works as in cross-lingual use).
        speech_tokens: int32 ``[P]``; ``P`` may be 0 (a speaker known by embedding only).
        mel: float32 ``[frames, 80]``, log-mel of the prompt: as many frames as the model makes of ``P`` tokens
            (2 a token; 1.7 or 3.4 in CosyVoice-300M).
        embedding: float32 ``[192]``, the speaker encoder's.
        meta: plain values: ``created`` (ISO 8601, UTC), ``consent``, ``generation``, ``model``,
            ``speech_token_size`` (of the codebook the tokens belong to), ``seconds``; others are kept.

    Raises:
        InvalidVoiceError: ``invalid_name``, or ``invalid_voice`` for arrays of another shape, type or range.
        InvalidTextError: the prompt text is too long or not valid Unicode.
    """

    name: str
    prompt_text: str
    speech_tokens: NDArray[np.int32]
    mel: NDArray[np.float32]
    embedding: NDArray[np.float32]
    meta: Mapping[str, MetaValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", check_voice_name(self.name))
        object.__setattr__(self, "prompt_text", check_prompt_text(self.prompt_text))
        object.__setattr__(self, "speech_tokens", _owned(self.speech_tokens, np.int32, 1, "speech_tokens"))
        object.__setattr__(self, "mel", _owned(self.mel, np.float32, 2, "mel"))
        object.__setattr__(self, "embedding", _owned(self.embedding, np.float32, 1, "embedding"))
        object.__setattr__(self, "meta", MappingProxyType(_checked_meta(self.meta)))
        num_tokens, num_frames = len(self.speech_tokens), len(self.mel)
        if num_tokens > MAX_PROMPT_TOKENS:
            raise invalid_voice("speech_tokens are too many")
        if num_tokens and int(self.speech_tokens.min()) < 0:
            raise invalid_voice("speech_tokens are negative")
        if not num_tokens <= num_frames <= MAX_FRAMES_PER_TOKEN * num_tokens:
            raise invalid_voice("mel and speech tokens are not of the same length")
        if len(self.embedding) == 0:
            raise invalid_voice("embedding is empty")

    def check_fits(self, config: ModelConfig) -> None:
        """Make sure that this voice was made for this kind of model.

        Raises:
            InvalidVoiceError: ``invalid_voice``; the message says what differs and what to do.
        """
        codebook, generation = self.meta.get("speech_token_size"), self.meta.get("generation")
        wanted = config.lm.speech_token_size
        again = "Make it again from its recording with this model (`vivace voice add`)."
        if codebook is not None and codebook != wanted:
            raise invalid_voice(f"it was made for {codebook} speech tokens, this model has {wanted}. {again}")
        if generation is not None and generation != config.generation:
            raise invalid_voice(
                f"it was made for generation {generation}, this model is {config.generation}. {again}"
            )
        if len(self.speech_tokens) and int(self.speech_tokens.max()) >= wanted:
            raise invalid_voice(f"it has speech tokens beyond this model's {wanted}. {again}")
        if len(self.mel) != config.flow.num_frames(len(self.speech_tokens)):
            raise invalid_voice(f"its mel does not have this model's frames per token. {again}")
        if len(self.mel) and self.mel.shape[1] != config.flow.output_size:
            raise invalid_voice(f"its mel does not have this model's number of bands. {again}")
        if len(self.embedding) != config.flow.spk_embed_dim:
            raise invalid_voice(f"its speaker embedding is not of this model's size. {again}")


def check_prompt_text(text: str) -> str:
    """The text without white space around it.

    Raises:
        InvalidTextError: ``input_too_long``, ``invalid_utf8``.
    """
    if len(text) > MAX_PROMPT_TEXT_CHARACTERS:
        raise InvalidTextError(
            f"The prompt text is longer than {MAX_PROMPT_TEXT_CHARACTERS} characters. It must be what the "
            "recording says, nothing more.",
            code="input_too_long",
            param="prompt_text",
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidTextError(
            "The prompt text is not valid Unicode (it holds half of a surrogate pair).",
            code="invalid_utf8",
            param="prompt_text",
        )
    return text.strip()


def invalid_voice(reason: str) -> InvalidVoiceError:
    """The error for a voice that cannot be used."""
    return InvalidVoiceError(f"This voice cannot be used: {reason}", code="invalid_voice", param="voice")


def _owned(array: NDArray[np.generic], kind: type[np.generic], ndim: int, what: str) -> NDArray[np.generic]:
    """A read-only copy that nobody else can reach, after checking its type, dimensions and values."""
    if not isinstance(array, np.ndarray) or array.dtype != kind or array.ndim != ndim:
        raise invalid_voice(f"{what} must be a {ndim}-dimensional array of {np.dtype(kind).name}")
    if not np.isfinite(array).all():
        raise invalid_voice(f"{what} holds NaN or infinite values")
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy


def _checked_meta(meta: Mapping[str, MetaValue]) -> dict[str, MetaValue]:
    if len(meta) > MAX_META_ENTRIES:
        raise invalid_voice("its metadata has too many entries")
    for key, value in meta.items():
        if not isinstance(key, str) or not isinstance(value, str | int | float | bool | None):
            raise invalid_voice("its metadata must be plain text, numbers and truth values")
        if max(len(key), len(value) if isinstance(value, str) else 0) > MAX_META_CHARACTERS:
            raise invalid_voice("its metadata has an entry that is too long")
        if isinstance(value, int | float) and not abs(value) < MAX_META_NUMBER:  # also NaN
            raise invalid_voice("its metadata has a number that is not finite or too large")
    return dict(meta)
