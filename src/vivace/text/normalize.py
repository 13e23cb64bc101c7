"""Text as a person types it to text as the model reads it: numbers, dates, units, currency in words.

Written out for English and Chinese; all other languages keep their letters and digits. Special tags,
addresses and versions pass unchanged. Bounded in time, the same result for the same text, and no failure of
the number library reaches the caller.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType

from vivace.config import Limits
from vivace.text import chinese, english, library
from vivace.text.boundaries import clause_end, is_cjk
from vivace.text.chinese import digits as digits_zh
from vivace.text.clean import check_text, clean_text, is_blank, refuse_control_tokens, require_content
from vivace.text.language import READ_NUMBERS, detect_language, language_code
from vivace.text.mixed import number_spans
from vivace.text.numbers_en import digits as digits_en
from vivace.text.protected import split_protected

# The time limit of a text grows with its length; the limit itself is for a text of this size.
_CHARACTERS_PER_LIMIT = 4096
_HANGUL = re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]")
_DIGITS = "0123456789"
_WINDOW = 2000
"""More characters than ``clause_end`` ever looks at."""


def normalize(text: str, language: str | None = None, *, limits: Limits | None = None) -> str:
    """What the model reads for ``text``, in one line.

    Args:
        text: what the user typed; special tags allowed, control tokens not.
        language: code or name of the language; None or ``auto`` guesses.
        limits: ``text_characters`` bounds the length, ``normalize_seconds`` the time of the number library
            (after it, the rules alone read what is left).

    Raises:
        InvalidTextError: ``invalid_type``, ``input_too_long``, ``invalid_utf8``, ``special_token_not_allowed``,
            ``empty_input``, ``unpronounceable_input``.
    """
    limits = limits or Limits()
    raw = check_text(text, limits.text_characters)
    cleaned = clean_text(raw)
    require_content(cleaned, is_blank=is_blank(raw))
    given = language_code(language)
    overall = given or detect_language(cleaned)
    allowed_s = limits.normalize_seconds * (1 + len(cleaned) // _CHARACTERS_PER_LIMIT)
    deadline = time.monotonic() + allowed_s
    joiner = ClauseJoiner()
    parts: list[str] = []
    for clause in _clauses(cleaned):
        spoken_in = clause_language(clause, overall, is_given=given is not None)
        parts.append(joiner.join(clause, spoken_in, use_library=time.monotonic() < deadline))
    result = "".join(parts).strip()
    refuse_control_tokens(result)
    return result


def finish_sentence(text: str) -> str:
    """``text`` with a full stop if it ends in a letter or digit: the model falls at the end and stops cleanly.

    For the last segment of a text, or for a text shorter than one. The reference does the same.
    """
    if not text or not text[-1].isalnum():
        return text
    return text + ("。" if is_cjk(text[-1]) and not _HANGUL.match(text[-1]) else ".")


def clause_language(clause: str, overall: str, *, is_given: bool) -> str:
    """Language of one clause of a text in ``overall``. Its script decides against a given language too."""
    found = detect_language(clause, default=overall)
    if not is_given or found == overall:
        return found
    # What was said of the whole text stands, unless the clause is written in another script.
    return found if found in ("zh", "ja", "ko", "ru") or overall == "zh" else overall


class ClauseJoiner:
    """Normalises clauses one after another and puts the right space between them."""

    def __init__(self) -> None:
        self._last_raw = ""
        self._last_words = ""

    def join(self, clause: str, language: str, *, use_library: bool = True) -> str:
        """Normalised ``clause`` with a space before it if one belongs there; empty if nothing is left.

        Args:
            clause: cleaned text; a line break at its end makes a sentence end.
            language: two-letter code, or ``other``.
            use_library: False after the time limit.
        """
        stripped = clause.strip()
        if not stripped:
            self._last_raw += clause[-1:]
            return ""
        if "\n" in clause[len(clause.rstrip()) :] and stripped[-1].isalnum():
            stripped += "。" if language in ("zh", "ja") else "."
        head, stripped = self._cut_number(clause, stripped, language)
        words = head + normalize_clause(stripped, language, use_library=use_library)
        if not words:
            return ""
        if self._last_words and (clause[0].isspace() or self._last_raw[-1:].isspace()):
            between_cjk = is_cjk(self._last_words[-1]) and is_cjk(words[0]) and language in ("zh", "ja")
            words = words if between_cjk else " " + words
        self._last_raw, self._last_words = clause[-1], words[-1]
        return words if stripped else words.rstrip()

    def _cut_number(self, clause: str, stripped: str, language: str) -> tuple[str, str]:
        """The rest of a run of digits longer than a clause, read digit by digit, and what follows it."""
        size = len(stripped) - len(stripped.lstrip(_DIGITS))
        is_cut = size and clause[0] == stripped[0] and self._last_raw[-1:] in _DIGITS and self._last_raw
        if not is_cut or language not in READ_NUMBERS:
            return "", stripped
        read = f" {digits_en(stripped[:size])} " if language == "en" else digits_zh(stripped[:size])
        return read, stripped[size:].lstrip()


def normalize_clause(clause: str, language: str, *, use_library: bool = True) -> str:
    """Normalise one clause of at most a few hundred characters. Never raises for its content."""
    return "".join(
        _normalize_span(span, spoken_in, use_library) for span, spoken_in in number_spans(clause, language)
    )


def _normalize_span(span: str, language: str, use_library: bool) -> str:
    if language not in READ_NUMBERS:
        return span
    return _cached_clause(span, language) if use_library else _read_clause(span, language, False)


@lru_cache(maxsize=4096)
def _cached_clause(clause: str, language: str) -> str:
    return _read_clause(clause, language, True)


def _read_clause(clause: str, language: str, use_library: bool) -> str:
    parts = [
        part if is_protected else _read_part(part, language, use_library)
        for part, is_protected in split_protected(clause)
    ]
    text = "".join(parts)
    return chinese.join_characters(text) if language == "zh" else text


def _read_part(part: str, language: str, use_library: bool) -> str:
    rules: ModuleType = english if language == "en" else chinese
    core = part.strip()
    if not core or not rules.TRIGGER.search(core):
        return part
    text = rules.prepare(core).strip()
    if use_library and _has_digit(text):
        pieces = re.split("(?= )", text) if language == "en" else _short_pieces(text)
        text = "".join(_read_with_library(piece, language) for piece in pieces)
    before, after = part[: len(part) - len(part.lstrip())], part[len(part.rstrip()) :]
    return f"{before}{rules.finish(text).strip()}{after}"


def _read_with_library(piece: str, language: str) -> str:
    """``piece`` read by the library; word by word if it fails on the whole, and as it is where it still fails."""
    core = piece.strip()
    if not _has_digit(core):
        return piece
    result = library.read_piece(core, language)
    if result is None:
        words = core.split(" ")
        result = " ".join(
            (library.read_piece(word, language) or word) if _has_digit(word) else word for word in words
        )
    before, after = piece[: len(piece) - len(piece.lstrip())], piece[len(piece.rstrip()) :]
    return f"{before}{result}{after}"


def _short_pieces(text: str) -> Iterator[str]:
    """``text`` in pieces that the library takes, cut at spaces where there are any."""
    start = 0
    while len(text) - start > library.LONGEST_PIECE:
        cut = text.rfind(" ", start + 1, start + library.LONGEST_PIECE)
        cut = cut if cut > start else start + library.LONGEST_PIECE
        yield text[start:cut]
        start = cut
    yield text[start:]


def _has_digit(text: str) -> bool:
    return any(character in _DIGITS for character in text)


def _clauses(text: str) -> Iterator[str]:
    start, is_first = 0, True
    while start < len(text):
        # The scan needs no more than a clause and its look-ahead, so a long text costs linear time.
        window = text[start : start + _WINDOW]
        end = clause_end(window, is_first=is_first, is_final=len(text) - start <= _WINDOW)
        end = len(window) if end is None else end
        yield text[start : start + end]
        start, is_first = start + end, False
