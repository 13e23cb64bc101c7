"""Long text to segments of bounded length: every word once, in order."""

from __future__ import annotations

import re
from collections.abc import Callable

from vivace.text.boundaries import clause_end
from vivace.text.protected import PROTECTED
from vivace.text.special_tokens import PAIRED_TAGS, TAG_PATTERN

CountTokens = Callable[[str], int]

# A last segment shorter than this is lengthened: the model speaks single words badly.
_SHORT_TOKENS = 12
_STOP = re.compile(r"[.!?。！？；…]+[\"'”’」』）】》)\]]*\s*$")
_PAUSE = re.compile(r"(?<=[，、：；])|(?<=[,;:])(?=\s)|(?<=\s[-–—])(?=\s)|(?<=——)")
_SPACE = re.compile(r"(?<=\S)(?=\s)")
_SCAN_CHARACTERS = 2000
# Far more than text has; a segment that holds mostly marks without tokens must end too.
_CHARACTERS_PER_TOKEN = 50


def split_text(text: str, count_tokens: CountTokens, max_tokens: int) -> list[str]:
    """Segments of ``text`` with at most ``max_tokens`` tokens each.

    Cuts are made at sentence ends first, then at clause punctuation, then at spaces, then between characters;
    never inside a special tag, and inside ``<strong>…</strong>`` only if the pair alone is too long (each part
    is then a pair of its own). Sentences share a segment as long as they fit. Apart from white space
    at the cuts, the segments joined are ``text``. A text of punctuation only is one segment (or several, if long).

    Args:
        text: normalised text.
        count_tokens: number of model tokens of a string.
        max_tokens: at least 1; a single character or tag is never cut, whatever it counts.

    Returns:
        Segments without white space at their ends; none for blank text.
    """
    if max_tokens < 1:
        raise ValueError("max_tokens must be at least 1")
    if not text.strip():
        return []
    pieces: list[str] = []
    for sentence in _sentences(text):
        pieces.extend(_bounded(sentence, count_tokens, max_tokens))
    return [segment.strip() for segment in _merge(pieces, count_tokens, max_tokens) if segment.strip()]


def ends_sentence(text: str) -> bool:
    """Whether a sentence is over at the end of ``text``, closing quotation marks and spaces behind it or not."""
    return _STOP.search(text[-40:]) is not None


def _sentences(text: str) -> list[str]:
    """Whole sentences: clauses joined up to a sentence end."""
    sentences: list[str] = []
    current = ""
    start, is_first = 0, False
    while start < len(text):
        window = text[start : start + _SCAN_CHARACTERS]
        end = clause_end(window, is_first=is_first, is_final=len(text) - start <= _SCAN_CHARACTERS)
        end = len(window) if end is None else end
        clause = text[start : start + end]
        current += clause
        start += end
        if ends_sentence(current) or "\n" in clause[len(clause.rstrip()) :]:
            sentences.append(current)
            current = ""
    if current:
        sentences.append(current)
    return sentences


def _bounded(piece: str, count_tokens: CountTokens, max_tokens: int) -> list[str]:
    """``piece`` cut until every part fits."""
    if count_tokens(piece.strip()) <= max_tokens:
        return [piece]
    for cut_at in (_PAUSE, _SPACE):
        parts = _cut(piece, cut_at)
        if len(parts) > 1:
            grouped = _group(parts, count_tokens, max_tokens)
            return [
                bounded
                for part in grouped
                for bounded in _bounded_part(part, piece, count_tokens, max_tokens)
            ]
    return _cut_hard(piece, count_tokens, max_tokens)


def _bounded_part(part: str, whole: str, count_tokens: CountTokens, max_tokens: int) -> list[str]:
    return (
        _cut_hard(part, count_tokens, max_tokens)
        if part == whole
        else _bounded(part, count_tokens, max_tokens)
    )


def _atoms(text: str) -> list[tuple[int, int]]:
    """Spans of ``text`` that are not to be cut: tags, addresses, and whole tag pairs."""
    spans: list[tuple[int, int]] = []
    position = 0
    for match in PROTECTED.finditer(text):
        if match.start() < position:
            continue
        end = match.end()
        closing = PAIRED_TAGS.get(match.group())
        if closing is not None:
            found = text.find(closing, end)
            end = found + len(closing) if found >= 0 else end
        spans.append((match.start(), end))
        position = end
    return spans


def _cut(text: str, pattern: re.Pattern[str]) -> list[str]:
    """``text`` at every place of ``pattern`` that lies in no atom."""
    spans = _atoms(text)
    parts: list[str] = []
    start = index = 0
    for match in pattern.finditer(text):
        at = match.start()
        while index < len(spans) and spans[index][1] <= at:
            index += 1
        inside = index < len(spans) and spans[index][0] < at
        if inside or at <= start or at >= len(text):
            continue
        parts.append(text[start:at])
        start = at
    parts.append(text[start:])
    return parts


