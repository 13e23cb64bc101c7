"""Clients that cost little: requests written by hand, answers read as they come."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field

LIMIT_SECONDS = 150.0
BYTES_PER_SECOND = 48_000
PLAYER_SECONDS = 0.1


@dataclass
class Heard:
    """One answer as its client saw it.

    Attributes:
        status: of the answer; 0: the connection failed. is_whole: the body ended as it should.
        gaps_ms: between pieces of audio. underruns: pieces that came after a player that holds
            ``PLAYER_SECONDS`` back had run dry.
    """

    status: int = 0
    ttfb_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    underruns: int = 0
    num_bytes: int = 0
    digest: str = ""
    is_whole: bool = False
    was_left: bool = False


def speech_request(text: str, seed: int = 0, voice: str | None = None) -> bytes:
    """A request for PCM."""
    document = {"input": text, "seed": seed, "response_format": "pcm", "voice": voice}
    body = json.dumps({key: value for key, value in document.items() if value is not None}).encode()
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def speak(
    port: int, text: str, seed: int = 0, *, leave_after: int | None = None, pause_s: float = 0.0
) -> Heard:
    """One request.

    Args:
        leave_after: bytes after which the client goes away. pause_s: how long it waits before each read.
    """
    heard = Heard()
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
        async with asyncio.timeout(LIMIT_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
            try:
                await _listen(reader, writer, speech_request(text, seed), heard, leave_after, pause_s)
            finally:
                writer.transport.abort()
    return heard


async def _listen(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: bytes,
    heard: Heard,
    leave_after: int | None,
    pause_s: float,
) -> None:
    digest = hashlib.sha256()
    started = time.perf_counter()
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    heard.status = int(head.split()[1])
    if heard.status != 200:
        return
    first = last = 0.0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        piece = await reader.readexactly(size)
        await reader.readexactly(2)
        now = time.perf_counter()
        if not first:
            first, heard.ttfb_ms = now, 1e3 * (now - started)
        else:
            heard.gaps_ms.append(1e3 * (now - last))
            heard.underruns += now - first > heard.num_bytes / BYTES_PER_SECOND + PLAYER_SECONDS
        last = now
        heard.num_bytes += size
        digest.update(piece)
        if leave_after is not None and heard.num_bytes >= leave_after:
            heard.was_left = True
            return
        if pause_s:
            await asyncio.sleep(pause_s)
    heard.is_whole, heard.digest = True, digest.hexdigest()


async def open_websocket(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A session that has been greeted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    key = base64.b64encode(os.urandom(16)).decode()
    head = (
        f"GET /v1/audio/speech/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    )
    writer.write(head.encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    if b" 101 " not in answer:
        raise ConnectionError("no WebSocket")
    await reader.readexactly(4)
    return reader, writer


async def get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> int:
    """A request on a connection that stays open; its status."""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
    )
    await reader.readexactly(length)
    return int(head.split()[1])


async def until_closed(reader: asyncio.StreamReader, limit_s: float) -> float | None:
    """Seconds until the server closes; None: it does not within ``limit_s``."""
    started = time.monotonic()
    with suppress(ConnectionError):
        try:
            async with asyncio.timeout(limit_s):
                while await reader.read(65_536):
                    pass
        except TimeoutError:
            return None
    return time.monotonic() - started
