"""What a caller holds while a request runs, and the figures at its end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vivace.datatypes import AudioChunk, SynthesisResult

if TYPE_CHECKING:
    from vivace.datatypes import Samples
    from vivace.engine.live import LiveRequest


class SpeechStream(Iterator[AudioChunk]):
    """The audio of one request, chunk by chunk.

    ``close``, leaving a ``with`` block or dropping the object cancels what is still to come and frees the
    request's state at once.
    """

    def __init__(
        self,
        live: LiveRequest,
        chunks: Generator[AudioChunk, None, None],
        cancel: Callable[[LiveRequest], None],
    ) -> None:
        self._live = live
        self._chunks = chunks
        self._cancel = cancel
        self._first_ms = 0.0

    def __iter__(self) -> SpeechStream:
        return self

    def __next__(self) -> AudioChunk:
        chunk = next(self._chunks)
        if not self._first_ms:
            self._first_ms = chunk.elapsed_ms
        return chunk

    def __enter__(self) -> SpeechStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the request if it still runs."""
        self._cancel(self._live)

    def summary(self, samples: Samples | None = None) -> SynthesisResult:
        """The figures of the request so far; complete once the last chunk was taken.

        Args:
            samples: what the caller kept of the audio, to travel with the figures.
        """
        live = self._live
        audio_seconds = live.num_samples / live.sample_rate_hz
        wall_ms = live.wall_ms if live.is_done else live.elapsed_ms()
        return SynthesisResult(
            samples=np.zeros(0, np.float32) if samples is None else samples,
            sample_rate_hz=live.sample_rate_hz,
            audio_seconds=audio_seconds,
            ttfb_ms=self._first_ms,
            wall_ms=wall_ms,
            rtf=wall_ms / 1e3 / audio_seconds if audio_seconds else 0.0,
            tps=live.num_speech_tokens / live.times.lm_ms * 1e3 if live.times.lm_ms else 0.0,
            num_text_tokens=live.num_text_tokens,
            num_speech_tokens=live.num_speech_tokens,
            num_segments=live.num_segments,
            finish_reason=live.finish_reason or "cancelled",
            times=replace(live.times),
            spoken_text=list(live.spoken_text),
        )

    def collect(self) -> SynthesisResult:
        """Takes all chunks and returns them joined, with the figures."""
        parts = [chunk.samples for chunk in self]
        return self.summary(np.concatenate(parts) if parts else None)