def _group(parts: list[str], count_tokens: CountTokens, max_tokens: int) -> list[str]:
    """Neighbouring parts joined as long as they fit, in pieces of about equal length.

    Counts are added up, which may be off by a token per joint; the caller cuts what came out too long.
    """
    sizes = [count_tokens(part) for part in parts]
    total = sum(sizes)
    wanted = min(max_tokens, -(-total // -(-total // max_tokens)) + _SHORT_TOKENS)
    groups: list[list[str]] = []
    filled = 0
    for part, size in zip(parts, sizes, strict=True):
        if groups and filled + size <= wanted:
            groups[-1].append(part)
            filled += size
        else:
            groups.append([part])
            filled = size
    return ["".join(group) for group in groups]


def _cut_hard(text: str, count_tokens: CountTokens, max_tokens: int) -> list[str]:
    """Cut between characters; tag pairs are opened and closed anew in every part."""
    for opening, closing in PAIRED_TAGS.items():
        inner = text.strip()
        if (
            inner.startswith(opening)
            and inner.endswith(closing)
            and inner.find(closing) == len(inner) - len(closing)
        ):
            room = max(1, max_tokens - count_tokens(opening) - count_tokens(closing))
            content = inner[len(opening) : -len(closing)]
            return [
                f"{opening}{part.strip()}{closing}"
                for part in _bounded(content, count_tokens, room)
                if part.strip()
            ]
    units = _units(text)
    parts: list[str] = []
    start = 0
    while start < len(units):
        size = _largest_fit(units, start, count_tokens, max_tokens)
        parts.append("".join(units[start : start + size]))
        start += size
    return [bounded for part in parts for bounded in _reopen(part, len(parts), count_tokens, max_tokens)]


def _reopen(part: str, num_parts: int, count_tokens: CountTokens, max_tokens: int) -> list[str]:
    """A pair that was one unit but is too long is cut by itself."""
    too_long = num_parts > 1 and count_tokens(part.strip()) > max_tokens
    is_pair = part.strip().startswith(tuple(PAIRED_TAGS))
    return _cut_hard(part.strip(), count_tokens, max_tokens) if too_long and is_pair else [part]


def _units(text: str) -> list[str]:
    """Characters, with their combining marks and joiners, and whole tags or tag pairs."""
    units: list[str] = []
    spans = {start: end for start, end in _atoms(text) if TAG_PATTERN.match(text, start)}
    position = 0
    while position < len(text):
        end = spans.get(position, position + 1)
        while end < len(text) and _continues(text[end]):
            end += 1
        units.append(text[position:end])
        position = end
    return units


def _continues(character: str) -> bool:
    return (
        "\u0300" <= character <= "\u036f" or character in "\u200c\u200d" or "\ufe00" <= character <= "\ufe0f"
    )


def _largest_fit(units: list[str], start: int, count_tokens: CountTokens, max_tokens: int) -> int:
    """How many units from ``start`` fit, at least one. Doubles, then halves: few calls of the counter."""
    high = max_tokens
    while (
        start + high < len(units) and count_tokens("".join(units[start : start + high]).strip()) <= max_tokens
    ):
        high *= 2
    low, high = 1, min(high, len(units) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens("".join(units[start : start + middle]).strip()) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return low


def _merge(pieces: list[str], count_tokens: CountTokens, max_tokens: int) -> list[str]:
    """Neighbouring pieces joined as long as they fit; a short last segment takes a piece from the one before."""
    groups: list[list[str]] = []
    longest = max(_SCAN_CHARACTERS, _CHARACTERS_PER_TOKEN * max_tokens)
    for piece in _with_joined_silence(pieces, count_tokens):
        whole = "".join([*groups[-1], piece]).strip() if groups else ""
        if groups and len(whole) <= longest and count_tokens(whole) <= max_tokens:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    if len(groups) > 1 and len(groups[-2]) > 1 and count_tokens("".join(groups[-1]).strip()) < _SHORT_TOKENS:
        longer = [groups[-2][-1], *groups[-1]]
        if count_tokens("".join(longer).strip()) <= max_tokens:
            groups[-2:] = [groups[-2][:-1], longer]
    return ["".join(group) for group in groups]


def _with_joined_silence(pieces: list[str], count_tokens: CountTokens) -> list[str]:
    """Neighbouring pieces without a single token become one: each would be counted anew with all those before it."""
    joined: list[str] = []
    is_silent = False
    for piece in pieces:
        was_silent, is_silent = is_silent, not count_tokens(piece.strip())
        if was_silent and is_silent and len(joined[-1]) < _SCAN_CHARACTERS:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined
