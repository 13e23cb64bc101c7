"""Chinese: what the library leaves or misreads, before and after it."""

from __future__ import annotations

import re

from vivace.text.rules import Rule, apply_rules, rule

_DIGITS = dict(zip("0123456789", "零一二三四五六七八九", strict=True))
_UNITS = {
    "mmHg": "毫米汞柱",
    "mmol/L": "毫摩尔每升",
    "mmol/l": "毫摩尔每升",
    "mol/L": "摩尔每升",
    "mmol": "毫摩尔",
    "mol": "摩尔",
    "mg/dL": "毫克每分升",
    "mg/L": "毫克每升",
    "g/L": "克每升",
    "mg/kg": "毫克每千克",
    "μg": "微克",
    "µg": "微克",
    "mg": "毫克",
    "kg/m²": "千克每平方米",
    "ml": "毫升",
    "mL": "毫升",
    "L": "升",
    "km/h": "公里每小时",
    "m/s": "米每秒",
    "m²": "平方米",
    "m³": "立方米",
    "km²": "平方公里",
    "cm²": "平方厘米",
    "cm³": "立方厘米",
    "kWh": "千瓦时",
    "kW": "千瓦",
    "kPa": "千帕",
    "Hz": "赫兹",
    "kHz": "千赫兹",
    "MHz": "兆赫兹",
    "GHz": "吉赫兹",
    "dB": "分贝",
}
_UNIT = "|".join(re.escape(unit) for unit in sorted(_UNITS, key=len, reverse=True))
_CURRENCY = {"￥": "元", "¥": "元", "$": "美元", "€": "欧元", "£": "英镑"}
# What makes a long number a quantity (read as a whole) and not a code.
MEASURE_WORDS = "元块万亿人个件米公吨斤股美欧日平千克毫厘次年天小分秒名位张本台辆部条只家户"
_MATHS = {
    "＜": "小于",
    "<": "小于",
    "＞": "大于",
    ">": "大于",
    "≤": "小于等于",
    "≥": "大于等于",
    "≠": "不等于",
    "≈": "约等于",
    "＝": "等于",
    "=": "等于",
    "×": "乘",
    "÷": "除以",
    "±": "正负",
    "＋": "加",
    "+": "加",
}


def digits(text: str) -> str:
    """``"2024"`` → ``二零二四``."""
    return "".join(_DIGITS.get(character, "") for character in text)


def cardinal(text: str) -> str:
    """``"120"`` → ``一百二十``; for numbers below 1000."""
    value = int(text)
    hundreds, tens, ones = value // 100, value // 10 % 10, value % 10
    words = f"{_DIGITS[str(hundreds)]}百" if hundreds else ""
    if tens:
        words += ("" if tens == 1 and not hundreds else _DIGITS[str(tens)]) + "十"
    elif hundreds and ones:
        words += "零"
    return words + (_DIGITS[str(ones)] if ones or not value else "")


def _scaled(match: re.Match[str]) -> str:
    sign, amount, scale = match.groups()
    zeros = {"k": 3, "m": 6, "b": 9}[scale[0].lower()]
    whole, _, fraction = amount.partition(".")
    digits = (whole + fraction[:zeros].ljust(zeros, "0")).lstrip("0") or "0"
    for name, size in (("亿", 8), ("万", 4)):
        if len(digits) > size and digits.endswith("0" * size):
            return f"{sign}{digits[:-size]}{name}"
    return sign + digits


def _long_digits(match: re.Match[str]) -> str:
    text = match.group()
    # Mobile numbers: the library reads them as 幺三八….
    if re.fullmatch("1[3-9][0-9]{9}", text):
        return text
    if text.endswith("000") and len(text) <= 12:
        return text
    return digits(text)


