"""JSON from clients, read strictly: what two parsers could read differently is refused.

No NaN or Infinity, no duplicate names, no deep nesting, UTF-8 only, no halves of surrogate pairs in what is used.
Names that we do not know are ignored, as OpenAI's clients expect.
"""

from __future__ import annotations

import math
import re
from typing import Any

from vivace import strict_json
from vivace.server.errors import ServerError

MAX_DEPTH = 32
MAX_BRACKETS = 10_000
"""Far more than any request of ours needs; bounds the work of looking at them."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_BRACKET = re.compile(r"[\[\]{}]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(data: bytes) -> Any:
    """The document in ``data``.

    Raises:
        ServerError: ``invalid_utf8``, ``invalid_json``.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ServerError("The body is not valid UTF-8.", code="invalid_utf8") from None
    _check_depth(text)
    try:
        return strict_json.loads(text)
    except (ValueError, RecursionError):
        raise _invalid("The body is not valid JSON, or it names something twice.") from None


class Fields:
    """The members of a JSON object, taken one by one with their types checked.

    Every method raises ``ServerError`` with ``invalid_type``, ``missing_field``, ``value_out_of_range``,
    ``input_too_long`` or ``invalid_utf8`` and the member's name. A member that is null counts as absent.
    """

    def __init__(self, document: Any) -> None:
        if not isinstance(document, dict):
            raise ServerError("The body must be a JSON object.", code="invalid_type")
        self._members: dict[str, Any] = document

    def __contains__(self, name: str) -> bool:
        return self._members.get(name) is not None

    def raw(self, name: str) -> Any:
        """As it came; None if absent."""
        return self._members.get(name)

    def is_null(self, name: str) -> bool:
        """The member is there, and null."""
        return name in self._members and self._members[name] is None

    def text(self, name: str, *, max_characters: int | None = None) -> str | None:
        """A string that is valid Unicode."""
        value = self._members.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise wrong_type(name, "a string")
        if max_characters is not None and len(value) > max_characters:
            raise ServerError(
                f"{name} is longer than {max_characters} characters.", code="input_too_long", param=name
            )
        if _SURROGATE.search(value):
            raise ServerError(f"{name} holds half of a surrogate pair.", code="invalid_utf8", param=name)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number within bounds."""
        value = self._members.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, "a number")
        # Integers are compared as such: the largest have no float.
        if (isinstance(value, float) and not math.isfinite(value)) or not low <= value <= high:
            raise ServerError(
                f"{name} must lie between {low:g} and {high:g}.", code="value_out_of_range", param=name
            )
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer within bounds; 1.0 is none."""
        value = self._members.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, "an integer")
        if isinstance(value, float) or not low <= value <= high:
            raise ServerError(
                f"{name} must be an integer from {low} to {high}.", code="value_out_of_range", param=name
            )
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._members.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong_type(name, "true or false")
        return value


def wrong_type(name: str, wanted: str) -> ServerError:
    """The error for a member of another type."""
    return ServerError(f"{name} must be {wanted}.", code="invalid_type", param=name)


def missing(name: str) -> ServerError:
    """The error for a member that must be there."""
    return ServerError(f"{name} is missing.", code="missing_field", param=name)


def _invalid(what: str) -> ServerError:
    return ServerError(what, code="invalid_json")


def _check_depth(text: str) -> None:
    """Before parsing: how deep a parser may go differs between versions of Python."""
    num_brackets = text.count("[") + text.count("{")
    if num_brackets <= MAX_DEPTH:
        return
    depth = 0
    if num_brackets <= MAX_BRACKETS:
        for match in _BRACKET.finditer(_STRING.sub("", text)):
            depth += 1 if match.group() in "[{" else -1
            if depth > MAX_DEPTH:
                break
    if num_brackets > MAX_BRACKETS or depth > MAX_DEPTH:
        raise _invalid(f"The body is nested more than {MAX_DEPTH} deep, or has too many parts.")
