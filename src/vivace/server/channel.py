"""The audio of one request on its way from the engine process to its consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from vivace.datatypes import AudioChunk, SynthesisResult
from vivace.errors import CancelledRequestError, InvalidTextError

if TYPE_CHECKING:
    from vivace.engine import SynthesisRequest
    from vivace.server.wire import Header


class Channel:
    """What the server knows of one running request.

    Attributes:
        chunks: arrived and not yet taken.
        result: the figures as of the newest chunk.
        error: why it failed; is_done: it has ended, well or not.
        num_idle: ticks for which chunks have lain ready and none was taken.
    """

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self.chunks: deque[AudioChunk] = deque()
        self.result: SynthesisResult | None = None
        self.error: Exception | None = None
        self.is_done = False
        self.num_idle = 0
        self._news = asyncio.Event()

    def push(self, chunk: AudioChunk, result: SynthesisResult) -> None:
        """A chunk, and the figures so far; of the spoken and the skipped text only what is new."""
        if self.result is not None:
            result.spoken_text = [*self.result.spoken_text, *result.spoken_text]
            result.skipped_text = [*self.result.skipped_text, *result.skipped_text]
        self.chunks.append(chunk)
        self.result = result
        self._news.set()

    def finish(self, result: SynthesisResult) -> None:
        self.result = result
        self.is_done = True
        self._news.set()

    def fail(self, error: Exception, *, at_once: bool = False) -> None:
        """Ends with an error, after the chunks that have arrived or ``at_once``."""
        if self.is_done:
            return
        if at_once:
            self.chunks.clear()
        self.error = error
        self.is_done = True
        if self.result is not None:
            is_cancelled = isinstance(error, CancelledRequestError)
            self.result = replace(self.result, finish_reason="cancelled" if is_cancelled else "error")
        self._news.set()

    async def take(self) -> AudioChunk:
        """The next chunk. Raises the request's error, or ``StopAsyncIteration`` at its end."""
        while True:
            if self.chunks:
                self.num_idle = 0
                return self.chunks.popleft()
            if self.error is not None:
                raise self.error.with_traceback(None)
            if self.is_done:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()


class Desk(Protocol):
    """What a stream needs of the service."""

    async def begin(
        self, channel: Channel, request: SynthesisRequest, *, is_streamed: bool, source: bytes | None = None
    ) -> None:
        """Checks the request and sends it to the engine process.

        Args:
            source: a recording whose words are spoken in place of the request's text.
        """
        ...

    def send(self, channel: Channel, header: Header) -> None:
        """Says something about a request that runs."""
        ...

    def open_channel(self) -> Channel: ...

    def cancel(self, channel: Channel) -> None:
        """Ends a request, unless it has ended."""
        ...


class ProcessStream:
    """An asynchronous iterator of chunks. Closing or dropping it, or cancelling the waiting task, cancels.

    Args:
        find_desk: asked once, when the request begins.
        text, source: as pieces, or as a recording, in place of the request's text.
    """

    def __init__(
        self,
        find_desk: Callable[[], Desk],
        request: SynthesisRequest,
        text: AsyncIterable[str] | None = None,
        source: bytes | None = None,
    ) -> None:
        self._find_desk = find_desk
        self._desk: Desk | None = None
        self._request = request
        self._text = text
        self._source = source
        self._channel: Channel | None = None
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump: asyncio.Task[None] | None = None

    def __aiter__(self) -> ProcessStream:
        return self

    async def __anext__(self) -> AudioChunk:
        try:
            channel = self._channel or await self._begin()
            chunk = await channel.take()
        except BaseException:  # the end, an error, or the task was cancelled
            self._close()
            raise
        assert self._desk is not None
        self._desk.send(channel, {"kind": "credit"})
        return chunk

    async def __aenter__(self) -> ProcessStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:  # in any thread
        if self._loop is None or self._loop.is_closed() or self._channel is None or self._desk is None:
            return
        with suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(self._desk.cancel, self._channel)

    async def aclose(self) -> None:
        """Cancels the request if it still runs."""
        self._close()

    def summary(self) -> SynthesisResult:
        """The figures so far; complete once the last chunk was taken."""
        if self._channel is None or self._channel.result is None:
            raise RuntimeError("no chunk has come yet")
        return self._channel.result

    async def _begin(self) -> Channel:
        if self._is_closed:
            raise CancelledRequestError("the request was cancelled before it began")
        self._loop = asyncio.get_running_loop()
        desk = self._desk = self._find_desk()
        channel = self._channel = desk.open_channel()
        source, self._source = self._source, None
        try:
            await desk.begin(channel, self._request, is_streamed=self._text is not None, source=source)
        except Exception as error:
            channel.fail(error)
        if self._text is not None and not channel.is_done:
            self._pump = asyncio.create_task(_push_all(desk, channel, self._text))
        return channel

    def _close(self) -> None:
        self._is_closed = True
        if self._channel is not None and self._desk is not None:
            self._desk.cancel(self._channel)
        if self._pump is not None:
            self._pump.cancel()


async def _push_all(desk: Desk, channel: Channel, text: AsyncIterable[str]) -> None:
    """Sends streamed text. An error of the caller's iterator ends the request with that very error."""
    try:
        async for piece in text:
            if channel.is_done:
                return
            if not isinstance(piece, str):
                raise InvalidTextError("pieces of text must be str", code="invalid_type", param="text")
            desk.send(channel, {"kind": "text", "piece": piece})
        desk.send(channel, {"kind": "text_end"})
    except Exception as error:
        desk.send(channel, {"kind": "cancel"})
        channel.fail(error)
