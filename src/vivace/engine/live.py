"""The engine's record of one running request: everything mutable about it, in one place."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vivace.datatypes import AudioChunk, FinishReason, SamplingParams, StageTimes
from vivace.engine.scheduler import Ticket
from vivace.errors import VivaceError

if TYPE_CHECKING:
    from vivace.engine.chunking import ChunkPlan
    from vivace.engine.lm_runner import LMSession
    from vivace.engine.text_feed import SegmentInput, TextFeed
    from vivace.engine.vocoder_runner import VocoderSession
    from vivace.models.flow_stream import FlowStream
    from vivace.voice import Voice


@dataclass(slots=True)
class Segment:
    """The segment that is being spoken.

    Attributes:
        lm: decodes its speech tokens; None when the tokens are given (voice conversion).
        flow: its stream behind the voice's prompt; None in offline mode.
        tokens: decoded and not yet given to the flow.
        fed_tokens: given to the flow, prompt included; done_tokens: those whose chunks are finished.
        is_complete: no more tokens will come.
    """

    lm: LMSession | None
    flow: FlowStream | None
    fed_tokens: int
    done_tokens: int
    tokens: list[int] = field(default_factory=list)
    is_complete: bool = False

    @property
    def known_tokens(self) -> int:
        """All tokens there are so far, prompt included."""
        return self.fed_tokens + len(self.tokens)

    def take_chunk(self, plan: ChunkPlan) -> list[int]:
        """The tokens that the next chunk needs: up to its border and look-ahead; offline: all."""
        count = len(self.tokens)
        if self.flow is not None:
            count = min(count, plan.tokens_until_audio(self.done_tokens, self.fed_tokens))
        taken, self.tokens = self.tokens[:count], self.tokens[count:]
        self.fed_tokens += count
        self.done_tokens = max(self.done_tokens, plan.ready_border(self.fed_tokens))
        return taken


@dataclass(slots=True)
class LiveRequest:
    """One request from submit to its end.

    Attributes:
        feed: segments of text still to come; None for voice conversion.
        pieces: where streamed text comes from when the caller gave an iterable.
        chunks: made and not yet taken.
        finish_reason: None while it runs. error: why it failed, raised to the consumer.
        listener: called when there is a new chunk or the request has ended.
    """

    request_id: int
    ticket: Ticket
    voice: Voice
    sampling: SamplingParams
    stream: bool
    vocoder: VocoderSession
    feed: TextFeed | None
    sample_rate_hz: int
    pieces: Iterator[str] | None = None
    segment: Segment | None = None
    segment_input: SegmentInput | None = None
    attempt: int = 0
    num_segments: int = 0
    num_text_tokens: int = 0
    num_speech_tokens: int = 0
    num_samples: int = 0
    num_chunks: int = 0
    chunks: deque[AudioChunk] = field(default_factory=deque)
    spoken_text: list[str] = field(default_factory=list)
    times: StageTimes = field(default_factory=StageTimes)
    started: float = field(default_factory=time.perf_counter)
    finish_reason: FinishReason | None = None
    error: VivaceError | None = None
    was_cut: bool = False
    wall_ms: float = 0.0
    listener: Callable[[], object] | None = None

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1e3

    def account_waiting(self) -> None:
        """Time that went into no stage: other requests' turns, and the consumer."""
        times = self.times
        busy = times.text_ms + times.prompt_ms + times.lm_ms + times.flow_ms + times.vocoder_ms
        times.waiting_ms = max(0.0, self.elapsed_ms() - busy)
