"""What was said, as symbols: the targets of the CTC trainings and the yardstick of the phoneme error rate.

Three kinds of symbols, from best to simplest: the phonemes that the teacher spoke (where the corpus has
them), those of Vivace's own pronouncing front end, plain letters. Symbol 0 is CTC's blank.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence

from recipes.mini.corpus import Corpus, Item
from vivace.errors import ModelFolderError

Spell = Callable[[Item], list[str]]

BLANK = "<blank>"
_NOT_SOUNDS = re.compile(r"[\s\d.,;:!?…'\"“”()\-—ˈˌːˑ‖|→↗↘↓↑]")


def letters(item: Item) -> list[str]:
    """The letters a to z of the text."""
    return [character for character in str(item["text"]).lower() if "a" <= character <= "z"]


def teacher_phonemes(item: Item) -> list[str]:
    """The characters of the teacher's phoneme string without stress, length and punctuation."""
    return list(_NOT_SOUNDS.sub("", str(item["phonemes"])))


def front_end_phonemes() -> Spell:
    """ARPAbet without stress from ``vivace.text.pronounce``; ImportError or ModelFolderError if missing."""
    pronouncer = importlib.import_module("vivace.text.pronounce").Pronouncer()

    def spell(item: Item) -> list[str]:
        tags = re.findall(r"\[([A-Z]{1,2})[0-2]?\]", pronouncer(str(item["text"])))
        return [str(tag) for tag in tags]

    return spell


def choose(corpus: Corpus, kind: str = "auto") -> tuple[str, Spell]:
    """The kind of symbols to train on and the function that makes them.

    Args:
        kind: ``teacher``, ``frontend``, ``letters``, or ``auto``: the best that the corpus allows.
    """
    if kind == "teacher" or (kind == "auto" and all(item.get("phonemes") for item in corpus.items)):
        return "teacher", teacher_phonemes
    if kind in ("frontend", "auto"):
        try:
            return "frontend", front_end_phonemes()
        except (ImportError, ModelFolderError):
            if kind == "frontend":
                raise
    return "letters", letters


def alphabet(spelled: Iterable[Sequence[str]], least: int = 5) -> list[str]:
    """Blank first, then every symbol that occurs at least ``least`` times, sorted."""
    counts: dict[str, int] = {}
    for symbols in spelled:
        for symbol in symbols:
            counts[symbol] = counts.get(symbol, 0) + 1
    return [BLANK, *sorted(symbol for symbol, count in counts.items() if count >= least)]


def numbers(symbols: Sequence[str], names: Sequence[str]) -> list[int]:
    """Symbols to their places in the alphabet; unknown ones are left out."""
    place = {name: index for index, name in enumerate(names)}
    return [place[symbol] for symbol in symbols if symbol in place]


def references(corpus: Corpus, kind: str, names: Sequence[str]) -> list[list[int]]:
    """What every utterance says, as places in ``names``; ``kind`` as ``choose`` gave it."""
    _, spell = choose(corpus, kind)
    return [numbers(spell(item), names) for item in corpus.items]


def edit_distance(said: Sequence[int], meant: Sequence[int]) -> int:
    """Fewest insertions, deletions and substitutions that turn one into the other."""
    row = list(range(len(meant) + 1))
    for count, symbol in enumerate(said, 1):
        corner, row[0] = row[0], count
        for index, wanted in enumerate(meant, 1):
            corner, row[index] = (
                row[index],
                min(row[index] + 1, row[index - 1] + 1, corner + (symbol != wanted)),
            )
    return row[-1]


def error_rate(said: Sequence[Sequence[int]], meant: Sequence[Sequence[int]]) -> float:
    """Edit distance over all pairs, divided by the symbols meant."""
    edits = sum(edit_distance(one, other) for one, other in zip(said, meant, strict=True))
    return edits / max(1, sum(len(one) for one in meant))
