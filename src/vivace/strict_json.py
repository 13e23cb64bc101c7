"""JSON read strictly: what two parsers could read differently is refused."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str) -> Any:
    """The document in ``text``.

    Raises:
        ValueError: it is not JSON, names something twice, or holds NaN or Infinity.
        RecursionError: it is nested too deep.
    """
    return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object names something twice")
    return members


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
