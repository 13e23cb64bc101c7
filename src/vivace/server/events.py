"""What an answer says beside its audio: server-sent events, and the figures of a request."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from vivace.datatypes import SynthesisResult
    from vivace.server.errors import ErrorAnswer

_MOST_IN_HEADER = 8
"""Entries of the skipped text: 8 of 60 characters are less than 5 kB, which every proxy takes."""


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def delta_event(audio: bytes) -> bytes:
    """A piece of audio."""
    return _event({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()})


def done_event(summary: SynthesisResult) -> bytes:
    """The good end: tokens in and out as OpenAI counts them, and our figures."""
    num_in, num_out = summary.num_text_tokens, summary.num_speech_tokens
    usage = {"input_tokens": num_in, "output_tokens": num_out, "total_tokens": num_in + num_out}
    done = {"type": "speech.audio.done", "usage": usage, "timing": timing(summary)}
    return _event(done | skipped(summary))


def error_event(answer: ErrorAnswer) -> bytes:
    """The bad end."""
    return _event({"type": "speech.audio.error", **answer.document()})


def timing(summary: SynthesisResult) -> dict[str, Any]:
    """The figures of a request, as every front end reports them."""
    times = summary.times
    return {
        "ttfb_ms": round(summary.ttfb_ms, 1),
        "wall_ms": round(summary.wall_ms, 1),
        "rtf": round(summary.rtf, 4),
        "tps": round(summary.tps, 1),
        "audio_seconds": round(summary.audio_seconds, 3),
        "segments": summary.num_segments,
        "finish_reason": summary.finish_reason,
        "text_ms": round(times.text_ms, 1),
        "prompt_ms": round(times.prompt_ms, 1),
        "lm_ms": round(times.lm_ms, 1),
        "flow_ms": round(times.flow_ms, 1),
        "vocoder_ms": round(times.vocoder_ms, 1),
        "waiting_ms": round(times.waiting_ms, 1),
    }


def skipped(summary: SynthesisResult) -> dict[str, Any]:
    """What the model could not read and did not speak; nothing where it spoke all."""
    return {"skipped_text": summary.skipped_text} if summary.skipped_text else {}


def skipped_header(summary: SynthesisResult) -> dict[str, str]:
    """The same as a header, percent-encoded UTF-8 with commas between."""
    named = ",".join(quote(text, safe="") for text in summary.skipped_text[:_MOST_IN_HEADER])
    return {"x-vivace-skipped-text": named} if named else {}


def timing_headers(summary: SynthesisResult) -> dict[str, str]:
    """The figures that matter most, as headers."""
    shown = ("ttfb_ms", "wall_ms", "rtf", "tps", "audio_seconds", "finish_reason")
    figures = timing(summary)
    return {f"x-vivace-{name.replace('_', '-')}": str(figures[name]) for name in shown}
