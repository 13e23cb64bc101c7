"""English words to ARPAbet phonemes: a compressed dictionary, word formation, letter-to-sound rules.

The file (made by ``recipes/mini/build_lexicon.py``) is an .xz of UTF-8 text. Its first line is a format mark, the
second lists the phonemes; then four blocks, parted by form feeds: words, their phonemes, rule windows,
their phonemes. Phonemes are one character each: ``chr(33 + place in the list)``.
"""

from __future__ import annotations

import lzma
from pathlib import Path

from vivace.errors import ModelFolderError
from vivace.text.letter_sounds import apply_rules, settle_stress

FORMAT_MARK = "vivace lexicon 1"
BLOCK_END = "\f"
_LARGEST_TEXT_BYTES = 16 * 1024 * 1024
_MOST_MEMORY_BYTES = 128 * 1024 * 1024
"""A file's header may ask for a dictionary of 4 GiB; the strongest preset takes 65 MiB."""

LETTER_NAMES = {
    "a": "EY1", "b": "B IY1", "c": "S IY1", "d": "D IY1", "e": "IY1", "f": "EH1 F", "g": "JH IY1",
    "h": "EY1 CH", "i": "AY1", "j": "JH EY1", "k": "K EY1", "l": "EH1 L", "m": "EH1 M", "n": "EH1 N",
    "o": "OW1", "p": "P IY1", "q": "K Y UW1", "r": "AA1 R", "s": "EH1 S", "t": "T IY1", "u": "Y UW1",
    "v": "V IY1", "w": "D AH1 B AH0 L Y UW0", "x": "EH1 K S", "y": "W AY1", "z": "Z IY1",
}  # fmt: skip

_PREFIXES = {
    "un": "AH0 N", "re": "R IY0", "non": "N AA1 N", "pre": "P R IY0", "mis": "M IH0 S", "anti": "AE2 N T IY0",
    "multi": "M AH2 L T IY0", "micro": "M AY2 K R OW0", "ultra": "AH2 L T R AH0", "co": "K OW0",
}  # fmt: skip

# Suffixes that leave the stem's sound alone. -s, -ed and -ing have rules of their own.
_SUFFIXES = {
    "ly": "L IY0", "ness": "N AH0 S", "less": "L AH0 S", "ful": "F AH0 L", "ment": "M AH0 N T", "er": "ER0",
    "ers": "ER0 Z", "est": "AH0 S T", "able": "AH0 B AH0 L", "ish": "IH0 SH", "ism": "IH2 Z AH0 M",
    "ist": "IH0 S T", "ists": "IH0 S T S", "like": "L AY2 K", "ship": "SH IH2 P", "wise": "W AY2 Z",
    "hood": "HH UH2 D", "proof": "P R UW2 F", "y": "IY0",
}  # fmt: skip

_SIBILANTS = ("S", "Z", "SH", "ZH", "CH", "JH")
_VOICELESS = ("P", "T", "K", "F", "TH")

Phonemes = tuple[str, ...]


def with_s(stem: Phonemes) -> Phonemes:
    """The plural, the possessive and the third person: S, Z or IH0 Z by the last sound."""
    if stem[-1] in _SIBILANTS:
        return (*stem, "IH0", "Z")
    return (*stem, "S" if stem[-1] in _VOICELESS else "Z")


def with_ed(stem: Phonemes) -> Phonemes:
    """The past tense: T, D or IH0 D by the last sound."""
    if stem[-1] in ("T", "D"):
        return (*stem, "IH0", "D")
    return (*stem, "T" if stem[-1] in (*_VOICELESS, "S", "SH", "CH") else "D")


def weaken(phonemes: Phonemes) -> Phonemes:
    """Primary stress becomes secondary: the second half of a compound."""
    return tuple(p[:-1] + "2" if p.endswith("1") else p for p in phonemes)


def stems(word: str, suffix: str) -> list[str]:
    """Spellings that ``word`` may have had before ``suffix`` was added: plain, final e dropped, doubled, y → i."""
    if not word.endswith(suffix) or len(word) - len(suffix) < 2:
        return []
    stem = word[: -len(suffix)]
    out = [stem]
    if suffix[0] in "aeiy":
        if len(stem) > 3 and stem[-1] == stem[-2]:
            out.append(stem[:-1])
        out.append(stem + "e")
    if stem.endswith("i"):
        out.append(stem[:-1] + "y")
    return out


def _read_text(path: Path) -> str:
    """The unpacked file. Raises OSError, LZMAError or ValueError; never takes more than a lexicon needs."""
    if not path.is_file() or path.stat().st_size > _LARGEST_TEXT_BYTES:
        raise ValueError("not a regular file of a lexicon's size")
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_MEMORY_BYTES)
    content = unpacker.decompress(path.read_bytes(), _LARGEST_TEXT_BYTES)
    if not unpacker.eof:
        raise ValueError("cut off, or too large")
    return content.decode("utf-8")


