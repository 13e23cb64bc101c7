"""Load on a server of its own, over real sockets of 127.0.0.1, and what becomes of it. Needs Linux.

python -m benchmarks.server_load [PHASE …] | python -m benchmarks.rows benchmarks/results/server_load.jsonl

Phases: ``streams`` (how many streams at once keep pace), ``idle`` (silent WebSockets), ``half-open`` (peers that take
nothing), ``slow-loris`` (headers in drops), ``keep-alive`` (connections that stay open), ``drain`` (SIGTERM with
streams running), all with an engine that costs nothing; ``faults`` (the engine process killed and stopped),
``overload`` (ten times what it can) and ``soak`` (clients that leave and dawdle, for ``--minutes``) with the embedded
model. Everything ends by itself; server
and clients share this machine's cores. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.load import faults, phases
from benchmarks.load.server import ServerLostError, ServerProcess, command_of
from benchmarks.load.soak import Soak
from vivace.bench.common import hardware

if TYPE_CHECKING:
    from collections.abc import Coroutine

PHASES = ("streams", "idle", "half-open", "slow-loris", "keep-alive", "drain", "faults", "overload", "soak")
MOST = {"streams": 500, "sockets": 2_000, "connections": 4_000, "clients": 32, "minutes": 600, "times": 100}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Load on a server over loopback.")
    parser.add_argument("phases", nargs="*", metavar="PHASE", help=", ".join(PHASES))
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[25, 50, 100, 200], help="levels, one after another"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each level, and of idleness")
    parser.add_argument(
        "--sockets", type=int, default=1_000, help="WebSockets; a tenth are half-open, half in drops"
    )
    parser.add_argument("--connections", type=int, default=3_000)
    parser.add_argument("--times", type=int, default=5, help="that the engine is killed, and stopped")
    parser.add_argument("--clients", type=int, default=4, help="of the soak")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the soak")
    options = parser.parse_args()
    if set(options.phases) - set(PHASES):
        parser.error(f"phases are {', '.join(PHASES)}")
    for name, most in MOST.items():
        given = getattr(options, name)
        if max(given if isinstance(given, list) else [given]) > most:
            parser.error(f"--{name} may be {most} at most")
    return options


def _phase(
    name: str, server: ServerProcess, options: argparse.Namespace
) -> list[Coroutine[Any, Any, dict[str, Any]]]:
    if name == "streams":
        return [phases.streams(server, count, options.seconds) for count in options.streams]
    if name == "idle":
        return [phases.idle_websockets(server, options.sockets, options.seconds)]
    if name == "half-open":
        return [phases.half_open(server, options.sockets // 10)]
    if name == "slow-loris":
        return [phases.slow_loris(server, options.sockets // 2)]
    if name == "keep-alive":
        return [phases.keep_alive(server, options.connections)]
    if name == "drain":
        return [faults.drain(server, server.terminate)]
    if name == "overload":
        return [faults.overload(server, options.seconds / 2, options.seconds)]
    return [Soak(server, random.Random(0)).run(options.clients, 60 * options.minutes)]


def _measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One phase on a fresh server; its figures, and how the server ended."""
    with tempfile.TemporaryDirectory() as folder:
        engine = "mini" if name in ("overload", "soak") else "paced"
        server = ServerProcess(command_of(engine, Path(folder)), Path(folder))
        try:

            async def run() -> list[dict[str, Any]]:
                return [await step for step in _phase(name, server, options)]

            results = asyncio.run(run())
        finally:
            started = time.monotonic()
            code = server.end(is_asked=name == "drain")
    return {"steps": results, "exit_code": code, "ended_after_s": round(time.monotonic() - started, 2)}


def _measure_faults(times: int) -> dict[str, Any]:
    """Each fault on as many fresh servers as asked for."""
    steps, codes = [], set()
    for number in (signal.SIGKILL, signal.SIGSTOP):
        struck = []
        for _ in range(times):
            with tempfile.TemporaryDirectory() as folder:
                server = ServerProcess(command_of("mini", Path(folder)), Path(folder))
                try:
                    struck.append(asyncio.run(faults.engine_lost(server, number)))
                finally:
                    codes.add(server.end())
        steps.append(faults.summary(number, struck))
    return {"steps": steps, "exit_codes": sorted(codes)}


def main() -> None:
    """Runs the phases asked for, all of them by default."""
    options = _options()
    if sys.platform != "linux":
        raise SystemExit("this benchmark reads /proc, so it needs Linux")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    measured = {}
    for name in options.phases or PHASES:
        try:
            measured[name] = _measure_faults(options.times) if name == "faults" else _measure(name, options)
        except ServerLostError as error:
            raise SystemExit(f"{name}: {error}") from error
        print(name, json.dumps(measured[name]), flush=True)
    document = {
        "bench": "server_load",
        "hardware": hardware("cpu"),
        "load_average_1m": round(os.getloadavg()[0], 1),
        **measured,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
