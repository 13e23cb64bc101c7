"""Compiles an engine's kernels on all cores while its weights are read, where the caches on disk lack them.

What it does not compile, for whatever reason, is compiled at its first launch as without it.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vivace.checkpoint import load_config
from vivace.checkpoint.loading import resolve_device
from vivace.config import ModelConfig
from vivace.engine.kernel_index import END, index_file, is_complete
from vivace.engine.kernel_plan import EngineKind
from vivace.environment import compiler_environment
from vivace.errors import VivaceError
from vivace.kernels.gpu import NEEDED, Gpu, gpu_of, num_multiprocessors

COMMAND = (sys.executable, "-P", "-m", "vivace.engine.kernel_compiler")

MOST_WORKERS = 16

_END_S = 1.0

_SILENCE_S = 20.0  # without news the process is taken for lost: no kernel takes a tenth of it

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What was compiled.

    Attributes:
        kernels: how many were looked at; those that were there already count. failed: names and why.
        cpu_seconds: of all of them together. slowest: name and processor seconds of the slowest one.
        is_complete: nothing was left out.
        folder: where Triton's lie.
    """

    kernels: int
    cpu_seconds: float
    slowest: tuple[str, float]
    failed: tuple[tuple[str, str], ...]
    is_complete: bool
    folder: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def can_launch() -> bool:
    """Whether Triton can launch what it compiles; ``DeviceStages.open`` says why not."""
    from vivace.kernels.triton_launcher import why_no_launches

    return why_no_launches() is None


@contextmanager
def compile_ahead(
    folder: Path, device: str, dtype: torch.dtype, max_streams: int, *, deterministic: bool
) -> Iterator[None]:
    """Compiles what an engine for a model folder lacks while the body runs, and at its end waits for the rest.

    Nothing happens on a CPU, or for what ``load_assets`` will refuse.
    """
    ahead = None
    with suppress(VivaceError):
        resolved = resolve_device(device)
        if resolved.type == "cuda":
            kind = engine_kind(load_config(folder), resolved, dtype, max_streams, deterministic=deterministic)
            ahead = CompileAhead.start(kind)
    try:
        yield
        if ahead is not None:
            ahead.wait()
    finally:
        if ahead is not None:
            ahead.close()


def engine_kind(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, max_streams: int, *, deterministic: bool
) -> EngineKind | None:
    """What an engine on ``device`` needs kernels for; None where it takes none."""
    gpu = gpu_of(device)
    if gpu is None or gpu.capability < NEEDED or dtype == torch.int8:
        return None
    gpu = Gpu(gpu.capability, num_multiprocessors(device))
    return EngineKind(config, dtype, gpu, max_streams, deterministic)


def compile_now(kind: EngineKind) -> CompileReport:
    """Compiles all kernels of an engine, on any machine, however slow; what is there already is not counted."""
    from vivace.engine.kernel_compiler import KERNEL_S

    ahead = CompileAhead(kind, num_workers())
    try:
        return ahead.wait(KERNEL_S + _SILENCE_S)
    finally:
        ahead.close()


def num_workers() -> int:
    """Cores that this process may use, within bounds."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


class CompileAhead:
    """A process that compiles. ``close`` it.

    Args:
        kind: for which engine.
        workers: kernels at a time.
        command: for tests.
    """

    def __init__(self, kind: EngineKind, workers: int, command: Sequence[str] = COMMAND) -> None:
        from vivace.engine.kernel_compiler import order_of
        from vivace.kernels.triton_cache import use_cache_folder

        self._started, self._folder = time.monotonic(), str(use_cache_folder())
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=compiler_environment(),
            start_new_session=True,  # so that all that it has started ends with it
        )
        self._data = b""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended already, as ``wait`` will find
            self._process.stdin.write(order_of(kind, workers).encode() + b"\n")
            self._process.stdin.flush()

    @classmethod
    def start(cls, kind: EngineKind | None) -> CompileAhead | None:
        """Starts if there is something to compile and more than one core to do it with; never raises."""
        if kind is None or num_workers() < 2 or not hasattr(os, "fork"):
            return None
        try:
            from vivace.kernels.triton_cache import use_cache_folder

            if not can_launch():
                return None
            if is_complete(index_file(kind, use_cache_folder())):
                return None
            _log.info("compiling kernels on %d cores", num_workers())
            return cls(kind, num_workers())
        except (ImportError, OSError) as error:
            _log.info("kernels are not compiled ahead: %s", error)
            return None

    def wait(self, silence_s: float = _SILENCE_S) -> CompileReport:
        """Waits until all kernels are compiled, or until the process ends or says nothing for so long; then ends it."""
        pipe = self._process.stdout
        assert pipe is not None
        is_complete = False
        while not is_complete and select.select([pipe], [], [], silence_s)[0]:
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                break
            self._data += part
            is_complete = _has_ended(self._data)
        self.close()
        report = _report(self._data, self._folder, is_complete=is_complete)
        _log.info(
            "%d kernels compiled ahead in %.1f s (%.1f s of processor time)%s",
            report.kernels,
            time.monotonic() - self._started,
            report.cpu_seconds,
            "" if is_complete else "; the others follow one by one",
        )
        return report

    def close(self) -> None:
        """Ends the process, if it still runs. Doing so twice is allowed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.stdout.closed:  # its number may be another one's by now
            return
        with suppress(OSError):
            self._process.stdin.close()  # it ends its children, then itself
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


def _lines(data: bytes) -> Iterator[dict[str, Any]]:
    """What the process has said so far."""
    for text in data.splitlines():
        with suppress(ValueError):  # a line that was cut off, or is somebody else's
            line = json.loads(text)
            if isinstance(line, dict):
                yield line


def _has_ended(data: bytes) -> bool:
    """Whether nothing more is to be expected."""
    return END in _lines(data[-1000:])


def _report(data: bytes, folder: str, *, is_complete: bool) -> CompileReport:
    lines = [line for line in _lines(data) if {"name", "cpu_seconds", "error"} <= line.keys()]
    seconds = [(line["name"], line["cpu_seconds"]) for line in lines]
    return CompileReport(
        kernels=len(lines),
        cpu_seconds=sum(own for _, own in seconds),
        slowest=max(seconds, key=lambda pair: pair[1], default=("", 0.0)),
        failed=tuple((line["name"], line["error"]) for line in lines if line["error"]),
        is_complete=is_complete,
        folder=folder,
    )
