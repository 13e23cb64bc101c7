"""The front ends on WebSocket: our own protocol (``docs/protocol.md``) and the shape of ElevenLabs'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import WebSocketRoute

from vivace.server.connection import Connection
from vivace.server.elevenlabs import add_elevenlabs_routes
from vivace.server.websocket_session import Session

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.websockets import WebSocket

    from vivace.config import ServerConfig
    from vivace.server.service import SpeechService

PATH = "/v1/audio/speech/stream"


def add_websocket_routes(app: FastAPI, service: SpeechService, config: ServerConfig) -> None:
    """Adds the routes; ``Guard`` has checked host, origin and key before."""

    async def speech_stream(websocket: WebSocket) -> None:
        await Session(Connection(websocket, config), service, config, app.state.metrics).run()

    app.router.routes.append(WebSocketRoute(PATH, speech_stream))
    add_elevenlabs_routes(app, service, config)
