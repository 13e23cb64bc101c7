"""The embedded model's English front end: words become bracketed ARPAbet tags of CosyVoice 3's token list.

``Hello, world!`` → ``[HH][AH0][L][OW1], [W][ER1][L][D]!``. A space parts words, and ``, . ? !`` stay; other
punctuation becomes one of these or nothing. Tags in brackets pass through. Letters of other scripts are not said:
``text.readable`` takes them out before, and names them.
Numbers are expected to be written out already (``text.normalize``); stray digits are read one by one.
"""

from __future__ import annotations

import re
from pathlib import Path

from vivace.text.lexicon import Lexicon, Phonemes
from vivace.text.readable import plain_letters
from vivace.text.special_tokens import COSYVOICE3_TOKENS

LEXICON_NAME = "lexicon.xz"
EMBEDDED_LEXICON = Path(__file__).parent.parent / "assets" / "mini" / LEXICON_NAME

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_SIGNS = {"&": "and", "%": "percent", "+": "plus", "=": "equals", "@": "at", "#": "number", "$": "dollars"}
_PUNCTUATION = {
    ",": ",", ";": ",", ":": ",", "(": ",", ")": ",", "–": ",", "—": ",", "…": ",", "，": ",", "、": ",",
    ".": ".", "。": ".", "?": "?", "？": "?", "!": "!", "！": "!",
}  # fmt: skip
_STRENGTH = {",": 0, ".": 1, "!": 2, "?": 3}

# A title's dot is no end of a sentence; "no." and "st." only count with what follows.
_TITLES = r"(?:Mr|Mrs|Ms|Dr|Prof|St|vs|Jr|Sr)\."

# Written in capitals these are initials, though the dictionary has a word of the same letters.
_INITIALS = frozenset({
    "us", "un", "ai", "am", "pm", "it", "id", "pr", "hr", "os", "ad", "er", "ac", "uk", "eu",
})  # fmt: skip

# Words said differently as a noun and as a verb: the dictionary holds the first, this the verb.
_VERBS = {
    "use": "Y UW1 Z", "close": "K L OW1 Z", "live": "L IH1 V", "present": "P R IY0 Z EH1 N T",
    "record": "R IH0 K AO1 R D", "object": "AH0 B JH EH1 K T", "project": "P R AH0 JH EH1 K T",
    "desert": "D IH0 Z ER1 T", "separate": "S EH1 P ER0 EY2 T", "estimate": "EH1 S T AH0 M EY2 T",
    "house": "HH AW1 Z", "wind": "W AY1 N D", "tear": "T EH1 R", "conduct": "K AH0 N D AH1 K T",
    "contract": "K AH0 N T R AE1 K T", "permit": "P ER0 M IH1 T", "produce": "P R AH0 D UW1 S",
    "progress": "P R AH0 G R EH1 S", "protest": "P R AH0 T EH1 S T", "increase": "IH0 N K R IY1 S",
    "decrease": "D IH0 K R IY1 S", "import": "IH0 M P AO1 R T", "export": "EH0 K S P AO1 R T",
    "refuse": "R AH0 F Y UW1 Z", "rebel": "R IH0 B EH1 L", "suspect": "S AH0 S P EH1 K T",
    "excuse": "IH0 K S K Y UW1 Z", "content": "K AH0 N T EH1 N T",
}  # fmt: skip
_NOUNS = {
    "use": "Y UW1 S", "live": "L AY1 V", "lead": "L IY1 D", "tear": "T IH1 R", "excuse": "IH0 K S K Y UW1 S",
    "refuse": "R EH1 F Y UW2 Z", "close": "K L OW1 S", "conduct": "K AA1 N D AH0 K T",
    "contract": "K AA1 N T R AE2 K T", "permit": "P ER1 M IH2 T", "produce": "P R OW1 D UW0 S",
    "progress": "P R AA1 G R EH2 S", "protest": "P R OW1 T EH2 S T", "increase": "IH1 N K R IY2 S",
    "import": "IH1 M P AO2 R T", "export": "EH1 K S P AO2 R T", "rebel": "R EH1 B AH0 L",
    "suspect": "S AH1 S P EH2 K T",
}  # fmt: skip
_BEFORE_VERB = frozenset({
    "to", "will", "would", "can", "could", "should", "must", "may", "might", "shall", "don't",
    "doesn't", "didn't", "won't", "can't", "couldn't", "i", "you", "we", "they", "please", "let's",
})  # fmt: skip
_BEFORE_NOUN = frozenset({
    "the", "a", "an", "this", "that", "my", "your", "his", "her", "its", "our", "their", "no", "any",
    "some", "of", "in",
})  # fmt: skip
_READ_PAST = frozenset({
    "have", "has", "had", "was", "were", "is", "are", "be", "been", "he", "she", "it", "i've", "we've",
    "they've", "you've",
})  # fmt: skip

_TAG = "|".join(re.escape(token) for token in sorted(COSYVOICE3_TOKENS, key=len, reverse=True))
_PIECES = re.compile(
    rf"(?P<tag>{_TAG})"
    rf"|(?P<title>\b{_TITLES}(?=\s))"
    r"|(?P<dotted>\b(?:[A-Za-z]\.){2,})"
    r"|(?P<word>[A-Za-z]+(?:'[A-Za-z]+)*'?|'[A-Za-z]+)"
    r"|(?P<digit>[0-9])"
    r"|(?P<space>\s+)"
    r"|(?P<other>.)",
    re.DOTALL,
)


