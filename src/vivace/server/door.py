"""The door of ``vivace serve``: keys and address.

Loads no library of the engine's, so that what is wrong is said at once.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from vivace.errors import ServeError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from vivace.config import ServerConfig

MIN_KEY_CHARACTERS = 8
BACKLOG = 1024
"""Connections that wait to be accepted."""
RESERVED_FILES = 256
"""Open files that are kept for anything but connections."""


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


def read_aliases(given: Iterable[str]) -> dict[str, str]:
    """Pairs such as ``alloy=anna``.

    Raises:
        ServeError: one is no pair.
    """
    pairs = [text.partition("=") for text in given]
    if not all(name and target for name, _, target in pairs):
        raise ServeError("A voice alias is written NAME=VOICE, such as alloy=anna")
    return {name: target for name, _, target in pairs}


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
        len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key
        for key in config.api_keys
    ):
        raise ServeError(
            f"API keys must have {MIN_KEY_CHARACTERS} or more printable ASCII characters and no blanks"
        )


def fit_to_open_files(config: ServerConfig) -> ServerConfig:
    """The settings with no more connections than this process may have files open; raises that bound if it can."""
    try:
        import resource
    except ImportError:  # Windows has no such bound
        return config
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            return replace(config, max_connections=max(1, soft - min(RESERVED_FILES, soft // 2)))
    return config


def bind(
    config: ServerConfig, host: str | None = None, port: int | None = None, option: str = "--port"
) -> socket.socket:
    """The listening socket, at the configured address or another one.

    Args:
        option: how the user chooses another port.

    Raises:
        ServeError: the address cannot be had; says why and what to do.
    """
    host = (config.host if host is None else host).strip("[]")
    port = config.port if port is None else port
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
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
        raise _taken(host, port, error, option) from error
    return listener


def listen(listener: socket.socket, option: str = "--port") -> None:
    """Begins to listen. Until then Linux lets several servers have one address, if all of them are starting.

    Raises:
        ServeError: another one listens there. (uvloop would keep that to itself, and serve nobody.)
    """
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _taken(host, port, error, option) from error


def _taken(host: str, port: int, error: OSError, option: str) -> ServeError:
    reason = (error.strerror or "failed").lower()
    return ServeError(
        f"Cannot listen on {host} port {port}: {reason}; choose another with {option} (0 takes a free one)"
    )


def address_of(listener: socket.socket) -> str:
    """Where a browser finds the page."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"
