"""The loop over all requests in work: plan, run, emit; and the one place where a request ends.

Whoever holds the ``Turn`` steps and changes requests, one thread at a time; all other threads leave messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from vivace.datatypes import AudioChunk, FinishReason
from vivace.engine.live import LiveRequest
from vivace.engine.scheduler import Overdue, Scheduler, StepPlan
from vivace.engine.turn import Turn
from vivace.errors import (
    CancelledRequestError,
    InvalidRequestError,
    OverloadedError,
    SynthesisError,
    VivaceError,
)

if TYPE_CHECKING:
    from vivace.engine.stages import Stages
    from vivace.engine.work import Outcome

CANCELLED = "the request was cancelled"

_log = logging.getLogger(__name__)


class EngineLoop:
    """The requests of one engine. All methods may be called from any thread.

    Args:
        stages: do the work. scheduler: says whose.

    Attributes:
        turn: who may change requests. live: those in work, by id.
        is_closed: nothing runs, and nothing will.
        last_plan: chunks and rows of the latest step.
    """

    def __init__(self, stages: Stages, scheduler: Scheduler) -> None:
        self.turn = Turn()
        self.live: dict[int, LiveRequest] = {}
        self.is_closed = False
        self.last_plan = 0, 0
        self._stages, self._scheduler = stages, scheduler
        self._last_step_ms = now_ms()
        self._launches_halved = stages.launches_halved

    def admit(self, live: LiveRequest) -> None:
        """Into the queue, unless that is full or the engine has been closed meanwhile.

        Raises:
            OverloadedError, InvalidRequestError: as the scheduler's ``add``; and when it is closed.
        """

        def admit() -> None:
            self.check_open()
            self._scheduler.add(live.ticket)
            self.live[live.request_id] = live

        self.turn.ask(admit)

    def check_open(self) -> None:
        """Raises ``InvalidRequestError`` once the engine is closed."""
        if self.is_closed:
            raise InvalidRequestError("the engine is closed; open a new one", code="engine_closed")

    def close(self) -> None:
        """Ends everything that runs, and refuses what is new."""
        self.is_closed = True
        self.turn.ask(self._finish_all)

    def step(self) -> bool:
        """Plan, run, emit. False when nothing could be done, or another thread is at it."""
        return self.turn.run(self._step)

    def run_forever(self) -> None:
        """Steps until ``close``; sleeps while there is nothing to do. A fault of the loop itself closes it."""
        try:
            while not self.is_closed:
                seen = self.turn.version
                if not self.step():
                    self._sleep(seen)
        except Exception:
            _log.exception("the engine's loop failed")
        finally:
            self.close()  # whoever waits for a chunk must not wait for ever

    def take(self, live: LiveRequest) -> AudioChunk | None:
        """The request's next finished chunk, if there is one. Raises its error once all chunks are taken."""
        if live.is_cancelled and not live.is_done:
            raise CancelledRequestError(CANCELLED)
        error = live.error if live.is_done else None  # before the chunks: what is done makes no more of them
        chunk = None
        with suppress(IndexError):
            chunk = live.chunks.popleft()
        if chunk is not None:
            self.turn.tell(lambda: self._note_taken(live))
        elif error is not None:
            raise error
        return chunk

    def next_chunk(self, live: LiveRequest, pull_text: Callable[[LiveRequest], None]) -> AudioChunk | None:
        """Steps until the request has a chunk; None at its end.

        Args:
            pull_text: brings more text for a request that waits for it, in this thread.
        """
        while True:
            seen, is_done = self.turn.version, live.is_done
            chunk = self.take(live)
            if chunk is not None or is_done:
                return chunk
            if live.pieces is not None and live.ticket.waits_for_text:
                pull_text(live)
            elif not self.step():
                self._sleep(seen)

    def cancel(self, live: LiveRequest) -> None:
        """Ends a request and frees its state: now, or at the end of the step that runs in another thread.

        Never waits. A request that has ended already is left as it is.
        """
        if not live.is_done:
            live.is_cancelled = True
            self.turn.tell(lambda: self._finish(live, "cancelled", CancelledRequestError(CANCELLED)))

    def listen(self, live: LiveRequest, listener: Callable[[], object]) -> None:
        """Calls ``listener`` (from the thread that steps) whenever the request has news. It must not raise."""
        live.listener = listener
        listener()

    def abort(self, live: LiveRequest, error: Exception) -> None:
        """Ends a request with ``error``, which its consumer gets as it is."""
        self.turn.tell(lambda: self._finish(live, "error", error))

    # -- inside; what follows runs under the turn ------------------------------------------------------------------

    def _step(self) -> bool:
        started_ms = now_ms()
        with torch.inference_mode(), self._stages.on_device():
            moved = self._note_arrivals()
            changed = self._emit_all(self._stages.collect(), ()) or moved
            # Who came while the device made those tokens need not wait for a step.
            changed |= self.turn.deliver()
            plan = self._scheduler.plan(now_ms())
            if plan is None:
                return changed
            for request_id, reason in plan.overdue:
                self._end_overdue(self.live[request_id], reason)
            self._swap(plan)
            self._emit_all(self._stages.run(plan, self.live), plan.requests)
        self._note_step(plan, started_ms)
        return True

    def _note_arrivals(self) -> bool:
        """Tells the scheduler whose pages are where they were sent; whether there was any."""
        swapper = self._stages.swapper
        arrived = [] if swapper is None else swapper.arrived()
        for live in arrived:
            self._scheduler.moved(live.ticket)
        return bool(arrived)

    def _swap(self, plan: StepPlan) -> None:
        """Begins to move pages to host memory and back."""
        swapper = self._stages.swapper
        for live in self._planned(plan.swap_in):
            assert swapper is not None
            try:
                swapper.come_back(live)
            except Exception as error:
                self._fail(live, error)
        for live in self._planned(plan.swap_out):
            assert swapper is not None
            try:
                swapper.leave(live)
            except Exception as error:
                _log.warning("pages cannot move to host memory and stay on the device", exc_info=error)
                self._scheduler.stop_swapping(live.ticket)

    def _emit_all(self, outcomes: Iterator[Outcome], planned: Iterable[int]) -> bool:
        """Hands over what a step made; whether that was anything. A fault of the step itself ends its requests."""
        made = False
        try:
            for outcome in outcomes:
                made = True
                self._emit(outcome)
        except Exception as error:
            self._finish_planned(planned, partial(self._fail, error=error))
        except BaseException:  # Ctrl-C in the middle of the requests' state
            interrupted = CancelledRequestError("the engine was interrupted")
            self._finish_planned(planned, lambda live: self._finish(live, "cancelled", interrupted))
            raise
        return made

    def _emit(self, outcome: Outcome) -> None:
        """Hands over what the step made, and tells the scheduler what the request can do next."""
        live, chunk = outcome.live, outcome.chunk
        if outcome.error is not None:
            self._fail(live, outcome.error)
            return
        if chunk is not None:
            live.first_ms = live.first_ms or chunk.elapsed_ms
            live.num_samples += len(chunk.samples)
            live.num_chunks += 1
            live.ticket.note_chunk(now_ms(), live.num_samples * 1000 // live.sample_rate_hz)
            live.chunks.append(chunk)
        if chunk is not None and chunk.is_last:
            self._finish(live, "length" if live.was_cut else "stop")
            return
        self._stages.update_ticket(live)
        if chunk is not None and live.listener is not None:
            live.listener()

    def _fail(self, live: LiveRequest, error: Exception) -> None:
        """Ends a request with an error; a fault of ours must not reach the thread that happens to step."""
        if isinstance(error, CancelledRequestError):
            self._finish(live, "cancelled", error)
            return
        if isinstance(error, torch.OutOfMemoryError):
            _log.error("the device's memory is full", exc_info=error)
            error = OverloadedError("the device's memory is full; try again later", retry_after_s=1.0)
        elif not isinstance(error, VivaceError):
            _log.error("internal error in a request", exc_info=error)
            error = SynthesisError(f"internal error ({type(error).__name__})")
        self._finish(live, "error", error)

    def _finish_planned(self, planned: Iterable[int], finish: Callable[[LiveRequest], None]) -> None:
        for live in self._planned(planned):
            finish(live)

    def _planned(self, planned: Iterable[int]) -> list[LiveRequest]:
        """Those that have not ended meanwhile."""
        return [self.live[request_id] for request_id in planned if request_id in self.live]

    def _end_overdue(self, live: LiveRequest, reason: Overdue) -> None:
        if reason == "queue":
            wait_s = self._scheduler.requests.retry_after_s()
            message = "the request waited too long for its turn; try again later"
            self._finish(live, "error", OverloadedError(message, retry_after_s=wait_s))
        else:
            message = "the audio was not taken for too long; read it faster or ask for less at a time"
            self._finish(live, "cancelled", CancelledRequestError(message, code="consumer_stalled"))

    def _note_step(self, plan: StepPlan, started_ms: int) -> None:
        """What the batch limit learns from."""
        halved = self._stages.launches_halved
        if halved > self._launches_halved:
            self._scheduler.limit.shrink()
        self._launches_halved = halved
        ended_ms = now_ms()
        self._scheduler.limit.note(ended_ms - started_ms, ended_ms - self._last_step_ms)
        self._last_step_ms = ended_ms
        self.last_plan = sum(hop for _, hop in plan.render), len(plan.decode)

    def _sleep(self, version: int) -> None:
        """Until something changed since ``version`` was read, or time changes what can be done."""
        wake_ms = self._scheduler.wake_ms
        self.turn.wait(version, None if wake_ms is None else max(0, wake_ms - now_ms()) / 1000)

    def _finish(self, live: LiveRequest, reason: FinishReason, error: Exception | None = None) -> None:
        """The one place where a request ends, whatever the reason: its state is freed here."""
        if live.is_done:
            return
        live.wall_ms = live.elapsed_ms()
        live.account_waiting()
        if self._stages.swapper is not None:
            self._stages.swapper.forget(live)
        live.release()
        if reason == "cancelled":
            live.chunks.clear()
        self._scheduler.remove(live.request_id, None if error is not None else now_ms())
        self.live.pop(live.request_id, None)
        if isinstance(error, VivaceError):
            # A traceback would keep the stages' tensors alive for as long as the caller keeps the error.
            error = error.with_traceback(None)
        live.error = error
        live.finish_reason = reason  # last: whoever sees it may rely on the rest
        listener, live.listener = live.listener, None
        if listener is not None:
            listener()

    def _finish_all(self) -> None:
        for live in list(self.live.values()):
            self._finish(live, "cancelled", CancelledRequestError("the engine was closed"))

    def _note_taken(self, live: LiveRequest) -> None:
        live.ticket.pending_chunks -= 1
        live.ticket.lagging_ms = -1


def now_ms() -> int:
    """The scheduler's clock."""
    return time.monotonic_ns() // 1_000_000
