"""English: what a reader says for numbers, dates, money, units and abbreviations.

These rules come before the library (which misreads some of these: ``1990s`` as seconds, ``5 m`` as minutes,
``555-1234`` as a range, ``$1,000.50`` without its cents); :func:`finish` reads the digits that it left.
"""

from __future__ import annotations

import re

from vivace.text.amounts_en import AMOUNT_RULES, MONTHS, SIGNS, START, N
from vivace.text.numbers_en import cardinal, decimal, digits, number, ordinal, plural, year
from vivace.text.rules import Rule, apply_rules, rule
from vivace.text.symbols_en import SYMBOL_RULES, SYMBOL_TRIGGER
from vivace.text.tables import words
from vivace.text.units_en import (
    ABBREVIATIONS,
    CURRENCIES,
    CURRENCY_CODES,
    PER_UNITS,
    TITLES_BEFORE_NUMBER,
    UNITS,
)

_DECIMAL = rf"{N}(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
_MONTH = rf"({'|'.join(MONTHS)}|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec)\b\.?"
_SCALE = "thousand|million|billion|trillion|bn|mn|tn|[kKmMbBtT]"
_SCALE_WORDS = {
    "k": "thousand",
    "m": "million",
    "mn": "million",
    "b": "billion",
    "bn": "billion",
    "t": "trillion",
    "tn": "trillion",
}
_MONEY = {**CURRENCIES, **CURRENCY_CODES}
_UNIT = "|".join(re.escape(unit) for unit in sorted([*UNITS, *PER_UNITS], key=len, reverse=True))
_REGNAL = (
    "Henry|Louis|Elizabeth|Charles|George|Edward|James|William|Richard|John|Paul|Pius|Napoleon|Catherine|Ivan|"
    "Alexander|Benedict|Philip|Francis|Frederick|Leo|Peter|Gregory|Innocent|Clement"
)
_ROMAN = {
    numeral: value
    for value, numeral in enumerate(
        words("II III IV V VI VII VIII IX X XI XII XIII XIV XV XVI XVII XVIII XIX XX"), start=2
    )
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
    one, many, cent, cents = _MONEY[symbol]
    whole, _, fraction = amount.partition(".")
    minus = "minus " if sign else ""
    if scale:
        return f"{minus}{number(amount)} {_SCALE_WORDS.get(scale.lower(), scale)} {many}"
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
    return next((name for name in MONTHS if name.startswith(short[:3])), short)


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
    return f"{MONTHS[int(match.group(2)) - 1]} {ordinal(match.group(3))}, {year(match.group(1))}"


def _us_date(match: re.Match[str]) -> str:
    month, day, long_year = match.groups()
    return f"{MONTHS[int(month) - 1]} {ordinal(day)}, {year(long_year)}"


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


def _street(match: re.Match[str]) -> str:
    return f"{match.group(1) or match.group(2)}Street"


def _roman(match: re.Match[str]) -> str:
    return f"{match.group(1)} {cardinal(str(_ROMAN[match.group(2)]))}"


def _regnal(match: re.Match[str]) -> str:
    return f"{match.group(1)} the {ordinal(str(_ROMAN[match.group(2)]))}"


_ABBREVIATION = "|".join(re.escape(short) for short in sorted(ABBREVIATIONS, key=len, reverse=True))
_TITLE = "|".join(re.escape(short) for short in sorted(TITLES_BEFORE_NUMBER, key=len, reverse=True))
# The full stop of `p.m.` may end the sentence too: it goes only where the sentence goes on.
_AM_PM = r"[AaPp]\.[Mm]\.(?=\s?[a-z,;])|[AaPp]\.?[Mm]\b"
_HALF = rf"(?P<half>{_AM_PM})"

RULES: tuple[Rule, ...] = (
    *SYMBOL_RULES,
    *AMOUNT_RULES,
    # St. is a saint before a name that begins a phrase and a street after a name.
    rule(r"\b([A-Z][\w'’]+ )St\.(?=$|[,;?!)]|\s[a-z0-9])|\b([0-9]+ [A-Z][\w'’]+ )St\.", _street),
    rule(r"\bSt\. (?=[A-Z])", "Saint "),
    rule(rf"(?<![\w.])({_ABBREVIATION})(?=[\s,;:)]|$)", lambda match: ABBREVIATIONS[match.group(1)]),
    rule(rf"(?<!\w)({_TITLE})\s?(?=[0-9])", lambda match: TITLES_BEFORE_NUMBER[match.group(1)] + " "),
    rule(
        r"\b(War|[Cc]hapter|[Pp]art|[Vv]olume|Act|[Ss]ection|[Pp]hase|Book|Title|[Tt]ype|[Ss]tage|[Ll]evel|Bowl) "
        rf"({_ROMAN_PATTERN})\b",
        _roman,
    ),
    rule(rf"\b({_REGNAL}) ({_ROMAN_PATTERN})\b", _regnal),
    rule("[０-９]", lambda match: chr(ord(match.group()) - 0xFEE0)),
    rule(r"(?:(?<=[\s(\[\"'“=])|^)[-−](?=\.?[0-9])", "minus "),
    rule(r"\b1(00|000)s(?= of\b)", lambda match: "hundreds" if match.group(1) == "00" else "thousands"),
    # Ranges of something: the second number carries the unit.
    rule(rf"([$£€¥])({N}(?:\.[0-9]+)?)\s?[-–]\s?(?:\1)?(?={N})", r"\2 to \1"),
    rule(
        rf"(?<![\w.,/-])({N}(?:\.[0-9]+)?)\s?[-–]\s?(?=(?:{N})(?:\.[0-9]+)?\s?(?:{_UNIT}|[AaPp]\.?[Mm]\b)(?![\w/²³]))",
        r"\1 to ",
    ),
    rule(r"(:[0-5][0-9]|[0-9]\s?[AaPp]\.?[Mm]\.?|%|°[CF]?)\s?[-–]\s?(?=[0-9])", r"\1 to "),
    rule(rf"\b{_MONTH} ([0-9]{{1,2}})\s?[-–]\s?([0-9]{{1,2}})(?![\w:%-]|[.,/][0-9])", _day_range),
    rule(
        rf"(?P<sign>[-−]?)(?P<symbol>US\$|[{SIGNS}]|\b(?:{'|'.join(CURRENCY_CODES)}))\s?(?P<amount>{N}(?:\.[0-9]+)?)(?:\s?(?P<scale>{_SCALE})\b)?",
        _money,
    ),
    rule(rf"{START}([0-9]{{4}})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])(?![\w-])", _iso_date),
    rule(rf"{START}(0?[1-9]|1[0-2])/(0?[1-9]|[12][0-9]|3[01])/((?:1[1-9]|20)[0-9]{{2}})(?![\w/])", _us_date),
    rule(
        rf"\b{_MONTH} (0?[1-9]|[12][0-9]|3[01])(?:st|nd|rd|th)?(?![\w:%]|[.,/][0-9])"
        r"(?:,? ([12][0-9]{3})(?![\w:%]|[.,][0-9]))?",
        _month_day,
    ),
    rule(
        rf"{START}(0?[1-9]|[12][0-9]|3[01])(?:st|nd|rd|th)? (?:of )?{_MONTH}(?:,? ([12][0-9]{{3}})\b)?",
        _day_month,
    ),
    rule(
        rf"{START}(?P<hour>[01]?[0-9]|2[0-4]):(?P<minute>[0-5][0-9])(?::(?P<second>[0-5][0-9]))?(?![:0-9])(?:\s?{_HALF})?",
        _clock,
    ),
    rule(rf"{START}(1[0-2]|[1-9])\s?({_AM_PM})", _hour),
    rule(
        r"(?<![\w-])(?:\+[0-9]{1,3}[-. ]?)?(?:\([0-9]{2,4}\) ?|[0-9]{3}[-. ])[0-9]{3,4}[-. ][0-9]{4}(?![\w-])",
        _phone,
    ),
    rule(r"(?<![\w-])1-[0-9]{3}-[0-9]{3}-[0-9]{4}(?![\w-])", _phone),
    rule(
        r"(?<![\w-])\+[0-9]{1,3}(?:[- ][0-9]{2,5}){2,5}(?![\w-])|(?<![\w-])[0-9]{3}-[0-9]{4}(?![\w-])", _phone
    ),
    rule(
        r"(?<![\w-])[0-9]+(?:-[0-9]+){2,}(?![\w-])",
        lambda match: ", ".join(digits(group) for group in match.group().split("-")),
    ),
    rule(
        r"(?<!\w)((?:1[0-9]|20)[0-9]0)['’]?s\b|(?:(?<!\w)['’]|(?<=[Tt]he )|(?<=[Hh]is )|(?<=[Hh]er )|(?<=my )|(?<=our )"
        r"|(?<=heir )|(?<=your )|(?<=arly )|(?<=mid )|(?<=mid-)|(?<=late ))([1-9]0)['’]?s\b",
        _decade,
    ),
    rule(rf"{START}({N})(?:st|nd|rd|th)\b", lambda match: ordinal(match.group(1))),
    rule(r"(?<![\w/.,])(?:([0-9]{1,3}) )?([0-9]{1,3})/([0-9]{1,4})(?![\w/]|[.,][0-9])", _fraction),
    rule(
        r"([0-9]+)\s?([½¼¾⅓⅔⅛⅜⅝⅞])", lambda match: f"{cardinal(match.group(1))} and {_MIXED[match.group(2)]}"
    ),
    rule("[½¼¾⅓⅔⅛⅜⅝⅞]", lambda match: _FRACTIONS[match.group()]),
    rule(r"\b([0-9]{1,2})['′]([0-9]{1,2})(?:\"|″|'')", r"\1 feet \2 inches"),
    rule(
        rf"(?:(?<![\w.,)])(?P<sign>[-−])|(?<![\w.,]))(?P<value>{_DECIMAL})\s?(?P<unit>{_UNIT})(?![\w/²³])",
        _measure,
    ),
    rule(r"([0-9)])\s[-−]\s(?=[^-=]{1,40}=)", r"\1 minus "),
    rule(rf"{START}({N}(?:\.[0-9]+)?)\s?[-–—]\s?({N}(?:\.[0-9]+)?)(?![\w-]|[.,][0-9])", _range),
    rule(r"([0-9])\s?%", r"\1 percent"),
    rule(r"([A-Za-z0-9)])²", r"\1 squared"),
    rule(r"([A-Za-z0-9)])³", r"\1 cubed"),
    rule(r"([0-9])\s?[x×*]\s?(?=[0-9])", r"\1 times "),
    rule(r"([0-9)])\s?\^\s?(?=[0-9])", r"\1 to the power of "),
    rule(r"([0-9)])\s?÷\s?(?=[0-9(])", r"\1 divided by "),
    rule(r"\+\+", " plus plus"),
    rule(r"(?<![\w)])\+(?=[0-9])", "plus "),
    rule(r"(?<=[\w)])\s?\+\s?(?=[\w(])", " plus "),
    rule(r"(?<=[0-9A-Za-z])\+(?=\W|$)", " plus"),
    rule(r"(?<=[\w)])\s{0,3}=\s{0,3}(?=[-\w(])", " equals "),
    rule(r"\s?&\s?", " and "),
    rule(r"(?<=\w)\s?@\s?(?=\w)", " at "),
    rule(r"\s?[≤⩽]\s?", " less than or equal to "),
    rule(r"\s?[≥⩾]\s?", " greater than or equal to "),
    rule(r"\s?≠\s?", " not equal to "),
    rule(r"\s?≈\s?", " about "),
    rule(r"(?<=[\w)])\s?[<＜]\s?(?=[-\w(])|[<＜]\s?(?=[0-9])", " less than "),
    rule(r"(?<=[\w)])\s?[>＞]\s?(?=[-\w(])|[>＞]\s?(?=[0-9])", " greater than "),
    rule(r"[~∼](?=[0-9])", "about "),
    rule(r"\s?±\s?", " plus or minus "),
    rule("§\\s?", "section "),
    rule("[©®™]", ""),
    rule(r"(?<![\w.,-])[0-9]{7,}(?![\w-]|[.,][0-9])", _long_digits),
    rule(
        r"(?<![\w.,])[0-9]{16,}(?:\.[0-9]+)?(?![\w]|,[0-9])",
        lambda match: " point ".join(digits(part) for part in match.group().split(".")),
    ),
    rule(
        rf"{START}[0-9]{{1,3}}(?:,[0-9]{{3}})+(?:\.[0-9]+)?(?![\w]|[.,][0-9])",
        lambda match: number(match.group()),
    ),
    rule(r"\b911\b", "nine one one"),
    # Numbers that stand alone. The library sees only single words that still hold digits after this: with a
    # whole sentence it reads `5 in the` as inches and `march 5` as a date.
    rule(
        rf"(?<![\w.,:/-])(?<![0-9]['’])(?:{N}(?:\.[0-9]+)?|\.[0-9]+)(?!\w|[.,:/'’-][0-9])",
        _plain_number,
    ),
    rule(r"(?<=[0-9]),(?=[0-9]{1,2}(?![0-9]))", ", "),
    rule(
        r"(?<![\w.])([0-9]+)\.([0-9]+)(?=[A-Za-z])",
        lambda match: f"{decimal(match.group(1), match.group(2))} ",
    ),
    # Letters and digits run together: A4, 3D, MP3, H2O.
    rule(r"(?<=[A-Za-z])[-–](?=[0-9])|(?<=[0-9])[-–](?=[A-Za-z])", " "),
    rule(r"(?<=[A-Za-z])[0-9]+(?![0-9.,:/])|(?<![0-9.,:/])[0-9]+(?=[A-Za-z])", _code_number),
)

TRIGGER = re.compile(
    r"[0-9０-９&%+=@#<>$£€¥₹₩~^*×÷±°²³½-¾⅓-⅞≤≥≠≈√§₀-₉⁰-⁹©®™＜＞]|[A-Za-z]\.|\b[IVX]{2,}\b| [VX]\b"
    rf"|\bw/|\bvs\b|[a-z]\s?[-–]\s?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)|{SYMBOL_TRIGGER}"
)
"""A clause without a match is read as it stands."""

_LEFTOVER_NUMBER = re.compile(r"(?<![0-9])(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
_SPACES = re.compile(" {2,}")


def prepare(text: str) -> str:
    """Apply the rules, in order."""
    return _SPACES.sub(" ", apply_rules(RULES, text))


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
