"""Text that comes in pieces, cut anywhere, to normalised clauses as soon as they are safe to speak."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from vivace.config import Limits
from vivace.errors import InvalidTextError
from vivace.text.boundaries import LONGEST_CLAUSE, clause_end
from vivace.text.clean import (
    check_text,
    clean_text,
    is_blank,
    is_speakable,
    refuse_control_tokens,
    require_content,
    squeeze,
)
from vivace.text.language import detect_language, language_code
from vivace.text.normalize import ClauseJoiner, clause_language

_LANGUAGE_SAMPLE_CHARACTERS = 1000


class ClauseStream:
    """Collects pieces of text and gives out normalised clauses.

    The clauses depend on the text alone, not on how it was cut: ``"".join`` of all clauses is the same for
    every cutting. A piece may end inside a tag, a number, a word or a surrogate pair. The first clause ends
    early (at a comma after a few words), later ones at sentence ends or after more words.

    Not thread-safe; one per request.
    """

    def __init__(self, language: str | None = None, *, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._given = language_code(language)
        self._pending = ""
        self._unspoken = ""
        self._sample = ""
        self._is_blank = True
        self._characters = 0
        self._spent_s = 0.0
        self._is_first = True
        self._is_closed = False
        self._half_character = ""
        self._joiner = ClauseJoiner()

    def push(self, piece: str) -> list[str]:
        """Take the next piece; return the clauses that are now complete.

        Raises:
            InvalidTextError: as ``normalize`` does; ``empty_input`` and ``unpronounceable_input`` only in
                :meth:`flush`.
        """
        assert not self._is_closed, "push after flush"
        if not isinstance(piece, str):
            raise InvalidTextError("a piece of text must be a string", code="invalid_type", param="text")
        self._characters += len(piece)
        if self._characters > self._limits.text_characters:
            raise InvalidTextError(
                f"the text is longer than {self._limits.text_characters} characters; send it in parts",
                code="input_too_long",
                param="text",
            )
        piece = self._join_surrogates(piece)
        check_text(piece, self._limits.text_characters)
        self._pending += piece
        return list(self._take(is_final=False))

    def flush(self) -> list[str]:
        """The text is complete; return what is left of it.

        Raises:
            InvalidTextError: also if nothing of the whole text could be spoken.
        """
        assert not self._is_closed, "flush after flush"
        self._is_closed = True
        if self._half_character:
            check_text(self._half_character, 1)
        clauses = list(self._take(is_final=True))
        if self._is_first:
            require_content(self._unspoken, is_blank=self._is_blank)
        return clauses

    def _join_surrogates(self, piece: str) -> str:
        """Put the halves of a character together; a first half at the end waits for the next piece."""
        piece, self._half_character = self._half_character + piece, ""
        if piece and "\ud800" <= piece[-1] <= "\udbff":
            piece, self._half_character = piece[:-1], piece[-1]
        if any("\ud800" <= character <= "\udfff" for character in piece):
            piece = piece.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return piece

    def _take(self, *, is_final: bool) -> Iterator[str]:
        while self._pending:
            end = clause_end(self._pending, is_first=self._is_first, is_final=is_final)
            if end is None:
                return
            clause, self._pending = self._pending[:end], self._pending[end:]
            words = self._read(clause)
            if words:
                yield words

    def _read(self, raw: str) -> str:
        """Normalise one clause; what cannot be spoken alone (``!!!``) joins the next clause."""
        self._is_blank = self._is_blank and is_blank(raw)
        cleaned = clean_text(raw)
        if not is_speakable(cleaned):
            self._unspoken = _joined(self._unspoken, squeeze(raw, cleaned))[:LONGEST_CLAUSE]
            return ""
        clause = _joined(self._unspoken, squeeze(raw, cleaned))
        self._unspoken = ""
        if len(self._sample) < _LANGUAGE_SAMPLE_CHARACTERS:
            self._sample += clause
        overall = self._given or detect_language(self._sample)
        spoken_in = clause_language(clause, overall, is_given=self._given is not None)
        started = time.monotonic()
        allowed_s = self._limits.normalize_seconds * (1 + self._characters // 4096)
        words = self._joiner.join(clause, spoken_in, use_library=self._spent_s < allowed_s)
        self._spent_s += time.monotonic() - started
        refuse_control_tokens(words)
        self._is_first = self._is_first and not words
        return words


def _joined(before: str, clause: str) -> str:
    """With one space or line break between them, not two."""
    return before + (clause.lstrip() if before[-1:].isspace() else clause)


def stream_clauses(
    pieces: Iterable[str], language: str | None = None, *, limits: Limits | None = None
) -> Iterator[str]:
    """Clauses of a text that ``pieces`` yields; lazily, one piece ahead at most.

    Raises:
        InvalidTextError: as ``ClauseStream``.
    """
    stream = ClauseStream(language, limits=limits)
    for piece in pieces:
        yield from stream.push(piece)
    yield from stream.flush()
