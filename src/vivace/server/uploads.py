"""Forms with a recording in them: a few at once, read from memory."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from vivace.server.answers import check_content_type
from vivace.server.errors import ServerError
from vivace.server.json_body import missing
from vivace.server.multipart import Form, parse_form

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from vivace.config import ServerConfig

UPLOAD_WAIT_SECONDS = 10.0


@asynccontextmanager
async def upload_form(request: Request) -> AsyncIterator[Form]:
    """The form of a request; within the block it counts as one of the uploads at work.

    Raises:
        ServerError: ``overloaded``, ``unsupported_media_type``, ``invalid_form``.
    """
    content_type = check_content_type(request, "multipart/form-data")
    uploads: asyncio.Semaphore = request.app.state.uploads
    try:
        async with asyncio.timeout(UPLOAD_WAIT_SECONDS):
            await uploads.acquire()
    except TimeoutError:
        raise ServerError("Too many uploads at once.", code="overloaded", retry_after_s=5.0) from None
    try:
        yield await asyncio.to_thread(parse_form, await request.body(), content_type)
    finally:
        uploads.release()


def recording(form: Form, config: ServerConfig, *names: str) -> bytes:
    """The first of these parts that is there.

    Raises:
        ServerError: ``missing_field``, ``payload_too_large``.
    """
    audio = form.data(*names)
    if audio is None:
        raise missing(names[0])
    if len(audio) > config.upload_bytes:
        raise ServerError(
            f"The recording is larger than {config.upload_bytes} bytes.",
            code="payload_too_large",
            param=names[0],
        )
    return audio
