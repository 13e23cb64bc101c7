"""Builds the embedded model's pronouncing lexicon from the CMU Pronouncing Dictionary (with stress).

The dictionary comes from the npm package ``cmu-pronouncing-dictionary`` (``npm pack`` gives its .tgz); its licence
is in ``src/vivace/assets/mini/LICENSES.md``. Only the first pronunciation of a word is kept, regular possessives are
dropped and a few entries changed (``OVERRIDES``).

    python -m recipes.mini.build_lexicon cmu-pronouncing-dictionary-3.0.0.tgz --out src/vivace/assets/mini/lexicon.xz
    python -m recipes.mini.build_lexicon cmu-pronouncing-dictionary-3.0.0.tgz --check   # held-out accuracy
"""

from __future__ import annotations

import argparse
import lzma
import random
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes.mini.letter_rules import Aligned, align, learn_costs, learn_rules
from vivace.text.letter_sounds import apply_rules, settle_stress
from vivace.text.lexicon import BLOCK_END, FORMAT_MARK, Lexicon, with_s

Words = dict[str, tuple[str, ...]]

# Where the dictionary's first pronunciation is not what a reader expects without context, or plainly wrong.
OVERRIDES = {
    "a": "AH0", "and": "AH0 N D", "the": "DH AH0", "read": "R IY1 D", "live": "L IH1 V", "lead": "L IY1 D",
    "wind": "W IH1 N D", "tear": "T EH1 R", "tears": "T IH1 R Z", "close": "K L OW1 Z", "use": "Y UW1 Z",
    "uses": "Y UW1 Z IH0 Z", "house": "HH AW1 S", "does": "D AH1 Z", "bow": "B OW1", "row": "R OW1",
    "bass": "B EY1 S", "minute": "M IH1 N AH0 T", "content": "K AA1 N T EH0 N T", "object": "AA1 B JH EH0 K T",
    "present": "P R EH1 Z AH0 N T", "record": "R EH1 K ER0 D", "project": "P R AA1 JH EH0 K T",
    "desert": "D EH1 Z ER0 T", "separate": "S EH1 P ER0 IH0 T", "estimate": "EH1 S T AH0 M AH0 T",
    "excuse": "IH0 K S K Y UW1 Z", "aaa": "T R IH2 P AH0 L EY1", "for": "F AO1 R", "your": "Y AO1 R",
    "to": "T UW1", "i'd": "AY1 D", "mr": "M IH1 S T ER0", "mrs": "M IH1 S IH0 Z", "dr": "D AA1 K T ER0",
    "ms": "M IH1 Z", "st": "S EY1 N T", "vs": "V ER1 S AH0 S", "etc": "EH2 T S EH1 T ER0 AH0",
    "ok": "OW2 K EY1", "wifi": "W AY1 F AY2",
}  # fmt: skip
_ENTRY = re.compile(r"""\s*"?([^":]+)"?: "([^"#]+?)\s*(?:#[^"]*)?",?""")


def read_dictionary(path: Path) -> Words:
    """Lower-case words (a–z and apostrophes) with their first pronunciation."""
    with tarfile.open(path) as archive:
        member = archive.extractfile("package/index.js")
        if member is None:
            raise ValueError(f"{path} holds no package/index.js")
        lines = member.read().decode("utf-8").splitlines()
    words: Words = {}
    for line in lines:
        entry = _ENTRY.fullmatch(line.strip())
        if entry and re.fullmatch(r"'?[a-z][a-z']*", entry[1]):
            words[entry[1]] = tuple(entry[2].split())
    return words | {word: tuple(sound.split()) for word, sound in OVERRIDES.items()}


def bare(phonemes: Sequence[str]) -> tuple[str, ...]:
    """Phonemes without stress digits."""
    return tuple(phoneme.rstrip("012") for phoneme in phonemes)


def align_words(words: Mapping[str, tuple[str, ...]], seed: int = 0) -> list[Aligned]:
    """Letters and phonemes of all words side by side; words that cannot be aligned (AAA) are left out."""
    sample = random.Random(seed).sample(sorted(words), min(15_000, len(words)))
    cost = learn_costs({word: bare(words[word]) for word in sample})
    out = []
    for word in sorted(words):
        pairs = align(word, bare(words[word]), cost)
        if pairs is not None:
            rest = iter(words[word])
            out.append([(letter, tuple(next(rest) for _ in group)) for letter, group in pairs])
    return out


