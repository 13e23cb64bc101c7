"""Where a clause ends. Decided from the text up to a bounded look-ahead, so that text that is still coming in
is cut at the same places as text that is there at once.
"""

from __future__ import annotations

import re

from vivace.text.clean import LINE_BREAKS, MARKUP
from vivace.text.special_tokens import LONGEST_TAG, PAIRED_TAGS, TAG_PATTERN
from vivace.text.tables import words
from vivace.text.units_en import TITLES_BEFORE_NUMBER

LONGEST_CLAUSE = 200
"""Characters after which a clause is cut at a space (or anywhere, if there is none)."""
_LONGEST_MARKUP = 320
_LONGEST_PAIR = 400

_WIDE_STOPS = "。！？；"
_WIDE_PAUSES = "，：…"
_STOPS = ".!?"
_PAUSES = ",;:"
_MARKS = frozenset(_WIDE_STOPS + _WIDE_PAUSES + _STOPS + _PAUSES)
_CLOSERS = frozenset("”’」』）】》〉)]}»")
_CJK = re.compile("[\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")
# A pause ends a clause only if enough was said: little before the first clause (early audio), more later.
_FIRST_PAUSE_WIDTH = 20.0
_PAUSE_WIDTH = 80.0
_WIDTH_OF_CJK = 2.5

# Short forms that stand before a name: the next word is capitalised and no new sentence.
_BEFORE_NAMES = frozenset(
    words(
        "dr mr mrs ms prof gen col capt lt sgt rev hon gov sen rep st mt ft vs cf e.g i.e viz mme mlle m hr fr "
        "ph.d u.s u.k d.c"
    )
)
_BEFORE_NUMBERS = frozenset(
    short.rstrip(".").lower() for short in TITLES_BEFORE_NUMBER if short.endswith(".")
)
# Short forms inside a sentence: a full stop ends it only if a capital follows.
_INSIDE = frozenset(
    words(
        "etc al jan feb mar apr jun jul aug sept sep oct nov dec inc ltd corp co jr sr ave blvd rd approx dept est "
        "a.m p.m bzw ca usw nr str z.b т.е т.д т.п г др ул"
    )
)


def is_cjk(character: str) -> bool:
    """Whether ``character`` is written without spaces around it (Chinese, Japanese; Hangul counts as wide too)."""
    return bool(_CJK.match(character))


def clause_end(text: str, *, is_first: bool, is_final: bool) -> int | None:
    """Where the first clause of ``text`` ends (exclusive), or None if only more text can tell.

    Once a number is returned, the same number is returned for every longer text. With ``is_final`` nothing
    more comes, and a number is always returned. Spaces after the clause belong to the next one, as all does behind
    the line break that ends a clause: whoever pauses behind either is not waited for. Numbers, abbreviations, tags,
    addresses and tag pairs are never cut.

    Args:
        text: what has come in since the last clause's end.
        is_first: the clause is the first of its text, and may end at an earlier pause.
        is_final: the text is complete.
    """
    lead = _after_spaces(text, 0)
    if lead == len(text):
        return lead if is_final else None
    if not _has_break(text[:lead]):
        return _line_end(text, is_first, is_final)
    end = _line_end(text[lead:], is_first, is_final)
    return None if end is None else lead + end


def _line_end(text: str, is_first: bool, is_final: bool) -> int | None:
    """``clause_end`` of a text that begins in a line, not with a break in front of one."""
    position, last_space, size = 0, 0, len(text)
    while position < size:
        if position >= LONGEST_CLAUSE:
            return _forced_end(text, position, last_space, is_final)
        character = text[position]
        if character in "<[":
            after = _after_tag(text, position, is_final)
            if after is None:
                return None
            position = after
        elif character in LINE_BREAKS:
            return _after_break(text, position, is_final)
        elif character in _MARKS:
            after = _after_marks(text, position)
            if after == size and not is_final:
                return None
            ends = _ends_clause(text, position, after, is_first, is_final)
            if ends is None:
                return None
            if ends:
                return after
            position = after
        else:
            if character.isspace():
                last_space = position
            position += 1
    return size if is_final else None


def _forced_end(text: str, position: int, last_space: int, is_final: bool) -> int | None:
    if last_space > 0:
        return last_space
    # No space: cut before a base character, not before its combining marks.
    while position < len(text) and position < LONGEST_CLAUSE + 50 and not text[position].isalnum():
        position += 1
    return None if position == len(text) and not is_final else position


def _after_break(text: str, position: int, is_final: bool) -> int | None:
    """End of one line break; None: it may be half of one."""
    if text[position] != "\r":
        return position + 1
    if position + 1 == len(text):
        return position + 1 if is_final else None
    return position + 2 if text[position + 1] == "\n" else position + 1


