"""When each stage ran: spans on the device's own clock, for timelines. Costs nothing while nobody looks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

Lane = Literal["text", "prompt", "lm", "flow", "vocoder"]


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of a stage, milliseconds since the trace began."""

    lane: Lane
    start_ms: float
    end_ms: float


class Trace:
    """Collects spans while it is attached to the engine's stages.

    On a CUDA device a span runs from the moment the device begins the work to the moment it has done it, so
    work that was queued early or overlaps other work shows as it ran. Elsewhere spans are the host's.

    Args:
        device: where the stages run.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._host: list[Span] = []
        self._marked: list[tuple[Lane, Any, Any]] = []
        self._origin: Any = None
        self._started = 0.0
        self.start()

    def start(self) -> None:
        """Forgets everything; time begins now."""
        self._host.clear()
        self._marked.clear()
        if self._on_cuda:
            torch.cuda.synchronize()
            self._origin = _mark(None)
        self._started = time.perf_counter()

    @contextmanager
    def span(self, lane: Lane, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        """Work of a stage that the body does, or on CUDA enqueues on ``stream`` (None: the current one)."""
        if self._on_cuda:
            before = _mark(stream)
            yield
            self._marked.append((lane, before, _mark(stream)))
            return
        before_s = time.perf_counter()
        yield
        self.add(lane, before_s, time.perf_counter())

    def add(self, lane: Lane, before_s: float, after_s: float) -> None:
        """A span by the host's clock (``time.perf_counter``)."""
        self._host.append(Span(lane, (before_s - self._started) * 1e3, (after_s - self._started) * 1e3))

    def spans(self) -> list[Span]:
        """All spans so far, by start."""
        if self._on_cuda:
            torch.cuda.synchronize()
        marked = [
            Span(lane, self._origin.elapsed_time(before), self._origin.elapsed_time(after))
            for lane, before, after in self._marked
        ]
        return sorted(self._host + marked, key=lambda span: span.start_ms)


def _mark(stream: torch.cuda.Stream | None) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream or torch.cuda.current_stream())
    return event