def without_regular_possessives(words: Words) -> Words:
    """Drop what the lexicon derives by itself: ``dog's`` from ``dog``."""
    return {
        word: sound
        for word, sound in words.items()
        if not (word.endswith("'s") and word[:-2] in words and with_s(words[word[:-2]]) == sound)
    }


def pack(words: Words, rules: Mapping[str, Sequence[str]]) -> bytes:
    """The lexicon file: see ``vivace.text.lexicon``."""
    symbols = sorted({symbol for sound in words.values() for symbol in sound})
    code = {symbol: chr(33 + i) for i, symbol in enumerate(symbols)}

    def block(values: list[Sequence[str]]) -> str:
        return "\n".join("".join(code[symbol] for symbol in value) for value in values)

    names, windows = sorted(words), sorted(rules)
    blocks = (
        f"{FORMAT_MARK}\n{' '.join(symbols)}",
        "\n".join(names),
        block([words[name] for name in names]),
        "\n".join(windows),
        block([rules[window] for window in windows]),
    )
    return lzma.compress(BLOCK_END.join(blocks).encode("utf-8"), preset=9 | lzma.PRESET_EXTREME)


def edits(one: Sequence[str], other: Sequence[str]) -> int:
    """Levenshtein distance."""
    row = list(range(len(other) + 1))
    for i, x in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def check(words: Words, folder: Path, min_gain: int) -> None:
    """Print the phoneme accuracy on 4,000 words that neither dictionary nor rules have seen."""
    plain = [word for word in sorted(words) if "'" not in word]
    held = set(random.Random(1).sample(plain, 4_000))
    known = {word: words[word] for word in plain if word not in held}
    rules = learn_rules(align_words(known), min_gain)
    path = folder / "held-out.xz"
    path.write_bytes(pack(known, rules))
    lexicon = Lexicon(path)
    coded = {w: settle_stress(apply_rules(w, rules)) for w in held}
    for name, say in (
        ("rules alone", lambda w: coded[w]),
        ("parts, then rules", lambda w: lexicon.pronounce(w)),
    ):
        total = sum(len(words[w]) for w in held)
        wrong = sum(edits(bare(say(w)), bare(words[w])) for w in held)
        wrong_stress = sum(edits(say(w), words[w]) for w in held)
        whole = sum(bare(say(w)) == bare(words[w]) for w in held)
        print(
            f"{name}: phoneme accuracy {1 - wrong / total:.3f}, with stress {1 - wrong_stress / total:.3f}, "
            f"words right {whole / len(held):.3f}"
        )
    parts = [w for w in held if lexicon.derived(w)]
    total = sum(len(words[w]) for w in parts)
    for name, say in (("rules", lambda w: coded[w]), ("parts", lambda w: lexicon.derived(w) or ())):
        print(
            f"made of parts ({len(parts)}), by {name}:",
            1 - sum(edits(bare(say(w)), bare(words[w])) for w in parts) / total,
        )


def main(argv: list[str] | None = None) -> None:
    """Build the file, or check the rules on held-out words."""
    parser = argparse.ArgumentParser(prog="python -m recipes.mini.build_lexicon", description=__doc__)
    parser.add_argument("dictionary", type=Path, help="the npm package's .tgz")
    parser.add_argument("--out", type=Path, default=Path("src/vivace/assets/mini/lexicon.xz"))
    parser.add_argument(
        "--min-gain", type=int, default=2, help="letters that a rule must put right to be kept"
    )
    parser.add_argument(
        "--check", action="store_true", help="measure on held-out words (writes beside --out)"
    )
    args = parser.parse_args(argv)
    words = read_dictionary(args.dictionary)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.check:
        check(words, args.out.parent, args.min_gain)
        return
    plain = {word: sound for word, sound in words.items() if "'" not in word}
    rules = learn_rules(align_words(plain), args.min_gain)
    kept = without_regular_possessives(words)
    args.out.write_bytes(pack(kept, rules))
    print(f"{len(kept)} words, {len(rules)} rules, {args.out.stat().st_size} bytes in {args.out}")


if __name__ == "__main__":
    main()
