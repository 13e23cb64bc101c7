"""Typed reading of parsed YAML; every error names the file and the key."""

from __future__ import annotations

import math

from vivace.checkpoint.yaml_reader import Call, References, Value
from vivace.errors import ModelFolderError


class Section:
    """One mapping of the file.

    Args:
        name: dotted path to it; empty at the top.
        values: its pairs; references are followed when read.
        references: of the whole file.
    """

    def __init__(self, name: str, values: dict[str, Value], references: References) -> None:
        self.name = name
        self._values = values
        self._references = references

    @property
    def file(self) -> str:
        return self._references.file

    def _fail(self, key: str, problem: str) -> ModelFolderError:
        dotted = f"{self.name}.{key}" if self.name else key
        return ModelFolderError(f"{self._references.file}: {dotted} {problem}")

    def _get(self, key: str) -> Value:
        if key not in self._values:
            raise self._fail(key, "is missing; copy the file from the official folder again")
        return self._references.follow(self._values[key])

    def integer(self, key: str) -> int:
        return self._integer(key, self._get(key))

    def _integer(self, key: str, value: Value) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._fail(key, "must be a whole number")
        return value

    def number(self, key: str) -> float:
        return self._number(key, self._get(key))

    def _number(self, key: str, value: Value) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._fail(key, "must be a number")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        return self._integers(key, self._get(key))

    def _integers(self, key: str, value: Value) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > 16:
            raise self._fail(key, "must be a short list of whole numbers")
        return tuple(self._integer(key, self._references.follow(item)) for item in value)

    def integer_rows(self, key: str) -> tuple[tuple[int, ...], ...]:
        rows = self._get(key)
        if not isinstance(rows, list) or len(rows) > 16:
            raise self._fail(key, "must be a short list of lists")
        return tuple(self._integers(key, self._references.follow(row)) for row in rows)

    def optional_text(self, key: str) -> str | None:
        value = self._references.follow(self._values.get(key))
        if value is not None and not isinstance(value, str):
            raise self._fail(key, "must be text")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self._references.follow(self._values.get(key))
        return None if value is None else self._number(key, value)

    def number_pair(self, key: str) -> tuple[float, float]:
        pair = self._get(key)
        if not isinstance(pair, list) or len(pair) != 2:
            raise self._fail(key, "must be two numbers")
        first, second = (self._number(key, self._references.follow(item)) for item in pair)
        return first, second

    def must_be(self, key: str, *accepted: Value) -> None:
        """A setting with one supported answer; absent is fine, for it is the reference's default."""
        if key in self._values and self._get(key) not in accepted:
            raise self._fail(
                key, f"must be {' or '.join(map(repr, accepted))}; other values are not supported"
            )

    def mapping(self, key: str) -> Section:
        value = self._get(key)
        if not isinstance(value, dict):
            raise self._fail(key, "must be a mapping")
        return Section(f"{self.name}.{key}".lstrip("."), value, self._references)

    def call(self, key: str, target: str) -> Section:
        value = self._get(key)
        if not isinstance(value, Call) or value.target != target:
            raise self._fail(key, f"must be a {target}")
        return Section(f"{self.name}.{key}".lstrip("."), value.arguments, self._references)

    def only(self, keys: frozenset[str]) -> None:
        for key in self._values:
            if key not in keys:
                raise self._fail(key, "is an unknown key")
