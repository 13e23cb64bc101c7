"""A service whose audio is its text, so that a test can read what was spoken, and clients for it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import struct
from contextlib import asynccontextmanager, suppress

import numpy as np
from websockets.asyncio.client import connect

from tests.server_helpers import RATE, FakeService
from vivace.config import Limits
from vivace.datatypes import AudioChunk, StageTimes, SynthesisResult
from vivace.engine.request import check_request
from vivace.errors import InvalidTextError, OverloadedError, SynthesisError

DEADLINE_S = 30.0


class TalkService(FakeService):
    """Speaks the UTF-8 bytes of the text as samples, one chunk a word, one segment a sentence.

    ``slow`` pauses, ``block`` stops for ever, ``endless`` never stops speaking, ``fail`` fails.
    """

    def __init__(self, folder):
        super().__init__(folder)
        self.words = []  # as they are spoken

    def stream(self, request, text=None):
        return TalkStream(self, request, text)


class TalkStream:
    def __init__(self, service, request, text):
        self._service = service
        self._request = request
        self._text = text
        self._chunks = None
        self._index = 0
        self._num_samples = 0
        self._segment = 0
        self._spoken = [""]
        self._skipped: list[str] = []

    def __aiter__(self):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.aclose()

    async def aclose(self):
        if self in self._service.running:
            self._service.running.discard(self)
            self._service.ended.append("cancelled")

    async def __anext__(self):
        if self._chunks is None:
            if self._service.state != "ready":
                code = "draining" if self._service.state == "draining" else "engine_restarting"
                raise OverloadedError("no requests now", code=code)
            check_request(self._request, Limits())
            self._service.requests.append(self._request)
            self._service.running.add(self)
            self._chunks = self._speak()
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            self._service.running.discard(self)
            self._service.ended.append("done")
            raise

    async def _speak(self):
        said = False
        async for word in self._words():
            if self._spoken[-1].endswith(". "):
                self._segment += 1
                self._spoken.append("")
            self._spoken[-1] += word
            self._service.words.append(word)
            said = True
            if word.strip() == "slow":
                await asyncio.sleep(0.05)
            elif word.strip() == "block":
                await asyncio.Event().wait()
            elif word.strip() == "unread":
                self._skipped.append("你好")
            elif word.strip() == "fail":
                raise SynthesisError("internal error (Planted)")
            while word.strip() == "endless":
                yield self._chunk(np.zeros(RATE, np.float32))
            yield self._chunk(np.frombuffer(word.encode(), np.uint8).astype(np.float32) / 32767)
        if not said:
            raise InvalidTextError("nothing to say", code="empty_input", param="text")

    async def _words(self):
        """Words with the blank behind them, however the text was cut."""
        rest = self._request.text
        async for piece in self._text or _nothing():
            rest += piece
            while " " in rest:
                word, _, rest = rest.partition(" ")
                yield word + " "
        *words, rest = rest.split(" ")
        for word in words:
            yield word + " "
        if rest:
            yield rest

    def _chunk(self, samples):
        start_s = self._num_samples / RATE
        self._index += 1
        self._num_samples += len(samples)
        return AudioChunk(
            samples, RATE, self._index - 1, self._segment, start_s, 1.5, StageTimes(lm_ms=1.0), False
        )

    def summary(self):
        return SynthesisResult(
            np.zeros(0, np.float32), RATE, self._num_samples / RATE, 1.5, 2.0, 0.1, 80.0, 5, 25, 1, "stop",
            StageTimes(lm_ms=1.0), self._spoken, self._skipped,
        )  # fmt: skip


async def _nothing():
    return
    yield


def spoken(pcm):
    """The text in PCM that ``TalkService`` has spoken."""
    return np.frombuffer(pcm, "<i2").astype(np.uint8).tobytes().decode()


class Client:
    """Our protocol, as a client speaks it."""

    def __init__(self, connection):
        self.connection = connection

    async def say(self, kind, **members):
        await self.connection.send(json.dumps({"type": kind, **members}))

    async def next(self):
        """The next message: a dict, or bytes of audio."""
        async with asyncio.timeout(DEADLINE_S):
            message = await self.connection.recv()
        return message if isinstance(message, bytes) else json.loads(message)

    async def until(self, kind):
        """Messages up to the next one of a kind; the audio joined comes with it as ``audio``."""
        audio, events = b"", []
        while True:
            message = await self.next()
            if isinstance(message, bytes):
                audio += message
                continue
            events.append(message)
            if message["type"] == kind:
                return {**message, "audio": audio, "events": events}

    async def closed(self):
        """The close code."""
        with suppress(Exception):
            async with asyncio.timeout(DEADLINE_S):
                async for _ in self.connection:
                    pass
        return self.connection.close_code


def url_of(server, path="/v1/audio/speech/stream"):
    return f"ws://127.0.0.1:{server.port}{path}"


@asynccontextmanager
async def session(server, path="/v1/audio/speech/stream", **options):
    """A session that has been greeted."""
    async with connect(url_of(server, path), max_size=None, **options) as connection:
        client = Client(connection)
        ready = await client.next()
        assert ready["type"] == "session.ready"
        client.ready = ready
        yield client


class RawSocket:
    """A WebSocket made by hand, for what no client library would send."""

    def __init__(
        self, server, *, path="/v1/audio/speech/stream", headers=(), request=None, receive_bytes=None
    ):
        self.socket = socket.socket()
        self.socket.settimeout(DEADLINE_S)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", server.port))
        lines = request or [
            f"GET {path} HTTP/1.1",
            f"Host: 127.0.0.1:{server.port}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
            *headers,
        ]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        self._buffer = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def status(self):
        """Of the answer to the handshake."""
        while b"\r\n\r\n" not in self._buffer:
            data = self.socket.recv(65536)
            if not data:
                break
            self._buffer += data
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0

    def send(self, opcode, payload=b"", *, is_last=True, reserved=0, is_masked=True):
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(
                frame(opcode, payload, is_last=is_last, reserved=reserved, is_masked=is_masked)
            )

    def close_code(self):
        """Reads until the other side closes; the code it gave, or None."""
        code = None
        with suppress(ConnectionResetError):
            while True:
                opcode, payload = self.receive()
                if opcode is None:
                    return code
                if opcode == 8:
                    code = struct.unpack(">H", payload[:2])[0] if payload else 1005
        return code

    def receive(self):
        """One frame of the server: (opcode, payload); (None, b"") at the end."""
        head = self._exactly(2)
        if len(head) < 2:
            return None, b""
        size = head[1] & 127
        if size == 126:
            size = struct.unpack(">H", self._exactly(2))[0]
        elif size == 127:
            size = struct.unpack(">Q", self._exactly(8))[0]
        return head[0] & 15, self._exactly(size)

    def _exactly(self, size):
        while len(self._buffer) < size:
            data = self.socket.recv(1 << 20)
            if not data:
                break
            self._buffer += data
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken


def frame(opcode, payload=b"", *, is_last=True, reserved=0, is_masked=True):
    """A client's frame; its mask is zero, which changes nothing."""
    head = bytes([(0x80 if is_last else 0) | reserved << 4 | opcode])
    size, bit = len(payload), 0x80 if is_masked else 0
    if size < 126:
        head += bytes([bit | size])
    elif size < 65536:
        head += bytes([bit | 126]) + struct.pack(">H", size)
    else:
        head += bytes([bit | 127]) + struct.pack(">Q", size)
    return head + (bytes(4) if is_masked else b"") + payload
