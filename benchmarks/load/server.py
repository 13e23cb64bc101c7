"""``python -m benchmarks.load.server paced|mini FOLDER``: a server on a free port of 127.0.0.1.

It prints its address, and ends with SIGTERM, as ``vivace serve`` does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vivace.config import ServerConfig
from vivace.server.child import COMMAND, EngineSettings
from vivace.server.door import bind, fit_to_open_files
from vivace.server.process import ProcessService
from vivace.server.run import run

if TYPE_CHECKING:
    from collections.abc import Sequence

PACED = (sys.executable, "-P", "-m", "benchmarks.load.engine")
START_SECONDS = 60


class ServerLostError(RuntimeError):
    """The server did not start, or has ended although nobody asked it to."""


def command_of(engine: str, folder: Path) -> list[str]:
    """What starts a server of this module. ``engine``: "paced" or "mini"; ``folder``: of its voices."""
    return [sys.executable, "-m", "benchmarks.load.server", engine, str(folder)]


class ServerProcess:
    """The server, from its start to ``end``, and what it takes of the machine.

    Args:
        command: what starts it. It prints its address first.
        folder: of its voices.

    Raises:
        ServerLostError: it does not start.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        environment = {**os.environ, "VIVACE_VOICES": str(folder)}
        self._process = subprocess.Popen(list(command), stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        with self._process.stdout as output:
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", output.readline())
        if found is None:
            self._process.kill()
            self._process.wait()
            raise ServerLostError("the server did not start")
        self.port = int(found[1])
        self.pid = self._process.pid

    def check(self) -> None:
        """Raises ServerLostError if it has ended."""
        code = self._process.poll()
        if code is not None:
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            raise ServerLostError(f"the server has ended before the benchmark did: {how}")

    def engine_pid(self) -> int | None:
        """The engine process; None while it is being replaced. Raises ServerLostError."""
        self.check()
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline") for pid in children}
        for pid, path in commands.items():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                command = path.read_bytes()
                if b"load.engine" in command or b"server.worker" in command:
                    return pid
        return None

    def take(self) -> dict[str, float]:
        """Memory of server and engine in MB, open files, threads. Raises ServerLostError."""
        engine = self.engine_pid()
        return {
            "server_mb": round(memory_mb(self.pid), 2),
            "engine_mb": round(memory_mb(engine), 2) if engine else 0.0,
            "open_files": len(list(Path(f"/proc/{self.pid}/fd").iterdir())),
            "threads": len(list(Path(f"/proc/{self.pid}/task").iterdir())),
        }

    def cpu_seconds(self) -> dict[str, float]:
        """Of server and engine so far. Raises ServerLostError."""
        engine = self.engine_pid()
        return {"server": cpu_seconds(self.pid), "engine": cpu_seconds(engine) if engine else 0.0}

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def end(self, *, is_asked: bool = False) -> int:
        """SIGTERM, unless it ``is_asked`` to end already; the exit code."""
        if not is_asked:
            self.terminate()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def memory_mb(pid: int) -> float:
    """Resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = fields[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Serves."""
    engine, folder = sys.argv[1], Path(sys.argv[2])
    config = ServerConfig(port=0)

    async def open_service() -> ProcessService:
        command = PACED if engine == "paced" else COMMAND
        return await ProcessService.open(EngineSettings(voices_folder=folder), command=command)

    with bind(config) as listener:
        run(open_service, fit_to_open_files(config), listener, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
