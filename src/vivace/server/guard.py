"""What stands in front of every front end: host, origin, key, sizes and times, and the last word on errors."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from uvicorn.protocols.utils import ClientDisconnected

from vivace.server.auth import KeyRing, check_host, check_key, check_origin
from vivace.server.errors import ErrorAnswer, ServerError, describe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from vivace.config import ServerConfig
    from vivace.server.metrics import Metrics

    Scope = MutableMapping[str, Any]
    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

UPLOAD_PATHS = re.compile(
    r"/v1/audio/(voices|voice_consents|transform)"
    r"|(/elevenlabs)?/v1/(speech-to-speech|voice-changer)/[^/]+(/stream)?"
)
MULTIPART_OVERHEAD_BYTES = 64 * 1024
LINGER_SECONDS = 2.0
LINGER_BYTES = 16 * 1024 * 1024
"""How long, and how much, an upload that was refused is still read, so that its sender gets to see the answer."""
CUT = "vivace.cut"
"""Key of the scope: a function that closes the connection so that the answer cannot look complete."""

_METHODS = "GET, POST, DELETE, OPTIONS"
_HEADERS = "authorization, content-type, xi-api-key, x-request-id"


class WriteStalledError(Exception):
    """The client takes nothing any more."""


class Guard:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: App, config: ServerConfig, metrics: Metrics) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._keys = KeyRing(config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, self._config)
        try:
            origin = self._check(scope)
            if scope["type"] == "http":
                exchange.origin = origin
                exchange.check_length()
                if scope["method"] == "OPTIONS" and origin is not None:
                    await exchange.answer_preflight()
                    return
        except ServerError as error:
            await self._refuse(scope, exchange, error)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            await self._run(scope, exchange)

    def _check(self, scope: Scope) -> str | None:
        headers = scope["headers"]
        host = check_host(self._config, headers, scope.get("http_version", "1.1"))
        origin = check_origin(self._config, headers, host)
        if scope["type"] == "http" and scope["method"] == "OPTIONS" and origin is not None:
            return origin  # a preflight carries no key
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        check_key(self._keys, headers, scope["path"], is_read=is_read)
        return origin

    async def _refuse(self, scope: Scope, exchange: Exchange, error: ServerError) -> None:
        answer = describe(error)
        self._metrics.errors.labels(answer.code).inc()
        if scope["type"] == "http":
            await exchange.answer(answer)
        else:
            await exchange.deny_websocket(answer)

    async def _run(self, scope: Scope, exchange: Exchange) -> None:
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server itself leaves the body out
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            pass  # it left before its body was complete
        except (WriteStalledError, ConnectionError):
            self._metrics.errors.labels("write_stall").inc()
            await exchange.cut(at_once=True)
        except Exception as error:  # the last door: no error leaves without an answer
            answer = describe(error)
            self._metrics.errors.labels(answer.code).inc()
            if exchange.has_started:
                await exchange.cut()
            else:
                await exchange.answer(answer)


class Exchange:
    """One request and its answer, within the limits."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: ServerConfig) -> None:
        self._scope, self._receive, self._send, self._config = scope, receive, send, config
        self.request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = self.request_id
        self.origin: str | None = None
        self.has_started = False
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._body_bytes = 0
        self._deadline = time.monotonic() + config.body_seconds
        self._has_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0") != b"")
            for name, value in self._headers
        )
        self._body_is_read = not self._has_body

    @property
    def max_body_bytes(self) -> int:
        """How large the body may be."""
        if UPLOAD_PATHS.fullmatch(self._scope["path"]):
            return self._config.upload_bytes + MULTIPART_OVERHEAD_BYTES
        return self._config.body_bytes

    def check_length(self) -> None:
        """Refuses by the announced length and encoding, before anything is read."""
        for name, value in self._headers:
            if name == b"content-length" and int(value) > self.max_body_bytes:
                raise self._too_large()
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                raise ServerError("The only Transfer-Encoding is chunked.", code="invalid_request")
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise ServerError("Send the body without Content-Encoding.", code="unsupported_media_type")

    async def receive(self) -> Message:
        """As ASGI's; the body within its size and time."""
        if self._body_is_read:
            return await self._receive()
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise ServerError("The body took too long to arrive.", code="request_timeout") from None
        if message["type"] == "http.request":
            self._body_bytes += len(message.get("body", b""))
            self._body_is_read = not message.get("more_body", False)
            if self._body_bytes > self.max_body_bytes:
                raise self._too_large()
        return message

    async def send(self, message: Message) -> None:
        """As ASGI's; with our headers, and no longer than a reader may stall."""
        if message["type"] == "http.response.start":
            self.has_started = True
            message["headers"] = [*message.get("headers", []), *self._own_headers()]
        try:
            async with asyncio.timeout(self._config.write_stall_seconds):
                await self._send(message)
        except TimeoutError:
            raise WriteStalledError from None

    async def cut(self, *, at_once: bool = False) -> None:
        """Ends the connection without the mark that ends a body."""
        close = self._scope.get(CUT)
        if close is None:
            raise ConnectionError("the answer was cut off")  # for servers that are not ours
        close(at_once=at_once)
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, answer: ErrorAnswer) -> None:
        """Sends an error. A body that was not read is read on for a moment: a closed door would hide the answer."""
        body = answer.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *[(name.encode(), value.encode()) for name, value in answer.headers.items()],
        ]
        with suppress(WriteStalledError, ConnectionError):
            await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body, "more_body": True})
            if not self._body_is_read and not self._waits_for_permission():
                await self._linger()
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer_preflight(self) -> None:
        """Tells a browser what a page of an allowed origin may send."""
        headers = [
            (b"access-control-allow-methods", _METHODS.encode()),
            (b"access-control-allow-headers", _HEADERS.encode()),
            (b"access-control-max-age", b"600"),
            (b"content-length", b"0"),
        ]
        await self.send({"type": "http.response.start", "status": 204, "headers": headers})
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def deny_websocket(self, answer: ErrorAnswer) -> None:
        """Refuses a handshake with the error's status where the server can, else by closing."""
        await self._receive()
        if "websocket.http.response" not in self._scope.get("extensions", {}):
            await self._send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"application/json"), *self._own_headers()]
        await self._send(
            {"type": "websocket.http.response.start", "status": answer.status, "headers": headers}
        )
        await self._send({"type": "websocket.http.response.body", "body": answer.body()})
        raise ClientDisconnected  # uvicorn takes any other end of a refused handshake for a fault of ours

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", self.request_id.encode()), (b"x-content-type-options", b"nosniff")]
        if self.origin is not None:
            headers += [
                (b"access-control-allow-origin", self.origin.encode("latin-1")),
                (b"access-control-expose-headers", b"*"),
                (b"vary", b"origin"),
            ]
        if not self._body_is_read:
            headers.append((b"connection", b"close"))
        return headers

    def _too_large(self) -> ServerError:
        return ServerError(f"The body is larger than {self.max_body_bytes} bytes.", code="payload_too_large")

    def _waits_for_permission(self) -> bool:
        return any(name == b"expect" for name, _ in self._headers) and not self._body_bytes

    async def _linger(self) -> None:
        read = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while read < LINGER_BYTES:
                    message = await self._receive()
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return
                    read += len(message.get("body", b""))
