"""HTTP connections that cannot be held open or filled up: what uvicorn's own protocol does not bound.

A request line or header that never ends, endless or huge headers, more connections than allowed, peers that
vanished, and an end of the connection that cannot be taken for the end of a body.
"""

from __future__ import annotations

import re
import socket
import uuid
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vivace.server.errors import ServerError, describe
from vivace.server.guard import CUT

if TYPE_CHECKING:
    import asyncio

    from vivace.config import ServerConfig
    from vivace.server.metrics import Metrics

_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_SOCKET_OPTIONS = {
    "TCP_USER_TIMEOUT": 30_000,
    "TCP_KEEPIDLE": 20,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 2,
    "TCP_NOTSENT_LOWAT": 131_072,
}
"""Vanished peers are noticed within about 40 s; the kernel holds little of what a slow reader has not taken."""


_HTTP2_OFFER = re.compile(rb"\r\nupgrade:([ \t]*h2c[ \t]*(?=\r\n))", re.IGNORECASE)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Made by ``bounded_protocol``, which gives it its limits."""

    limits: ServerConfig
    metrics: Metrics

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._in_headers = True
        self._header_bytes = 0
        self._refusal: ServerError | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        _set_socket_options(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(ServerError("Too many connections.", code="overloaded", retry_after_s=5.0))
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
            data = _without_http2(data)
        super().data_received(data)
        # Only what is still unfinished counts here: the rest of the data may be a body.
        if self._in_headers and self._header_bytes > self.limits.header_bytes and self._refusal is None:
            self._refuse(_headers_too_large(self.limits))

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_header_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.header_bytes or len(self.headers) > self.limits.header_count:
            self._refusal = _headers_too_large(self.limits)
            raise self._refusal
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._refusal = ServerError("Speak HTTP/1.1.", code="invalid_request")
            raise self._refusal
        super().on_headers_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[CUT] = self.cut
        self._header_bytes = max(1, self._header_bytes)
        if self._header_timer is None:
            self._start_header_timer()

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._header_bytes = 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._stop_header_timer()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        refusal, self._refusal = self._refusal, None
        self._refuse(refusal or ServerError("This is not valid HTTP.", code="invalid_request"))

    def cut(self, *, at_once: bool = False) -> None:
        """Closes without the mark that ends a body; ``at_once`` also drops what was not sent yet."""
        if at_once:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.close()
            self.loop.call_later(self.limits.write_stall_seconds, self.transport.abort)

    def _refuse(self, error: ServerError) -> None:
        """Answers what is not a request, and closes. In the midst of an answer it closes only."""
        self._refusal = error
        self._stop_header_timer()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True  # the application has nothing more to say to this client
                cycle.message_event.set()
            answer = describe(error)
            self.metrics.errors.labels(answer.code).inc()
            body = answer.body()
            lines = [
                f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Error')}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
                f"x-request-id: req_{uuid.uuid4().hex}",
                *[f"{name}: {value}" for name, value in answer.headers.items()],
            ]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.cut()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_seconds, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if not self._in_headers or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_header_timer()  # an answer is under way; this one comes after it
        elif self._header_bytes == 0:
            self.transport.close()  # never said a word
        else:
            self._refuse(ServerError("The request's header took too long.", code="request_timeout"))


def bounded_protocol(config: ServerConfig, metrics: Metrics) -> type[BoundedProtocol]:
    """The class of connections with these limits, as uvicorn's ``http`` setting takes it."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": config, "metrics": metrics})


def _without_http2(data: bytes) -> bytes:
    """A request without its offer to go on in HTTP/2, with which the parser would skip the body.

    Java's client makes that offer with every request.
    """
    if b"h2c" not in data:
        return data
    head, end, rest = data.partition(b"\r\n\r\n")
    return _HTTP2_OFFER.sub(rb"\r\nx-declined:\1", head + b"\r\n")[:-2] + end + rest


def _headers_too_large(limits: ServerConfig) -> ServerError:
    return ServerError(
        f"A request may have {limits.header_count} headers and {limits.header_bytes} bytes of them.",
        code="headers_too_large",
    )


def _set_socket_options(transport: asyncio.Transport) -> None:
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SOCKET_OPTIONS.items():
        number = getattr(socket, name, None)
        if number is not None:
            connection.setsockopt(socket.IPPROTO_TCP, number, value)
