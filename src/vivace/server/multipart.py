"""``multipart/form-data``, read from memory within tight bounds. Nothing is written to disk."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vivace.server.errors import ServerError

MAX_PARTS = 16
MAX_PART_HEADER_BYTES = 4 * 1024
MAX_FIELD_BYTES = 16 * 1024

_BOUNDARY = re.compile(r"""(?:^|;)\s*boundary=(?:"([^"]{1,70})"|([^\s";,]{1,70}))\s*(?:;|$)""", re.IGNORECASE)
_NAME = re.compile(rb"""(?:^|;)\s*name=(?:"([^"]{1,100})"|([^\s";,]{1,100}))""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Form:
    """The parts of a form by name; each name at most once. What a client calls its files is not kept."""

    parts: dict[str, bytes]

    def text(self, *names: str) -> str | None:
        """The first of these fields that is there, as text.

        Raises:
            ServerError: ``invalid_utf8``, ``input_too_long``.
        """
        for name in names:
            if name in self.parts:
                data = self.parts[name]
                if len(data) > MAX_FIELD_BYTES:
                    raise ServerError(f"{name} is too long.", code="input_too_long", param=name)
                try:
                    return data.decode("utf-8")
                except UnicodeDecodeError:
                    raise ServerError(
                        f"{name} is not valid UTF-8.", code="invalid_utf8", param=name
                    ) from None
        return None

    def data(self, *names: str) -> bytes | None:
        """The first of these fields that is there."""
        return next((self.parts[name] for name in names if name in self.parts), None)


def parse_form(body: bytes, content_type: str) -> Form:
    """Splits a body into its parts.

    Raises:
        ServerError: ``invalid_form``.
    """
    match = _BOUNDARY.search(content_type.partition(";")[2])
    if match is None:
        raise _invalid("Its Content-Type names no boundary")
    delimiter = b"--" + (match.group(1) or match.group(2)).encode("latin-1")
    # What a client may write in front of the first part is of no use to anybody.
    if not body.startswith(delimiter):
        raise _invalid("It does not begin with its boundary")
    pieces = (b"\r\n" + body).split(b"\r\n" + delimiter, MAX_PARTS + 2)[1:]
    if len(pieces) > MAX_PARTS + 1:
        raise _invalid(f"It has more than {MAX_PARTS} parts")
    if not pieces[-1].startswith(b"--"):
        raise _invalid("Its end is missing")
    parts: dict[str, bytes] = {}
    for piece in pieces[:-1]:
        name, data = _part(piece)
        if name in parts:
            raise _invalid("It has two parts of one name")
        parts[name] = data
    return Form(parts)


def _part(piece: bytes) -> tuple[str, bytes]:
    if not piece.startswith(b"\r\n"):
        raise _invalid("A boundary is malformed")
    end = piece.find(b"\r\n\r\n", 0, MAX_PART_HEADER_BYTES)
    if end < 0:
        raise _invalid("A part has no header, or one that is too long")
    name = None
    for line in piece[2:end].split(b"\r\n"):
        key, _, value = line.partition(b":")
        key = key.strip().lower()
        if key == b"content-disposition":
            kind, _, rest = value.partition(b";")
            match = _NAME.search(rest)
            if kind.strip().lower() == b"form-data" and match is not None:
                name = match.group(1) or match.group(2)
        elif key == b"content-transfer-encoding" and value.strip().lower() not in (
            b"binary",
            b"8bit",
            b"7bit",
        ):
            raise _invalid("A part has a transfer encoding")
        elif key == b"content-type" and b"multipart/" in value.lower():
            raise _invalid("A part is a form itself")
    if name is None:
        raise _invalid("A part has no name")
    return name.decode("latin-1"), piece[end + 4 :]


def _invalid(what: str) -> ServerError:
    return ServerError(f"The form cannot be read. {what}.", code="invalid_form")
