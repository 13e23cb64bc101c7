"""The door to ``wetext``, the normalisation library: loaded on first use, bounded, never raising.

``import wetext`` reads about 20 grammars (0.35 s), so it happens at the first text that needs it or in
:func:`warm_up`, which an engine calls when it opens. One call costs 0.3 to 2 ms for a clause. The
library raises assertion errors for some inputs (``#5``, NUL, very long amounts)
and its time grows with the square of the length, hence short pieces and a fallback.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

LONGEST_PIECE = 200
"""Characters that one call of the library sees at most."""


@lru_cache(maxsize=1)
def load() -> Any:
    """The library's normaliser (imported here: 0.35 s)."""
    from wetext import Normalizer

    return Normalizer(operator="tn", remove_interjections=False, remove_erhua=False, full_to_half=False)


def warm_up() -> None:
    """Loads the library before a text needs it; if that fails, texts are read without it, as ever."""
    with suppress(Exception):
        load()


@lru_cache(maxsize=8192)
def read_piece(piece: str, language: str) -> str | None:
    """What the library makes of ``piece``, or None if it failed or lost letters.

    Args:
        piece: at most ``LONGEST_PIECE`` characters, without leading or trailing space.
        language: ``en`` or ``zh``.
    """
    if not piece or len(piece) > LONGEST_PIECE:
        return None
    try:
        result = load().normalize(piece, lang=language)
    except Exception:  # The library's failures have no common base: assertions, RuntimeError, ValueError.
        return None
    if not isinstance(result, str) or not result.strip():
        return None
    result = re.sub(r'\\(["\\])', r"\1", result)
    return result if _keeps_letters(piece, result) else None


def _keeps_letters(before: str, after: str) -> bool:
    """Letters outside ASCII survive, and so do most of the words: the library drops what it does not know."""
    rare = [letter for letter in before if not letter.isascii() and letter.isalpha()]
    if any(after.count(letter) < rare.count(letter) for letter in set(rare)):
        return False
    words = re.findall(r"[A-Za-z]{5,}", before)
    lowered = after.lower()
    return all(word.lower() in lowered for word in words)
