"""The engine's record of one running request: everything mutable about it, in one place."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vivace.datatypes import AudioChunk, FinishReason, SamplingParams, StageTimes
from vivace.engine.scheduler import Ticket

if TYPE_CHECKING:
    from vivace.engine.chunking import ChunkPlan
    from vivace.engine.device_stages import DeviceVocoderSession
    from vivace.engine.lm_device_session import DeviceLMSession
    from vivace.engine.lm_runner import LMSession
    from vivace.engine.text_feed import SegmentInput, TextFeed, TextReader
    from vivace.engine.vocoder_runner import VocoderSession
    from vivace.models.flow_paged import MelHandle, PagedStream
    from vivace.models.kinds import AnyFlowStream
    from vivace.voice import Voice


@dataclass(slots=True)
class Segment:
    """The segment that is being spoken.

    Attributes:
        index: 0, 1, 2 … within the request.
        lm: decodes its speech tokens; None when the tokens are given (voice conversion).
        flow: its stream behind the voice's prompt; None in offline mode.
        release: gives back what the two hold on the device.
        tokens: decoded and not yet given to the flow.
        is_whole: rendered at once: in offline mode, and when decoded anew, so that all of it can be judged.
        fed_tokens: given to the flow, prompt included; done_tokens: those whose chunks are finished.
        is_complete: no more tokens will come.
        early_tokens: of ``tokens``, those that the flow has already had for the last chunk of the prompt; early_mel:
            that chunk on its way.
    """

    index: int
    lm: LMSession | DeviceLMSession | None
    flow: AnyFlowStream | PagedStream | None
    release: Callable[[], None]
    is_whole: bool
    fed_tokens: int
    done_tokens: int
    tokens: list[int] = field(default_factory=list)
    is_complete: bool = False
    early_tokens: int = 0
    early_mel: MelHandle | None = None

    @property
    def known_tokens(self) -> int:
        """All tokens there are so far, prompt included."""
        return self.fed_tokens + len(self.tokens)

    def take_chunk(self, plan: ChunkPlan, hop: int = 1) -> list[int]:
        """The tokens that the next ``hop`` chunks need: up to their border and look-ahead; all of a whole segment."""
        count = len(self.tokens)
        if not self.is_whole:
            needed = plan.tokens_until_audio(self.done_tokens, self.fed_tokens)
            count = min(count, needed + (hop - 1) * plan.chunk_tokens)
        taken, self.tokens = self.tokens[:count], self.tokens[count:]
        self.fed_tokens += count
        self.done_tokens = max(self.done_tokens, plan.ready_border(self.fed_tokens))
        return taken


@dataclass(slots=True)
class LiveRequest:
    """One request from submit to its end.

    Only whoever holds the engine's turn changes it, but for ``reader`` and ``pieces`` (the thread that brings the
    text) and for taking ``chunks`` (the consumer).

    Attributes:
        vocoder: runs on through all segments; None before the first chunk on a device, and once the request has ended,
            as are the others that may be.
        reader, feed: the two sides of its text; None for voice conversion.
        pieces: where streamed text comes from when the caller gave an iterable.
        given_tokens: speech tokens to render instead of text.
        chunks: made and not yet taken.
        skipped_text: the reader's, which may still add to it.
        attempt: decodings of the segment that were thrown away.
        was_cut: a segment reached its longest length, or one token came over and over.
        is_cancelled: the consumer has left; nothing more is handed out.
        finish_reason: None while it runs. error: why it failed, raised to the consumer.
        listener: called when there is a new chunk or the request has ended.
    """

    request_id: int
    ticket: Ticket
    voice: Voice
    sampling: SamplingParams
    stream: bool
    sample_rate_hz: int
    started: float
    speed: float
    vocoder: VocoderSession | DeviceVocoderSession | None
    reader: TextReader | None = None
    feed: TextFeed | None = None
    pieces: Iterator[str] | None = None
    given_tokens: list[int] | None = None
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
    skipped_text: list[str] = field(default_factory=list)
    times: StageTimes = field(default_factory=StageTimes)
    first_ms: float = 0.0
    wall_ms: float = 0.0
    was_cut: bool = False
    is_cancelled: bool = False
    finish_reason: FinishReason | None = None
    error: Exception | None = None
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
        times.waiting_ms = max(times.waiting_ms, self.elapsed_ms() - busy)

    def drop_segment(self) -> Segment | None:
        """Takes the segment out and gives back what it holds on the device."""
        segment, self.segment = self.segment, None
        if segment is not None:
            segment.release()
        return segment

    def close_segment(self) -> None:
        """The segment has been spoken: it enters the request's figures."""
        entry, self.segment_input = self.segment_input, None
        segment = self.drop_segment()
        self.attempt = 0
        if segment is None or segment.lm is None or entry is None:
            return
        self.was_cut |= segment.lm.finish_reason == "length"
        self.num_text_tokens += entry.num_text_tokens
        self.spoken_text.append(entry.text)
        self.num_segments += 1

    def release(self) -> None:
        """Lets go of all that takes memory but the chunks that the consumer may still take."""
        self.drop_segment()
        self.segment_input = None
        vocoder, self.vocoder = self.vocoder, None
        if vocoder is not None:
            vocoder.close()
        self.reader = self.feed = None
        self.pieces = None
        self.given_tokens = None
