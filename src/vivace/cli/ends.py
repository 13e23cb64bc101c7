"""Signals that end a command by an exception (``entry`` sees to that), where none may come: SIGTERM and SIGHUP."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from types import FrameType

Handler: TypeAlias = "Callable[[int, FrameType | None], object]"


def _handlers() -> dict[int, Handler]:
    """What ends the command, by signal; nothing outside the main thread, and where the system's own way is in force."""
    found: dict[int, Handler] = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            handler = None if number is None else signal.getsignal(number)
            if number is not None and callable(handler):
                found[number] = handler
    return found


@contextmanager
def ends_held() -> Iterator[None]:
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
def ends_cancel_task() -> Iterator[None]:
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
