"""English: what a reader says for numbers, dates, money, units and abbreviations.

These rules come before the library (which misreads some of these: ``1990s`` as seconds, ``5 m`` as minutes,
``555-1234`` as a range, ``$1,000.50`` without its cents); :func:`finish` reads the digits that it left.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vivace.text.numbers_en import cardinal, decimal, digits, number, ordinal, plural, year
from vivace.text.tables import words
from vivace.text.units_en import ABBREVIATIONS, CURRENCIES, PER_UNITS, TITLES_BEFORE_NUMBER, UNITS

Rule = tuple[re.Pattern[str], Callable[["re.Match[str]"], str]]

_N = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"{_N}(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
_START = r"(?<![\w.,])"
_MONTHS = words(
    "January February March April May June July August September October November December "
    "Jan Feb Mar Apr Jun Jul Aug Sept Sep Oct Nov Dec"
)
_FULL_MONTHS = _MONTHS[:12]
_MONTH = rf"({'|'.join(_MONTHS)})\b\.?"
_SCALE = "thousand|million|billion|trillion|bn|[kKMB]"
_SCALE_WORDS = {"k": "thousand", "K": "thousand", "M": "million", "B": "billion", "bn": "billion"}
_UNIT = "|".join(re.escape(unit) for unit in sorted([*UNITS, *PER_UNITS], key=len, reverse=True))
_REGNAL = (
    "Henry|Louis|Elizabeth|Charles|George|Edward|James|William|Richard|John|Paul|Pius|Napoleon|Catherine|Ivan|"
    "Alexander|Benedict|Philip|Francis|Frederick|Leo|Peter|Gregory|Innocent|Clement"
)
_ROMAN = {
    "II": 2,
    "III": 3,
    "IV": 4,
    "V": 5,
    "VI": 6,
    "VII": 7,
    "VIII": 8,
    "IX": 9,
    "X": 10,
    "XI": 11,
    "XII": 12,
    "XIII": 13,
    "XIV": 14,
    "XV": 15,
    "XVI": 16,
    "XVII": 17,
    "XVIII": 18,
    "XIX": 19,
    "XX": 20,
}
_ROMAN_PATTERN = "|".join(sorted(_ROMAN, key=len, reverse=True))
_FRACTIONS = {
    "½": "one half",
    "¼": "one quarter",
    "¾": "three quarters",
    "⅓": "one third",
    "⅔": "two thirds",
    "⅛": "one eighth",
    "⅜": "three eighths",
    "⅝": "five eighths",
    "⅞": "seven eighths",
}
_MIXED = {
    "½": "a half",
    "¼": "a quarter",
    "⅓": "a third",
    "⅛": "an eighth",
    **{mark: _FRACTIONS[mark] for mark in "¾⅔⅜⅝⅞"},
}


def _is_one(value: str) -> bool:
    return value in ("1", "1.0")


def _money(match: re.Match[str]) -> str:
    sign, symbol, amount, scale = match.group("sign", "symbol", "amount", "scale")
    one, many, cent, cents = CURRENCIES[symbol]
    whole, _, fraction = amount.partition(".")
    minus = "minus " if sign else ""
    if scale:
        return f"{minus}{number(amount)} {_SCALE_WORDS.get(scale, scale)} {many}"
    whole_words = f"{cardinal(whole)} {one if _is_one(whole) else many}"
    if len(fraction) == 2 and cent:
        if fraction == "00":
            return minus + whole_words
        cent_words = f"{cardinal(fraction)} {cent if fraction == '01' else cents}"
        return minus + (cent_words if whole.strip("0,") == "" else f"{whole_words} and {cent_words}")
    return minus + (f"{number(amount)} {many}" if fraction else whole_words)


def _clock(match: re.Match[str]) -> str:
    hour, minute, second, half = match.group("hour", "minute", "second", "half")
    half_words = f" {half[0].upper()}M" if half else ""
    if minute == "00":
        middle = "" if half else (" o'clock" if 1 <= int(hour) <= 12 else " hundred")
    else:
        middle = " oh " + cardinal(minute) if minute[0] == "0" else " " + cardinal(minute)
    seconds = ""
    if second:
        seconds = f" and {cardinal(second)} second" + ("" if int(second) == 1 else "s")
    return f"{cardinal(hour)}{middle}{seconds}{half_words}"


def _hour(match: re.Match[str]) -> str:
    return f"{cardinal(match.group(1))} {match.group(2)[0].upper()}M"


def _month_name(short: str) -> str:
    return next((name for name in _FULL_MONTHS if name.startswith(short[:3])), short)


def _month_day(match: re.Match[str]) -> str:
    month, day, following_year = match.groups()
    tail = f", {year(following_year)}" if following_year else ""
    return f"{_month_name(month)} {ordinal(day)}{tail}"


def _day_month(match: re.Match[str]) -> str:
    day, month, following_year = match.groups()
    tail = f" {year(following_year)}" if following_year else ""
    return f"{ordinal(day)} of {_month_name(month)}{tail}"


def _day_range(match: re.Match[str]) -> str:
    month, first, last = match.groups()
    return f"{_month_name(month)} {ordinal(first)} to {ordinal(last)}"


def _iso_date(match: re.Match[str]) -> str:
    return f"{_FULL_MONTHS[int(match.group(2)) - 1]} {ordinal(match.group(3))}, {year(match.group(1))}"


def _us_date(match: re.Match[str]) -> str:
    month, day, long_year = match.groups()
    return f"{_FULL_MONTHS[int(month) - 1]} {ordinal(day)}, {year(long_year)}"


def _phone(match: re.Match[str]) -> str:
    groups = re.findall("[0-9]+", match.group())
    plus = "plus " if match.group().startswith("+") else ""
    return plus + ", ".join(digits(group) for group in groups)


def _decade(match: re.Match[str]) -> str:
    return plural(year(match.group(1))) if match.group(1) else plural(cardinal(match.group(2)))


def _fraction_words(top: str, bottom: str) -> str:
    if (top, bottom) in (("24", "7"), ("9", "11"), ("50", "50")):
        return f"{cardinal(top)} {cardinal(bottom)}"
    if int(bottom) < 2 or int(bottom) > 100 or (int(top) >= 20 and int(bottom) >= 20):
        return f"{cardinal(top)} over {cardinal(bottom)}"
    part = {2: "half", 4: "quarter"}.get(int(bottom), ordinal(bottom))
    if int(top) != 1:
        part = "halves" if part == "half" else plural(part)
    return f"{cardinal(top)} {part}"


def _fraction(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()
    words = _fraction_words(top, bottom)
    if not whole:
        return words
    return f"{cardinal(whole)} and {'a ' + words[4:] if words.startswith('one ') else words}"


def _measure(match: re.Match[str]) -> str:
    sign, value, unit = match.group("sign", "value", "unit")
    minus = "minus " if sign else ""
    if unit in PER_UNITS:
        one, many = PER_UNITS[unit]
    else:
        one, many = UNITS[unit]
    return f"{minus}{number(value)} {one if _is_one(value) else many}"


def _range(match: re.Match[str]) -> str:
    low, high = match.groups()
    if len(low) == 4 and len(high) in (2, 4) and _looks_like_year(low):
        return f"{year(low)} to {year(high) if len(high) == 4 else cardinal(high)}"
    return f"{number(low)} to {number(high)}"


def _looks_like_year(text: str) -> bool:
    return len(text) == 4 and text.isdigit() and 1100 <= int(text) <= 2099


def _long_digits(match: re.Match[str]) -> str:
    text = match.group()
    round_number = text.endswith("000") and len(text) <= 15 and not text.startswith("0")
    return cardinal(text) if round_number else digits(text)


def _plain_number(match: re.Match[str]) -> str:
    text = match.group()
    if _looks_like_year(text):
        return year(text)
    whole, _, fraction = text.partition(".")
    if fraction:
        return decimal(whole, fraction)
    if "," not in whole and len(whole) > 1 and whole.startswith("0"):
        return digits(whole)
    return cardinal(whole)


def _code_number(match: re.Match[str]) -> str:
    """Digits beside letters: short ones as a number, long ones digit by digit."""
    text = match.group()
    words = digits(text) if len(text) > 3 or text.startswith("0") else cardinal(text)
    before = match.string[match.start() - 1 : match.start()]
    after = match.string[match.end() : match.end() + 1]
    return (" " if before.isalpha() else "") + words + (" " if after.isalpha() else "")


def _roman(match: re.Match[str]) -> str:
    return f"{match.group(1)} {cardinal(str(_ROMAN[match.group(2)]))}"


def _regnal(match: re.Match[str]) -> str:
    return f"{match.group(1)} the {ordinal(str(_ROMAN[match.group(2)]))}"


def _rule(pattern: str, replace: Callable[[re.Match[str]], str] | str) -> Rule:
    if isinstance(replace, str):
        template = replace
        return re.compile(pattern), lambda match: match.expand(template)
    return re.compile(pattern), replace


_ABBREVIATION = "|".join(re.escape(short) for short in sorted(ABBREVIATIONS, key=len, reverse=True))
_TITLE = "|".join(re.escape(short) for short in sorted(TITLES_BEFORE_NUMBER, key=len, reverse=True))
# The full stop of `p.m.` may end the sentence too: it goes only where the sentence goes on.
_AM_PM = r"[AaPp]\.[Mm]\.(?=\s?[a-z,;])|[AaPp]\.?[Mm]\b"
_HALF = rf"(?P<half>{_AM_PM})"

RULES: tuple[Rule, ...] = (
    # St. is a saint before a name that begins a phrase and a street after a name.
    _rule(r"(?<=[a-z] )St\.(?=\s|$|[,;?!])(?! [A-Z][a-z]+ [A-Z])", "Street"),
    _rule(r"\bSt\. (?=[A-Z])", "Saint "),
    _rule(rf"(?<![\w.])({_ABBREVIATION})(?=[\s,;:)]|$)", lambda match: ABBREVIATIONS[match.group(1)]),
    _rule(rf"(?<!\w)({_TITLE})\s?(?=[0-9])", lambda match: TITLES_BEFORE_NUMBER[match.group(1)] + " "),
    _rule(
        rf"\b(War|Chapter|Part|Volume|Act|Section|Phase|Book|Title|Type|Stage|Level|Bowl) ({_ROMAN_PATTERN})\b",
        _roman,
    ),
    _rule(rf"\b({_REGNAL}) ({_ROMAN_PATTERN})\b", _regnal),
    _rule("[０-９]", lambda match: chr(ord(match.group()) - 0xFEE0)),
    _rule(r"(?:(?<=[\s(\[\"'“=])|^)[-−](?=\.?[0-9])", "minus "),
    _rule(r"\b1(00|000)s(?= of\b)", lambda match: "hundreds" if match.group(1) == "00" else "thousands"),
    # Ranges of something: the second number carries the unit.
    _rule(rf"([$£€¥])({_N}(?:\.[0-9]+)?)\s?[-–]\s?(?:\1)?(?={_N})", r"\2 to \1"),
    _rule(
        rf"(?<![\w.,/-])({_N}(?:\.[0-9]+)?)\s?[-–]\s?(?=(?:{_N})(?:\.[0-9]+)?\s?(?:{_UNIT}|[AaPp]\.?[Mm]\b)(?![\w/²³]))",
        r"\1 to ",
    ),
    _rule(r"(:[0-5][0-9]|[0-9]\s?[AaPp]\.?[Mm]\.?|%|°[CF]?)\s?[-–]\s?(?=[0-9])", r"\1 to "),
    _rule(rf"\b{_MONTH} ([0-9]{{1,2}})\s?[-–]\s?([0-9]{{1,2}})(?![\w:%-]|[.,/][0-9])", _day_range),
    _rule(
        rf"(?P<sign>[-−]?)(?P<symbol>US\$|[$£€¥₹₩])\s?(?P<amount>{_N}(?:\.[0-9]+)?)(?:\s?(?P<scale>{_SCALE})\b)?",
        _money,
    ),
    _rule(rf"{_START}([0-9]{{4}})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])(?![\w-])", _iso_date),
    _rule(
        rf"{_START}(0?[1-9]|1[0-2])/(0?[1-9]|[12][0-9]|3[01])/((?:1[1-9]|20)[0-9]{{2}})(?![\w/])", _us_date
    ),
    _rule(
        rf"\b{_MONTH} (0?[1-9]|[12][0-9]|3[01])(?:st|nd|rd|th)?(?![\w:%]|[.,/][0-9])"
        r"(?:,? ([12][0-9]{3})(?![\w:%]|[.,][0-9]))?",
        _month_day,
    ),
    _rule(
        rf"{_START}(0?[1-9]|[12][0-9]|3[01])(?:st|nd|rd|th)? (?:of )?{_MONTH}(?:,? ([12][0-9]{{3}})\b)?",
        _day_month,
    ),
    _rule(
        rf"{_START}(?P<hour>[01]?[0-9]|2[0-4]):(?P<minute>[0-5][0-9])(?::(?P<second>[0-5][0-9]))?(?![:0-9])(?:\s?{_HALF})?",
        _clock,
    ),
    _rule(rf"{_START}(1[0-2]|[1-9])\s?({_AM_PM})", _hour),
    _rule(
        r"(?<![\w-])(?:\+[0-9]{1,3}[-. ]?)?(?:\([0-9]{2,4}\) ?|[0-9]{3}[-. ])[0-9]{3,4}[-. ][0-9]{4}(?![\w-])",
        _phone,
    ),
    _rule(r"(?<![\w-])1-[0-9]{3}-[0-9]{3}-[0-9]{4}(?![\w-])", _phone),
    _rule(
        r"(?<![\w-])\+[0-9]{1,3}(?:[- ][0-9]{2,5}){2,5}(?![\w-])|(?<![\w-])[0-9]{3}-[0-9]{4}(?![\w-])", _phone
    ),
    _rule(r"(?<!\w)((?:1[0-9]|20)[0-9]0)['’]?s\b|(?<!\w)['’]?([1-9]0)['’]?s\b", _decade),
    _rule(rf"{_START}({_N})(?:st|nd|rd|th)\b", lambda match: ordinal(match.group(1))),
    _rule(r"(?<![\w/.,])(?:([0-9]{1,3}) )?([0-9]{1,3})/([0-9]{1,4})(?![\w/]|[.,][0-9])", _fraction),
    _rule(
        r"([0-9]+)\s?([½¼¾⅓⅔⅛⅜⅝⅞])", lambda match: f"{cardinal(match.group(1))} and {_MIXED[match.group(2)]}"
    ),
    _rule("[½¼¾⅓⅔⅛⅜⅝⅞]", lambda match: _FRACTIONS[match.group()]),
    _rule(r"\b([0-9]{1,2})['′]([0-9]{1,2})(?:\"|″|'')", r"\1 feet \2 inches"),
    _rule(
        rf"(?:(?<![\w.,)])(?P<sign>[-−])|(?<![\w.,]))(?P<value>{_DECIMAL})\s?(?P<unit>{_UNIT})(?![\w/²³])",
        _measure,
    ),
    _rule(r"([0-9)])\s[-−]\s(?=[^-=]{1,40}=)", r"\1 minus "),
    _rule(rf"{_START}({_N}(?:\.[0-9]+)?)\s?[-–—]\s?({_N}(?:\.[0-9]+)?)(?![\w-]|[.,][0-9])", _range),
    _rule(r"([0-9])\s?%", r"\1 percent"),
    _rule(r"([A-Za-z0-9)])²", r"\1 squared"),
    _rule(r"([A-Za-z0-9)])³", r"\1 cubed"),
    _rule(r"([0-9])\s?[x×*]\s?(?=[0-9])", r"\1 times "),
    _rule(r"([0-9)])\s?\^\s?(?=[0-9])", r"\1 to the power of "),
    _rule(r"([0-9)])\s?÷\s?(?=[0-9(])", r"\1 divided by "),
    _rule(r"\+\+", " plus plus"),
    _rule(r"(?<![\w)])\+(?=[0-9])", "plus "),
    _rule(r"(?<=[\w)])\s?\+\s?(?=[\w(])", " plus "),
    _rule(r"(?<=[0-9A-Za-z])\+(?=\W|$)", " plus"),
    _rule(r"(?<=[\w)])\s?=\s?(?=[-\w(])", " equals "),
    _rule(r"\s?&\s?", " and "),
    _rule(r"(?<=\w)\s?@\s?(?=\w)", " at "),
    _rule(r"\s?[≤⩽]\s?", " less than or equal to "),
    _rule(r"\s?[≥⩾]\s?", " greater than or equal to "),
    _rule(r"\s?≠\s?", " not equal to "),
    _rule(r"\s?≈\s?", " about "),
    _rule(r"(?<=[\w)])\s?[<＜]\s?(?=[-\w(])|[<＜]\s?(?=[0-9])", " less than "),
    _rule(r"(?<=[\w)])\s?[>＞]\s?(?=[-\w(])|[>＞]\s?(?=[0-9])", " greater than "),
    _rule(r"[~∼](?=[0-9])", "about "),
    _rule(r"\s?±\s?", " plus or minus "),
    _rule("§\\s?", "section "),
    _rule("[©®™]", ""),
    _rule(r"(?<![\w.,-])[0-9]{7,}(?![\w-]|[.,][0-9])", _long_digits),
    _rule(
        r"(?<![\w.,])[0-9]{16,}(?:\.[0-9]+)?(?![\w]|,[0-9])",
        lambda match: " point ".join(digits(part) for part in match.group().split(".")),
    ),
    _rule(
        rf"{_START}[0-9]{{1,3}}(?:,[0-9]{{3}})+(?:\.[0-9]+)?(?![\w]|[.,][0-9])",
        lambda match: number(match.group()),
    ),
    _rule(r"\b911\b", "nine one one"),
    # Numbers that stand alone. The library sees only single words that still hold digits after this: with a
    # whole sentence it reads `5 in the` as inches and `march 5` as a date.
    _rule(
        rf"(?<![\w.,:/-])(?<![0-9]['’])(?:{_N}(?:\.[0-9]+)?|\.[0-9]+)(?!\w|[.,:/'’-][0-9])",
        _plain_number,
    ),
    # Letters and digits run together: A4, 3D, MP3, H2O.
    _rule(r"(?<=[A-Za-z])[-–](?=[0-9])|(?<=[0-9])[-–](?=[A-Za-z])", " "),
    _rule(r"(?<=[A-Za-z])[0-9]+(?![0-9.,:/])|(?<![0-9.,:/])[0-9]+(?=[A-Za-z])", _code_number),
)

TRIGGER = re.compile(r"[0-9０-９&%+=@#<>$£€¥₹₩~^*×÷±°²³½-¾⅓-⅞≤≥≠≈§©®™＜＞]|[A-Za-z]\.|\b[IVX]{2,}\b| [VX]\b")
"""A clause without a match is read as it stands."""

_LEFTOVER_NUMBER = re.compile(r"(?<![0-9])(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
_SPACES = re.compile(" {2,}")


def prepare(text: str) -> str:
    """Apply the rules, in order."""
    for pattern, replace in RULES:
        text = pattern.sub(replace, text)
    return _SPACES.sub(" ", text)


def finish(text: str) -> str:
    """Read every number that is left, so that no digit stays."""

    def read(match: re.Match[str]) -> str:
        words = _plain_number(match)
        before = text[match.start() - 1 : match.start()]
        after = text[match.end() : match.end() + 1]
        return (" " if before.isalnum() else "") + words + (" " if after.isalnum() else "")

    return _SPACES.sub(" ", _LEFTOVER_NUMBER.sub(read, text))


def speak_dots(text: str) -> str:
    """A protected address or version in words, for models that read no digits or dots.

    ``v2.5.1`` → ``v two point five point one``; ``www.example.com`` → ``w w w dot example dot com``.
    """
    if re.fullmatch(r"[vV]?[0-9.]+", text):
        prefix = "v " if text[0] in "vV" else ""
        return prefix + " point ".join(cardinal(part) for part in text.strip("vV").split("."))
    text = re.sub(r"^https?://", "", text)
    names = {".": " dot ", "@": " at ", "/": " slash ", "-": " dash ", "_": " underscore ", ":": " colon "}
    words = re.sub(r"[._@/:\-]", lambda match: names[match.group()], text)
    words = re.sub(r"\bwww\b", "w w w", words)
    words = re.sub(r"[^A-Za-z0-9 ]+", " ", words)
    return _SPACES.sub(" ", finish(words)).strip()
