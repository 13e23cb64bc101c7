"""One WebSocket with the limits that every front end on it keeps."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocketDisconnect

from vivace.server.guard import CUT

if TYPE_CHECKING:
    from starlette.websockets import WebSocket

    from vivace.config import ServerConfig

SUBPROTOCOL = "vivace"
"""What a client that sends its key as a subprotocol offers beside it: browsers insist on an answer."""


class PeerGoneError(Exception):
    """The other side has left, or takes nothing any more; the connection has ended."""


class CloseError(Exception):
    """The connection must be closed by us.

    Args:
        code: of the close frame. reason: a short word.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Connection:
    """Text frames come in; text and binary frames go out."""

    def __init__(self, websocket: WebSocket, config: ServerConfig) -> None:
        self._websocket = websocket
        self._config = config

    async def accept(self) -> None:
        offers = self._websocket.scope.get("subprotocols", ())
        message = {"type": "websocket.accept", "subprotocol": SUBPROTOCOL if SUBPROTOCOL in offers else None}
        try:
            await self._websocket.receive()
            await self._websocket.send(message)
        except (WebSocketDisconnect, OSError, RuntimeError):
            raise PeerGoneError from None

    async def receive(self) -> str:
        """The next text frame. Raises ``CloseError`` for what no front end takes."""
        try:
            message = await self._websocket.receive()
        except (WebSocketDisconnect, RuntimeError):
            raise PeerGoneError from None
        if message["type"] == "websocket.disconnect":
            raise PeerGoneError
        text = message.get("text")
        if text is None:
            raise CloseError(1003, "send text frames")
        if len(text) > self._config.websocket_frame_bytes:
            raise CloseError(1009, "frame too large")
        return str(text)

    async def send_json(self, document: dict[str, Any]) -> None:
        await self._send({"type": "websocket.send", "text": json.dumps(document, ensure_ascii=False)})

    async def send_bytes(self, data: bytes) -> None:
        """Sends audio. Lets others have their turn, also where neither engine nor peer is ever waited for."""
        await self._send({"type": "websocket.send", "bytes": data})
        await asyncio.sleep(0)

    async def close(self, code: int, reason: str = "") -> None:
        with suppress(PeerGoneError):
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _send(self, message: dict[str, Any]) -> None:
        """Waits for a peer that is slow, but not for ever."""
        try:
            async with asyncio.timeout(self._config.write_stall_seconds):
                await self._websocket.send(message)
        except TimeoutError:
            cut = self._websocket.scope.get(CUT)
            if cut is not None:
                cut(1008, "write_stall")
            raise PeerGoneError from None
        except (WebSocketDisconnect, OSError, RuntimeError):
            raise PeerGoneError from None
