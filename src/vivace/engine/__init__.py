"""The engine joins the stages: text, speech LM, flow, vocoder. Nothing else does.

What runs a model is loaded at first use: requests and voices take no tensor library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vivace.engine.request import SynthesisRequest
from vivace.engine.voices import open_voices

if TYPE_CHECKING:
    from vivace.engine.async_engine import AsyncEngine
    from vivace.engine.engine import Engine
    from vivace.engine.results import SpeechStream
    from vivace.engine.router import EngineRouter

__all__ = ["AsyncEngine", "Engine", "EngineRouter", "SpeechStream", "SynthesisRequest", "open_voices"]

_LAZY = {
    "AsyncEngine": "vivace.engine.async_engine",
    "Engine": "vivace.engine.engine",
    "EngineRouter": "vivace.engine.router",
    "SpeechStream": "vivace.engine.results",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
