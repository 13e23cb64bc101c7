"""English text to the phoneme symbols of the teacher, by way of espeak-ng.

espeak-ng (GPL) is called as a shared library while the corpus is made and is no part of what is shipped.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from functools import cache
from typing import Any

# The number of each symbol: runs that follow one another, as (first number, symbols).
_RUNS = [
    (1, ";:,.!?"),
    (9, '—…"()“” \u0303ʣʥʦʨᵝꭧAI'),
    (31, "O"),
    (33, "Q"),
    (35, "ST"),
    (39, "W"),
    (41, "Yᵊabcdef"),
    (50, "hijklmnopqrstuvwxyzɑɐɒæ"),
    (75, "βɔɕç"),
    (80, "ɖðʤə"),
    (85, "ɚɛɜ"),
    (90, "ɟ"),
    (92, "ɡ"),
    (99, "ɥ"),
    (101, "ɨɪʝ"),
    (110, "ɯɰŋɳɲɴø"),
    (118, "ɸθœ"),
    (123, "ɹ"),
    (125, "ɾɻ"),
    (128, "ʁɽʂʃʈʧ"),
    (135, "ʊʋ"),
    (138, "ʌɣɤ"),
    (142, "χʎ"),
    (147, "ʒʔ"),
    (156, "ˈˌː"),
    (162, "ʰ"),
    (164, "ʲ"),
    (169, "↓"),
    (171, "→↗↘"),
    (177, "ᵻ"),
]
TOKENS = {symbol: first + place for first, run in _RUNS for place, symbol in enumerate(run)}

_BEFORE: list[tuple[str, Any]] = [
    (r"\b([AaPp])\.\s?[Mm]\b\.?", lambda found: ("ay" if found[1] in "Aa" else "pee") + " em"),
    (r"\.{2,}", "…"),
]
_ABBREVIATED = re.compile(r"\b(Mr|Mrs|Ms|Dr|St|Prof|vs|Jr|Sr)\.(?=\s)")
_PAUSE = re.compile(r"\s*([;:,.!?…—]+)(?=[\s\"”)]|$|(?<=[…—]))\s*")
_SHARED = [
    ("ʔˌn\u0329", "ʔn"),
    ("ʔn\u0329", "ʔn"),
    ("a^ɪ", "I"),
    ("a^ʊ", "W"),
    ("d^ʒ", "ʤ"),
    ("e^ɪ", "A"),
    ("t^ʃ", "ʧ"),
    ("ɔ^ɪ", "Y"),
    ("ə^l", "ᵊl"),
    ("ʲo", "jo"),
    ("ʲə", "jə"),
    ("ʲ", ""),
    ("e^ə", "ɛː"),
    ("e", "A"),
    ("ɚ", "əɹ"),
    ("r", "ɹ"),
    ("x", "k"),
    ("ç", "k"),
    ("ɐ", "ə"),
    ("ɬ", "l"),
    ("\u0303", ""),
]
_AMERICAN = [("o^ʊ", "O"), ("ɜːɹ", "ɜɹ"), ("ɜː", "ɜɹ"), ("ɪə", "iə"), ("ː", "")]
_BRITISH = [("iə", "ɪə"), ("ə^ʊ", "Q")]
_LAST = [("o", "ɔ"), ("ɹɹ", "ɹ"), ("ɾ", "T"), ("ʔ", "t"), ("^", "")]


@cache
def _library() -> ctypes.CDLL:
    """espeak-ng, ready to give phonemes."""
    path = ctypes.util.find_library("espeak-ng")
    if path is None:
        raise RuntimeError("espeak-ng is not installed")
    library = ctypes.CDLL(path)
    library.espeak_TextToPhonemes.restype = ctypes.c_char_p
    library.espeak_TextToPhonemes.argtypes = [ctypes.POINTER(ctypes.c_char_p), ctypes.c_int, ctypes.c_int]
    if library.espeak_Initialize(2, 0, None, 0) < 0:
        raise RuntimeError("espeak-ng did not start")
    return library


def espeak(text: str, british: bool) -> str:
    """Words without punctuation in espeak-ng's own notation (IPA; ``^`` ties the two halves of one sound)."""
    library = _library()
    if library.espeak_SetVoiceByName(b"gmw/en" if british else b"gmw/en-US"):
        raise RuntimeError("espeak-ng lacks its English voice")
    rest = ctypes.c_char_p(text.encode())
    parts = []
    while rest.value:
        part = library.espeak_TextToPhonemes(ctypes.byref(rest), 1, ord("^") << 8 | 0x80 | 0x02)
        parts.append((part or b"").decode())
    return " ".join(part.strip() for part in parts if part.strip())


def phonemes(text: str, british: bool = False) -> str:
    """The teacher's symbols for an English sentence whose numbers are written out."""
    for pattern, replacement in _BEFORE:
        text = re.sub(pattern, replacement, text)
    text = _ABBREVIATED.sub(r"\1", text)
    result = ""
    for index, part in enumerate(_PAUSE.split(text)):
        if index % 2:
            result += part[0] + " "
        elif part.strip():
            result += espeak(part, british)
    for old, new in [*_SHARED, *(_BRITISH if british else _AMERICAN)]:
        result = result.replace(old, new)
    result = re.sub(r"(\S)\u0329", r"ᵊ\1", result)
    for old, new in _LAST:
        result = result.replace(old, new)
    return re.sub(r"\s+", " ", result).strip()


def tokens(symbols: str) -> list[int]:
    """The numbers of the symbols; what the teacher does not know is left out."""
    return [TOKENS[symbol] for symbol in symbols if symbol in TOKENS]


def is_british(voice: str) -> bool:
    """Whether a voice of the teacher speaks British English (``bf_``, ``bm_``)."""
    return voice.startswith("b")
