"""ElevenLabs' WebSockets ``stream-input`` (one stream of speech) and ``multi-stream-input`` (several contexts).

How an end is read: ``close_context`` right after a flush is the regular end, and what was flushed is spoken.
``close_context`` while text waits for its flush, or a second one, is an interruption, which stops at once.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from vivace.errors import VivaceError
from vivace.server.connection import CloseError, PeerGoneError
from vivace.server.elevenlabs_call import VoiceCall, make_call
from vivace.server.elevenlabs_context import Context
from vivace.server.errors import ServerError, describe
from vivace.server.json_body import Fields, parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vivace.config import ServerConfig
    from vivace.server.connection import Connection
    from vivace.server.metrics import Metrics
    from vivace.server.service import SpeechService

MAX_CONTEXTS = 10
MAX_FAULTS = 10
MAX_INACTIVITY_SECONDS = 180.0
DEFAULT_CONTEXT = "default"
MAX_NAME_CHARACTERS = 256


class ElevenLabsSession:
    """One connection."""

    def __init__(
        self,
        connection: Connection,
        service: SpeechService,
        config: ServerConfig,
        metrics: Metrics,
        *,
        voice: str,
        query: Mapping[str, str],
        is_multi: bool,
    ) -> None:
        self._connection, self._service, self._config, self._metrics = connection, service, config, metrics
        self._voice, self._query, self._is_multi = voice, query, is_multi
        self._contexts: dict[str | None, Context] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._done: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._idle_s = _idle_seconds(config, query)

    async def run(self) -> None:
        """Until the client leaves or closes, or breaks a rule."""
        try:
            await self._connection.accept()
            call = await self._make_call()
            reading = self._keep(asyncio.create_task(self._read_all(call)))
            while not (self._is_closing and self._tasks <= {reading}):
                task = await self._done.get()
                self._tasks.discard(task)
                if not task.cancelled():
                    task.result()
                if not self._is_multi and task is not reading:
                    self._check_only()
                    break
                self._drop_ended()
            await self._connection.close(1000)
        except PeerGoneError:
            pass
        except CloseError as error:
            await self._connection.close(error.code, error.reason)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._done.put_nowait)
        return task

    def _check_only(self) -> None:
        context = self._contexts.get(None)
        if context is not None and context.has_failed:  # its error has been told
            raise CloseError(1011, "failed")

    async def _make_call(self) -> VoiceCall:
        try:
            return await make_call(self._service, self._config, self._voice, self._query)
        except VivaceError as error:
            await self._report(error)
            raise CloseError(1008, error.code) from None

    async def _report(self, error: Exception) -> None:
        answer = describe(error)
        self._metrics.errors.labels(answer.code).inc()
        await self._connection.send_json(
            {"error": answer.code, "message": answer.message, "code": answer.status}
        )

    def _drop_ended(self, *, also_failed: bool = False) -> None:
        """Forgets contexts that have said all. A failed one is kept until it is closed: its text still arrives."""
        for name, context in list(self._contexts.items()):
            if context.has_ended and (context.is_closing or (also_failed and context.has_failed)):
                del self._contexts[name]

    # -- messages --------------------------------------------------------------------------------------------------

    async def _read_all(self, call: VoiceCall) -> None:
        """Until the client has closed the socket with a message, and everything has been said."""
        num_faults = 0
        while True:
            text = await self._receive()
            try:
                message = Fields(parse_json(text.encode()))
                await self._handle(call, message)
                if self._is_closing and len(self._tasks) == 1:  # nothing is left to say
                    return
            except (PeerGoneError, CloseError):
                raise
            except Exception as error:
                await self._report(error)
                num_faults += 1
                if num_faults >= MAX_FAULTS:
                    raise CloseError(1008, "too many errors") from None

    async def _receive(self) -> str:
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    return await self._connection.receive()
            except TimeoutError:
                contexts = list(self._contexts.values())
                sent = max((context.last_sent for context in contexts), default=0.0)
                is_busy = any(context.is_busy for context in contexts)
                if not is_busy and time.monotonic() - sent >= self._idle_s:
                    raise CloseError(1008, "input_timeout_exceeded") from None

    async def _handle(self, call: VoiceCall, message: Fields) -> None:
        name = self._context_name(message)
        context = self._contexts.get(name)
        if message.flag("close_socket", default=False):
            self._is_closing = True
            for other in self._contexts.values():
                other.close()
            return
        if message.flag("close_context", default=False):
            if context is not None:
                await self._close_context(context)
            return
        text = message.raw("text")
        if text is not None and not isinstance(text, str):
            raise ServerError("text must be a string.", code="invalid_type", param="text")
        if context is None and text and not self._is_closing:
            context = self._open_context(name, call)
        if context is None:
            return  # keeps the connection alive
        context.call = context.call.with_settings(message)
        await self._add_text(context, text)
        if message.flag("flush", default=False):
            context.flush()
        if text == "" and not self._is_multi:  # the end of the only stream
            context.close()

    def _context_name(self, message: Fields) -> str | None:
        if not self._is_multi:
            return None
        name = message.text("context_id", max_characters=MAX_NAME_CHARACTERS)
        return name or message.text("contextId", max_characters=MAX_NAME_CHARACTERS) or DEFAULT_CONTEXT

    def _open_context(self, name: str | None, call: VoiceCall) -> Context:
        if len(self._contexts) >= MAX_CONTEXTS:
            self._drop_ended(also_failed=True)
        if len(self._contexts) >= MAX_CONTEXTS:
            raise ServerError(
                f"A connection may have {MAX_CONTEXTS} contexts; close some first.", code="overloaded"
            )
        context = Context(name, call, self._connection, self._service, self._config, self._metrics)
        self._contexts[name] = context
        self._keep(context.start())
        return context

    async def _add_text(self, context: Context, text: str | None) -> None:
        if text:
            try:
                context.add_text(text)
            except ServerError as error:
                await context.fail(error)
        if (
            sum(other.pending_bytes for other in self._contexts.values())
            > self._config.websocket_pending_text_bytes
        ):
            await self._report(ServerError("Too much text waits to be spoken.", code="input_too_long"))
            raise CloseError(1009, "too much text")

    async def _close_context(self, context: Context) -> None:
        if context.is_closing or context.has_open_text or context.has_ended:
            had_ended = context.has_ended
            await context.stop()
            context.is_closing = True
            if not had_ended:
                await context.tell_final()
            self._drop_ended()
        else:
            context.close()


def _idle_seconds(config: ServerConfig, query: Mapping[str, str]) -> float:
    """Clients may ask for more time between their messages."""
    asked = query.get("inactivity_timeout", "")
    seconds = float(asked) if asked.isascii() and asked.isdecimal() and len(asked) < 6 else 0.0
    return max(config.websocket_idle_seconds, min(seconds, MAX_INACTIVITY_SECONDS))
