"""A server on loopback with an engine that follows a script, and a plain socket to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.helpers import noise_voice
from vivace import VoiceRegistry
from vivace.config import Limits, ServerConfig
from vivace.datatypes import AudioChunk, StageTimes, SynthesisResult
from vivace.engine import SynthesisRequest
from vivace.engine.request import check_request
from vivace.errors import CancelledRequestError, InvalidAudioError, OverloadedError
from vivace.random_checkpoint import tiny_config
from vivace.server.app import create_app
from vivace.server.door import bind
from vivace.server.run import make_server, run_on_fast_loop

RATE = 24_000
Step = float | Exception | Callable[[], object]
"""Seconds of audio to give, an error to raise, or something to await first."""


class FakeService:
    """Gives what ``script`` says; keeps every request in ``requests`` and when each one ended in ``ended``."""

    def __init__(self, folder: Path) -> None:
        voices = {
            name: replace(noise_voice(tiny_config()), name=name) for name in ("daniel", "emma", "heart")
        }
        self.voices = VoiceRegistry(folder, builtin=voices)
        self.model, self.sample_rate_hz, self.state = "vivace-fake", RATE, "ready"
        self.script: list[Step] = [0.2, 0.2]
        self.requests: list[SynthesisRequest] = []
        self.uploads: list[tuple[int, str]] = []
        self.sources: list[tuple[bytes, str | None, float]] = []
        self.running: set[FakeStream] = set()
        self.ended: list[str] = []
        self.figures: dict[str, float] = {}
        self.closed = asyncio.Event()

    async def wait_until_closed(self):
        """A step of a script: ends with an error once the service closes."""
        await self.closed.wait()
        raise CancelledRequestError("the service was closed")

    @property
    def num_running(self) -> int:
        return len(self.running)

    def gauges(self):
        return self.figures

    def stream(self, request, text=None):
        return FakeStream(self, request)

    def transform(self, source, voice=None, *, speed=1.0):
        self.sources.append((source, voice, speed))
        stream = FakeStream(self, SynthesisRequest("", voice=voice, speed=speed))
        if not source.startswith(b"RIFF"):
            stream._steps = iter([InvalidAudioError("This is not audio.", param="prompt_audio")])
        return stream

    async def make_voice(self, prompt_audio, prompt_text="", *, name="clone", consent=False):
        if not prompt_audio.startswith(b"RIFF"):
            raise InvalidAudioError("This is not audio.", param="prompt_audio")
        self.uploads.append((len(prompt_audio), prompt_text))
        return replace(noise_voice(tiny_config(), text=prompt_text), name=name, meta={"consent": consent})

    async def drain(self, timeout_s):
        self.state = "draining"
        limit = time.monotonic() + timeout_s
        while self.running and time.monotonic() < limit:
            await asyncio.sleep(0.01)

    async def close(self):
        self.state = "failed"
        self.closed.set()


class FakeStream:
    def __init__(self, service: FakeService, request: SynthesisRequest) -> None:
        self._service, self._request = service, request
        self._steps = iter(service.script)
        self._index, self._samples, self._pending = 0, 0, None
        self._is_open = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        service = self._service
        if not self._is_open:
            if service.state != "ready":
                raise OverloadedError("no requests", code="draining")
            check_request(self._request, Limits())
            self._is_open = True
            service.requests.append(self._request)
            service.running.add(self)
        try:
            for step in self._steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    return self._chunk(step)
                await step()
        except BaseException:
            self._end("failed")
            raise
        self._end("done")
        raise StopAsyncIteration

    def _chunk(self, seconds):
        count = int(seconds * RATE)
        time_s = (self._samples + np.arange(count)) / RATE
        samples = (0.3 * np.sin(2 * np.pi * 220 * time_s)).astype(np.float32)
        start, self._samples, self._index = self._samples / RATE, self._samples + count, self._index + 1
        return AudioChunk(samples, RATE, self._index - 1, 0, start, 12.5, StageTimes(), False)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.aclose()

    async def aclose(self):
        self._end("cancelled")

    def _end(self, how):
        if self in self._service.running:
            self._service.running.discard(self)
            self._service.ended.append(how)

    def summary(self):
        seconds = self._samples / RATE
        empty = np.zeros(0, np.float32)
        return SynthesisResult(
            empty, RATE, seconds, 12.5, 50.0, 0.1, 80.0, 5, 25, 1, "stop", StageTimes(lm_ms=1.0), []
        )


class LoopbackServer:
    """A real server in a thread of its own; ``with`` starts and ends it."""

    def __init__(self, make_service, config: ServerConfig | None = None) -> None:
        self.config = replace(config or ServerConfig(), port=0)
        self._make_service = make_service
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.service = self.app = self.server = None
        self._failure: BaseException | None = None

    def _run(self) -> None:
        try:
            run_on_fast_loop(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        made = self._make_service()
        self.service = await made if asyncio.iscoroutine(made) else made
        self.loop = asyncio.get_running_loop()
        self.app = create_app(self.service, self.config)
        self.server = make_server(self.app, self.config, self.app.state.metrics)
        with bind(self.config) as listener:
            self.port = listener.getsockname()[1]
            task = asyncio.ensure_future(self.server.serve(sockets=[listener]))
            while not self.server.started and not task.done():
                await asyncio.sleep(0.001)
            self._ready.set()
            await task
        await self.service.close()

    def __enter__(self) -> LoopbackServer:
        self._thread.start()
        assert self._ready.wait(60)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_) -> None:
        self.server.should_exit = self.server.force_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, function, *arguments):
        """Runs ``function`` on the server's event loop."""
        done = threading.Event()

        def run():
            function(*arguments)
            done.set()

        self.loop.call_soon_threadsafe(run)
        assert done.wait(10)

    @contextlib.contextmanager
    def connect(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            yield connection

    def exchange(self, data: bytes, *, timeout: float = 10.0) -> bytes:
        """Sends raw bytes and returns everything until the server closes or falls silent."""
        with self.connect() as connection:
            connection.settimeout(timeout)
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while data := connection.recv(65_536):
            received += data
    return received


def read_head(connection: socket.socket) -> bytes:
    """Up to and with the blank line behind the headers."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = connection.recv(1)
        if not data:
            break
        received += data
    return received


def post(document, *, path: str = "/v1/audio/speech", headers: tuple[str, ...] = (), version="1.1") -> bytes:
    """The bytes of a request with a JSON body; ``document`` may be bytes already."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def status_and_code(answer: bytes) -> tuple[int, str | None]:
    """Of a raw answer with a JSON error in it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    try:
        return status, json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return status, None


@contextlib.contextmanager
def at_once(seconds: float) -> Iterator[None]:
    """The block keeps this process, servers in it included, busy for less than that.

    Processor time is the bound, which does not grow where other processes run beside this one; the clock's is five
    times as long and finds what waits.
    """
    busy_s, started_s = time.process_time(), time.monotonic()
    yield
    assert time.process_time() - busy_s < seconds, "it took too much of the processor"
    assert time.monotonic() - started_s < 5 * seconds, "it took too long"


def wait_until(condition, seconds: float = 30.0) -> None:
    """Waits for another thread's doing."""
    event, limit = threading.Event(), time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        event.wait(0.005)