def _has_break(text: str) -> bool:
    return any(character in LINE_BREAKS for character in text)


def _after_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _after_marks(text: str, position: int) -> int:
    """End of a run of marks and the quotes or brackets that close after them."""
    start, limit = position, min(len(text), LONGEST_CLAUSE + 50)
    while position < limit and (text[position] in _MARKS or text[position] in _CLOSERS):
        position += 1
    # A straight quote closes if it is the second one of the clause.
    if position < limit and text[position] == '"' and text[:position].count('"') % 2 == 1:
        position += 1
        while position < limit and text[position] in _CLOSERS:
            position += 1
    return max(position, start + 1)


def _after_tag(text: str, position: int, is_final: bool) -> int | None:
    """End of the tag, element or tag pair that begins here; the next position if none does; None: more text needed."""
    match = TAG_PATTERN.match(text, position)
    if match:
        closing = PAIRED_TAGS.get(match.group())
        if closing is None:
            return match.end()
        found = text.find(closing, match.end(), match.end() + _LONGEST_PAIR)
        if found >= 0:
            return found + len(closing)
        undecided = len(text) < match.end() + _LONGEST_PAIR and not is_final
        return None if undecided else match.end()
    if text[position] == "<":
        element = MARKUP.match(text, position, position + _LONGEST_MARKUP)
        if element:
            return element.end()
        # Only the start of an element of a known shape is worth waiting for.
        rest = text[position + 1 : position + _LONGEST_MARKUP]
        begins = not rest or rest[0].isalpha() or rest[0] in "/!?|"
        if begins and ">" not in rest and len(rest) < _LONGEST_MARKUP - 1 and not is_final:
            return None
        return position + 1
    rest = text[position : position + LONGEST_TAG]
    if len(rest) < LONGEST_TAG and "]" not in rest and not is_final:
        return None
    return position + 1


def _ends_clause(text: str, start: int, end: int, is_first: bool, is_final: bool) -> bool | None:
    """Whether the marks ``text[start:end]`` end a clause."""
    marks = text[start:end]
    following = text[end : end + 1]
    if not following:
        return True
    if any(mark in _WIDE_STOPS for mark in marks):
        return True
    if any(mark in _WIDE_PAUSES for mark in marks):
        return not following.isdigit() and _is_wide_enough(text, end, is_first)
    if not following.isspace():
        # Full stops of Chinese text written with ASCII marks; inside numbers and addresses nothing ends.
        return marks[0] in _STOPS and is_cjk(following) and not following.isdigit()
    if following in LINE_BREAKS:
        return False  # it ends the clause itself
    is_stop = any(mark in _STOPS for mark in marks)
    if is_stop and (sure := _stop_ends(text, start, marks, "")) is not None:
        return sure
    next_at = _after_spaces(text, end)
    if _has_break(text[end:next_at]):
        return False
    if next_at == len(text):
        return True if is_final else None
    following = text[next_at]
    if is_stop:
        return _stop_ends(text, start, marks, following)
    return not following.isdigit() and _is_wide_enough(text, end, is_first)


def _stop_ends(text: str, at: int, marks: str, following: str) -> bool | None:
    """Whether ``marks`` with a stop at ``at`` end a sentence. None: what follows decides, and is not known yet ("")."""
    if marks[0] == "." and not marks.startswith(".."):
        return _full_stop_ends(text, at, following)
    if not (marks[-1] in _CLOSERS or marks[-1] == '"'):
        return True
    # `"What?" he said.` is one clause.
    return not following.islower() if following else None


def _full_stop_ends(text: str, at: int, following: str) -> bool | None:
    """As ``_stop_ends``, of a single full stop."""
    begin = max(text.rfind(space, 0, at) for space in " \t\u00a0\u3000") + 1
    word = text[begin:at].lstrip("\"'“‘([{«")
    lowered = word.lower()
    if lowered in _BEFORE_NAMES:
        return False
    if lowered in _BEFORE_NUMBERS:
        return not following.isdigit() if following else None
    if lowered in _INSIDE:
        return following.isupper() or is_cjk(following) if following else None
    if len(word) == 1 and word.isupper() and word != "I":
        return not following.isupper() if following else None
    # `U.S. economy` goes on; `1. Buy milk` is a list.
    if "." in word and all(len(part) == 1 and part.isalpha() for part in word.split(".")):
        return False
    return not (word.isdigit() and text[:at].strip() == word)


def _is_wide_enough(text: str, end: int, is_first: bool) -> bool:
    width = sum(_WIDTH_OF_CJK if is_cjk(character) else 1.0 for character in text[:end])
    return width >= (_FIRST_PAUSE_WIDTH if is_first else _PAUSE_WIDTH)
