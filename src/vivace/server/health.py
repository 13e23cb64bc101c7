"""``GET /health/live``, ``/health/ready`` (or ``/health``) and ``/metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from vivace.server.answers import json_answer
from vivace.server.metrics import GaugeSource

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vivace.config import ServerConfig
    from vivace.server.metrics import Metrics
    from vivace.server.service import SpeechService

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LIVE_PATH = "/health/live"
HEALTH_PATHS = ("/health/ready", "/health")
"""Of the question whether requests are taken; many health checks know no other path than the shorter one."""


def add_health_routes(app: FastAPI, service: SpeechService, config: ServerConfig) -> None:
    """Adds the routes."""

    @app.get(LIVE_PATH, response_class=Response)
    async def live() -> Response:
        """The process answers."""
        return json_answer({"status": "live"})

    async def ready() -> Response:
        """The engine takes requests, and gave a sign of life lately."""
        state = service.state
        age = service.gauges().get("heartbeat_age_seconds") if isinstance(service, GaugeSource) else None
        is_alive = age is None or age <= config.heartbeat_seconds
        if state == "ready" and is_alive:
            return json_answer({"status": "ready"})
        return not_ready(state if is_alive else "stalled")

    for path in HEALTH_PATHS:
        app.get(path, response_class=Response)(ready)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return metrics_answer(app.state.metrics)


def not_ready(status: str) -> Response:
    """Why no requests are taken now."""
    return json_answer({"status": status}, 503, {"retry-after": "1"})


def metrics_answer(metrics: Metrics) -> Response:
    """All figures."""
    return Response(metrics.render(), media_type=METRICS_TYPE)
