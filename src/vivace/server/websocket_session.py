"""Our WebSocket protocol: text streams in, audio streams out, and can be interrupted. See ``docs/protocol.md``."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from vivace.server.connection import CloseError, PeerGoneError
from vivace.server.errors import ServerError
from vivace.server.json_body import Fields, missing, parse_json
from vivace.server.session_config import SessionConfig, changed
from vivace.server.speaker import ConfiguredUtterance, Speaker

if TYPE_CHECKING:
    from vivace.config import ServerConfig
    from vivace.server.connection import Connection
    from vivace.server.metrics import Metrics
    from vivace.server.service import SpeechService

MAX_FAULTS = 10
"""Messages that make no sense before the session is closed."""


class Session:
    """One connection: a reader that acts on messages, beside a ``Speaker``."""

    def __init__(
        self, connection: Connection, service: SpeechService, config: ServerConfig, metrics: Metrics
    ) -> None:
        self._connection = connection
        self._service = service
        self._config = config
        self._speaker = Speaker(connection, service, config, metrics)
        self._settings = SessionConfig()
        self._open: ConfiguredUtterance | None = None  # takes the text that comes
        self._num_utterances = 0
        self._num_faults = 0
        self._is_closing = False

    async def run(self) -> None:
        """Until the client leaves, asks for the end, or breaks a rule."""
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._connection.accept()
            await self._connection.send_json(await self._greeting())
            tasks = [asyncio.create_task(self._read_all()), asyncio.create_task(self._speaker.run())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._connection.send_json({"type": "session.done"})
            await self._connection.close(1000)
        except PeerGoneError:
            pass
        except CloseError as error:
            await self._connection.close(error.code, error.reason)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _greeting(self) -> dict[str, Any]:
        return {
            "type": "session.ready",
            "model": self._service.model,
            "voices": await asyncio.to_thread(self._service.voices.usable_names),
            "sample_rate": self._service.sample_rate_hz,
        }

    async def _read_all(self) -> None:
        while True:
            text = await self._receive()
            try:
                message = Fields(parse_json(text.encode()))
                kind = message.text("type", max_characters=64)
                if kind is None:
                    raise missing("type")
                await self._handle(kind, message)
            except (PeerGoneError, CloseError):
                raise
            except Exception as error:
                await self._speaker.report(error, None)
                self._num_faults += 1
                if self._num_faults >= MAX_FAULTS:
                    raise CloseError(1008, "too many errors") from None

    async def _receive(self) -> str:
        """The next message. A client that says nothing while nothing is spoken is not waited for."""
        idle_s = self._config.websocket_idle_seconds
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    return await self._connection.receive()
            except TimeoutError:
                if not self._speaker.is_busy and time.monotonic() - self._speaker.last_sent >= idle_s:
                    raise CloseError(1008, "idle") from None

    async def _handle(self, kind: str, message: Fields) -> None:
        if self._is_closing and kind in ("session.config", "input.text", "input.done"):
            raise _unexpected("The session is closing.")
        if kind == "input.text":
            await self._add_text(message)
        elif kind == "input.done":
            await self._end_text()
        elif kind in ("cancel", "clear"):
            await self._cancel()
        elif kind == "session.config":
            await self._configure(message)
        elif kind == "session.close":
            await self._close()
        elif kind == "ping":
            await self._connection.send_json({"type": "pong"})
        else:
            raise ServerError("There is no message of this type.", code="unsupported_value", param="type")

    async def _configure(self, message: Fields) -> None:
        if self._open is not None:
            raise _unexpected("Finish the utterance with input.done before changing the configuration.")
        self._settings = await changed(self._settings, message, self._service, self._config)

    async def _add_text(self, message: Fields) -> None:
        piece = message.raw("text")
        if piece is None:
            raise missing("text")
        if not isinstance(piece, str):
            raise ServerError("text must be a string.", code="invalid_type", param="text")
        utterance = self._open or self._begin(piece)
        if utterance is None or utterance.has_ended:
            return
        try:
            self._speaker.pending_bytes += utterance.text.push(piece)
        except ServerError as error:
            await self._speaker.drop(utterance, error)
        await self._check_pending(utterance)

    def _begin(self, piece: str) -> ConfiguredUtterance | None:
        """A new utterance, unless the piece holds nothing yet."""
        if not piece:
            return None
        self._num_utterances += 1
        self._open = ConfiguredUtterance(self._num_utterances, settings=self._settings)
        self._speaker.add(self._open)
        return self._open

    async def _check_pending(self, utterance: ConfiguredUtterance) -> None:
        limit = self._config.websocket_pending_text_bytes
        if self._speaker.pending_bytes > limit:
            error = ServerError(
                f"More than {limit} bytes of text wait to be spoken.", code="input_too_long", param="text"
            )
            await self._speaker.report(error, utterance)
            raise CloseError(1009, "too much text")

    async def _end_text(self) -> None:
        utterance, self._open = self._open, None
        if utterance is None:
            raise ServerError("There is no text to finish.", code="empty_input", param="text")
        if utterance.has_ended:
            return
        try:
            utterance.finish_text()
        except ServerError as error:
            await self._speaker.drop(utterance, error)

    async def _cancel(self) -> None:
        self._open = None
        cancelled = await self._speaker.cancel()
        for utterance in cancelled:
            await self._tell_cancelled(utterance.number, round(utterance.audio_seconds, 3))
        if not cancelled:
            await self._tell_cancelled(None, 0.0)

    async def _tell_cancelled(self, number: int | None, audio_seconds: float) -> None:
        await self._connection.send_json(
            {"type": "audio.cancelled", "utterance": number, "audio_seconds": audio_seconds}
        )

    async def _close(self) -> None:
        if self._open is not None:
            await self._end_text()
        self._is_closing = True
        self._speaker.close()


def _unexpected(message: str) -> ServerError:
    return ServerError(message, code="unexpected_message", param="type")
