"""The page at ``/``: hand-written files inside the package, read once and served from memory.

A request names a file of a table, never a path, so that nothing else can be reached.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response

from vivace.server.errors import ServerError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

    from vivace.config import ServerConfig

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "media-src 'self' blob:",  # a recording, before it is sent
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
)
PAGE_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
    "referrer-policy": "no-referrer",
}
"""Headers of the document; the files that it loads are bound by them."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page; ``etag`` changes with its content."""

    body: bytes
    media_type: str
    etag: str


def read_page(folder: Path = FOLDER) -> dict[str, PageFile]:
    """All files of the page by their path below ``folder``, with ``/`` between the parts."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in _TYPES and path.is_file():
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
            files[path.relative_to(folder).as_posix()] = PageFile(body, _TYPES[path.suffix], etag)
    return files


def add_page(app: FastAPI, config: ServerConfig) -> None:
    """Serves the page at ``/`` and its files below ``/static/``. It needs no settings; it asks for a key itself."""
    files = read_page()

    async def index(request: Request) -> Response:
        return _answer(request, files[INDEX], PAGE_HEADERS)

    async def static(request: Request) -> Response:
        file = files.get(request.path_params["path"])
        if file is None:
            raise ServerError("There is nothing at this address.", code="not_found")
        return _answer(request, file, {})

    app.router.add_route("/", index, methods=["GET", "HEAD"], include_in_schema=False)
    app.router.add_route("/static/{path:path}", static, methods=["GET", "HEAD"], include_in_schema=False)


def _answer(request: Request, file: PageFile, headers: dict[str, str]) -> Response:
    """The file, or 304 when the browser has it. Browsers ask each time, so that an update shows at once."""
    headers = headers | {"etag": file.etag, "cache-control": "no-cache"}
    if _has(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


def _has(if_none_match: str, etag: str) -> bool:
    known = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in known or known == ["*"]
