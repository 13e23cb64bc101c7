"""``vivace serve``: loads the engine, serves, and closes everything in order.

SIGTERM or SIGINT once: no new requests, those that run may finish within ``drain_seconds``. Twice: now.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from vivace.audio.watermark import find_watermark
from vivace.checkpoint import load_config, model_folder
from vivace.checkpoint.files import find_paths
from vivace.errors import ModelFolderError
from vivace.server.app import create_app
from vivace.server.door import BACKLOG, address_of, listen
from vivace.server.fleet import Fleet
from vivace.server.local import LocalService
from vivace.server.marked import MarkedService
from vivace.server.metrics import Metrics, gauges_by_engine
from vivace.server.process import ProcessService
from vivace.server.protocol import bounded_protocol
from vivace.server.starting import Entrance
from vivace.server.websocket_protocol import bounded_websocket
from vivace.server.wyoming import wyoming_server

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    from vivace.config import ServerConfig
    from vivace.server.child import EngineSettings
    from vivace.server.guard import App
    from vivace.server.service import SpeechService

WEBSOCKET_PING_SECONDS = 20.0
CLOSE_SECONDS = 5.0


class Server(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: App, config: ServerConfig, metrics: Metrics) -> Server:
    """A uvicorn server with the limits of ``config``."""
    settings = uvicorn.Config(
        app,
        http=bounded_protocol(config, metrics),
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
        backlog=BACKLOG,
    )
    return Server(settings)


async def open_service(
    settings: EngineSettings, watermark: str | None = None, devices: Sequence[str] = ()
) -> SpeechService:
    """The engine: in a process of its own where the system has them, else in a thread.

    Args:
        devices: for an engine each, in place of that of ``settings``.
        watermark: name of an installed one, which all speech then carries.

    Raises:
        ModelFolderError: the folder cannot be used; the message names the file.
        ServeError: there is no such watermark.
    """
    each = [replace(settings, device=device) for device in devices] or [settings]
    if watermark is None:
        return await _open_plain(each)
    make = find_watermark(watermark)
    return MarkedService(await _open_plain(each), watermark, make)


def _check_speaks(settings: EngineSettings) -> None:
    """Before anything is loaded: a server whose model cannot read text would refuse every request."""
    folder = model_folder(settings.model)
    paths, missing = find_paths(folder, load_config(folder), settings.tokenizer)
    if paths.tokenizer is None:
        where = f"{folder}: " if settings.tokenizer is None else ""  # which was named as it was given
        raise ModelFolderError(where + missing["tokenizer"])


async def _open_plain(each: Sequence[EngineSettings]) -> SpeechService:
    settings = each[0]
    await asyncio.to_thread(_check_speaks, settings)
    name = "vivace-mini" if settings.model == "mini" else Path(settings.model).resolve().name
    if os.name == "posix" and len(each) > 1:
        return await Fleet.open(each, model=name)
    if os.name == "posix":
        return await ProcessService.open(settings, model=name)
    return await _open_in_threads(each, name)


async def _open_in_threads(each: Sequence[EngineSettings], name: str) -> SpeechService:
    """Where there are no processes that could be watched. Loads the tensor library."""
    from vivace.checkpoint.model import PRECISIONS
    from vivace.engine import EngineRouter

    settings = each[0]
    engines = await EngineRouter.open(
        settings.model,
        devices=[engine.device for engine in each],
        dtype=PRECISIONS[settings.dtype],
        lm_variant=settings.lm_variant,
        voices_folder=settings.voices_folder,
        tokenizer=settings.tokenizer,
        limits=settings.limits,
        max_streams=settings.max_streams,
        deterministic=settings.deterministic,
        host_memory_gb=settings.host_memory_gb,
    )
    return LocalService(engines, name)


async def serve(
    open_service: Callable[[], Awaitable[SpeechService]],
    config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[str], None],
    wyoming: socket.socket | None = None,
) -> None:
    """Serves until a signal comes. While the model loads it answers that it does.

    Args:
        open_service: loads the engine.
        listener: from ``bind``.
        announce: is given one line once requests are taken.
        wyoming: where Home Assistant's protocol is spoken once the model is there, if it is.

    Raises:
        ServeError: another server has begun to listen at an address meanwhile.
    """
    listen(listener)
    metrics = Metrics()
    entrance = Entrance(config, metrics)
    server = make_server(entrance, config, metrics)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    lag = asyncio.ensure_future(metrics.watch_loop())
    opening = asyncio.ensure_future(open_service())
    ending = _Ending(server, opening, config)
    service: SpeechService | None = None
    try:
        async with contextlib.AsyncExitStack() as doors:
            doors.enter_context(_signals(ending))
            service = await _opened(opening, ending)
            if service is None:
                return
            entrance.app = create_app(service, config, metrics)
            ending.service = service
            if wyoming is not None:
                listen(wyoming, "--wyoming-port")
                await doors.enter_async_context(wyoming_server(wyoming, service, config, metrics))
            while not server.started and not serving.done():
                await asyncio.sleep(0)
            if server.started:
                announce(_greeting(service, address_of(listener)))
                if wyoming is not None:
                    announce("Wyoming at {}:{}".format(*wyoming.getsockname()[:2]))
            await serving
    finally:
        lag.cancel()
        server.should_exit = True
        if service is not None:
            await service.close()
        await asyncio.wait([serving])


async def _opened(opening: asyncio.Future[SpeechService], ending: _Ending) -> SpeechService | None:
    """The service; None if a signal has ended the loading."""
    try:
        return await opening
    except asyncio.CancelledError:
        if not ending.is_asked:
            raise
        return None


def run(
    open_service: Callable[[], Awaitable[SpeechService]],
    config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[str], None],
    wyoming: socket.socket | None = None,
) -> None:
    """``serve`` on an event loop of its own."""
    run_on_fast_loop(serve(open_service, config, listener, announce, wyoming))


def run_on_fast_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine on uvloop, or on asyncio's own loop where there is none (Windows)."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def _greeting(service: SpeechService, address: str) -> str:
    num_voices, num_engines = len(service.voices.builtin_names), len(gauges_by_engine(service))
    several = f", {num_engines} engines" if num_engines > 1 else ""
    mark = f", watermark {service.watermark}" if isinstance(service, MarkedService) else ""
    voices = f"{num_voices} voice{'' if num_voices == 1 else 's'} of its own"
    return f"Vivace speaks at {address} (model {service.model}, {voices}{several}{mark})"


class _Ending:
    """The first signal ends the loading, or drains; the second ends.

    Attributes:
        service: to drain; None while it loads.
        is_asked: there was a signal.
    """

    def __init__(self, server: Server, opening: asyncio.Future[SpeechService], config: ServerConfig) -> None:
        self.service: SpeechService | None = None
        self.is_asked = False
        self._server, self._opening, self._config = server, opening, config
        self._draining: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        is_first, self.is_asked = not self.is_asked, True
        if not is_first:
            self._server.should_exit = self._server.force_exit = True
        elif self.service is None:
            self._opening.cancel()
            self._server.should_exit = True  # also if it has just been opened
        else:
            self._draining = asyncio.ensure_future(self._drain(self.service))

    def cancel(self) -> None:
        """Nothing is left to drain."""
        if self._draining is not None:
            self._draining.cancel()

    async def _drain(self, service: SpeechService) -> None:
        await service.drain(self._config.drain_seconds)
        if service.num_running:  # they end with an error now, not with the server
            await service.close()
        self._server.should_exit = True


@contextlib.contextmanager
def _signals(ending: _Ending) -> Iterator[None]:
    """Tells ``ending`` of SIGINT and SIGTERM."""
    loop = asyncio.get_running_loop()

    def on_plain_signal(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(ending.on_signal)

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        for number in numbers:
            loop.add_signal_handler(number, ending.on_signal)
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
        ending.cancel()
