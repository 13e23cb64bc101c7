"""The one place that turns an error into an answer.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

Every front end takes ``describe``: the same code and words over HTTP, in a stream of events, over WebSocket.
No message holds any of the client's input, a path, or an address.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vivace.errors import OverloadedError, VivaceError

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger(__name__)

_STATUS_OF_CODE = {
    "invalid_api_key": 401,
    "forbidden_origin": 403,
    "consent_required": 403,
    "builtin_voice": 403,
    "model_not_found": 404,
    "consent_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "length_required": 411,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "unknown_host": 421,
    "headers_too_large": 431,
    "rate_limited": 429,
    "not_implemented": 501,
    "overloaded": 503,
    "draining": 503,
    "starting": 503,
    "engine_restarting": 503,
    "engine_closed": 503,
    "deadline_exceeded": 504,
    "storage_full": 507,
}
_TYPE_OF_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_REPEATS = (409, 500, 501, 507)
"""Statuses that clients would try again although the answer stays the same."""

_FAILURES = {
    "synthesis_failed": "The model failed to speak this text. Try another seed.",
    "no_speech": "The model failed to speak this text. Try another seed.",
    "invalid_model_folder": "This server's model lacks what that takes. The server's log names the file.",
}

HTTP_PARAMS = {
    "text": "input",
    "instruction": "instructions",
    "prompt_audio": "audio_sample",
    "prompt_text": "ref_text",
}
"""Names of the engine, and what the same thing is called over HTTP."""

SESSION_PARAMS = {"instruction": "instructions"}
"""The same in the messages of a WebSocket session, whose text is called ``text``."""


class ServerError(VivaceError):
    """An error of a front end; its status follows from its code.

    Args:
        retry_after_s: seconds after which trying again makes sense.
    """

    def __init__(
        self, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, code=code, param=param)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as a client sees it."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def type(self) -> str:
        """The class of error that OpenAI's clients know."""
        if self.status in _TYPE_OF_STATUS:
            return _TYPE_OF_STATUS[self.status]
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def document(self) -> dict[str, Any]:
        """What the body says."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """``document`` as JSON."""
        return json.dumps(self.document(), ensure_ascii=False).encode()


def describe(error: BaseException, params: Mapping[str, str] = HTTP_PARAMS) -> ErrorAnswer:
    """What a client is told about an error. One that is not ours says nothing of itself, and is logged.

    Args:
        params: names of the engine, and what the client calls them.
    """
    if not isinstance(error, VivaceError):
        _log.error("a request failed", exc_info=error)
        return ErrorAnswer(
            500, "internal_error", "The server failed to answer. Its log says why.", headers=_again(500)
        )
    status = _STATUS_OF_CODE.get(error.code) or (400 if isinstance(error, ServerError) else error.http_status)
    if status == 499:  # ended by the server, since the client is still there to read this
        error = ServerError("The server ended this request.", code="engine_restarting")
        status = 503
    if status == 500:
        _log.error("a request failed: %s (%s)", error.message, error.code)
        said = _FAILURES.get(error.code, "The server failed to answer. Its log says why.")
        return ErrorAnswer(500, "internal_error", said, headers=_again(500))
    headers = _again(status)
    retry_after_s = getattr(error, "retry_after_s", None)
    if status in (429, 503) or isinstance(error, OverloadedError):
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s or 1.0)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    param = params.get(error.param or "", error.param)
    return ErrorAnswer(status, error.code, error.sentence, param, headers)


def _again(status: int) -> dict[str, str]:
    return {"x-should-retry": "false"} if status in _REPEATS else {}
