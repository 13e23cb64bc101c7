"""English: amounts, dates and numbers in forms that chats bring. These rules come before those of ``english``."""

from __future__ import annotations

import re
import unicodedata

from vivace.text.numbers_en import cardinal, digits, number, ordinal, year
from vivace.text.rules import Rule, rule
from vivace.text.tables import words
from vivace.text.units_en import CURRENCIES, CURRENCY_CODES

N = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
"""An integer, with or without thousands commas."""
START = r"(?<![\w.,])"
"""No number or word goes before."""
_PLAIN = r"(?<![\w.,$£€¥₹₩])"
SIGNS = "".join(sign for sign in CURRENCIES if len(sign) == 1)
"""Of currencies, for use in a character class."""
_CODES = "|".join(CURRENCY_CODES)
_SCALE = "thousand|million|billion|trillion|[kKmMbB]"
_SCALES = {"k": "thousand", "m": "million", "b": "billion"}
_PERIODS = (
    "second|sec|minute|min|hour|hr|day|week|wk|month|mo|year|yr|night|user|seat|person|unit|kg|GB|token|item"
)
_PERIOD_NAMES = {"sec": "second", "min": "minute", "hr": "hour", "wk": "week", "mo": "month", "yr": "year"}
_DAYS = dict(
    zip(
        words("Mon Tue Tues Wed Thu Thur Thurs Fri Sat Sun"),
        words("Monday Tuesday Tuesday Wednesday Thursday Thursday Thursday Friday Saturday Sunday"),
        strict=True,
    )
)
_DAY = "|".join(_DAYS)
MONTHS = words("January February March April May June July August September October November December")
_HALVED = {"480": "four eighty", "720": "seven twenty", "1080": "ten eighty", "1440": "fourteen forty"}
_MACHINES = (
    "[Vv]ersion|[Rr]elease|Python|Ubuntu|CUDA|Node|Java|PHP|iOS|iPadOS|macOS|Android|Django|PyTorch|Kubernetes|Debian|"
    "Fedora|Linux|Windows|Rust|Ruby|Postgres|PostgreSQL|MySQL|Go"
)


def _scaled(match: re.Match[str]) -> str:
    return f"{number(match.group(1))} {_SCALES[match.group(2).lower()]}"


def _per(match: re.Match[str]) -> str:
    period = match.group(2)
    return f"{match.group(1)} per {_PERIOD_NAMES.get(period, period)}"


def _dated(day: str, month: str, in_year: str) -> str:
    return f"{ordinal(day)} of {MONTHS[int(month) - 1]} {year(in_year)}"


def _short_date(match: re.Match[str]) -> str:
    month, day, short = match.groups()
    century = "20" if int(short) < 50 else "19"
    return f"{MONTHS[int(month) - 1]} {ordinal(day)}, {year(century + short)}"


def _minor(text: str) -> str:
    return f"oh {digits(text[1:])}" if text[0] == "0" and len(text) > 1 else cardinal(text)


def _day_range(match: re.Match[str]) -> str:
    return f"{_DAYS[match.group(1)]} to {_DAYS[match.group(2)]}"


def _superscript(match: re.Match[str]) -> str:
    exponent = "".join(str(unicodedata.digit(digit)) for digit in match.group(2))
    return f" to the power of {'minus ' if match.group(1) else ''}{cardinal(exponent)}"


def _out_of(match: re.Match[str]) -> str:
    return f"{number(match.group(1))} out of {cardinal(match.group(2))}"


def _without_spaces(match: re.Match[str]) -> str:
    return match.group().replace(" ", "")


def _hours(match: re.Match[str]) -> str:
    first, unit, second = match.group(1), match.group(2), match.group(3)
    names = ("hour", "minute") if unit == "h" else ("minute", "second")
    return " ".join(
        f"{cardinal(value)} {name}{'' if int(value) == 1 else 's'}"
        for value, name in zip((first, second), names, strict=True)
    )


