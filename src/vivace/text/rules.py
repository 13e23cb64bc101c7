"""What a rule of normalisation is: a pattern and what takes its place."""

from __future__ import annotations

import re
from collections.abc import Callable

Rule = tuple[re.Pattern[str], Callable[["re.Match[str]"], str]]


def rule(pattern: str, replace: Callable[[re.Match[str]], str] | str) -> Rule:
    """A rule; ``replace`` is a function of the match or a template such as ``\\1 to ``."""
    if isinstance(replace, str):
        template = replace
        return re.compile(pattern), lambda match: match.expand(template)
    return re.compile(pattern), replace


def apply_rules(rules: tuple[Rule, ...], text: str) -> str:
    """``text`` after all rules, in order."""
    for pattern, replace in rules:
        text = pattern.sub(replace, text)
    return text
