"""The process that compiles an engine's kernels before it needs them: ``python -m vivace.engine.kernel_compiler``.

Reads what to compile as one line of JSON, writes one line for every kernel, one behind the last, and empty ones while
another process compiles the same; ends when its input ends: then nobody needs the kernels any more. It sees no GPU, so
it takes none of its memory.
"""

from __future__ import annotations

import fcntl
import json
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from vivace.checkpoint.config_json import from_json, to_json
from vivace.config import ModelConfig
from vivace.engine.kernel_index import END, index_file, is_complete, write_index
from vivace.engine.kernel_plan import EngineKind, plan
from vivace.kernels.compile_pool import CompilePool, Outcome
from vivace.kernels.gpu import Gpu
from vivace.kernels.triton_cache import use_cache_folder

KERNEL_S = 90.0
"""One kernel may take so long; the slowest takes a few seconds."""

_TURN_S, _TURNS = 1.0, 120  # how often to ask whether another process has ended, and how many times


def order_of(kind: EngineKind, workers: int) -> str:
    """What the process reads, as one line."""
    return json.dumps(
        {
            "config": to_json(kind.config),
            "dtype": str(kind.dtype).removeprefix("torch."),
            "capability": kind.gpu.capability,
            "multiprocessors": kind.gpu.multiprocessors,
            "max_streams": kind.max_streams,
            "deterministic": kind.deterministic,
            "workers": workers,
        }
    )


def read_order(line: str) -> tuple[EngineKind, int]:
    """The same again."""
    values = json.loads(line)
    major, minor = values["capability"]
    kind = EngineKind(
        from_json(ModelConfig, values["config"], "order"),
        getattr(torch, values["dtype"]),
        Gpu((major, minor), values["multiprocessors"]),
        values["max_streams"],
        values["deterministic"],
    )
    return kind, values["workers"]


def run(kind: EngineKind, workers: int, out: TextIO, stop: int | None) -> bool:
    """Compiles all kernels of an engine that are not there yet; whether all of them could be compiled."""
    index = index_file(kind, use_cache_folder())
    with _alone(index.with_suffix(".lock"), out, stop):
        if is_complete(index):  # another process was faster
            return True
        pool = CompilePool(
            workers, _kept, done=lambda outcome: _tell(out, outcome), timeout_s=KERNEL_S, stop=stop
        )
        try:
            plan(kind, pool.add)
            outcomes = pool.finish()
        finally:
            pool.close()
        if all(outcome.is_known for outcome in outcomes):
            write_index(index, [file for outcome in outcomes for file in outcome.result or ()])
        return not any(outcome.error for outcome in outcomes)


def _kept(kernel: Any, compiled: Any) -> list[str]:
    files: list[str] = kernel.kept(compiled)
    return files


def _tell(out: TextIO, outcome: Outcome) -> None:
    line = {"name": outcome.kernel.name, "cpu_seconds": round(outcome.seconds, 2), "error": outcome.error}
    out.write(json.dumps(line) + "\n")
    out.flush()


@contextmanager
def _alone(lock: Path, out: TextIO, stop: int | None) -> Iterator[None]:
    """One process at a time for the same kernels, where that can be had."""
    with suppress(OSError):
        lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        stream = lock.open("w")
    except OSError:
        yield
        return
    with stream:
        _take_turn(stream, out, stop)
        yield


def _take_turn(stream: TextIO, out: TextIO, stop: int | None) -> None:
    """Waits for the lock, with empty news meanwhile: silence would be taken for the end of the process.

    Raises:
        InterruptedError: nobody needs the kernels any more, or the other process takes too long.
    """
    for _ in range(_TURNS):
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            out.write("{}\n")
            out.flush()
        except OSError:  # some file systems have no locks
            return
        if select.select([] if stop is None else [stop], [], [], _TURN_S)[0]:
            break
    raise InterruptedError


def main() -> None:
    """Entry point of the process."""
    kind, workers = read_order(sys.stdin.readline())
    with suppress(InterruptedError, BrokenPipeError):
        run(kind, workers, sys.stdout, sys.stdin.fileno())
        sys.stdout.write(json.dumps(END) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