RULES: tuple[Rule, ...] = (
    # A hyphen between letters and digits is no minus: GPT-4, Qwen2.5-7B.
    rule(r"(?<=[A-Za-z])[-–](?=[0-9])", ""),
    rule(r"([A-Za-z][0-9]+(?:\.[0-9]+)?)-(?=[0-9])", r"\1，"),
    rule(r"([0-9])\s?[-–~～]\s?(?=[0-9]+\s?[点时岁])", r"\1到"),
    rule(r"([￥¥$€£]\s?)([0-9]+(?:\.[0-9]+)?)(k|K|m|M|bn|b|B)(?![A-Za-z])", _scaled),
    rule(r"(?<![￥¥$€£0-9.,])([0-9][0-9,]*(?:\.[0-9]+)?)\s?([$€£])(?![0-9])", r"\2\1"),
    rule(r"([元块镑])/(?=[月年天日周人次个小])", r"\1每"),
    rule(r"√\s?(?=[A-Za-z0-9(])", "根号"),
    rule(r"(?<=[A-Za-z0-9)])\^([23])(?![0-9])", lambda match: "平方" if match.group(1) == "2" else "立方"),
    rule(r"(?<=[A-Za-z0-9)])\^([0-9]+)", r"的\1次方"),
    rule(r"([0-9%])\s?(?:->|=>|→|⇒)\s?(?=[0-9])", r"\1到"),
    rule(r"\s?(?:->|=>|→|⇒)\s?(?=\S)", "，"),
    rule("[０-９]", lambda match: chr(ord(match.group()) - 0xFEE0)),
    rule(r"(?<=[0-9])％", "%"),
    rule(r"(?<=[0-9])%\s?[-–~～](?=[0-9])", "%到"),
    rule(
        r"([0-9]{2,3})/([0-9]{2,3})(?=\s?mmHg)",
        lambda match: f"{cardinal(match.group(1))}比{cardinal(match.group(2))}",
    ),
    rule(r"([一二三四五六七八九十百零])\s?mmHg", r"\1毫米汞柱"),
    rule(rf"(?<=[0-9])\s?({_UNIT})(?![A-Za-z/²³])", lambda match: _UNITS[match.group(1)]),
    rule(r"[￥¥]\s?([0-9][0-9,.]*)\s?元", r"\1元"),
    rule(
        r"([￥¥$€£])\s?([0-9][0-9,]*(?:\.[0-9]+)?)([千百]?[万亿]?)",
        lambda match: match.group(2) + match.group(3) + _CURRENCY[match.group(1)],
    ),
    rule(
        r"(?<=[0-9])\.([0-9]*?)0+(元|美元|欧元|英镑)",
        lambda match: f".{match.group(1)}{match.group(2)}" if match.group(1) else match.group(2),
    ),
    rule(rf"(?<![\w.,:/-])[0-9]{{7,}}(?![0-9.,:/-]*[0-9]|[{MEASURE_WORDS}])", _long_digits),
    rule(
        rf"(?<=[\u4e00-\u9fff])(?<![{MEASURE_WORDS}第])[0-9]{{7,}}(?![0-9.,:/-]*[0-9]|[{MEASURE_WORDS}])",
        _long_digits,
    ),
    rule("[0-9]{13,}", lambda match: digits(match.group())),
    rule(r"[²]", "平方"),
    rule(r"[³]", "立方"),
    rule(r"(?<=[0-9])\s?[*×]\s?(?=[0-9])", "乘"),
    rule(r"[＜<＞>≤≥≠≈＝=×÷±＋]|(?<=[\w)])\s?\+\s?(?=[\w(])", lambda match: _MATHS[match.group().strip()]),
)

TRIGGER = re.compile(r"[0-9０-９²³＜<＞>≤≥≠≈＝=×÷±＋%％￥¥$€£℃°√→⇒]|[元块镑]/|->|=>")
"""A clause without a match is read as it stands."""

_SPACE_BETWEEN = re.compile(
    r"(?<=[\u3400-\u9fff\u3000-\u303f\uff00-\uff65]) +(?=[\u3400-\u9fff\u3000-\u303f\uff00-\uff65])"
)
_LEFTOVER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def prepare(text: str) -> str:
    """Apply the rules, in order."""
    return apply_rules(RULES, text)


def finish(text: str) -> str:
    """Read the digits that are left one by one, but not those of a word such as ``MP3``."""

    def read(match: re.Match[str]) -> str:
        return "点".join(digits(part) for part in match.group().split("."))

    return _LEFTOVER.sub(read, text)


def join_characters(text: str) -> str:
    """Drop spaces between Chinese characters; those beside Latin words stay."""
    return _SPACE_BETWEEN.sub("", text)
