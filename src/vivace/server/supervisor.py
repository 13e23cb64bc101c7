"""Keeps an engine process running: starts it, replaces it when it is lost, and makes requests wait meanwhile."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from vivace.errors import OverloadedError, VivaceError
from vivace.server.child import EngineProcess, EngineSettings, Watch
from vivace.server.sent_voices import SentVoices

if TYPE_CHECKING:
    from vivace.server.child import OnFrame

STEADY_SECONDS = 60.0
"""An engine process that lived this long did not fail because of how it was started."""
MANY_FAILED_STARTS = 3

_log = logging.getLogger(__name__)


class Supervisor:
    """The engine process of the moment, and the next one.

    Args:
        on_frame: takes what the process says.
        on_lost: called when nothing can be expected of the process any more.

    Attributes:
        child: the process; None while there is none. sent: the voices that it holds.
        sample_rate_hz: of the model; 0 before the first start.
        num_restarts: processes that had to be replaced.
        last_recovery_s: from the newest failure noticed to the next engine ready; None before the first.
        num_waiting: requests that wait for the next one.
    """

    def __init__(
        self,
        settings: EngineSettings,
        watch: Watch,
        command: Sequence[str],
        *,
        on_frame: OnFrame,
        on_lost: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.watch = watch
        self.child: EngineProcess | None = None
        self.sent: SentVoices | None = None
        self.sample_rate_hz = 0
        self.num_restarts = 0
        self.last_recovery_s: float | None = None
        self.num_waiting = 0
        self._command = command
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._num_failed_starts = 0
        self._start_s = 5.0
        self._has_child = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def has_failed(self) -> bool:
        """It does not start, however often it is tried; it is tried on."""
        return self._num_failed_starts >= MANY_FAILED_STARTS

    async def open(self) -> None:
        """Starts the first process, and from then on replaces it. Raises as ``EngineProcess.start``."""
        child = await self._start()
        self._task = asyncio.create_task(self._supervise(child))

    async def close(self) -> None:
        """Ends the process for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        child, self.child = self.child, None
        if child is not None:
            await child.kill()

    async def ready_child(self) -> EngineProcess:
        """The process; waits a moment for one that is being replaced.

        Raises:
            OverloadedError: ``engine_restarting``: that takes longer, or too many wait already.
        """
        if self.child is None and self.num_waiting < self.watch.max_waiting:
            self.num_waiting += 1
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._has_child.wait(), self.watch.wait_s)
            finally:
                self.num_waiting -= 1
        if self.child is None:
            raise self.restarting_error()
        return self.child

    def restarting_error(self) -> OverloadedError:
        """What requests are told while there is no engine."""
        return OverloadedError(
            "The engine is being restarted. Try again in a moment.",
            code="engine_restarting",
            retry_after_s=math.ceil(self._start_s),
        )

    def gauges(self) -> dict[str, float]:
        """Figures for ``/metrics``."""
        figures = {"engine_restarts": float(self.num_restarts)}
        if self.child is None:
            return figures
        return self.child.gauges | figures | {"heartbeat_age_seconds": self.child.silent_s}

    async def _start(self) -> EngineProcess:
        clock = asyncio.get_running_loop().time
        started = clock()
        child = await EngineProcess.start(self.settings.header(), self._on_frame, self.watch, self._command)
        self._start_s = clock() - started
        self._num_failed_starts = 0
        self.sample_rate_hz = child.sample_rate_hz
        self.child, self.sent = child, SentVoices(child)
        self._has_child.set()
        return child

    async def _supervise(self, child: EngineProcess) -> None:
        clock = asyncio.get_running_loop().time
        num_quick = 0  # failures in a row, each soon after the start
        while True:
            started = clock()
            reason = await child.lost
            lost = clock()
            num_quick = 0 if lost - started >= STEADY_SECONDS else num_quick + 1
            self.child = self.sent = None
            self._has_child.clear()
            self.num_restarts += 1
            _log.error("the engine process is replaced: %s", reason)
            self._on_lost()
            await child.kill()
            child = await self._restart(num_quick - 1)
            self.last_recovery_s = clock() - lost
            _log.warning("the engine is ready again after %.1f s", self.last_recovery_s)

    async def _restart(self, num_failures: int) -> EngineProcess:
        """A new process, however often it takes; waits longer after each failure in a row."""
        while True:
            if num_failures > 0:
                delay_s = self.watch.backoff_s * 2.0 ** min(num_failures - 1, 16)
                await asyncio.sleep(min(delay_s, self.watch.max_backoff_s))
            try:
                return await self._start()
            except VivaceError as error:
                num_failures += 1
                self._num_failed_starts += 1
                _log.error("the engine process does not start: %s", error.message)
