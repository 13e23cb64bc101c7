"""Clauses with Chinese and Latin words in them: which language each number is read in."""

from __future__ import annotations

import re

from vivace.text.chinese import MEASURE_WORDS
from vivace.text.language import CJK, detect_language, is_english_phrase

_MARKS = "\u3000-\u303f\uff00-\uff65"
_NUMBER = r"[0-9]+(?:[.,:][0-9]+)*%?"
_LETTER = re.compile(f"[{CJK}]")
# With the numbers written against it; behind a space only those before a measure word.
_CJK_RUN = re.compile(
    rf"(?:(?<![A-Za-z0-9.,:$€£¥])(?:{_NUMBER}|{_NUMBER}\s(?=[{MEASURE_WORDS}])))?"
    rf"[{CJK}](?:[0-9.,:%\s{_MARKS}]*[{CJK}])*(?:{_NUMBER}(?![A-Za-z]))?"
)
_LATIN_RUN = re.compile(rf"[A-Za-z][^{CJK}{_MARKS}]*")
_AFTER_LETTERS = re.compile(r"[^A-Za-z]*$")


def number_spans(clause: str, language: str) -> list[tuple[str, str]]:
    """``clause`` as ``(span, language)``, in order, by the words around its numbers; joined they are ``clause``.

    In a Chinese clause an English phrase keeps its numbers in English (``他说 I have 12 pears``), but a name does not
    (``iPhone 12``). In any other clause Chinese words take the numbers that touch them (``12个``).

    Args:
        language: of most of the clause.
    """
    if clause.isascii() or not re.search("[0-9]", clause) or not _LETTER.search(clause):
        return [(clause, language)]
    runs = _english_in_chinese(clause) if language == "zh" else _cjk_in_other(clause, language)
    spans: list[tuple[str, str]] = []
    at = 0
    for start, end, found in runs:
        spans += [(clause[at:start], language), (clause[start:end], found)]
        at = end
    spans.append((clause[at:], language))
    return [span for span in spans if span[0]]


def _english_in_chinese(clause: str) -> list[tuple[int, int, str]]:
    runs = []
    for match in _LATIN_RUN.finditer(clause):
        if not is_english_phrase(match.group()):
            continue
        tail = _AFTER_LETTERS.search(match.group())
        after = clause[match.end() : match.end() + 1]
        # The number at its end may belong to what follows.
        end = match.end() - len(tail.group()) if tail and _LETTER.match(after) else match.end()
        runs.append((match.start(), end, "en"))
    return runs


def _cjk_in_other(clause: str, language: str) -> list[tuple[int, int, str]]:
    if language in ("ja", "ko"):
        return []
    return [(*match.span(), detect_language(match.group())) for match in _CJK_RUN.finditer(clause)]
