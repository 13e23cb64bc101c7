"""WebSocket connections that cannot be held open or filled up: what uvicorn's own protocol does not bound.

Messages in endless pieces, floods of pings, and peers that take nothing while they are closed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.server import ServerProtocol

from vivace.server.guard import CUT

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent
    from websockets.frames import Frame
    from websockets.http11 import Request

    from vivace.config import ServerConfig

MAX_CONTROL_FRAMES_PER_SECOND = 100
MAX_UNSENT_BYTES = 256 * 1024
"""Answers to pings that a peer may leave untaken."""
LINGER_SECONDS = 5.0
"""How long a connection that has been closed may take to say goodbye."""

_BAD_HANDSHAKE = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection. Made by ``bounded_websocket``, which gives it its limits."""

    limits: ServerConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Without compression: audio does not shrink, and a small frame cannot become a large one.
        self.conn = ServerProtocol(max_size=self.limits.websocket_frame_bytes, logger=self.logger)
        self.queue: asyncio.Queue[ASGIReceiveEvent] = asyncio.Queue()
        self._num_pieces = 0
        self._message_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self._control_second = 0
        self._num_control = 0

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._message_timer, self._abort_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # A handshake that is no request (one with a body, say) would be waited for without end.
        if self.conn.handshake_exc is not None and not self.handshake_initiated and not self.close_sent:
            self.close_sent = True
            self.transport.write(_BAD_HANDSHAKE)
            self.transport.close()
            self._abort_later()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            scope: dict[str, Any] = self.scope  # type: ignore[assignment]
            scope[CUT] = self.cut

    def cut(self, code: int = 1011, reason: str = "") -> None:
        """Closes without waiting for what the peer has not taken."""
        if not self.transport.is_closing():
            if not self.close_sent:
                self._send_close(code, reason)
            self.transport.close()
        self._abort_later()

    # -- messages ------------------------------------------------------------------------------------------------

    def handle_text(self, event: Frame) -> None:
        self._begin_message(event)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._begin_message(event)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        self._num_pieces += 1
        if self._num_pieces > self.limits.websocket_frame_bytes:  # empty ones do not count towards the size
            self._refuse(1008, "too many fragments")
            return
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self._refuse(1007, "invalid UTF-8")
                return
        super().send_receive_event_to_app()

    def _begin_message(self, event: Frame) -> None:
        self._num_pieces = 0
        if not event.fin:
            self._message_timer = self.loop.call_later(
                self.limits.header_seconds, self._refuse, 1008, "the message took too long"
            )

    # -- control frames --------------------------------------------------------------------------------------------

    def handle_ping(self) -> None:
        if self._is_flood() or self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._refuse(1008, "too many pings")
        else:
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._is_flood():
            self._refuse(1008, "too many pongs")
        else:
            super().handle_pong(event)

    def _is_flood(self) -> bool:
        second = int(self.loop.time())
        if second != self._control_second:
            self._control_second, self._num_control = second, 0
        self._num_control += 1
        return self._num_control > MAX_CONTROL_FRAMES_PER_SECOND

    # -- the end -----------------------------------------------------------------------------------------------------

    def handle_parser_exception(self) -> None:
        super().handle_parser_exception()
        self._abort_later()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._abort_later()

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self._abort_later()

    def _refuse(self, code: int, reason: str) -> None:
        """Ends the connection for what the peer did; the application hears that it is gone."""
        self._message_timer = None
        self.frames = []
        if not self.close_sent and not self.transport.is_closing():
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.cut(code, reason)

    def _send_close(self, code: int, reason: str) -> None:
        self.close_sent = True
        try:
            self.conn.send_close(code, reason)
        except InvalidState:  # never opened, or closed already
            return
        self.transport.write(b"".join(self.conn.data_to_send()))

    def _abort_later(self) -> None:
        if self._abort_timer is None and not self.disconnected:
            self._abort_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)


def bounded_websocket(config: ServerConfig) -> type[BoundedWebSocketProtocol]:
    """The class of connections with these limits, as uvicorn's ``ws`` setting takes it."""
    return type("BoundedWebSocketProtocol", (BoundedWebSocketProtocol,), {"limits": config})
