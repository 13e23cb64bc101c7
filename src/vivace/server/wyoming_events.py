"""Wyoming's events on a TCP connection: a line of JSON, then the data and the payload whose lengths it gives."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.server.connection import PeerGoneError
from vivace.server.errors import ServerError
from vivace.server.json_body import Fields, parse_json

if TYPE_CHECKING:
    from vivace.config import ServerConfig

MAX_LINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a client; payloads are for audio, which a client does not send us."""

    kind: str
    data: Fields


class EventPeer:
    """A client's connection, with the limits of the WebSocket front ends."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, config: ServerConfig
    ) -> None:
        self._reader, self._writer, self._config = reader, writer, config

    async def receive(self) -> Event:
        """The next event.

        Raises:
            PeerGoneError: the client has left. ServerError: what it sent is no event, or came too slowly; nothing
                more can be understood. TimeoutError: nothing came for ``websocket_idle_seconds``.
        """
        try:
            async with asyncio.timeout(self._config.websocket_idle_seconds):
                first = await self._reader.readexactly(1)
            return await self._rest(first)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise PeerGoneError from None

    async def _rest(self, first: bytes) -> Event:
        try:
            async with asyncio.timeout(self._config.header_seconds):
                line = first + await self._reader.readuntil(b"\n") if first != b"\n" else first
                header = Fields(parse_json(line))
                data = header.raw("data") or {}
                if not isinstance(data, dict):
                    raise ServerError("data must be an object.", code="invalid_type", param="data")
                size = header.integer("data_length", 0, self._config.websocket_frame_bytes) or 0
                if size:
                    data |= _object(parse_json(await self._reader.readexactly(size)))
                await self._reader.readexactly(
                    header.integer("payload_length", 0, self._config.websocket_frame_bytes) or 0
                )
        except (asyncio.LimitOverrunError, ValueError) as error:
            if isinstance(error, ServerError):
                raise
            raise ServerError("The event is too long.", code="payload_too_large") from None
        except TimeoutError:
            raise ServerError("The event took too long.", code="request_timeout") from None
        kind = header.text("type", max_characters=64)
        if kind is None:
            raise ServerError("The event has no type.", code="missing_field", param="type")
        return Event(kind, Fields(data))

    async def send(self, kind: str, data: dict[str, Any] | None = None, payload: bytes = b"") -> None:
        """Sends an event. Waits for a client that is slow, but not for ever."""
        header: dict[str, Any] = {"type": kind}
        body = json.dumps(data, ensure_ascii=False).encode() if data else b""
        if body:
            header["data_length"] = len(body)
        if payload:
            header["payload_length"] = len(payload)
        try:
            self._writer.write(json.dumps(header).encode() + b"\n" + body + payload)
            async with asyncio.timeout(self._config.write_stall_seconds):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise PeerGoneError from None
        except ConnectionError:
            raise PeerGoneError from None

    async def close(self) -> None:
        """Closes; what the client does not take within a moment is dropped."""
        self._writer.close()
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(self._config.write_stall_seconds):
                await self._writer.wait_closed()
        self._writer.transport.abort()


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ServerError("data must be an object.", code="invalid_type", param="data")
    return value
