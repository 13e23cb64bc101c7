"""What the embedded model's English front end can read of a text. The rest is left out, and named.

It knows Latin letters, digits, single Greek letters as names (``π``) and ARPAbet tags. A model that reads other scripts
takes none of this.
"""

from __future__ import annotations

import re
import unicodedata
from string import ascii_letters

from vivace.errors import InvalidTextError
from vivace.text.language import GREEK_ALONE
from vivace.text.special_tokens import PHONEME_TAGS, TAG_PATTERN
from vivace.text.tables import words

LONGEST_WORD = 100
"""Letters in a row that may still be a word; the longest ones that dictionaries list have some 50."""
_LONGEST_NAMED = 60
_MOST_NAMED = 50

# Latin letters that are no plain letter with an accent.
_LETTERS = {
    "ß": "ss", "ẞ": "SS", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L",
    "đ": "d", "Đ": "D", "ð": "th", "Ð": "Th", "þ": "th", "Þ": "Th", "ı": "i", "ħ": "h", "Ħ": "H", "µ": "μ",
}  # fmt: skip
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξοπρστυφχψως",
        words(
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau "
            "upsilon phi chi psi omega sigma"
        ),
        strict=True,
    )
)
_LONG_WORD = re.compile(rf"[A-Za-z]{{{LONGEST_WORD + 1},}}")
_EMPTY_QUOTES = re.compile(r"“\s*”|‘\s*’|\"\s*\"|\(\s*\)|\[\s*\]|「\s*」|『\s*』|《\s*》|«\s*»")
_SPACE_BEFORE_MARK = re.compile(r"\s+(?=[,.;:!?，。；：！？、])")
_DOUBLED_MARK = re.compile(r"[,;:](?=[,.;:!?])")
_SPACES = re.compile(r"\s{2,}")

UNREADABLE_ADVICE = (
    "the embedded model reads English only and cannot read this text; write English words "
    f"of at most {LONGEST_WORD} letters, or open a CosyVoice checkpoint for Chinese and other languages"
)


def plain_letters(text: str) -> str:
    """Typewriter apostrophes, Latin letters without accents and marks, Greek letters as names; other scripts stay."""
    text = text.replace("’", "'").replace("‘", "'").replace("ʼ", "'")
    if text.isascii():
        return text
    text = "".join(character if character.isascii() else _plain(character) for character in text)
    return GREEK_ALONE.sub(_greek_name, text)


def _plain(character: str) -> str:
    if character in _LETTERS:
        return _LETTERS[character]
    if unicodedata.category(character) == "Mn":
        return ""
    decomposed = unicodedata.normalize("NFKD", character)
    letters = "".join(part for part in decomposed if part.isascii() and part.isalnum())
    return letters or character


def _greek_name(match: re.Match[str]) -> str:
    name = _GREEK[match.group().lower()]
    before = match.string[match.start() - 1 : match.start()]
    after = match.string[match.end() : match.end() + 1]
    return (" " if before.isalnum() else "") + name + (" " if after.isalnum() else "")


class ReadableText:
    """Leaves out what cannot be read, for the pieces of one text in their order.

    Attributes:
        skipped: what was left out: spans of other scripts, and what is too long to be a word. At most 50,
            of at most 60 characters; then ``…`` alone ends the list.
    """

    def __init__(self) -> None:
        self.skipped: list[str] = []
        self._is_in_long_word = False

    def keep(self, piece: str) -> str:
        """``piece`` without what cannot be read; empty if no word is left."""
        kept, skipped, _, _ = self._divide(piece)
        for span in skipped:
            self._note(span)
        return kept

    def keep_most(self, text: str) -> str:
        """The same of a whole text, most of which must be readable.

        Raises:
            InvalidTextError: ``unpronounceable_input``: what is left would be no more than scraps of it.
        """
        kept, skipped, num_read, num_skipped = self._divide(text)
        if not kept or num_skipped > num_read:
            raise unreadable()
        for span in skipped:
            self._note(span)
        return kept

    def _note(self, span: str) -> None:
        if len(self.skipped) < _MOST_NAMED:
            self.skipped.append(span if len(span) <= _LONGEST_NAMED else span[: _LONGEST_NAMED - 1] + "…")
        elif self.skipped[-1] != "…":
            self.skipped.append("…")

    def _divide(self, text: str) -> tuple[str, list[str], int, int]:
        """What is kept, the spans left out, and the letters and digits of both."""
        goes_on = self._is_in_long_word
        spans = sorted(_long_words(text, self._is_in_long_word) + _other_scripts(text))
        if text:
            self._is_in_long_word = bool(spans) and spans[-1][1] == len(text) and text[-1] in ascii_letters
        kept, at = "", 0
        for start, end in spans:
            kept += text[at:start]
            at = end
        kept += text[at:]
        num_read = _num_spoken(kept)
        skipped = [text[start:end] for start, end in spans]
        if not num_read:
            kept = ""
        elif skipped:
            kept = _tidy(kept, " " + text if goes_on else text)
        return kept, skipped, num_read, sum(_num_letters(span) for span in skipped)


def unreadable() -> InvalidTextError:
    """The error for a text of which this front end can read nothing, or only scraps."""
    return InvalidTextError(UNREADABLE_ADVICE, code="unpronounceable_input", param="text")


def _long_words(text: str, is_in_long_word: bool) -> list[tuple[int, int]]:
    """Runs of letters that are no words, among them the end of one that the piece before began."""
    spans = [match.span() for match in _LONG_WORD.finditer(text)]
    size = len(text) - len(text.lstrip(ascii_letters)) if is_in_long_word else 0
    return [(0, size), *spans] if size and (not spans or spans[0][0]) else spans


def _other_scripts(text: str) -> list[tuple[int, int]]:
    """Spans of letters and digits that nothing maps to Latin ones; marks and spaces between them included."""
    if text.isascii():
        return []
    alone = {match.start() for match in GREEK_ALONE.finditer(text)}
    spans: list[tuple[int, int]] = []
    is_open = False
    for index, character in enumerate(text):
        if character.isascii():
            is_open = is_open and not character.isalnum()
        elif is_open and unicodedata.category(character)[0] == "M":
            spans[-1] = spans[-1][0], index + 1
        elif character.isalnum():
            if index in alone or character in _LETTERS or _plain(character)[:1].isascii():
                is_open = False
                continue
            spans.append((spans.pop()[0] if is_open else index, index + 1))
            is_open = True
    return spans


def _num_letters(text: str) -> int:
    return sum(character.isalnum() for character in text)


def _num_spoken(text: str) -> int:
    """Letters and digits, those of a phoneme's tag included; other tags make no sound in this model."""
    tags = TAG_PATTERN.findall(text)
    return _num_letters(TAG_PATTERN.sub("", text)) + sum(tag in PHONEME_TAGS for tag in tags)


def _tidy(kept: str, before: str) -> str:
    """No empty quotes, doubled marks or spaces where a word was taken out; at the ends as ``before``."""
    kept = _EMPTY_QUOTES.sub("", kept)
    kept = _DOUBLED_MARK.sub("", _SPACE_BEFORE_MARK.sub("", kept))
    kept = _SPACES.sub(" ", kept)
    kept = kept if before[:1].isspace() else kept.lstrip()
    return kept if before[-1:].isspace() else kept.rstrip()
