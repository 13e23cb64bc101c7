"""Letter-to-sound rules: how a word that no dictionary lists is said. Data comes from ``recipes/mini``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

_MARGIN = "#" * 4
# How a window grows: (letters before, letters after), the most telling neighbour first.
_SHAPES = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4))


def windows(word: str, index: int) -> Iterator[str]:
    """The letters around ``word[index]``, narrow to wide; ``#`` stands beyond either end.

    Their lengths are 1, 2, 3 …, so that a window's text alone says which letters it holds.
    """
    padded = _MARGIN + word + _MARGIN
    centre = index + len(_MARGIN)
    for before, after in _SHAPES:
        yield padded[centre - before : centre + after + 1]


def apply_rules(word: str, rules: Mapping[str, Sequence[str]]) -> list[str]:
    """Phonemes of ``word`` (lower-case letters): for each letter the widest window that has a rule."""
    padded = _MARGIN + word + _MARGIN
    out: list[str] = []
    for centre in range(len(_MARGIN), len(_MARGIN) + len(word)):
        for before, after in reversed(_SHAPES):
            group = rules.get(padded[centre - before : centre + after + 1])
            if group is not None:
                out.extend(group)
                break
    return out


def settle_stress(phonemes: Sequence[str]) -> list[str]:
    """Exactly one primary stress: letters are decided one by one and may give none or several.

    The first one stays; the others become secondary. Without any, the first secondary one is raised, else the
    first full vowel, else the first vowel.
    """
    vowels = [i for i, phoneme in enumerate(phonemes) if phoneme[-1].isdigit()]
    if not vowels:
        return list(phonemes)
    primary = [i for i in vowels if phonemes[i][-1] == "1"]
    secondary = [i for i in vowels if phonemes[i][-1] == "2"]
    full = [i for i in vowels if phonemes[i] not in ("AH0", "IH0", "ER0")]
    chosen = (primary or secondary or full or vowels)[0]
    out = list(phonemes)
    for i in primary:
        out[i] = out[i][:-1] + "2"
    out[chosen] = out[chosen][:-1] + "1"
    return out
