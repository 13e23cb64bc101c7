"""All front ends that speak HTTP, in one application."""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.responses import Response

from vivace import __version__
from vivace.server.answers import add_error_handlers, json_answer
from vivace.server.consents import add_consent_routes
from vivace.server.guard import Guard
from vivace.server.health import add_health_routes
from vivace.server.metrics import Metrics
from vivace.server.models import add_model_routes
from vivace.server.speech import add_speech_routes
from vivace.server.transform import add_transform_routes
from vivace.server.voices import add_voice_routes
from vivace.voice.consent import ConsentRegistry

if TYPE_CHECKING:
    from vivace.config import ServerConfig
    from vivace.server.service import SpeechService


def create_app(service: SpeechService, config: ServerConfig, metrics: Metrics | None = None) -> FastAPI:
    """The application. Front ends count what they do in ``app.state.metrics``.

    Args:
        metrics: go on counting here.
    """
    app = FastAPI(title="Vivace", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.metrics = metrics or Metrics()
    app.state.metrics.service = service
    app.add_middleware(Guard, config=config, metrics=app.state.metrics)
    add_error_handlers(app)
    add_speech_routes(app, service, config)
    add_model_routes(app, service, config)
    consents = ConsentRegistry(service.voices.folder)
    app.state.uploads = asyncio.Semaphore(config.max_uploads)
    add_consent_routes(app, consents, config)
    add_transform_routes(app, service, config)
    add_voice_routes(app, service, config, consents)
    add_health_routes(app, service, config)
    if find_spec("vivace.server.websocket") is not None:
        import_module("vivace.server.websocket").add_websocket_routes(app, service, config)
    if find_spec("vivace.server.page") is not None:
        import_module("vivace.server.page").add_page(app, config)
    else:
        _add_greeting(app, service)
    return app


def _add_greeting(app: FastAPI, service: SpeechService) -> None:
    @app.get("/", response_class=Response)
    async def greeting() -> Response:
        """Says who answers; some clients open a connection with it."""
        return json_answer({"name": "vivace", "version": __version__, "model": service.model})
