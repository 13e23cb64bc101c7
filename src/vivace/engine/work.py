"""Pieces of work on their way through a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vivace.datatypes import AudioChunk
    from vivace.engine.live import LiveRequest, Segment


@dataclass(slots=True)
class Outcome:
    """What a step made of a request: a chunk, an error that ends it, or neither."""

    live: LiveRequest
    chunk: AudioChunk | None = None
    error: Exception | None = None


@dataclass(slots=True)
class Rendering:
    """One request's part in rendering.

    Attributes:
        segment: None behind the last one, when the vocoder is flushed.
        tokens: for the flow.
        border: tokens until the first chunk border of its frames.
        is_first: nothing of the segment was rendered before.
        segment_ends, request_ends: with these tokens.
    """

    live: LiveRequest
    segment: Segment | None
    tokens: list[int]
    border: int
    is_first: bool
    segment_ends: bool
    request_ends: bool


def attempt(live: LiveRequest, work: Callable[[], AudioChunk | None]) -> Outcome:
    """Does work for one request; an error is its own."""
    try:
        return Outcome(live, work())
    except Exception as error:
        return Outcome(live, error=error)
