"""Figures for Prometheus, in a registry of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from vivace.server.service import SpeechService

_SECONDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)
_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 5)
_LAG_SECONDS = 0.1
_STATES = ("starting", "ready", "restarting", "draining", "failed")
_SERVICE_GAUGES = {
    "queue_length": "Requests that wait for their first turn.",
    "batch_size": "Sequences in the latest step of the speech LM.",
    "flow_batch_size": "Chunks in the latest flow step.",
    "flow_batch_limit": "Chunks that a step may render at present; adapts to load and latency.",
    "pages_used": "Pages of the key and value cache in use.",
    "pages_total": "Pages of the key and value cache.",
    "flow_pages_used": "Pages of the flow that running requests hold.",
    "flow_pages_total": "Pages of the flow for requests.",
    "host_pages_used": "Pages of the flow that lie in host memory.",
    "host_pages_total": "Pages of the flow that host memory has room for.",
    "streams_on_host": "Running requests whose pages are in host memory, or on the way.",
    "swaps_out": "How often a request's pages went to host memory.",
    "swaps_in": "How often they came back.",
    "engine_busy_ratio": "Share of the engine's latest steps' time in which one ran.",
    "step_seconds_p99": "99th percentile of the time of the latest steps.",
    "gpu_busy_ratio": "Share of the last second in which the GPU worked.",
    "gpu_memory_bytes": "GPU memory in use.",
    "engine_ready": "1 while the engine takes requests.",
    "engine_streams": "Requests that were given to the engine and have not ended.",
    "engine_restarts": "How often the engine was started again.",
    "heartbeat_age_seconds": "Age of the engine's latest sign of life.",
}


@runtime_checkable
class GaugeSource(Protocol):
    """A service that knows some of these figures: ``queue_length``, ``batch_size``, ``flow_batch_size``,
    ``pages_used``, ``pages_total``, ``gpu_busy_ratio``, ``gpu_memory_bytes``, ``engine_restarts``,
    ``heartbeat_age_seconds``."""

    def gauges(self) -> Mapping[str, float]: ...


@runtime_checkable
class EnginesSource(Protocol):
    """A service of several engines: the labels of each, and its figures."""

    def gauges_by_engine(self) -> Sequence[tuple[Mapping[str, str], Mapping[str, float]]]: ...


def gauges_by_engine(service: SpeechService) -> Sequence[tuple[Mapping[str, str], Mapping[str, float]]]:
    """Labels and figures of each engine; a service with only one has no labels."""
    if isinstance(service, EnginesSource):
        return service.gauges_by_engine()
    return [({}, service.gauges())] if isinstance(service, GaugeSource) else []


class Metrics:
    """Counts what the front ends do.

    Accepted requests are those running, plus those that ended: done, failed or cancelled.

    Attributes:
        service: None while its model loads.
    """

    def __init__(self, service: SpeechService | None = None) -> None:
        self.service = service
        registry = self._registry = CollectorRegistry()
        self.accepted = Counter(
            "vivace_requests_accepted", "Speech requests begun.", ["front_end"], registry=registry
        )
        self.ended = Counter(
            "vivace_requests_ended",
            "Speech requests by outcome: done, failed, cancelled.",
            ["front_end", "outcome"],
            registry=registry,
        )
        self.errors = Counter("vivace_errors", "Errors by code.", ["code"], registry=registry)
        self.ttfb_seconds = Histogram(
            "vivace_ttfb_seconds",
            "From the request to its first byte of audio.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.rtf = Histogram("vivace_rtf", "Wall time over audio time.", buckets=_RATIOS, registry=registry)
        self.audio_seconds = Counter("vivace_audio_seconds", "Audio made.", registry=registry)
        self.underruns = Counter(
            "vivace_underruns", "Chunks that came after a player would have run dry.", registry=registry
        )
        self._running = Gauge("vivace_running", "Requests in work.", registry=registry)
        self._state = Gauge(
            "vivace_state", "1 for the state the service is in.", ["state"], registry=registry
        )
        self._gauges: dict[str, Gauge] = {}
        self._loop_lag = Gauge(
            "vivace_loop_lag_seconds",
            "Longest time since the last look in which the event loop did nothing else.",
            registry=registry,
        )
        self._longest_lag_s = 0.0

    async def watch_loop(self) -> None:
        """Measures how late the event loop is, until it is cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_LAG_SECONDS)
            self._longest_lag_s = max(self._longest_lag_s, time.monotonic() - before - _LAG_SECONDS)

    def render(self) -> bytes:
        """All figures in Prometheus' text format."""
        self._loop_lag.set(self._longest_lag_s)
        self._longest_lag_s = 0.0
        service = self.service
        self._running.set(service.num_running if service is not None else 0)
        for state in _STATES:
            self._state.labels(state).set(state == ("starting" if service is None else service.state))
        for labels, figures in gauges_by_engine(service) if service is not None else ():
            for name, value in figures.items():
                if name in _SERVICE_GAUGES:
                    self._gauge(name, labels).set(value)
        return generate_latest(self._registry)

    def _gauge(self, name: str, labels: Mapping[str, str]) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(
                f"vivace_{name}", _SERVICE_GAUGES[name], list(labels), registry=self._registry
            )
        return self._gauges[name].labels(**labels) if labels else self._gauges[name]
