"""The engine process: ``python -m vivace.server.worker SOCKET PARENT``.

SOCKET is the number of an inherited, connected socket; ``wire`` says what is spoken over it. The process ends when
the socket closes or its parent ends, whatever it is doing. It asks the engine's loop for a sign of life at every
beat, so that the parent hears of a step that hangs, and takes a chunk from the engine only when the consumer has
room for one.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vivace.config import Limits
from vivace.engine import AsyncEngine, SynthesisRequest
from vivace.errors import SynthesisError, VivaceError
from vivace.server.wire import (
    Header,
    WireError,
    chunk_frame,
    error_header,
    pack,
    read_frame,
    request_of,
    result_header,
)
from vivace.voice.file import from_bytes, to_bytes

if TYPE_CHECKING:
    from vivace.server.service import ServiceStream
    from vivace.voice import Voice

BEAT_SECONDS = 0.25
SWITCH_SECONDS = 0.001
"""How long the engine's thread may keep the interpreter while a finished chunk waits to be sent."""


class WorkerEngine(Protocol):
    """What the process needs of an ``AsyncEngine``."""

    @property
    def is_running(self) -> bool: ...

    @property
    def sample_rate_hz(self) -> int: ...

    def stream(self, request: SynthesisRequest, text: AsyncIterator[str] | None = None) -> ServiceStream: ...

    def transform(
        self, source: bytes, voice: str | Voice | None = None, *, speed: float = 1.0
    ) -> ServiceStream: ...

    async def make_voice(
        self, prompt_audio: bytes, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice: ...

    def ask_for_sign(self, answer: Callable[[], object]) -> None: ...

    def gauges(self) -> dict[str, float]: ...


OpenEngine = Callable[[Header], Awaitable[WorkerEngine]]


async def open_engine(settings: Header) -> WorkerEngine:
    """The engine that the settings of ``process.EngineSettings`` describe."""
    from vivace.checkpoint.model import PRECISIONS

    folder, tokenizer = settings["voices_folder"], settings["tokenizer"]
    return await AsyncEngine.open(
        settings["model"],
        device=settings["device"],
        dtype=PRECISIONS[settings["dtype"]],
        lm_variant=settings["lm_variant"],
        voices_folder=None if folder is None else Path(folder),
        tokenizer=None if tokenizer is None else Path(tokenizer),
        limits=Limits(**settings["limits"]),
        max_streams=settings["max_streams"],
        deterministic=settings["deterministic"],
        host_memory_gb=settings["host_memory_gb"],
    )


class _Session:
    """One request: what its consumer allows, and its text as it arrives (None is its end)."""

    def __init__(self, credit: int) -> None:
        self.credit = asyncio.Semaphore(credit)
        self.text: asyncio.Queue[str | None] = asyncio.Queue()

    async def pieces(self) -> AsyncIterator[str]:
        while (piece := await self.text.get()) is not None:
            yield piece


class Worker:
    """Serves one parent until it goes."""

    def __init__(
        self, engine: WorkerEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._writer = writer
        self._sessions: dict[int, _Session] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._voices: dict[int, Voice] = {}
        self._last_voice: str | Voice | None = None
        self._num_missed = 0
        self._is_asked = False

    async def run(self) -> None:
        """Until the parent closes the socket, or the engine's loop has ended."""
        self._send({"kind": "ready", "sample_rate_hz": self._engine.sample_rate_hz})
        beats = asyncio.create_task(self._beat())
        reading = asyncio.create_task(self._read())
        await asyncio.wait([beats, reading], return_when=asyncio.FIRST_COMPLETED)
        with suppress(OSError):
            await self._writer.drain()

    async def _read(self) -> None:
        with suppress(EOFError, OSError, WireError):
            while True:
                self._handle(*await read_frame(self._reader))

    def _handle(self, header: Header, payload: bytes) -> None:
        kind = header["kind"]
        session = self._sessions.get(header.get("id", 0))
        if kind in ("speak", "transform"):
            self._begin(header, payload)
        elif kind == "make_voice":
            self._start(header["id"], self._make_voice(header, payload))
        elif kind == "probe":
            self._start(header["id"], self._probe(header["id"]))
        elif kind == "voice":
            self._voices[header["key"]] = from_bytes(payload)
        elif kind == "forget":
            self._voices.pop(header["key"], None)
        elif kind == "cancel":
            task = self._tasks.get(header["id"])
            if task is not None:
                task.cancel()
        elif session is not None:  # what comes after its end is not heard
            if kind == "credit":
                session.credit.release()
            elif kind == "text":
                session.text.put_nowait(header["piece"])
            elif kind == "text_end":
                session.text.put_nowait(None)

    def _begin(self, header: Header, source: bytes) -> None:
        voice = header["voice"]
        if isinstance(voice, int):
            voice = self._voices[voice]
        self._last_voice = voice
        request = request_of(header["request"], voice)
        session = self._sessions[header["id"]] = _Session(header["credit"])
        if header["kind"] == "transform":
            stream = self._engine.transform(source, voice, speed=request.speed)
        else:
            stream = self._engine.stream(request, session.pieces() if header["is_streamed"] else None)
        self._start(header["id"], self._speak(header["id"], session, stream))

    def _start(self, request_id: int, work: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._sessions.pop(request_id, None)
            del self._tasks[request_id]
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception):
                self._send({"kind": "error", "id": request_id, **error_header(error)})

        task = self._tasks[request_id] = asyncio.create_task(work)
        task.add_done_callback(ended)

    async def _speak(self, request_id: int, session: _Session, opened: ServiceStream) -> None:
        async with opened as stream:
            is_last, num_told, num_skipped = False, 0, 0
            while True:
                if not is_last:  # after the last chunk comes only the end
                    await session.credit.acquire()
                try:
                    chunk = await anext(stream)
                except StopAsyncIteration:
                    break
                is_last = chunk.is_last
                so_far = stream.summary()
                self._writer.write(chunk_frame(request_id, chunk, so_far, num_told, num_skipped))
                num_told, num_skipped = len(so_far.spoken_text), len(so_far.skipped_text)
                await self._writer.drain()
            self._send({"kind": "end", "id": request_id, "result": result_header(stream.summary())})

    async def _make_voice(self, header: Header, payload: bytes) -> None:
        voice = await self._engine.make_voice(
            payload, header["text"], name=header["name"], consent=header["consent"]
        )
        self._send({"kind": "made_voice", "id": header["id"]}, to_bytes(voice))

    async def _probe(self, request_id: int) -> None:
        """Speaks a word and tells whether the engine still can. It does not judge voices or a full queue."""
        is_well = True
        try:
            async with self._engine.stream(SynthesisRequest("Ready.", voice=self._last_voice)) as stream:
                await anext(stream)
        except SynthesisError:
            is_well = False
        except VivaceError:
            pass
        except Exception:
            is_well = False
        self._send({"kind": "probed", "id": request_id, "is_well": is_well})

    async def _beat(self) -> None:
        """Counts beats, not seconds, so that a process that was stopped for a while does not accuse its engine."""
        while self._engine.is_running:
            if not self._is_asked:
                self._is_asked, self._num_missed = True, 0
                self._engine.ask_for_sign(self._heard)
            hangs_s = self._num_missed * BEAT_SECONDS
            self._send({"kind": "beat", "hangs_s": hangs_s, "gauges": self._engine.gauges()})
            await asyncio.sleep(BEAT_SECONDS)
            self._num_missed += 1
        self._send({"kind": "broken"})

    def _heard(self) -> None:  # from any thread
        self._is_asked, self._num_missed = False, 0

    def _send(self, header: Header, payload: bytes = b"") -> None:
        with suppress(OSError):
            self._writer.write(pack(header, payload))


async def serve(connection: socket.socket, open_engine: OpenEngine) -> None:
    """Reads the settings, opens the engine, and serves."""
    reader, writer = await asyncio.open_connection(sock=connection)
    settings, _ = await read_frame(reader)
    gone = asyncio.create_task(_end_with_parent(reader))
    try:
        engine = await open_engine(settings)
    except VivaceError as error:
        writer.write(pack({"kind": "unusable", **error_header(error)}))
        await writer.drain()
        return
    gone.cancel()
    await asyncio.wait([gone])
    # What is loaded stays to the end: looking through all of it, as the garbage collector does now and then, would
    # hold up every stream for a fifth of a second.
    gc.collect()
    gc.freeze()
    await Worker(engine, reader, writer).run()


async def _end_with_parent(reader: asyncio.StreamReader) -> None:
    """While the model loads the parent says nothing, but it may leave."""
    with suppress(EOFError, OSError, WireError):
        await read_frame(reader)
    os._exit(1)


def die_with_parent(parent: int) -> None:
    """On Linux the kernel kills this process when its parent ends, also where our own code is stuck."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we could ask
            os._exit(1)


def main(open_engine: OpenEngine = open_engine) -> None:
    """Entry point of the process."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    sys.setswitchinterval(SWITCH_SECONDS)
    # The terminal and service managers signal all processes; when to end is the parent's decision.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with suppress(EOFError, OSError):
        asyncio.run(serve(socket.socket(fileno=descriptor), open_engine))
    sys.stderr.flush()
    os._exit(0)  # the engine's thread may hang, and nothing here needs an orderly end


if __name__ == "__main__":
    main()
