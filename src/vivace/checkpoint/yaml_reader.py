"""Reads the YAML dialect of the official model folders (HyperPyYAML) as data.

In the dialect a file can name classes to build and functions to call. Here nothing is ever built or called:
``!new:`` and ``!name:`` become a :class:`Call` value, ``!ref`` becomes a :class:`Ref` value, everything else
that could act (``!apply``, ``!include``, ``!!python/...``, anchors, own directives) is refused. Work is
bounded: bytes, parser events, depth and the length of numbers and expressions are limited, and references
are followed without copying, so no short file expands into a large one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, Union, cast

import yaml

from vivace.errors import ModelFolderError

MAX_BYTES = 64 * 1024
"""The official file has 7 kB. Bounds the parser's time, which grows with the bytes."""
MAX_EVENTS = 4_000
"""The official file makes under 500 parser events."""
MAX_DEPTH = 24
MAX_DIGITS = 15
MAX_EXPRESSION = 120
MAX_MAGNITUDE = 10**12
MAX_REF_CHAIN = 32

SEED_CALLS = frozenset(
    {"random.seed", "numpy.random.seed", "torch.manual_seed", "torch.cuda.manual_seed_all"}
)
"""What official files really put behind ``!apply``; kept as plain numbers and otherwise ignored."""

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TARGET = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_TERM = re.compile(r"\s*(?:<(?P<key>[A-Za-z_]\w*)>|(?P<number>[0-9.]+(?:[eE][-+]?[0-9]+)?))\s*")
_OPERATOR = re.compile(r"//|[*+-]")


@dataclass(frozen=True, slots=True)
class Ref:
    """``!ref``: a top-level key, or a sum, difference, product or floor quotient of keys and numbers."""

    expression: str
    line: int


@dataclass(frozen=True, slots=True)
class Call:
    """``!new:target`` or ``!name:target`` with its keyword arguments. Never called."""

    kind: Literal["new", "name"]
    target: str
    arguments: dict[str, Value]
    line: int


Scalar: TypeAlias = bool | int | float | str | None
Value: TypeAlias = Union[Scalar, Ref, Call, "list[Value]", "dict[str, Value]"]


