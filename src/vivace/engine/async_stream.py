"""The audio of one request for asyncio. The event loop never waits for the engine's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from vivace.datatypes import AudioChunk, SynthesisResult
from vivace.engine.results import join, summarise
from vivace.errors import CancelledRequestError

if TYPE_CHECKING:
    from vivace.datatypes import Samples
    from vivace.engine.engine import Engine
    from vivace.engine.live import LiveRequest


class AsyncSpeechStream(AsyncIterator[AudioChunk]):
    """As ``SpeechStream``: an asynchronous iterator of chunks whose request begins with the first ``anext``.

    ``aclose``, leaving an ``async with`` block, dropping the object or cancelling the task that waits for a chunk
    cancels the request.

    Args:
        submit: checks the request and puts it in the queue; runs in a thread.
        text: pieces of text as they arrive, for a request that takes them pushed.
    """

    def __init__(
        self, engine: Engine, submit: Callable[[], LiveRequest], text: AsyncIterable[str] | None = None
    ) -> None:
        self._engine = engine
        self._submit = submit
        self._text = text
        self._live: LiveRequest | None = None
        self._pump: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._refusal: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether the request has not ended; also before it has begun."""
        return self._refusal is None and (self._live is None or not self._live.is_done)

    def __aiter__(self) -> AsyncSpeechStream:
        return self

    async def __anext__(self) -> AudioChunk:
        try:
            live = self._live or await self._begin()
            while True:
                self._news.clear()
                is_done = live.is_done
                chunk = self._engine.take(live)
                if chunk is not None:
                    return chunk
                if is_done:
                    raise StopAsyncIteration
                await self._news.wait()
        except BaseException:  # the end, an error, or the task was cancelled
            self.close()
            raise

    async def __aenter__(self) -> AsyncSpeechStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self.close()

    async def aclose(self) -> None:
        """Cancels the request if it still runs."""
        self.close()

    def close(self) -> None:
        """As ``aclose``; may be called from anywhere."""
        if self._live is not None:
            self._engine.cancel(self._live)
        elif self._refusal is None:
            self._refusal = CancelledRequestError("the request was cancelled before it began")
        if self._pump is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop has been closed, and the task with it
                self._loop.call_soon_threadsafe(self._pump.cancel)
            self._pump = None

    def summary(self, samples: Samples | None = None) -> SynthesisResult:
        """As ``SpeechStream.summary``; only once the request has begun."""
        if self._live is None:
            raise RuntimeError("no chunk was asked for yet")
        return summarise(self._live, samples)

    async def collect(self) -> SynthesisResult:
        """Takes the chunks that are left and returns them joined, with the figures of the whole request."""
        return self.summary(join([chunk.samples async for chunk in self]))

    async def _begin(self) -> LiveRequest:
        self._raise_refusal()
        loop = self._loop = asyncio.get_running_loop()
        try:
            live = self._live = await _in_thread(self._submit, self._engine.cancel)
        except Exception as error:
            self._refusal = error
            raise
        if self._was_closed:  # by another task, meanwhile
            self._engine.cancel(live)
        self._raise_refusal()
        news = self._news

        def listener() -> None:  # knows nothing of this stream, so that dropping it frees it
            with suppress(RuntimeError):  # the loop has been closed: nobody listens any more
                loop.call_soon_threadsafe(news.set)

        self._engine.listen(live, listener)
        if self._text is not None:
            self._pump = asyncio.create_task(_push_all(self._engine, live, self._text))
        elif live.pieces is not None:
            # Not the loop's executor: its end would wait for an iterator that never gives its next piece.
            pull = self._engine.pull_all_text
            threading.Thread(target=pull, args=(live,), name="vivace-text", daemon=True).start()
        return live

    @property
    def _was_closed(self) -> bool:
        return self._refusal is not None

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal


async def _in_thread(submit: Callable[[], LiveRequest], cancel: Callable[[LiveRequest], None]) -> LiveRequest:
    """``submit`` in a thread; if the waiting task is cancelled meanwhile, its request is cancelled too."""
    made: list[LiveRequest] = []
    abandoned = threading.Event()

    def run() -> LiveRequest:
        live = submit()
        made.append(live)
        if abandoned.is_set():
            cancel(live)
        return live

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        abandoned.set()
        for live in made:
            cancel(live)
        raise


async def _push_all(engine: Engine, live: LiveRequest, text: AsyncIterable[str]) -> None:
    """Feeds streamed text. An error of the caller's iterator ends the request with that very error."""
    try:
        async for piece in text:
            await asyncio.to_thread(engine.push_text, live, piece)
            if live.is_done:
                return
        await asyncio.to_thread(engine.finish_text, live)
    except Exception as error:
        engine.abort(live, error)
