"""Which voice a client means: a stored one, a built-in one, or a name that OpenAI's clients know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.errors import VoiceNotFoundError

if TYPE_CHECKING:
    from vivace.config import ServerConfig
    from vivace.voice import VoiceRegistry

OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
    *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
)
_LIKE = {
    **dict.fromkeys(("alloy", "coral", "marin", "nova"), "heart"),
    **dict.fromkeys(("ballad", "fable", "sage", "shimmer"), "emma"),
    **dict.fromkeys(("cedar", "onyx"), "daniel"),
    **dict.fromkeys(("ash", "echo", "verse"), "puck"),
}
"""OpenAI's voices, and those of the embedded model that come nearest."""


def find_voice_name(voices: VoiceRegistry, config: ServerConfig, asked: str | None) -> str | None:
    """The name of a voice that exists; None takes the model's default. May read a file.

    A voice of that very name comes first, then the configured aliases, then OpenAI's names, which are spread
    over the model's own voices.

    Raises:
        VoiceNotFoundError: there is no such voice. InvalidVoiceError: its file is damaged.
    """
    if asked is None or asked == "default":
        return None
    target = config.voice_aliases.get(asked, asked)
    try:
        return voices.get(target).name
    except VoiceNotFoundError:
        builtin, known = voices.builtin_names, asked.lower()
        if known not in OPENAI_VOICES or not builtin:
            raise
    like = _LIKE[known]
    return like if like in builtin else builtin[OPENAI_VOICES.index(known) % len(builtin)]