class _Builder:
    """Turns parser events into values, counting as it goes."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.num_events = 0
        self._events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)

    def fail(self, problem: str, event: yaml.Event | None = None) -> ModelFolderError:
        where = f"line {event.start_mark.line + 1}: " if event is not None and event.start_mark else ""
        return ModelFolderError(f"{self.file}: {where}{problem}")

    def next_event(self) -> yaml.Event:
        try:
            event = next(self._events)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"line {mark.line + 1}: " if mark is not None else ""
            raise ModelFolderError(
                f"{self.file}: {where}not valid YAML; copy the file from the official folder again"
            ) from error
        self.num_events += 1
        if self.num_events > MAX_EVENTS:
            raise self.fail(f"has more than {MAX_EVENTS} entries; this is no CosyVoice configuration")
        if getattr(event, "anchor", None) is not None:
            raise self.fail("anchors and aliases (& and *) are not accepted", event)
        return event

    def document(self) -> dict[str, Value]:
        self.next_event()  # stream start
        start = self.next_event()
        if isinstance(start, yaml.StreamEndEvent):
            raise self.fail("is empty; copy it from the official folder again")
        if isinstance(start, yaml.DocumentStartEvent) and (start.tags or start.version):
            raise self.fail("YAML directives (%) are not accepted", start)
        value = self.value(self.next_event(), 0)
        self.next_event()  # document end
        if not isinstance(self.next_event(), yaml.StreamEndEvent):
            raise self.fail("holds more than one document")
        if not isinstance(value, dict):
            raise self.fail("must be a mapping of keys to values at the top")
        return value

    def value(self, event: yaml.Event, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise self.fail(f"is nested deeper than {MAX_DEPTH} levels", event)
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            return self.tagged(str(tag), event, depth)
        return self.plain(event, depth)

    def plain(self, event: yaml.Event, depth: int) -> Value:
        if isinstance(event, yaml.ScalarEvent):
            if event.style is not None or event.tag == "!":
                return str(event.value)
            return self.scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Value] = []
            while not isinstance(item := self.next_event(), yaml.SequenceEndEvent):
                items.append(self.value(item, depth + 1))
            return items
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(depth)
        raise self.fail("anchors and aliases (& and *) are not accepted", event)

    def mapping(self, depth: int) -> dict[str, Value]:
        pairs: dict[str, Value] = {}
        while not isinstance(event := self.next_event(), yaml.MappingEndEvent):
            if not (
                isinstance(event, yaml.ScalarEvent) and event.tag is None and _KEY.fullmatch(event.value)
            ):
                raise self.fail("a key must be a plain word", event)
            if event.value in pairs:
                raise self.fail(f"key '{event.value}' stands twice", event)
            pairs[event.value] = self.value(self.next_event(), depth + 1)
        return pairs

    def scalar(self, event: yaml.ScalarEvent) -> Scalar:
        text: str = event.value
        if text in ("", "~", "null", "Null", "NULL"):
            return None
        if text in ("true", "True", "TRUE"):
            return True
        if text in ("false", "False", "FALSE"):
            return False
        is_integer = _INTEGER.fullmatch(text) is not None
        if is_integer or _FLOAT.fullmatch(text):
            if len(text) > MAX_DIGITS + 1:
                raise self.fail(f"a number has more than {MAX_DIGITS} digits", event)
            return int(text) if is_integer else float(text)
        return text

    def tagged(self, tag: str, event: yaml.Event, depth: int) -> Value:
        line = event.start_mark.line + 1 if event.start_mark else 0
        if tag == "!ref":
            if not isinstance(event, yaml.ScalarEvent) or len(event.value) > MAX_EXPRESSION:
                raise self.fail("!ref needs one short expression", event)
            return Ref(event.value, line)
        kind, _, target = tag.removeprefix("!").partition(":")
        if kind in ("new", "name") and _TARGET.fullmatch(target):
            if isinstance(event, yaml.ScalarEvent) and event.value == "":
                return Call(cast("Literal['new', 'name']", kind), target, {}, line)
            if isinstance(event, yaml.MappingStartEvent):
                return Call(cast("Literal['new', 'name']", kind), target, self.mapping(depth), line)
            raise self.fail(f"{target} takes named values only", event)
        if kind == "apply" and target in SEED_CALLS:
            seeds = self.plain(event, depth)
            if isinstance(seeds, list) and len(seeds) == 1 and type(seeds[0]) is int:
                return seeds[0]
        raise self.fail(f"'{tag[:60]}' is not accepted: a model folder is data, no code is run", event)


class References:
    """Follows ``!ref`` values within one parsed file, without copying and with bounded work: every key once.

    Attributes:
        num_followed: keys that were followed so far, for the tests.
    """

    def __init__(self, top: dict[str, Value], file: str) -> None:
        self.file = file
        self.num_followed = 0
        self._top = top
        self._followed: dict[str, Value] = {}

    def follow(self, value: Value, chain: int = 0) -> Value:
        """``value`` itself, or what a :class:`Ref` stands for. Raises ModelFolderError.

        Args:
            value: any value of the file.
            chain: how many references led to it.
        """
        if not isinstance(value, Ref):
            return value
        if chain > MAX_REF_CHAIN:
            raise ModelFolderError(f"{self.file}: line {value.line}: !ref goes in a circle or too far")
        return self._evaluate(value, chain)

    def _evaluate(self, ref: Ref, chain: int) -> Value:
        """Terms joined by operators; ``*`` and ``//`` bind tighter than ``+`` and ``-``; no brackets."""
        text = ref.expression
        first, position = self._term(text, 0, ref, chain)
        if position == len(text):
            return first
        total: int | float = 0
        product = self._number(first, ref)
        sign = 1
        while position < len(text):
            operator = _OPERATOR.match(text, position)
            if operator is None:
                raise self._bad(ref)
            term, position = self._term(text, operator.end(), ref, chain)
            number = self._number(term, ref)
            match operator.group():
                case "*":
                    product = self._bounded(product * number, ref)
                case "//":
                    if number == 0:
                        raise self._bad(ref)
                    product = product // number
                case symbol:
                    total = self._bounded(total + sign * product, ref)
                    sign, product = (1 if symbol == "+" else -1), number
        return self._bounded(total + sign * product, ref)

    def _term(self, text: str, position: int, ref: Ref, chain: int) -> tuple[Value, int]:
        match = _TERM.match(text, position)
        if match is None:
            raise self._bad(ref)
        if (key := match["key"]) is not None:
            if key not in self._top:
                raise ModelFolderError(f"{self.file}: line {ref.line}: !ref to a missing key '{key[:60]}'")
            if key not in self._followed:
                self.num_followed += 1
                self._followed[key] = self.follow(self._top[key], chain + 1)
            return self._followed[key], match.end()
        digits = match["number"]
        if len(digits) > MAX_DIGITS or not (_INTEGER.fullmatch(digits) or _FLOAT.fullmatch(digits)):
            raise self._bad(ref)
        return (int(digits) if digits.isdecimal() else float(digits)), match.end()

    def _number(self, value: Value, ref: Ref) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(ref)
        return value

    def _bounded(self, value: int | float, ref: Ref) -> int | float:
        if not abs(value) <= MAX_MAGNITUDE:  # also catches NaN
            raise ModelFolderError(f"{self.file}: line {ref.line}: !ref gives a number that is too large")
        return value

    def _bad(self, ref: Ref) -> ModelFolderError:
        return ModelFolderError(
            f"{self.file}: line {ref.line}: !ref accepts <key> and numbers joined by + - * //, nothing else"
        )


def parse_hyper_yaml(text: str, file: str) -> dict[str, Value]:
    """Parses ``text`` to plain values, :class:`Ref` and :class:`Call`.

    Args:
        text: the whole file.
        file: its name, for messages.

    Raises:
        ModelFolderError: anything that is not plain data, or more of it than any real file has.
    """
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise ModelFolderError(
            f"{file}: is larger than {MAX_BYTES // 1024} KiB; this is no CosyVoice configuration"
        )
    return _Builder(text, file).document()


def read_hyper_yaml(path: Path) -> dict[str, Value]:
    """Reads and parses one file; see :func:`parse_hyper_yaml`."""
    with path.open("rb") as stream:
        raw = stream.read(MAX_BYTES + 1)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFolderError(
            f"{path.name}: is not UTF-8 text; copy it from the official folder again"
        ) from error
    return parse_hyper_yaml(text, path.name)
