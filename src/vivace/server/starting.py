"""What answers from the first moment on: while the model loads, that it does; then the application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.server.answers import json_answer
from vivace.server.errors import ServerError, describe
from vivace.server.guard import Exchange, Guard
from vivace.server.health import HEALTH_PATHS, LIVE_PATH, metrics_answer, not_ready

if TYPE_CHECKING:
    from vivace.config import ServerConfig
    from vivace.server.guard import App, Receive, Scope, Send
    from vivace.server.metrics import Metrics

RETRY_AFTER_SECONDS = 5.0


class Entrance:
    """The ASGI application of ``vivace serve``.

    Attributes:
        app: what answers from now on; at first a door that is alive, but not ready.
    """

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self.app: App = Guard(_Starting(config, metrics), config, metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class _Starting:
    """Health and figures as ever; all else has to come again."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self._config, self._metrics = config, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["type"] == "http" and path == LIVE_PATH:
            await json_answer({"status": "live"})(scope, receive, send)
        elif scope["type"] == "http" and path in HEALTH_PATHS:
            await not_ready("starting")(scope, receive, send)
        elif scope["type"] == "http" and path == "/metrics":
            await metrics_answer(self._metrics)(scope, receive, send)
        else:
            error = ServerError(
                "The model is being loaded. Try again in a moment.",
                code="starting",
                retry_after_s=RETRY_AFTER_SECONDS,
            )
            if scope["type"] == "http":
                raise error  # the guard answers, and counts
            self._metrics.errors.labels(error.code).inc()
            await Exchange(scope, receive, send, self._config).deny_websocket(describe(error))
