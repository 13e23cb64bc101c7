"""All front ends that speak HTTP, in one application."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fastapi import FastAPI

from vivace import __version__
from vivace.server.metrics import Metrics

if TYPE_CHECKING:
    from vivace.config import ServerConfig
    from vivace.server.service import SpeechService


def create_app(service: SpeechService, config: ServerConfig) -> FastAPI:
    """The application. Front ends count what they do in ``app.state.metrics``."""
    app = FastAPI(title="Vivace", version=__version__, docs_url=None, redoc_url=None)
    app.state.metrics = Metrics(service)
    if find_spec("vivace.server.websocket") is not None:
        import_module("vivace.server.websocket").add_websocket_routes(app, service, config)
    if find_spec("vivace.server.page") is not None:
        import_module("vivace.server.page").add_page(app, config)
    return app