class Pronouncer:
    """Turns English text into tags. Loaded once; threads may share it.

    Args:
        path: a lexicon file; None takes the one inside the package.

    Raises:
        ModelFolderError: the file is missing or damaged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.lexicon = Lexicon(path or EMBEDDED_LEXICON)

    @classmethod
    def from_folder(cls, folder: Path) -> Pronouncer:
        """The front end of a model folder: its own ``lexicon.xz``, or the package's where it has none."""
        path = folder / LEXICON_NAME
        return cls(path if path.exists() else None)

    def __call__(self, text: str) -> str:
        """Same as ``to_tags``."""
        return self.to_tags(text)

    def to_tags(self, text: str) -> str:
        """The text with every English word as tags; see the module's docstring.

        A single space stands where white space was, also at either end, so that the results of consecutive
        pieces of a text can be joined. Text without anything to say gives a string without tags.
        """
        out = _Writer()
        shouting = not any(c.islower() for c in text)
        previous = ""
        pieces = list(_PIECES.finditer(plain_letters(text)))
        next_words = _next_words(pieces)
        for place, piece in enumerate(pieces):
            kind, value = piece.lastgroup, piece.group()
            if kind == "tag":
                out.word(value)
            elif kind == "space":
                out.space()
            elif kind == "word":
                out.word(_tags(self._in_context(value, previous, next_words[place], shouting)))
                previous = value.lower()
            elif kind == "title":
                out.word(_tags(self.lexicon.pronounce(value[:-1].lower())))
            elif kind == "dotted":
                out.word(_tags(self.lexicon.spelled(value.replace(".", "").lower())))
                if place + 1 == len(pieces):
                    out.punctuation(".")
            elif kind == "digit":
                out.separate()
                out.word(_tags(self.lexicon.pronounce(_DIGITS[int(value)])))
                out.separate()
            else:
                self._other(value, out)
        return out.text()

    def pronounce(self, word: str) -> Phonemes:
        """Phonemes of one word out of context, such as ``("HH", "AH0", "L", "OW1")``."""
        return self.lexicon.pronounce(plain_letters(word).lower())

    def _other(self, value: str, out: _Writer) -> None:
        if value in _PUNCTUATION:
            out.punctuation(_PUNCTUATION[value])
        elif value in _SIGNS:
            out.separate()
            out.word(_tags(self.lexicon.pronounce(_SIGNS[value])))
            out.separate()
        elif value in "-/_‐‑":
            out.separate()
        # Quotes, other scripts and everything else make no sound.

    def _in_context(self, word: str, previous: str, following: str, shouting: bool) -> Phonemes:
        """Phonemes of a word between its neighbours (``following`` as written, ``previous`` in lower case)."""
        lower = word.lower()
        if len(word) == 1:
            # "a" is the article, also at the start of a sentence; elsewhere a capital is the letter.
            article = lower == "a" and (word == "a" or not previous)
            return self.lexicon.pronounce("a") if article else self.lexicon.spelled(lower)
        capitals = word.isupper() and not shouting and len(word) <= 5 and "'" not in word
        if capitals and (lower in _INITIALS or lower not in self.lexicon):
            return self.lexicon.spelled(lower)
        if lower == "the" and following and self._starts_with_vowel(following):
            return ("DH", "IY0")
        if lower == "read" and previous in _READ_PAST:
            return ("R", "EH1", "D")
        if previous in _BEFORE_VERB and lower in _VERBS:
            return tuple(_VERBS[lower].split())
        if previous in _BEFORE_NOUN and lower in _NOUNS:
            return tuple(_NOUNS[lower].split())
        return self.lexicon.pronounce(lower)

    def _starts_with_vowel(self, word: str) -> bool:
        phonemes = self.lexicon.pronounce(word.lower())
        return bool(phonemes) and phonemes[0][-1].isdigit()


class _Writer:
    """Joins words and punctuation so that no two spaces or marks follow each other."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._apart = False

    def word(self, tags: str) -> None:
        """Append one word; nothing if it has no tags."""
        if tags:
            if self._parts and (self._parts[-1] in _STRENGTH or self._apart):
                self.space()
            self._parts.append(tags)
            self._apart = False

    def space(self) -> None:
        """One space, unless there is one."""
        if not self._parts or self._parts[-1] != " ":
            self._parts.append(" ")

    def separate(self) -> None:
        """A space before the next word, if one comes and one has come."""
        self._apart = True

    def punctuation(self, mark: str) -> None:
        """A mark right behind the last word; of several the strongest stays, none stands first."""
        parts = self._parts
        while parts and parts[-1] == " ":
            parts.pop()
        if not parts:
            return
        if parts[-1] in _STRENGTH:
            mark = max(mark, parts.pop(), key=_STRENGTH.__getitem__)
        parts.append(mark)

    def text(self) -> str:
        """Everything written."""
        return "".join(self._parts)


def _next_words(pieces: list[re.Match[str]]) -> list[str]:
    """For each piece the word after it, as written; empty where none comes."""
    following, words = "", [""] * len(pieces)
    for place in range(len(pieces) - 1, -1, -1):
        words[place] = following
        if pieces[place].lastgroup == "word":
            following = pieces[place].group()
    return words


def _tags(phonemes: Phonemes) -> str:
    return "".join(f"[{phoneme}]" for phoneme in phonemes)
