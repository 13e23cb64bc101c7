"""Spans of a text that no rule may touch or cut: tags, addresses, versions."""

from __future__ import annotations

import re

from vivace.text.special_tokens import TAG_PATTERN

_URL = r"(?:https?://|ftp://|www\.)[A-Za-z0-9\-._~:/?#@!$&'*+,;=%()]*[A-Za-z0-9/]"
# Repeats are bounded: a text of 100 000 letters or hyphens must not cost quadratic time.
_EMAIL = (
    r"(?<![A-Za-z0-9._%+\-])[A-Za-z0-9][A-Za-z0-9._%+\-]{0,63}@"
    r"[A-Za-z0-9\-]{1,63}(?:\.[A-Za-z0-9\-]{1,63}){0,8}\.[A-Za-z]{2,24}"
)
_DOMAIN = (
    r"(?<![A-Za-z0-9.@])(?:[A-Za-z0-9][A-Za-z0-9\-]{0,62}\.){1,9}"
    r"(?:com|org|net|edu|gov|io|ai|dev|app|co|cn|jp|kr|ru|de|fr|uk|info|html?|php|json|py|js|txt|pdf|md)\b"
    r"(?:/[A-Za-z0-9\-._~/?#=&%+]*[A-Za-z0-9/])?"
)
# 24.12.2026 is a day.
_DAY = r"(?:0?[1-9]|[12][0-9]|3[01])\.(?:0?[1-9]|1[0-2])\.(?:19|20)[0-9]{2}(?![\w]|\.[0-9])"
_VERSION = (
    rf"(?<![A-Za-z0-9.])(?!{_DAY})"
    r"(?:[vV]?[0-9]{1,9}(?:\.[0-9]{1,9}){2,}(?![0-9])"
    r"|[vV][0-9]{1,9}(?:\.[0-9]{1,9})?(?![0-9.]*[A-Za-z0-9]))"
)

PROTECTED = re.compile(f"{TAG_PATTERN.pattern}|{_URL}|{_EMAIL}|{_DOMAIN}|{_VERSION}")
"""One protected span."""


def split_protected(text: str) -> list[tuple[str, bool]]:
    """``text`` as ``(part, is_protected)``, in order; the parts joined are ``text``."""
    parts: list[tuple[str, bool]] = []
    start = 0
    for match in PROTECTED.finditer(text):
        if match.start() > start:
            parts.append((text[start : match.start()], False))
        parts.append((match.group(), True))
        start = match.end()
    if start < len(text):
        parts.append((text[start:], False))
    return parts
