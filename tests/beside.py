"""What each bad input runs beside: a stream on the same server that must not notice it, and a census before and after.

The neighbour gives a known wave, a piece every ten milliseconds, for as long as the bad input lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.server_helpers import RATE, FakeService, post, read_head, wait_until
from vivace.audio.pcm import pcm16
from vivace.datatypes import AudioChunk, StageTimes, SynthesisResult
from vivace.server.local import LocalService

NEIGHBOUR = "What the neighbour says."
PIECE_SAMPLES = RATE // 100
LONGEST_GAP_S = 1.5
"""Between two pieces, in processor time of this process: an event loop that reads a bad input takes more of it, and a
busy machine, which may hold up the neighbour too, does not."""
LONGEST_WAIT_S = 10.0
"""Between two pieces, by the clock: what blocks the event loop without work."""
LINUX = sys.platform == "linux"


class Neighbourly:
    """A service that also has a neighbour. It counts neither as running nor among the requests."""

    is_released = False

    def stream(self, request, text=None):
        if request.text == NEIGHBOUR:
            return NeighbourStream(self)
        return super().stream(request, text)


class FakeServiceWithNeighbour(Neighbourly, FakeService):
    pass


class LocalServiceWithNeighbour(Neighbourly, LocalService):
    pass


class NeighbourStream:
    def __init__(self, service):
        self._service = service
        self._index = 0

    def __aiter__(self):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def aclose(self):
        pass

    async def __anext__(self):
        if self._service.is_released and self._index > 1:
            raise StopAsyncIteration
        await asyncio.sleep(0.01)
        start, self._index = self._index * PIECE_SAMPLES, self._index + 1
        samples = wave(start, start + PIECE_SAMPLES)
        return AudioChunk(samples, RATE, self._index - 1, 0, start / RATE, 1.0, StageTimes(), False)

    def summary(self):
        nothing, seconds = np.zeros(0, np.float32), self._index / 100
        return SynthesisResult(nothing, RATE, seconds, 1.0, 2.0, 0.1, 80.0, 5, 25, 1, "stop", StageTimes())


def wave(start, end):
    return (0.4 * np.sin(np.arange(start, end) * 0.031)).astype(np.float32)


class Neighbour:
    """Its client, in a thread."""

    def __init__(self, server):
        self._server = server
        self._times, self._busy = [], []
        self._body = b""
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self):
        self._server.service.is_released = False
        self._thread.start()
        assert self._has_begun.wait(20)
        return self

    def _listen(self):
        keys = self._server.config.api_keys
        headers = ("Connection: close", *(f"Authorization: Bearer {key}" for key in keys[:1]))
        with self._server.connect() as connection:
            request = {"input": NEIGHBOUR, "response_format": "pcm"}
            connection.sendall(post(request, headers=headers))
            assert b" 200 OK" in read_head(connection)
            while data := connection.recv(65_536):
                self._times.append(time.monotonic())
                self._busy.append(time.process_time())
                self._body += data
                self._has_begun.set()

    def __exit__(self, kind, *_):
        self._server.service.is_released = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        if kind is None:
            self._check()

    def _check(self):
        audio = unchunked(self._body)
        assert len(audio) >= 4 * PIECE_SAMPLES
        assert audio == pcm16(wave(0, len(audio) // 2)), "the neighbour heard something else"
        assert np.diff(self._busy).max(initial=0.0) < LONGEST_GAP_S, "the neighbour had to wait"
        assert np.diff(self._times).max(initial=0.0) < LONGEST_WAIT_S, "the neighbour had to wait"


def unchunked(body):
    """A chunked body that must be whole."""
    audio, position = [], 0
    while True:
        end = body.index(b"\r\n", position)
        size = int(body[position:end], 16)
        if size == 0:
            assert body[end:] == b"\r\n\r\n"
            return b"".join(audio)
        audio.append(body[end + 2 : end + 2 + size])
        position = end + 4 + size


def census(server):
    """What a request may leave behind. Threads of the event loop's pool, which is bounded, are no leak."""
    pools = ("asyncio_", "uvloop_")
    threads = [thread.name for thread in threading.enumerate() if not thread.name.startswith(pools)]
    counts = {
        "threads": sorted(threads),
        "running": server.service.num_running,
        "tasks": len(server.server.server_state.tasks),
        "connections": len(server.server.server_state.connections),
        "temporary files": sorted(os.listdir(tempfile.gettempdir())),
    }
    if LINUX:
        counts["open files"] = len(os.listdir("/proc/self/fd"))
        children = Path("/proc/self/task").glob("*/children")
        counts["processes"] = sorted(pid for path in children for pid in _read(path).split())
    return counts


def _read(path):
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""


@contextlib.contextmanager
def beside(*servers):
    """The neighbours hear what they should, and afterwards everything is as it was."""
    for server in servers:  # the last row's connections may still be ending
        wait_until(lambda state=server.server.server_state: not state.tasks and not state.connections)
    before = [census(server) for server in servers]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(Neighbour(server))
        yield
    for server, counts in zip(servers, before, strict=True):
        with contextlib.suppress(AssertionError):
            wait_until(lambda server=server, counts=counts: census(server) == counts)
        now = census(server)
        changed = {name: (counts[name], now[name]) for name in now if now[name] != counts[name]}
        assert not changed, f"before and after: {changed}"


@contextlib.contextmanager
def own_temporary_folder(folder):
    """Temporary files of this process go to ``folder``, where nobody else's are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield


@contextlib.contextmanager
def memory_below(megabytes):
    """Resident memory never grows by more than that, also in between."""
    if not LINUX:
        yield
        return
    Path("/proc/self/clear_refs").write_text("5")  # from now on the kernel notes the highest value anew
    before = _resident_kb("VmRSS")
    yield
    assert _resident_kb("VmHWM") - before < megabytes * 1024, "too much memory"


def _resident_kb(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def beside_each_row(request, tmp_path_factory, *names):
    """The body of an autouse fixture: each row runs beside the neighbours of the servers it uses."""
    servers = [request.getfixturevalue(name) for name in names if name in request.fixturenames]
    with own_temporary_folder(tmp_path_factory.mktemp("temporary")), beside(*servers):
        yield
