"""Plain answers of the HTTP front ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from vivace.server.errors import ErrorAnswer, ServerError, describe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI
    from starlette.exceptions import HTTPException
    from starlette.requests import Request


MAX_CONTENT_TYPE_CHARACTERS = 1_000


def json_answer(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON document."""
    body = json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    return Response(body, status, headers, "application/json")


def error_response(answer: ErrorAnswer) -> Response:
    """An error as a response."""
    return Response(answer.body(), answer.status, answer.headers, "application/json")


def check_content_type(request: Request, wanted: str) -> str:
    """The whole ``Content-Type``.

    Raises:
        ServerError: ``unsupported_media_type``: it is another one than ``wanted``, or there are several;
            ``invalid_request``: it is too long.
    """
    given = request.headers.getlist("content-type")
    if sum(map(len, given)) > MAX_CONTENT_TYPE_CHARACTERS:
        raise ServerError("The Content-Type is too long.", code="invalid_request")
    kind = given[0].partition(";")[0].strip().lower() if len(given) == 1 else ""
    if kind != wanted:
        raise ServerError(f"The body must be {wanted}.", code="unsupported_media_type")
    return given[0]


def add_error_handlers(app: FastAPI) -> None:
    """Makes every error of the application an answer by the contract."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    from vivace.errors import VivaceError

    async def on_error(request: Request, error: Exception) -> Response:
        answer = describe(error)
        app.state.metrics.errors.labels(answer.code).inc()
        return error_response(answer)

    async def on_http_error(request: Request, error: Exception) -> Response:
        response = await on_error(request, _of_routing(error))  # type: ignore[arg-type]
        allowed = (getattr(error, "headers", None) or {}).get("Allow")
        if allowed is not None:
            response.headers["allow"] = allowed
        return response

    async def on_validation_error(request: Request, error: Exception) -> Response:
        return await on_error(request, ServerError("The request is not valid.", code="invalid_type"))

    app.add_exception_handler(VivaceError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)


def _of_routing(error: HTTPException) -> ServerError:
    if error.status_code == 404:
        return ServerError("There is nothing at this address.", code="not_found")
    if error.status_code == 405:
        return ServerError("This address does not take that method.", code="method_not_allowed")
    return ServerError("The request is not valid.", code="invalid_request")
