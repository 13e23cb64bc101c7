"""Integers and digit strings in English words."""

from __future__ import annotations

from vivace.text.tables import words

_SMALL = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
_SCALES = ("", " thousand", " million", " billion", " trillion")
_IRREGULAR_ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
    "twelve": "twelfth",
}  # fmt: skip
LARGEST_DIGITS = 15
"""Longer numbers are read digit by digit: nobody follows words for them."""


def _below_hundred(value: int) -> str:
    if value < 20:
        return _SMALL[value]
    tens, ones = divmod(value, 10)
    return _TENS[tens] + (f" {_SMALL[ones]}" if ones else "")


def _below_thousand(value: int, joiner: str) -> str:
    hundreds, rest = divmod(value, 100)
    if not hundreds:
        return _below_hundred(rest)
    return f"{_SMALL[hundreds]} hundred" + (f"{joiner}{_below_hundred(rest)}" if rest else "")


def digits(text: str) -> str:
    """``"2024"`` → ``two zero two four``; anything but ASCII digits is left out."""
    return " ".join(_SMALL[int(digit)] for digit in text if digit in "0123456789")


def cardinal(text: str) -> str:
    """``"1,234"`` → ``one thousand two hundred and thirty four``; digit by digit if very long."""
    text = text.replace(",", "")
    if len(text) > LARGEST_DIGITS:
        return digits(text)
    value = int(text)
    if value < 1000:
        return _below_thousand(value, " and ")
    groups: list[int] = []
    while value:
        value, group = divmod(value, 1000)
        groups.append(group)
    words = [
        _below_thousand(group, " and " if index == 0 else " ") + _SCALES[index]
        for index, group in reversed(list(enumerate(groups)))
        if group
    ]
    if len(groups) > 1 and 0 < groups[0] < 100:
        words.insert(-1, "and")
    return " ".join(words)


def decimal(whole: str, fraction: str) -> str:
    """``("3", "14")`` → ``three point one four``."""
    return f"{cardinal(whole or '0')} point {digits(fraction)}"


def number(text: str) -> str:
    """An integer or decimal, with or without thousands commas."""
    whole, _, fraction = text.partition(".")
    return decimal(whole, fraction) if fraction else cardinal(whole)


def ordinal(text: str) -> str:
    """``"21"`` → ``twenty first``."""
    words = cardinal(text).split(" ")
    last = words[-1]
    if last in _IRREGULAR_ORDINALS:
        words[-1] = _IRREGULAR_ORDINALS[last]
    elif last.endswith("y"):
        words[-1] = last[:-1] + "ieth"
    else:
        words[-1] = last + "th"
    return " ".join(words)


def year(text: str) -> str:
    """``"1998"`` → ``nineteen ninety eight``, ``"2005"`` → ``two thousand and five``."""
    value = int(text)
    century, rest = divmod(value, 100)
    if value % 1000 < 10 and value >= 1000:
        return cardinal(text)
    if rest == 0:
        return f"{_below_hundred(century)} hundred"
    return f"{_below_hundred(century)} {'oh ' if rest < 10 else ''}{_below_hundred(rest)}"


def plural(word: str) -> str:
    """Plural of the last number word: ``nineties``, ``hundreds``."""
    return word[:-1] + "ies" if word.endswith("y") else word + ("es" if word.endswith("x") else "s")
