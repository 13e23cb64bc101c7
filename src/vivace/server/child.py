"""Starts the engine process, hears from it, and notices when it is gone, stopped or stuck."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vivace.config import Limits
from vivace.environment import engine_environment
from vivace.errors import VivaceError
from vivace.server.wire import Header, WireError, error_of, pack, read_frame

if TYPE_CHECKING:
    from vivace.checkpoint import LMVariant

COMMAND = (sys.executable, "-P", "-m", "vivace.server.worker")
TICK_SECONDS = 0.25
SLOW_STEP_SECONDS = 300.0
REAP_SECONDS = 10.0
"""How long to wait for a killed process; one that the kernel keeps in a driver call is left to it."""

OnFrame = Callable[[Header, bytes], None]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """As the arguments of ``Engine.open``; ``dtype`` by name."""

    model: str | Path = "mini"
    device: str = "cpu"
    dtype: str = "auto"
    lm_variant: LMVariant = "base"
    voices_folder: Path | None = None
    tokenizer: Path | None = None
    limits: Limits = field(default_factory=Limits)
    max_streams: int | None = None
    deterministic: bool = False
    host_memory_gb: float = 0.0

    @property
    def is_slow(self) -> bool:
        """One step may take a minute: a large model on a CPU."""
        return self.device == "cpu" and str(self.model) != "mini"

    def header(self) -> Header:
        folders = {"voices_folder": self.voices_folder, "tokenizer": self.tokenizer}
        return {
            **asdict(self),
            "model": str(self.model),
            **{name: None if path is None else str(path) for name, path in folders.items()},
        }


@dataclass(frozen=True, slots=True)
class Watch:
    """How long to wait for what.

    Attributes:
        start_s: the engine process to load the model.
        silence_s: any word of it; it sends several a second.
        step_s: the step that its engine runs; ``SLOW_STEP_SECONDS`` where that is slow.
        probe_s: a word that it is asked to speak after a request has failed.
        stall_s: a consumer to take the next chunk.
        wait_s: a new request for an engine that restarts; ``max_waiting`` requests do, others are refused.
        backoff_s, max_backoff_s: before the second start in a row, and at most.
        credit_chunks: chunks that lie ready in this process for each consumer.
    """

    start_s: float = 600.0
    silence_s: float = 5.0
    step_s: float = 30.0
    probe_s: float = 30.0
    stall_s: float = 15.0
    wait_s: float = 5.0
    max_waiting: int = 64
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    credit_chunks: int = 4


class EngineProcess:
    """One run of the engine process, from ``start`` to ``kill``.

    Attributes:
        sample_rate_hz: of the model.
        gauges: figures of the engine, as of its latest beat.
        lost: done once the process can no longer be relied on; the result says why.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        watch: Watch,
    ) -> None:
        self.sample_rate_hz = 0
        self.gauges: dict[str, float] = {}
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process = process
        self._reader = reader
        self._writer = writer
        self._watch = watch
        self._tasks: list[asyncio.Task[None]] = []
        self._num_silent = 0

    @classmethod
    async def start(
        cls, settings: Header, on_frame: OnFrame, watch: Watch, command: Sequence[str] = COMMAND
    ) -> EngineProcess:
        """Starts the process and waits until its engine is ready.

        Raises:
            ModelFolderError and its kind: what the process says it lacks.
            VivaceError: it ended, or was not ready within ``watch.start_s``.
        """
        child = await _spawn(command, watch)
        try:
            child.send({"kind": "open", **settings})
            async with asyncio.timeout(watch.start_s):
                header, _ = await read_frame(child._reader)
        except (EOFError, OSError, WireError, TimeoutError):
            await child.kill()
            raise VivaceError("The engine process did not start; its log says why.") from None
        except BaseException:
            await child.kill()
            raise
        if header["kind"] != "ready":
            await child.kill()
            raise error_of(header)
        child.sample_rate_hz = header["sample_rate_hz"]
        child._tasks = [
            asyncio.create_task(child._read(on_frame)),
            asyncio.create_task(child._watch_silence()),
        ]
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def silent_s(self) -> float:
        """Seconds without a word of it, as the watchdog counts them."""
        return self._num_silent * TICK_SECONDS

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Sends a frame; to a process that is gone it sends nothing."""
        if not self.lost.done():
            self._writer.write(pack(header, payload))

    def lose(self, reason: str) -> None:
        """From now on nothing is expected of the process."""
        if not self.lost.done():
            self.lost.set_result(reason)

    async def kill(self) -> None:
        """Ends the process; afterwards nothing of it is left, also if the waiting task is cancelled."""
        self.lose("closed")
        for task in self._tasks:
            task.cancel()
        self._process.kill()
        self._writer.transport.abort()
        await asyncio.shield(asyncio.create_task(self._reap()))

    async def _reap(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, REAP_SECONDS)
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self, on_frame: OnFrame) -> None:
        try:
            while True:
                header, payload = await read_frame(self._reader)
                self._num_silent = 0
                if header["kind"] == "broken":
                    self.lose("its engine has failed")
                elif header["kind"] != "beat":
                    on_frame(header, payload)
                else:
                    self.gauges = header["gauges"]
                    if header["hangs_s"] > self._watch.step_s:
                        self.lose("its engine hangs")
        except (EOFError, OSError):
            self.lose("it ended")
        except WireError:
            self.lose("it does not make sense")

    async def _watch_silence(self) -> None:
        """Counts ticks, not seconds: while this process itself was held up, frames wait to be read."""
        while self.silent_s < self._watch.silence_s:
            await asyncio.sleep(TICK_SECONDS)
            self._num_silent += 1
        self.lose("it is silent")


async def _spawn(command: Sequence[str], watch: Watch) -> EngineProcess:
    ours, theirs = socket.socketpair()
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
        return EngineProcess(_popen(command, theirs.fileno()), reader, writer, watch)
    except OSError as error:
        ours.close()
        raise VivaceError("The engine process could not be started; see `vivace doctor`.") from error
    finally:
        theirs.close()


def _popen(command: Sequence[str], descriptor: int) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return subprocess.Popen(
        [*command, str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env=engine_environment() | {"PYTHONPATH": paths},
    )
