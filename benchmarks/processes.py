"""Runs a command for a given time, and ends it with everything that it has started.

On Linux every process of a step is known by a variable of its environment, which children inherit: also those that
moved to a session of their own, and those whose parent was killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

MARK = "PUBLISH_FOLDER"
"""Variable that names the folder whose step a process belongs to."""
GRACE_S = 3.0
"""Between the request to end and the end without one."""
GONE_S = 15.0
"""How long an end without request may take: a driver may keep a process for a while."""


def run_process(
    command: Sequence[str], folder: Path, output: Path, limit_s: float, environment: Mapping[str, str]
) -> int | None:
    """Exit status of a command that runs inside ``folder``; None: it was ended. Nothing that it had started is left.

    Args:
        output: file of what it prints, standard error included.
        limit_s: seconds; infinity: no limit.
    """
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, MARK: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(None if limit_s == math.inf else max(0.0, limit_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _end(process)
        end_processes_of(folder)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):  # nobody of the group is left
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GONE_S)


def end_processes_of(folder: Path) -> int:
    """Ends, without a request, what steps of this folder have left behind; how many there were.

    Waits until they are gone, because what they hold of a GPU is free only then.
    """
    ended: set[int] = set()
    ends = time.monotonic() + GONE_S
    while (found := processes_of(folder)) and time.monotonic() < ends:
        for pid in found:  # again, because one may have started another
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended |= set(found)
        time.sleep(0.02)
    return len(ended)


def processes_of(folder: Path) -> list[int]:
    """Ids of the processes that steps of this folder have started and that still run; none where there is no /proc."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # A process that has ended has no environment, also while nobody has asked for its status.
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]
