"""Markdown and LaTeX brackets, as language models write them, taken off: what they hold stays.

Works line by line, so that a text gives the same in pieces. All repeats are bounded: linear time.
"""

from __future__ import annotations

import re

from vivace.text.special_tokens import TAG_PATTERN

_FENCE = re.compile(r"(?m)^[ \t]*(?:```|~~~)[\w+#.-]{0,40}[ \t]*$")
_UNDERLINE = re.compile(r"(?m)^[ \t]*(?:[=_*-]|- |\* ){3,200}[ \t]*$")
_TABLE_RULE = re.compile(r"(?m)^[ \t]*\|?(?:[ \t]*:?-{2,50}:?[ \t]*\|){1,50}[ \t]*(?::?-{2,50}:?[ \t]*)?$")
_TABLE_ROW = re.compile(r"(?m)^[ \t]*\|(.{1,2000})\|[ \t]*$")
_HAN = re.compile("[\u3400-\u9fff]")
_LINK = re.compile(
    r"!?\[([^\[\]\n]{0,200})\]\((?:https?:|mailto:|www\.|[/#.]|[\w-]{1,60}[./])[^()\s]{0,500}(?: \"[^\"\n]{0,100}\")?\)"
)
_AUTOLINK = re.compile(r"<((?:https?://|mailto:)[^<>\s]{1,500})>")
_LINE_START = re.compile(
    r"(?m)^[ \t]*(?:(?:#{1,6}|[-*+•·◦▪‣●○■►–—>]|[-*_]{3,})[ \t]+){1,3}(?:\[[ xX]\][ \t]+)?"
)
_STARS = re.compile(r"\*\*|__|~~|`+")
_EMPHASIS = re.compile(
    r"(?<![\w*])\*(?=\S)([^*\n]{1,200}?)(?<=\S)\*(?![\w*])|(?<!\w)_(?=\S)([^_\n]{1,200}?)(?<=\S)_(?!\w)"
)
_FORMULA_BRACKET = re.compile(r"\\[()\[\]]")
_ESCAPE = re.compile(r"\\(?=[*_#\-+.!`~>|$])")
_FORMULA = re.compile(r"\$(?=[A-Za-z\\(|{])([^$\n]{1,200})(?<=\S)\$(?![0-9A-Za-z])")
_IN_FORMULAS = re.compile(r"[\\^_={}+]|^[A-Za-z]$")


def strip_markdown(text: str) -> str:
    """``text`` without marks that nobody reads aloud. Links leave their words, table rows their cells with commas."""
    text = _FENCE.sub("", text)
    if "|" in text:
        text = _TABLE_ROW.sub(_cells, _TABLE_RULE.sub("", text))
    text = _UNDERLINE.sub("", text)
    if "](" in text:
        text = _LINK.sub(_label, text)
    text = _AUTOLINK.sub(r"\1", text)
    text = _LINE_START.sub("", text)
    if "$" in text:
        text = _FORMULA.sub(_formula, text.replace("$$", " "))
    text = _ESCAPE.sub("", _FORMULA_BRACKET.sub("", text)).replace(" ** ", " ^ ")
    return _EMPHASIS.sub(lambda match: match.group(1) or match.group(2), _STARS.sub("", text))


def _cells(match: re.Match[str]) -> str:
    comma = "，" if _HAN.search(match.group(1)) else ", "
    return comma.join(cell.strip() for cell in match.group(1).split("|") if cell.strip())


def _label(match: re.Match[str]) -> str:
    label: str = match.group(1)
    return match.group() if TAG_PATTERN.fullmatch(f"[{label}]") else label


def _formula(match: re.Match[str]) -> str:
    return match.group(1) if _IN_FORMULAS.search(match.group(1)) else match.group()
