"""Word error rate for English that does not care how numbers and a few words are spelled."""

from __future__ import annotations

import re
from typing import Any

_SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_CONTRACTED: list[tuple[str, Any]] = [
    (r"\b(can|won)'t\b", lambda found: {"can": "can not", "won": "will not"}[found[1]]),
    (r"n't\b", " not"),
    (r"'ve\b", " have"),
    (r"'re\b", " are"),
    (r"'ll\b", " will"),
    (r"\bi'm\b", "i am"),
    (r"\b(it|that|what|there|here)'s\b", r"\1 is"),
]
_SPELLINGS = {
    "mr": "mister",
    "mrs": "missus",
    "dr": "doctor",
    "ok": "okay",
    "kg": "kilograms",
    "meters": "metres",
    "meter": "metre",
    "harbor": "harbour",
    "color": "colour",
    "favorite": "favourite",
    "theater": "theatre",
    "practised": "practiced",
    "gray": "grey",
    "cannot": "can not",
    "grandma": "grandmother",
    "catherine": "katherine",
    "mum": "mom",
    "percent": "per cent",
    "a.m": "am",
    "p.m": "pm",
}


def cardinal(number: int) -> str:
    """A number in words, without "and"."""
    for size, name in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = f" {cardinal(number % size)}" if number % size else ""
            return f"{cardinal(number // size)} {name}{rest}"
    if number < 20:
        return _SMALL[number]
    return _TENS[number // 10] + (f" {_SMALL[number % 10]}" if number % 10 else "")


def ordinal(number: int) -> str:
    """The place in a row, in words."""
    *head, last = cardinal(number).split()
    if last in _ORDINALS:
        last = _ORDINALS[last]
    elif last.endswith("y"):
        last = last[:-1] + "ieth"
    else:
        last += "h" if last.endswith("t") else "th"
    return " ".join([*head, last])


def year(number: int) -> str:
    """A number of four digits as a year is read."""
    head, tail = divmod(number, 100)
    if 2000 <= number < 2010 or not tail:
        return cardinal(number) if head % 10 == 0 else f"{cardinal(head)} hundred"
    return f"{cardinal(head)} {'oh ' if tail < 10 else ''}{cardinal(tail)}"


def _spoken(token: str) -> str:
    """One token that may hold digits, in words."""
    if found := re.fullmatch(r"(\d{1,2}):(\d\d)", token):
        hour, minute = int(found[1]), int(found[2])
        middle = "oh " if 0 < minute < 10 else ""
        return cardinal(hour) + (f" {middle}{cardinal(minute)}" if minute else "")
    if found := re.fullmatch(r"(\d+)(st|nd|rd|th)", token):
        return ordinal(int(found[1]))
    if re.fullmatch(r"\d{4}", token) and (1100 <= int(token) < 2100):
        return year(int(token))
    if re.fullmatch(r"[\d,]+", token) and token.strip(","):
        return cardinal(int(token.replace(",", "")))
    if found := re.fullmatch(r"(\d+)([a-z]+)", token):
        return f"{cardinal(int(found[1]))} {_SPELLINGS.get(found[2], found[2])}"
    return _SPELLINGS.get(token, token)


def normalise(text: str) -> list[str]:
    """The words of a text as they are compared."""
    text = text.lower().replace("’", "'").replace("-", " ").replace("%", " percent ")
    for pattern, replacement in _CONTRACTED:
        text = re.sub(pattern, replacement, text)
    text = re.sub(r"[$]\s?([\d,]+)", r"\1 dollars", text)
    text = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", text)
    text = re.sub(
        r"\b(january|february|march|april|may|june|july|august|september|october|november|december) "
        r"(\d{1,2})(?!\d|:|st|nd|rd|th)",
        lambda found: f"{found[1]} {ordinal(int(found[2]))}",
        text,
    )
    tokens = re.findall(r"\d+:\d\d|\d[\d,]*\d(?:st|nd|rd|th)?|\d+[a-z]*|[a-z']+", text)
    words = " ".join(_spoken(token.strip("'")) for token in tokens).split()
    return [
        word
        for place, word in enumerate(words)
        if not (word == "and" and place and words[place - 1] in ("hundred", "thousand", "million"))
    ]


def errors(wanted: list[str], heard: list[str]) -> int:
    """The fewest substitutions, deletions and insertions; a compound written apart costs nothing."""
    width = len(heard) + 1
    rows = [list(range(width))]
    for place, word in enumerate(wanted, 1):
        row = [place]
        for at in range(1, width):
            best = min(rows[-1][at] + 1, row[-1] + 1, rows[-1][at - 1] + (word != heard[at - 1]))
            if at > 1 and heard[at - 2] + heard[at - 1] == word:
                best = min(best, rows[-1][at - 2])
            if place > 1 and wanted[place - 2] + word == heard[at - 1]:
                best = min(best, rows[-2][at - 1])
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def count_errors(text: str, heard: str) -> tuple[int, int]:
    """How many of the words of ``text`` were heard wrongly, and how many words it has."""
    wanted = normalise(text)
    fewest = errors(wanted, normalise(heard))
    if re.search(r"\d:\d\d", text):  # times are often written down without their colon
        timed = re.sub(r"\b(\d{1,2})([0-5]\d)\b", r"\1:\2", heard)
        fewest = min(fewest, errors(wanted, normalise(timed)))
    return fewest, len(wanted)
