"""Speech of ``vivace serve`` as clients hear it, over real sockets of 127.0.0.1. Needs Linux.

    python -m benchmarks.server_speech --model FOLDER --device cuda --streams 1,32,128,300 \\
        | python -m benchmarks.rows benchmarks/results/server_speech.jsonl

The server is started as a user starts it. Listeners begin at random times; each asks for the same text with a seed of
its own, plays the answer to its end and asks again. A single listener asks again at once. What counts are the requests
sent inside the window; server and clients share the machine's cores. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.load.client import BYTES_PER_SECOND, Heard, speak
from benchmarks.load.phases import percentiles
from benchmarks.load.server import ServerLostError, ServerProcess
from vivace.bench.common import hardware
from vivace.bench.serving_player import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT = "She opened the window and looked at the rain for a while."
WARM_REQUESTS = 2
ROOM = 2
"""Streams that the server has room for, per listener: those that wait for their playback hold none."""


async def listen(
    server: ServerProcess,
    first_s: float,
    window: Window,
    seeds: itertools.count[int],
    heard: list[Heard],
    *,
    plays: bool,
) -> None:
    """One listener, until the window ends.

    Args:
        first_s: when it asks for the first time. window: when a request that is sent counts.
        heard: gets the answers that count.
        plays: it asks again when what it heard would have been played.

    Raises:
        ServerLostError: there is nobody to ask any more.
    """
    await asyncio.sleep(max(0.0, first_s - time.perf_counter()))
    while (sent_s := time.perf_counter()) < window.end_s:
        answer = await speak(server.port, TEXT, next(seeds))
        if not answer.is_whole:
            server.check()
        if window.holds(sent_s):
            heard.append(answer)
        if plays:
            ends_s = sent_s + answer.ttfb_ms / 1e3 + answer.num_bytes / BYTES_PER_SECOND
            await asyncio.sleep(max(0.01, ends_s - time.perf_counter()))


async def load(server: ServerProcess, streams: int, seconds: float, ramp_s: float) -> dict[str, Any]:
    """So many listeners; figures of the requests of ``seconds``, after ``ramp_s`` in which all have begun.

    Raises:
        ServerLostError: it has ended.
    """
    rng, seeds, heard = random.Random(streams), itertools.count(streams * 100_000), list[Heard]()
    begun_s = time.perf_counter()
    window = Window(begun_s + ramp_s, begun_s + ramp_s + seconds)
    plays = streams > 1
    tasks = [
        asyncio.create_task(
            listen(server, begun_s + rng.uniform(0, ramp_s), window, seeds, heard, plays=plays)
        )
        for _ in range(streams)
    ]
    try:
        await _pass(ramp_s, tasks)
        before, own = server.cpu_seconds(), time.process_time()
        await _pass(seconds, tasks)
        spent = {name: after - before[name] for name, after in server.cpu_seconds().items()}
        spent["clients"] = time.process_time() - own
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return figures(heard, streams) | {
        f"{name}_cpu_percent": round(100 * used / seconds, 1) for name, used in spent.items()
    }


async def _pass(seconds: float, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Waits so long, but not on when one of the listeners has failed; raises its error."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def figures(heard: Sequence[Heard], streams: int) -> dict[str, Any]:
    """Of the requests that count. A failed one is any that was not heard whole."""
    whole = [answer for answer in heard if answer.is_whole]
    return {
        "streams": streams,
        "requests": len(heard),
        "failed": len(heard) - len(whole),
        "statuses": {
            str(status): count for status, count in sorted(Counter(a.status for a in heard).items())
        },
        "ttfb_ms": percentiles([answer.ttfb_ms for answer in whole]),
        "underruns": sum(answer.underruns > 0 for answer in whole),
        "audio_seconds": round(sum(answer.num_bytes for answer in whole) / BYTES_PER_SECOND, 1),
    }


async def measure(server: ServerProcess, levels: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """One level after the other, each with a ramp as long as an utterance."""
    audio_s = 0.0
    for seed in range(WARM_REQUESTS):
        answer = await speak(server.port, TEXT, seed)
        if not answer.is_whole:
            server.check()
            raise SystemExit(f"the server does not speak: status {answer.status}")
        audio_s = max(audio_s, answer.num_bytes / BYTES_PER_SECOND)
    loads = []
    for streams in levels:
        loads.append(await load(server, streams, seconds, audio_s if streams > 1 else 0.0))
        print(json.dumps(loads[-1]), flush=True)
    return loads


def run(model: str, device: str, dtype: str, levels: Sequence[int], seconds: float) -> dict[str, Any]:
    """The document. Raises SystemExit if the server does not start or speak, or ends under load."""
    command = [sys.executable, "-m", "vivace.cli", "serve", "--model", model, "--device", device]
    command += ["--dtype", dtype, "--port", "0"]
    if device != "cpu":
        command += ["--max-streams", str(min(256, max(8, ROOM * max(levels))))]
    with tempfile.TemporaryDirectory() as voices:
        begun_s = time.perf_counter()
        try:
            server = ServerProcess(command, Path(voices))
            try:
                ready_s = time.perf_counter() - begun_s
                loads = asyncio.run(measure(server, levels, seconds))
                memory = server.take()
            finally:
                code = server.end()
        except ServerLostError as error:
            raise SystemExit(str(error)) from error
    return {
        "bench": "server_speech",
        # Takes memory of a GPU, so it is asked once the server has given that back.
        "hardware": hardware(device),
        "torch": torch.__version__,
        "model": Path(model).name,
        "precision": dtype,
        "ready_s": round(ready_s, 2),
        "loads": loads,
        "after": memory,
        "exit_code": code,
    }


def is_sound(document: dict[str, Any]) -> bool:
    """Whether every level was heard, each of its requests whole, and the server ended as it should."""
    loads = document["loads"]
    return not document["exit_code"] and all(entry["requests"] and not entry["failed"] for entry in loads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints; 1 where the document is not sound."""
    parser = argparse.ArgumentParser(description="Speech of a real server over loopback.")
    parser.add_argument("--model", default="mini", help="folder, or mini")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", default="1,2", help="listeners, one level after the other")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each level, behind its ramp")
    options = parser.parse_args(arguments)
    parts = [part.strip() for part in options.streams.split(",")]
    levels = [int(part) if part.isdecimal() else 0 for part in parts]
    if sys.platform != "linux":
        parser.error("this benchmark reads /proc, so it needs Linux")
    if not all(1 <= level <= 1000 for level in levels):
        parser.error("--streams takes numbers from 1 to 1000")
    if not 1 <= options.seconds <= 3600:
        parser.error("--seconds takes a number from 1 to 3600")
    document = run(options.model, options.device, options.dtype, levels, options.seconds)
    print(json.dumps(document))
    return 0 if is_sound(document) else 1


if __name__ == "__main__":
    sys.exit(main())
