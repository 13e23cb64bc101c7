"""``GET /health/live``, ``/health/ready`` and ``/metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from vivace.server.answers import json_answer
from vivace.server.metrics import GaugeSource

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vivace.config import ServerConfig
    from vivace.server.service import SpeechService

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add_health_routes(app: FastAPI, service: SpeechService, config: ServerConfig) -> None:
    """Adds the routes."""

    @app.get("/health/live", response_class=Response)
    async def live() -> Response:
        """The process answers."""
        return json_answer({"status": "live"})

    @app.get("/health/ready", response_class=Response)
    async def ready() -> Response:
        """The engine takes requests, and gave a sign of life lately."""
        state = service.state
        age = service.gauges().get("heartbeat_age_seconds") if isinstance(service, GaugeSource) else None
        is_alive = age is None or age <= config.heartbeat_seconds
        if state == "ready" and is_alive:
            return json_answer({"status": "ready"})
        return json_answer({"status": state if is_alive else "stalled"}, 503, {"retry-after": "1"})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(app.state.metrics.render(), media_type=METRICS_TYPE)
