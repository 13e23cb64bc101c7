"""A small server with the page and the routes that it uses: says what it is told to, remembers what it was asked."""

from __future__ import annotations

import asyncio
import base64
import math
import socket
import struct
import threading

import uvicorn
from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from starlette.responses import JSONResponse, Response

from vivace.config import ServerConfig
from vivace.server.answers import add_error_handlers
from vivace.server.page import add_page

RATE = 24_000


def tone(seconds: float, hertz: float = 220.0) -> bytes:
    """PCM of a vowel-like tone."""
    count = int(seconds * RATE)
    waves = ((1.0, 0.5), (2.0, 0.25), (3.0, 0.15), (7.0, 0.05))
    values = (
        sum(a * math.sin(2 * math.pi * hertz * h * i / RATE) for h, a in waves)
        * (0.6 + 0.4 * math.sin(i / 2900))
        for i in range(count)
    )
    return struct.pack(f"<{count}h", *(int(20_000 * value) for value in values))


CHUNK = tone(0.5)


class Fake:
    """The server's state; tests set its attributes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.chunks = 3
        self.gap_s = 0.02
        self.endless = False
        self.ready = True
        self.key: str | None = None
        self.skipped_text: list[str] = []
        self.speech_error: dict[str, str] | None = None
        self.upload_error: tuple[int, str] | None = None
        self.cut_after: int | None = None
        self.cut_error: dict[str, str] | None = None
        self.voices = [
            {"id": name, "name": name, "kind": "built-in", "default": name == "heart"}
            for name in ("daniel", "emma", "heart", "puck")
        ]
        self.sessions: list[list[dict]] = []
        self.cancelled = 0
        self.uploads: list[dict] = []
        self.speech: list[dict] = []


def error(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "x", "param": None, "code": code}}, status)


def make_app(fake: Fake) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.metrics = _NoMetrics()
    add_error_handlers(app)
    add_page(app, ServerConfig())

    def refused(request: Request) -> JSONResponse | None:
        sent = request.headers.get("authorization", "").encode("latin-1").decode()
        if fake.key is None or sent == f"Bearer {fake.key}":
            return None
        return error(401, "invalid_api_key", "This server needs a valid API key.")

    @app.get("/health/ready")
    async def ready() -> Response:
        return (
            JSONResponse({"status": "ready"}) if fake.ready else JSONResponse({"status": "restarting"}, 503)
        )

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return refused(request) or JSONResponse({"data": [{"id": "vivace-mini"}]})

    @app.get("/v1/audio/voices")
    async def voices(request: Request) -> Response:
        return refused(request) or JSONResponse({"data": fake.voices, "has_more": False})

    @app.post("/v1/audio/voices")
    async def add(request: Request) -> Response:
        if fake.upload_error:
            return error(*fake.upload_error, "The server's advice.")
        async with request.form() as form:
            audio = await form["audio_sample"].read()
            fake.uploads.append({**{k: v for k, v in form.items() if k != "audio_sample"}, "audio": audio})
        fake.voices.append({"id": form["name"], "name": form["name"], "kind": "stored"})
        return JSONResponse({"id": form["name"], "name": form["name"]})

    @app.delete("/v1/audio/voices/{name}")
    async def remove(name: str) -> Response:
        fake.voices = [voice for voice in fake.voices if voice["id"] != name]
        return JSONResponse({"id": name, "deleted": True})

    _add_speech(app, fake)
    return app


def _add_speech(app: FastAPI, fake: Fake) -> None:
    @app.post("/v1/audio/speech")
    async def speech(request: Request) -> Response:
        fake.speech.append(await request.json())
        return Response(b"fLaC" + bytes(100), media_type="audio/flac")

    @app.websocket("/v1/audio/speech/stream")
    async def stream(socket: WebSocket) -> None:
        offers = socket.scope["subprotocols"]
        if fake.key is not None:
            want = base64.urlsafe_b64encode(fake.key.encode()).decode().rstrip("=")
            if f"vivace.key.{want}" not in offers:
                await socket.close()
                return
        await socket.accept(subprotocol="vivace" if "vivace" in offers else None)
        await _session(fake, socket)


async def _session(fake: Fake, socket: WebSocket) -> None:
    heard: list[dict] = []
    fake.sessions.append(heard)
    speaking: asyncio.Task[None] | None = None
    try:
        while True:
            message = await socket.receive_json()
            heard.append(message)
            kind = message["type"]
            if kind == "session.config":
                await socket.send_json(
                    {"type": "session.ready", "model": "vivace-mini", "voices": [], "sample_rate": RATE}
                )
            elif kind == "input.text" and speaking is None:
                speaking = asyncio.create_task(_speak(fake, socket, heard))
            elif kind == "cancel":
                fake.cancelled += 1
                if speaking:
                    speaking.cancel()
    except (WebSocketDisconnect, RuntimeError):
        if speaking:
            speaking.cancel()


async def _speak(fake: Fake, socket: WebSocket, heard: list[dict]) -> None:
    if fake.speech_error:
        await socket.send_json({"type": "error", "param": None, **fake.speech_error})
        return
    await socket.send_json({"type": "audio.start", "utterance": 0, "sample_rate": RATE, "format": "pcm"})
    index = 0
    while fake.endless or index < fake.chunks:
        await socket.send_bytes(CHUNK)
        n = index + 1
        times = {"text_ms": 1, "prompt_ms": 2, "lm_ms": 30.0 * n, "flow_ms": 50.0 * n}
        await socket.send_json(
            {
                "type": "audio.timing",
                "utterance": 0,
                "index": index,
                "start_s": 0.5 * index,
                "duration_s": 0.5,
                "elapsed_ms": 20 + 100.0 * n,
                "times": {**times, "vocoder_ms": 15.0 * n, "waiting_ms": 0},
                "text_tokens": 10,
                "speech_tokens": 12 * n,
            }
        )
        if fake.cut_after == n:
            await (socket.send_json(fake.cut_error) if fake.cut_error else socket.close(1011))
            return
        index += 1
        await asyncio.sleep(fake.gap_s)
    while not any(message["type"] == "input.done" for message in heard):
        await asyncio.sleep(0.01)
    await socket.send_json(
        {
            "type": "audio.done",
            "utterance": 0,
            "ttfb_ms": 120.0,
            "rtf": 0.21,
            "tps": 400.0,
            "audio_seconds": 0.5 * index,
            "finish_reason": "stop",
            **({"skipped_text": fake.skipped_text} if fake.skipped_text else {}),
        }
    )


class _NoMetrics:
    def __getattr__(self, name: str):
        return self

    def __call__(self, *_):
        return self


class Running:
    """An application on a port of its own, in a thread; can go away and come back."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self.start()

    def start(self) -> None:
        config = uvicorn.Config(
            self._app,
            host="127.0.0.1",
            port=self.port,
            log_level="error",
            lifespan="off",
            ws="websockets-sansio",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        started = threading.Event()
        startup = self._server.startup

        async def tell(sockets=None):
            await startup(sockets)
            started.set()

        self._server.startup = tell
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        assert started.wait(10)

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()
