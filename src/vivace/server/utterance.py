"""One thing to say in a session where text comes in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vivace.audio.encoders import PcmEncoder, WavEncoder
from vivace.server.errors import ServerError
from vivace.server.text_queue import TextQueue

if TYPE_CHECKING:
    from vivace.audio.encoders import StreamEncoder
    from vivace.datatypes import AudioChunk, Samples
    from vivace.server.service import ServiceStream


@dataclass(eq=False, slots=True)
class Utterance:
    """From its first piece of text to its last audio.

    Attributes:
        number: 1, 2, 3 … within the session.
        has_ended: spoken, failed or cancelled; text that still comes for it is dropped.
        audio_seconds: sent so far.
    """

    number: int
    text: TextQueue = field(default_factory=TextQueue)
    has_ended: bool = False
    audio_seconds: float = 0.0
    _limit: asyncio.Timeout | None = None
    _left_s: float = 0.0

    def finish_text(self) -> None:
        """No more text will come; from now on the engine's time counts. Raises as ``TextQueue.finish``."""
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left_s)
        self.text.finish()

    async def chunks(self, stream: ServiceStream, seconds: float) -> AsyncIterator[AudioChunk]:
        """The audio. Once all the text is there, all the waiting for the engine together may take ``seconds``."""
        clock = asyncio.get_running_loop().time
        self._left_s = seconds
        while True:
            started = clock()
            try:
                async with asyncio.timeout(self._left_s if self.text.is_finished else None) as self._limit:
                    chunk = await anext(stream)
            except TimeoutError:
                raise ServerError("The speech took too long to make.", code="deadline_exceeded") from None
            except StopAsyncIteration:
                return
            finally:
                self._limit = None
            if self.text.is_finished:
                self._left_s = max(0.0, self._left_s - (clock() - started))
            self.audio_seconds += len(chunk.samples) / chunk.sample_rate_hz
            yield chunk


async def encode(encoder: StreamEncoder, samples: Samples) -> bytes:
    """The encoder's work, in a thread where it is more than a copy."""
    if isinstance(encoder, PcmEncoder | WavEncoder):
        return encoder.encode(samples)
    return await asyncio.to_thread(encoder.encode, samples)