AMOUNT_RULES: tuple[Rule, ...] = (
    rule(rf"[~∼]\s?(?=[{SIGNS}]?[0-9])", "about "),
    rule("[₀-₉]", lambda match: str(ord(match.group()) - ord("₀"))),
    rule("(?<=[A-Za-z0-9)])(⁻?)([⁰¹⁴-⁹]+|(?<=⁻)[²³]+)", _superscript),
    # Dates and times.
    rule(r"\b([0-9]{4}-[0-9]{2}-[0-9]{2})T([0-9]{2}:[0-9]{2})(?::00)?(?:\.[0-9]+)?Z(?!\w)", r"\1 at \2 UTC"),
    rule(r"\b([0-9]{4}-[0-9]{2}-[0-9]{2})T(?=[0-9]{2}:[0-9]{2})", r"\1 at "),
    rule(
        rf"{START}(0?[1-9]|[12][0-9]|3[01])\.(0?[1-9]|1[0-2])\.((?:19|20)[0-9]{{2}})(?![\w]|\.[0-9])",
        lambda match: _dated(*match.groups()),
    ),
    rule(rf"{START}(0?[1-9]|1[0-2])/(0?[1-9]|[12][0-9]|3[01])/([0-9]{{2}})(?![\w/]|\.[0-9])", _short_date),
    rule(r"\bFY\s?((?:19|20)[0-9]{2})\b", lambda match: f"FY {year(match.group(1))}"),
    rule(rf"\b({_DAY})\s?[-–]\s?({_DAY})\b", _day_range),
    rule(rf"{START}([0-9]{{1,2}})\s?(h)\s?([0-9]{{1,2}})\s?m(?:ins?)?\b", _hours),
    rule(rf"{START}([0-9]{{1,2}})\s?(m)\s?([0-9]{{1,2}})\s?s(?:ecs?)?\b", _hours),
    rule(r"\b([0-9]{1,2})\s?ft\.?\s?([0-9]{1,2})\s?in\b\.?", r"\1 feet \2 inches"),
    rule(
        r"\b([0-9]+(?:st|nd|rd|th))\s?[-–]\s?([0-9]+(?:st|nd|rd|th))\b",
        lambda match: f"{ordinal(match.group(1)[:-2])} to {ordinal(match.group(2)[:-2])}",
    ),
    rule(r"\b(Q[1-4])\s?[-–]\s?(Q[1-4])\b", r"\1 to \2"),
    rule(rf"{START}([0-9]{{1,3}}\.[0-9]{{1,2}})/(5|10|20|100)(?![\w/]|[.,][0-9])", _out_of),
    rule(
        r"\b([Ss]tep|[Pp]art|[Pp]age|[Ss]lide|[Ll]evel|[Rr]ound) ([0-9]+)/([0-9]+)(?![\w/])", r"\1 \2 of \3"
    ),
    rule(rf"{START}([4-9](?:\.[0-9])?|10)/(10)(?![\w/]|[.,][0-9])", _out_of),
    rule(rf"{START}([1-9][0-9]|100)/(100)(?![\w/]|[.,][0-9])", _out_of),
    # Money: the sign behind the amount, codes, decimal commas.
    rule(rf"([{SIGNS}])[-−](?=[0-9])", r"-\1"),
    rule(rf"([{SIGNS}])({N}(?:\.[0-9]+)?(?:bn|[kKmMbB]))\s?[-–]\s?(?=\1)", r"\1\2 to "),
    rule(rf"{START}({N})\s?[-–]\s?(?={N}(?:bn|[kKMB])\b)", r"\1 to "),
    rule(
        rf"{START}([0-9]{{1,3}}(?:\.[0-9]{{3}})+)(,[0-9]{{2}})?(?=\s?€)",
        lambda match: match.group(1).replace(".", "") + (match.group(2) or "").replace(",", "."),
    ),
    rule(r"(?<=[0-9])['’](?=[0-9]{3}(?![0-9\w'’\"]))", ""),
    rule(rf"{START}([0-9]+),([0-9]{{1,2}})(?=\s?(?:%|[kcm]?m\b|[km]?g\b|[kM]W|°|[cm]?l\b))", r"\1.\2"),
    rule(rf"{START}([0-9]+),([0-9]{{2}})\s?([{SIGNS}])(?![\w{SIGNS}])", r"\3\1.\2"),
    rule(rf"{START}({N}(?:\.[0-9]+)?(?:\s?(?:{_SCALE}))?)\s?([{SIGNS}])(?![\w{SIGNS}])", r"\2\1"),
    rule(rf"{START}({N}(?:\.[0-9]+)?(?:\s?(?:{_SCALE})\b)?)\s?({_CODES})\b", r"\2 \1"),
    rule(rf"([{SIGNS}]\s?[0-9][0-9.,]*(?:[kKmMbB]|bn)?)\s?/\s?({_PERIODS})\b", _per),
    rule(rf"(?<![/\w])([0-9]+\s?[a-z]+)/({_PERIODS})\b", _per),
    # Large numbers in short: `10k steps`, `1.2M`, `3m people`, but `4K screen` and `5 m`.
    rule(
        rf"{_PLAIN}(?![48]K)({N}(?:\.[0-9]+)?)([kKMB])(?=\s(?:[a-z-]+\s)?(?:people|[a-z]{{3,}}s)\b)", _scaled
    ),
    rule(rf"{_PLAIN}([0-9]+\.[0-9]+)([kKMB])(?![\w/²³])", _scaled),
    rule(
        rf"{_PLAIN}({N}(?:\.[0-9]+)?)\s?(m)(?=\s(?:[a-z-]+\s)?(?:people|users|customers|subscribers|followers|downloads|views|"
        r"visitors|residents|inhabitants|jobs|homes|households|children|adults|copies|votes|tokens|parameters)\b)",
        _scaled,
    ),
    rule(rf"(?<![0-9] ){START}[0-9]{{1,3}}(?: [0-9]{{3}}){{2,}}(?!\s?[0-9]|[.,-][0-9])", _without_spaces),
    rule(rf"(?<![0-9] ){START}[0-9]{{1,3}} 000(?!\s?[0-9]|[.,-][0-9])", _without_spaces),
    rule(
        rf"{START}({N}(?:\.[0-9]+)?)\s?[x×](?=\s(?:as|the|more|less|fewer|faster|slower|bigger|smaller|larger|longer|shorter|"
        r"better|worse|cheaper|higher|lower|stronger|quicker)\b)",
        r"\1 times",
    ),
    # Numbers that are names: read in groups, or digit by digit.
    rule(
        rf"\b({_MACHINES}) ([0-9]{{1,3}})\.([0-9]{{1,3}})(?![\w]|\.[0-9])",
        lambda match: f"{match.group(1)} {cardinal(match.group(2))} point {_minor(match.group(3))}",
    ),
    rule(
        r"\b([RG]TX|RX) ([1-9][0-9])([1-9][0-9])\b",
        lambda match: f"{match.group(1)} {cardinal(match.group(2))} {cardinal(match.group(3))}",
    ),
    rule(r"(?<=[A-Za-z])/([0-9])\.([0-9])(?![\w.])", r" \1 point \2"),
    rule(r"\b(480|720|1080|1440)([pi])\b", lambda match: f"{_HALVED[match.group(1)]} {match.group(2)}"),
    rule(
        r"\b((?:[Zz][Ii][Pp]|PIN|OTP|ID|[Cc]ode|[Pp]ostcode|[Ee]xtension|[Ee]xt\.)(?: code)?(?: is)?:?) ([0-9]{3,8})\b"
        r"(?![.,:/-]?[0-9])",
        lambda match: f"{match.group(1)} {digits(match.group(2))}",
    ),
    rule(r"^([0-9]{1,2})\)\s", r"\1. "),
)
