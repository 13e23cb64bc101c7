"""The whole configuration as JSON and back; every key must be known and of its type."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar, Union, cast

from vivace.errors import ModelFolderError

T = TypeVar("T")


def to_json(config: Any) -> dict[str, Any]:
    """A frozen dataclass as plain JSON values (tuples become lists)."""
    return dataclasses.asdict(config)


def from_json(cls: type[T], values: object, file: str, where: str = "config") -> T:
    """Builds ``cls`` from plain values.

    Raises:
        ModelFolderError: a key is unknown, missing, or has a value of another type.
    """
    if not isinstance(values, dict):
        raise ModelFolderError(f"{file}: {where} must be an object; convert the model again")
    fields = {field.name: field for field in dataclasses.fields(cast("Any", cls))}
    for key in values:
        if key not in fields:
            raise ModelFolderError(
                f"{file}: unknown key '{where}.{str(key)[:60]}'; this Vivace is older than the file"
            )
    hints = typing.get_type_hints(cls)
    arguments: dict[str, object] = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = _typed(hints[name], values[name], file, f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ModelFolderError(f"{file}: {where}.{name} is missing; convert the model again")
    return cls(**arguments)


def _typed(kind: Any, value: object, file: str, where: str) -> object:
    if dataclasses.is_dataclass(kind):
        return from_json(cast("type[object]", kind), value, file, where)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        length = len(value) if isinstance(value, list) else -1
        items = (inner[0],) * length if len(inner) == 2 and inner[1] is Ellipsis else inner
        if not isinstance(value, list) or length != len(items) or length > 64:
            raise ModelFolderError(f"{file}: {where} must be a short list; convert the model again")
        return tuple(_typed(item, entry, file, where) for item, entry in zip(items, value, strict=True))
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, file, where)
    accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if type(value) not in accepted or (isinstance(value, float) and not math.isfinite(value)):
        raise ModelFolderError(f"{file}: {where} must be of type {kind.__name__}; convert the model again")
    return float(cast("float", value)) if kind is float else value


def _one_of(kinds: tuple[Any, ...], value: object, file: str, where: str) -> object:
    """Something or None, or the first of several configurations that has all keys of ``value``."""
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    known = set(value) if isinstance(value, dict) else set()
    fits = (
        kind
        for kind in kinds
        if dataclasses.is_dataclass(kind) and known <= {field.name for field in dataclasses.fields(kind)}
    )
    return _typed(next(fits, kinds[0]), value, file, where)
