"""The engine joins the stages: text, speech LM, flow, vocoder. Nothing else does."""

from vivace.engine.async_engine import AsyncEngine
from vivace.engine.engine import Engine
from vivace.engine.loading import open_voices
from vivace.engine.request import SynthesisRequest
from vivace.engine.results import SpeechStream
from vivace.engine.router import EngineRouter

__all__ = ["AsyncEngine", "Engine", "EngineRouter", "SpeechStream", "SynthesisRequest", "open_voices"]
