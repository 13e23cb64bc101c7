"""``GET /v1/models`` and Open WebUI's ``GET /v1/audio/models``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from vivace.server.answers import json_answer
from vivace.server.errors import ServerError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vivace.config import ServerConfig
    from vivace.server.service import SpeechService


def check_model(service: SpeechService, config: ServerConfig, name: str | None) -> None:
    """Raises ``model_not_found`` for a model that is neither the loaded one nor an alias of it."""
    if name is not None and name not in (service.model, *config.model_aliases):
        raise ServerError(
            f"There is no model of this name; this server has {service.model}.",
            code="model_not_found",
            param="model",
        )


def add_model_routes(app: FastAPI, service: SpeechService, config: ServerConfig) -> None:
    """Adds the routes."""
    created = int(time.time())

    def entry(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "vivace"}

    @app.get("/v1/models", response_class=Response)
    async def list_models() -> Response:
        """The loaded model, and the names that mean it."""
        names = (service.model, *config.model_aliases)
        return json_answer({"object": "list", "data": [entry(name) for name in names]})

    @app.get("/v1/models/{name:path}", response_class=Response)
    async def get_model(name: str) -> Response:
        """One of them."""
        check_model(service, config, name)
        return json_answer(entry(name))

    @app.get("/v1/audio/models", response_class=Response)
    async def list_audio_models() -> Response:
        """As Open WebUI asks for them."""
        return json_answer({"models": [{"id": service.model, "name": service.model}]})
