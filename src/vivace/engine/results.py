"""What a caller holds while a request runs, and the figures at its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vivace.datatypes import AudioChunk, SynthesisResult

if TYPE_CHECKING:
    from vivace.datatypes import Samples
    from vivace.engine.engine import Engine
    from vivace.engine.live import LiveRequest


class SpeechStream(Iterator[AudioChunk]):
    """The audio of one request, chunk by chunk.

    ``close``, leaving a ``with`` block or dropping the object cancels what is still to come and frees the
    request's state at once. After an error or a cancellation every further ``next`` raises it again: such a
    stream never looks complete.
    """

    def __init__(self, engine: Engine, live: LiveRequest) -> None:
        self._engine = engine
        self._live = live

    def __iter__(self) -> SpeechStream:
        return self

    def __next__(self) -> AudioChunk:
        chunk = self._engine.next_chunk(self._live)
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> SpeechStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the request if it still runs."""
        self._engine.cancel(self._live)

    def summary(self, samples: Samples | None = None) -> SynthesisResult:
        """The figures of the request so far; complete once the last chunk was taken.

        Args:
            samples: what the caller kept of the audio, to travel with the figures.
        """
        return summarise(self._live, samples)

    def collect(self) -> SynthesisResult:
        """Takes the chunks that are left and returns them joined, with the figures of the whole request."""
        return self.summary(join([chunk.samples for chunk in self]))


def join(parts: list[Samples]) -> Samples:
    """All samples in one array."""
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def summarise(live: LiveRequest, samples: Samples | None = None) -> SynthesisResult:
    """The figures of a request so far."""
    audio_seconds = live.num_samples / live.sample_rate_hz
    wall_ms = live.wall_ms if live.is_done else live.elapsed_ms()
    num_text_tokens, entry = live.num_text_tokens, live.segment_input
    if entry is not None and not live.is_done:  # the segment that is being spoken
        num_text_tokens += entry.num_text_tokens
    return SynthesisResult(
        samples=join([]) if samples is None else samples,
        sample_rate_hz=live.sample_rate_hz,
        audio_seconds=audio_seconds,
        ttfb_ms=live.first_ms,
        wall_ms=wall_ms,
        rtf=wall_ms / 1e3 / audio_seconds if audio_seconds else 0.0,
        tps=live.num_speech_tokens / live.times.lm_ms * 1e3 if live.times.lm_ms else 0.0,
        num_text_tokens=num_text_tokens,
        num_speech_tokens=live.num_speech_tokens,
        num_segments=live.num_segments,
        finish_reason=live.finish_reason or "cancelled",
        times=replace(live.times),
        spoken_text=list(live.spoken_text),
        skipped_text=list(live.skipped_text),
    )
