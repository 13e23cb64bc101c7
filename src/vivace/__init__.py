"""Vivace: fast, exact, streaming CosyVoice text-to-speech.

The public names are loaded at first use, so that importing the package costs nothing (the audio decoder's
child process relies on it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vivace.datatypes import AudioChunk, SamplingParams, StageTimes, SynthesisResult
from vivace.errors import (
    CancelledRequestError,
    InvalidAudioError,
    InvalidRequestError,
    InvalidTextError,
    InvalidVoiceError,
    ModelFolderError,
    OverloadedError,
    SynthesisError,
    VivaceError,
    VoiceExistsError,
    VoiceNotFoundError,
)

if TYPE_CHECKING:
    from vivace.engine import AsyncEngine, Engine, EngineRouter, SpeechStream, SynthesisRequest
    from vivace.voice import Voice, VoiceRegistry

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "AudioChunk",
    "CancelledRequestError",
    "Engine",
    "EngineRouter",
    "InvalidAudioError",
    "InvalidRequestError",
    "InvalidTextError",
    "InvalidVoiceError",
    "ModelFolderError",
    "OverloadedError",
    "SamplingParams",
    "SpeechStream",
    "StageTimes",
    "SynthesisError",
    "SynthesisRequest",
    "SynthesisResult",
    "VivaceError",
    "Voice",
    "VoiceExistsError",
    "VoiceNotFoundError",
    "VoiceRegistry",
]

_LAZY = {
    "AsyncEngine": "vivace.engine",
    "Engine": "vivace.engine",
    "EngineRouter": "vivace.engine",
    "SpeechStream": "vivace.engine",
    "SynthesisRequest": "vivace.engine",
    "Voice": "vivace.voice",
    "VoiceRegistry": "vivace.voice",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        from vivace.environment import spin_briefly

        spin_briefly()  # before the tensor library is loaded
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
