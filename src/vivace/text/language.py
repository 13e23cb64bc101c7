"""Which language a text is in, by script and a few common words: it chooses how numbers are read."""

from __future__ import annotations

import re
import unicodedata

from vivace.text.protected import PROTECTED
from vivace.text.tables import words

READ_NUMBERS = frozenset({"en", "zh"})
"""Languages whose numbers we write out. All others keep their digits: the model reads them itself."""

_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_KANA = re.compile("[\u3041-\u3096\u30a1-\u30fa\u31f0-\u31ff\uff66-\uff9d]")
_HANGUL = re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]")
_CYRILLIC = re.compile("[\u0400-\u052f]")
GREEK_ALONE = re.compile("(?<![\u0370-\u03ff])[α-ωΑ-Ω](?![\u0370-\u03ff])")
"""A Greek letter that stands for itself, as in formulas."""
_OTHER_SCRIPT = re.compile("[\u0370-\u03ff\u0530-\u10ff\u1200-\u1cff\u2d00-\u2ddf\ua000-\uabff\ufb1d-\ufefc]")
CJK = f"{_HAN.pattern[1:-1]}{_KANA.pattern[1:-1]}{_HANGUL.pattern[1:-1]}"
"""Chinese characters, kana and Hangul, for use in a character class."""
_CJK_LETTER = re.compile(f"[{CJK}]")
_LATIN_WORD = re.compile(r"[A-Za-z\u00c0-\u024f\u1e00-\u1eff]+(?:['’][A-Za-z]+)?")

# Words found often in one of the languages and not in the other list.
_ENGLISH = frozenset(
    words(
        "the and of to is it in that you he was for on are with his they at be this have from or had by but not "
        "what all were we when your can said there an each which she do how their if will about many then them "
        "these some her would make him into has look more could been now find "
        "my its our i'm it's don't isn't can't won't let's hello please yes "
        "today version chapter page call cost costs number over under between than very january february march april "
        "june july august september october november december monday tuesday wednesday thursday friday saturday "
        "sunday"
    )
)
_OTHER_LATIN = (
    frozenset(
        words(
            "der das und ist nicht ein eine einen einem ich wir ihr sie mit auf für dem zu von sich auch wird sind "
            "haben bist wie aber oder nur nach bei wenn dann wirklich kostet uhr jahre jahr "
            "les une et est pas que qui dans sur avec je tu nous vous ils elle sont cette mais où aux avez coûte "
            "heures ans année es por para pero más muy está tengo tiene cuesta años euros "
            "il gli che è non sono una della nel ho anche più costa anni "
            "os uma não em dos da com são você tem anos het een niet ik zijn voor maar ook heeft "
            "nie się na że jak och att är inte har bir ve için çok değil"
        )
    )
    - _ENGLISH
)
# Foreign letters in words that English has taken over.
_LOAN_WORDS = frozenset(
    words("café cafe naïve résumé fiancé fiancée cliché façade déjà touché piñata jalapeño señor über")
)
_NAMES = {
    "english": "en",
    "chinese": "zh",
    "mandarin": "zh",
    "cantonese": "zh",
    "japanese": "ja",
    "korean": "ko",
    "russian": "ru",
    "german": "de",
    "french": "fr",
    "spanish": "es",
    "italian": "it",
    "portuguese": "pt",
    "yue": "zh",
    "cmn": "zh",
    "auto": "",
}


def language_code(language: str | None) -> str | None:
    """Two-letter code of a language named in any usual way (``en-US``, ``Chinese``); None for none or ``auto``."""
    if language is None:
        return None
    name = re.split("[-_]", language.strip().lower())[0]
    return _NAMES.get(name, name) or None


def is_language(language: str) -> bool:
    """Whether it has the form of a language's code or is a name that ``language_code`` knows."""
    code = language_code(language)
    return code is None or (len(code) in (2, 3) and code.isascii() and code.isalpha())


def detect_language(text: str, default: str = "en") -> str:
    """``zh``, ``ja``, ``ko``, ``ru``, ``en``, ``other``; ``default`` where nothing tells (digits only).

    Han characters with kana are Japanese, with Hangul Korean, else Chinese; a few of them in a Latin sentence decide
    nothing. Latin text is English unless words or letters of another European language outweigh.
    """
    text = PROTECTED.sub(" ", text)  # the "com" of an address is no Portuguese
    text = GREEK_ALONE.sub(" ", text)  # a formula is not Greek
    if not text.isascii() and _is_mostly_cjk(text):
        if _KANA.search(text):
            return "ja"
        if _HANGUL.search(text):
            return "ko"
        if _HAN.search(text):
            return "ja" if default == "ja" else "zh"
    if not text.isascii():
        cyrillic = len(_CYRILLIC.findall(text))
        other = len(_OTHER_SCRIPT.findall(text))
        if cyrillic or other:
            latin = len(re.findall("[A-Za-z]", text))
            if max(cyrillic, other) * 2 > latin:
                return "ru" if cyrillic >= other else "other"
    return _latin_language(text, default)


def _is_mostly_cjk(text: str) -> bool:
    """Whether a text is written in Chinese, Japanese or Korean: it may name things in Latin letters."""
    letters = len(_CJK_LETTER.findall(text))
    latin = _LATIN_WORD.findall(text)
    # A word of a sentence counts for two characters, a name for one.
    return letters > 0 and letters >= len(latin) * (2 if _is_english(latin) else 1)


def is_english_phrase(text: str) -> bool:
    """Whether Latin words are English rather than names and terms: one of the commonest is among them."""
    return _is_english(_LATIN_WORD.findall(text))


def _is_english(latin: list[str]) -> bool:
    return len(latin) > 1 and any(word == "I" or word.lower() in _ENGLISH for word in latin)


def _latin_language(text: str, default: str) -> str:
    english = other = words = 0
    for match in _LATIN_WORD.finditer(text):
        word = match.group().lower()
        words += 1
        if word in _ENGLISH:
            english += 1
        elif word in _OTHER_LATIN or (not word.isascii() and _is_foreign(word)):
            other += 1
    if default == "other":
        return "en" if english > 1 and not other else default
    if other > english or (other and not english):
        return "other"
    if english or default == "en":
        return "en"
    return "en" if default == "zh" and words > 2 else default


def _is_foreign(word: str) -> bool:
    if word in _LOAN_WORDS:
        return False
    decomposed = unicodedata.normalize("NFD", word)
    return any(unicodedata.combining(letter) for letter in decomposed) or any(
        letter in "ßøæœłıđ" for letter in word
    )
