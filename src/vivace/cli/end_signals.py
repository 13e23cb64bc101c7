"""SIGTERM and SIGHUP end a command by an exception, as Ctrl-C does; and where none may come, they wait."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from types import FrameType

_NAMES = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP

Handler: TypeAlias = "Callable[[int, FrameType | None], object]"


def end_on_signals() -> None:
    """From now on a closed terminal and ``kill`` end the command so: no half-written file stays behind."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for name in _NAMES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # under nohup it is ignored
            signal.signal(number, end)


def _handlers() -> dict[int, Handler]:
    """What ends the command, by signal; nothing outside the main thread, and where the system's own way is in force."""
    found: dict[int, Handler] = {}
    if threading.current_thread() is threading.main_thread():
        for name in _NAMES:
            number = getattr(signal, name, None)
            handler = None if number is None else signal.getsignal(number)
            if number is not None and callable(handler):
                found[number] = handler
    return found


@contextmanager
def end_signals_held() -> Iterator[None]:
    """They come behind the body: what it opens is in its owner's hands by then."""
    held: list[int] = []
    before = _handlers()
    for number in before:
        signal.signal(number, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            before[held[0]](held[0], None)


@contextmanager
def end_signals_cancel_task() -> Iterator[None]:
    """They cancel the running task, and come when it has unwound, as Ctrl-C does in asyncio.

    Raised in the midst of another task, the exception would be that task's, and the loop would tell of it.
    """
    loop, task, held = asyncio.get_running_loop(), asyncio.current_task(), list[int]()
    assert task is not None
    before = _handlers()

    def end(number: int) -> None:
        held.append(number)
        task.cancel()

    try:
        for number in before:
            loop.add_signal_handler(number, end, number)
    except NotImplementedError:  # Windows: they are raised wherever the program is
        before = {}
    try:
        yield
    except asyncio.CancelledError:
        if held:
            before[held[0]](held[0], None)
        raise
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
