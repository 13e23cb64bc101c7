"""``vivace serve``: opens the door, loads the engine, and closes both in order.

SIGTERM or SIGINT once: no new requests, those that run may finish within ``drain_seconds``. Twice: now.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from vivace.checkpoint.model import DTYPES
from vivace.engine import AsyncEngine
from vivace.errors import ServeError
from vivace.server.app import create_app
from vivace.server.local import LocalService
from vivace.server.process import ProcessService
from vivace.server.protocol import bounded_protocol
from vivace.server.websocket_protocol import bounded_websocket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from fastapi import FastAPI

    from vivace.config import ServerConfig
    from vivace.server.child import EngineSettings
    from vivace.server.service import SpeechService

WEBSOCKET_PING_SECONDS = 20.0
CLOSE_SECONDS = 5.0


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and those that begin with ``#`` are left out.

    Raises:
        ServeError: there are none, or others than the owner may read the file. OSError: it cannot be read.
    """
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ServeError("Others may read the file with the API keys: chmod 600 it")
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except UnicodeDecodeError:
        raise ServeError("The file with the API keys is not text") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ServeError("The file with the API keys has no key in it")
    return keys


class Server(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_access(config: ServerConfig) -> None:
    """Refuses what would be open to everybody.

    Raises:
        ServeError: keys are missing, or too short to be keys.
    """
    if not config.is_local and not config.api_keys:
        raise ServeError(
            f"Others could reach {config.host}: give keys with --api-keys FILE or VIVACE_API_KEYS, "
            "or listen on 127.0.0.1"
        )
    if any(
        len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key for key in config.api_keys
    ):
        raise ServeError("API keys must have 8 or more printable ASCII characters and no blanks")


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket.

    Raises:
        ServeError: the address cannot be had; says why and what to do.
    """
    host = config.host.strip("[]")
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
    except (OSError, OverflowError) as error:
        raise ServeError(f"Cannot listen on {host}: no such address") from error
    try:
        if hasattr(socket, "SO_REUSEADDR"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = (error.strerror or "failed").lower()
        raise ServeError(
            f"Cannot listen on {host} port {config.port}: {reason}; choose another with --port (0 takes a free one)"
        ) from error
    return listener


def make_server(app: FastAPI, config: ServerConfig) -> Server:
    """A uvicorn server with the limits of ``config``."""
    settings = uvicorn.Config(
        app,
        http=bounded_protocol(config),
        ws=bounded_websocket(config),
        ws_max_size=config.websocket_frame_bytes,
        ws_ping_interval=WEBSOCKET_PING_SECONDS,
        ws_ping_timeout=WEBSOCKET_PING_SECONDS,
        ws_per_message_deflate=False,
        lifespan="off",
        timeout_keep_alive=int(config.keep_alive_seconds),
        timeout_graceful_shutdown=int(CLOSE_SECONDS),
        access_log=False,
        log_config=None,
        log_level="error",  # what clients send wrong is no news
        server_header=False,
        proxy_headers=False,
        backlog=1024,
    )
    return Server(settings)


def address_of(listener: socket.socket) -> str:
    """Where a browser finds the page."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"


async def open_service(settings: EngineSettings) -> SpeechService:
    """The engine: in a process of its own where the system has them, else in a thread.

    Raises:
        ModelFolderError: the folder cannot be used; the message names the file.
    """
    name = "vivace-mini" if settings.model == "mini" else Path(settings.model).resolve().name
    if os.name == "posix":
        return await ProcessService.open(settings, model=name)
    engine = await AsyncEngine.open(
        settings.model,
        device=settings.device,
        dtype=DTYPES[settings.dtype],
        lm_variant=settings.lm_variant,
        voices_folder=settings.voices_folder,
        limits=settings.limits,
    )
    return LocalService(engine, name)


async def serve(
    open_service: Callable[[], Awaitable[SpeechService]],
    config: ServerConfig,
    announce: Callable[[str], None],
) -> None:
    """Serves until a signal comes.

    Args:
        open_service: loads the engine; called once the address is taken, so that a busy port is known at once.
        announce: is given one line once requests are taken.
    """
    check_access(config)
    with bind(config) as listener:
        service = await open_service()
        try:
            server = make_server(create_app(service, config), config)
            with _signals(service, server, config):
                serving = asyncio.ensure_future(server.serve(sockets=[listener]))
                while not server.started and not serving.done():
                    await asyncio.sleep(0)
                if server.started:
                    announce(_greeting(service, address_of(listener)))
                await serving
        finally:
            await service.close()


def run(
    open_service: Callable[[], Awaitable[SpeechService]],
    config: ServerConfig,
    announce: Callable[[str], None],
) -> None:
    """``serve`` on an event loop of its own."""
    with contextlib.suppress(ImportError):  # not on Windows
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(open_service, config, announce))
        return
    asyncio.run(serve(open_service, config, announce))


def _greeting(service: SpeechService, address: str) -> str:
    num_voices = len(service.voices.builtin_names)
    return f"Vivace speaks at {address} (model {service.model}, {num_voices} voices of its own)"


@contextlib.contextmanager
def _signals(service: SpeechService, server: Server, config: ServerConfig) -> Iterator[None]:
    """The first signal drains, the second ends."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        await service.drain(config.drain_seconds)
        server.should_exit = True

    def on_signal() -> None:
        if draining:
            server.should_exit = server.force_exit = True
        else:
            draining.append(loop.create_task(drain()))

    def on_plain_signal(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(on_signal)

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        for number in numbers:
            loop.add_signal_handler(number, on_signal)
    except NotImplementedError:  # Windows
        for number in numbers:
            signal.signal(number, on_plain_signal)
    except (ValueError, RuntimeError):  # not the main thread: whoever runs us ends us
        yield
        return
    try:
        yield
    finally:
        for number in numbers:
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)
        for task in draining:
            task.cancel()