class Lexicon:
    """Pronounces single words. Loaded once and never changed, so threads may share it.

    Args:
        path: the compressed file.

    Raises:
        ModelFolderError: the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            head, words, sounds, windows, groups = _read_text(path).split(BLOCK_END)
            mark, symbols = head.split("\n")
            if mark != FORMAT_MARK:
                raise ModelFolderError(f"{path}: written for another version; install the package again")
            self._symbols = {chr(33 + i): symbol for i, symbol in enumerate(symbols.split(" "))}
            self._words = dict(zip(words.split("\n"), sounds.split("\n"), strict=True))
            self._rules = dict(zip(windows.split("\n"), groups.split("\n"), strict=True))
            if not set(sounds + groups) <= {*self._symbols, "\n"}:
                raise ValueError("phonemes that are not in the list")
        except (OSError, lzma.LZMAError, MemoryError, ValueError) as error:
            raise ModelFolderError(f"{path}: not a readable lexicon; install the package again") from error
        self._made: dict[str, Phonemes] = {}

    def __contains__(self, word: str) -> bool:
        """Whether the dictionary itself lists ``word`` (lower case)."""
        return word in self._words

    def listed(self, word: str) -> Phonemes | None:
        """The dictionary's phonemes of ``word`` (lower case), or None."""
        coded = self._words.get(word)
        return None if coded is None else tuple(self._symbols[c] for c in coded)

    def pronounce(self, word: str) -> Phonemes:
        """Phonemes of ``word``: lower-case letters a–z, apostrophes allowed. Always says something."""
        found = self._made.get(word)
        if found is None:
            found = self.listed(word) or self.derived(word) or self.guessed(word)
            if len(self._made) < 10_000:
                self._made[word] = found
        return found

    def derived(self, word: str) -> Phonemes | None:
        """Phonemes of a word made of listed parts: inflection, suffix, prefix, compound; None if it is not."""
        if "'" in word:
            return self._with_apostrophe(word)
        for find in (self._inflected, self._suffixed, self._prefixed, self._compound):
            found = find(word)
            if found is not None:
                return found
        return None

    def guessed(self, word: str) -> Phonemes:
        """Phonemes by letter-to-sound rules; words without a vowel are spelled."""
        letters = word.replace("'", "")
        if not letters:
            return ()
        if not set(letters) & set("aeiouy"):
            return self.spelled(letters)
        coded = apply_rules(letters, self._rules)
        return tuple(settle_stress([self._symbols[c] for c in coded])) or self.spelled(letters)

    def spelled(self, letters: str) -> Phonemes:
        """Letter names one after the other; the last letter carries the stress, as in BBC."""
        names = [tuple(LETTER_NAMES[letter].split()) for letter in letters if letter in LETTER_NAMES]
        return tuple(p for name in names[:-1] for p in weaken(name)) + (names[-1] if names else ())

    def _with_apostrophe(self, word: str) -> Phonemes | None:
        if word.endswith("'s") and len(word) > 2:
            # One after the other: a word may be thousands of 's.
            stem, endings = word, 0
            while stem.endswith("'s") and len(stem) > 2 and not (endings and stem in self._words):
                stem, endings = stem[:-2], endings + 1
            phonemes = self.pronounce(stem)
            for _ in range(endings if phonemes else 0):
                phonemes = with_s(phonemes)
            return phonemes or None
        if word.endswith("'") or word.startswith("'"):
            bare = word.strip("'")
            return self.pronounce(bare) if bare else None
        return None

    def _stem(self, word: str, suffix: str) -> Phonemes | None:
        for stem in stems(word, suffix):
            found = self.listed(stem) if len(stem) > 2 else None
            if found is not None:
                return found
        return None

    def _inflected(self, word: str) -> Phonemes | None:
        if word.endswith("s") and not word.endswith("ss"):
            stem = self._stem(word, "s") or self._stem(word, "es")
            if stem is not None:
                return with_s(stem)
        stem = self._stem(word, "ed")
        if stem is not None:
            return with_ed(stem)
        for ending, sound in (("ing", ("IH0", "NG")), ("ings", ("IH0", "NG", "Z")), ("in'", ("IH0", "N"))):
            stem = self._stem(word, ending)
            if stem is not None:
                return stem + sound
        return None

    def _suffixed(self, word: str) -> Phonemes | None:
        for suffix, sound in _SUFFIXES.items():
            stem = self._stem(word, suffix)
            if stem is not None:
                added = tuple(sound.split())
                # Two equal sounds melt into one: real + ly, whole + ly.
                return stem + (added[1:] if stem[-1] == added[0] else added)
        if word.endswith("ically"):
            stem = self.listed(word[:-4])
            return None if stem is None else (*stem, "L", "IY0")
        return None

    def _prefixed(self, word: str) -> Phonemes | None:
        for prefix, sound in _PREFIXES.items():
            rest = word.removeprefix(prefix)
            if rest == word or len(rest) < 4:
                continue
            found = self.listed(rest) or self._inflected(rest) or self._suffixed(rest)
            if found is not None:
                return tuple(sound.split()) + found
        return None

    def _compound(self, word: str) -> Phonemes | None:
        # From the most even split outwards. Shorter parts are chance more often than not.
        if len(word) < 7:
            return None
        middle = len(word) / 2
        for cut in sorted(range(3, len(word) - 2), key=lambda at: abs(at - middle)):
            first, second = self.listed(word[:cut]), self.listed(word[cut:])
            if second is None and first is not None:
                second = self._inflected(word[cut:])
            if first is not None and second is not None:
                return first + weaken(second)
        return None
