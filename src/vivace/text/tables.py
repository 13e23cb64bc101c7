"""A helper for word lists kept as data."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """The words of ``text``, which are separated by white space."""
    return tuple(text.split())
