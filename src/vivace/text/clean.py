"""Checks of a user's text, and removal of what nobody would read aloud.

Everything here is linear in the length of the text and raises only ``InvalidTextError``.
"""

from __future__ import annotations

import re
import unicodedata

from vivace.errors import InvalidTextError
from vivace.text.markdown import strip_markdown
from vivace.text.special_tokens import AUDIBLE_TAGS, CONTROL_PATTERN, PAIRED_TAGS, TAG_PATTERN

# SSML and HTML elements. Only known names: `x<y and z>w` is mathematics, not mark-up.
_ELEMENTS = (
    "speak|break|voice|prosody|emphasis|say-as|phoneme|sub|sup|p|s|mark|audio|lang|w|par|seq|media|desc|lexicon|"
    "metadata|meta|html|head|title|body|div|span|a|b|i|u|em|br|hr|img|script|style|h[1-6]|ul|ol|li|table|thead|"
    "tbody|tr|td|th|code|pre|font|svg|iframe|form|input|button|label|link|small|blockquote|video|source|"
    "mstts:[a-z-]+|amazon:[a-z-]+|google:[a-z-]+"
)
MARKUP = re.compile(
    rf"<!--.{{0,2000}}?-->|<[!?][A-Za-z][^<>]{{0,300}}>|</?(?:{_ELEMENTS})(?:[\s/][^<>]{{0,300}})?>",
    re.IGNORECASE | re.DOTALL,
)
_ENTITIES = {
    "&amp;": "&",
    "&lt;": "<",
    "&gt;": ">",
    "&quot;": '"',
    "&apos;": "'",
    "&#39;": "'",
    "&nbsp;": " ",
    "&rsquo;": "’",
    "&lsquo;": "‘",
    "&rdquo;": "”",
    "&ldquo;": "“",
    "&mdash;": "—",
    "&ndash;": "–",
    "&hellip;": "…",
    "&deg;": "°",
    "&euro;": "€",
    "&pound;": "£",
}
_ENTITY = re.compile("|".join(_ENTITIES))

LINE_BREAKS = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
_ANY_BREAK = re.compile(r"\r\n|[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_BREAK_AND_SPACES = re.compile(r" ?\n[ \n]*")
# Letters in fancy dress: mathematical alphabets, full-width Latin, ligatures.
_STYLED = re.compile("[\U0001d400-\U0001d7ff\uff21-\uff3a\uff41-\uff5a\ufb00-\ufb06]")
# Units that Unicode squeezed into one character.
_SQUEEZED = str.maketrans(
    {
        "㎡": "m²",
        "㎥": "m³",
        "㎏": "kg",
        "㎜": "mm",
        "㎝": "cm",
        "㎞": "km",
        "㎎": "mg",
        "㎖": "ml",
        "㏄": "cc",
        "ℓ": "L",
    }
)
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_SPACES = re.compile(r"[^\S\n]+")
# A run of one mark longer than three says nothing more and costs the number library seconds.
_MARK_RUN = re.compile(r"([^\w\s])\1{3,}")
_COMBINING = r"[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
_COMBINING_RUN = re.compile(f"({_COMBINING}{{4}}){_COMBINING}+")
_EMOJI_CLASS = (
    "[\U0001f000-\U0001faff\U000e0000-\U000e01ef\u2600-\u27bf\u2b00-\u2bff\ufe00-\ufe0f\u20e3\u23e9-\u23fa]"
)
_EMOJI = re.compile(_EMOJI_CLASS)
_EMOJI_BEFORE_MARK = re.compile(rf" ?{_EMOJI_CLASS}+(?=[.,!?;:…])")
# Joiners shape Persian and Indic words; elsewhere (emoji families) they say nothing.
_LOOSE_JOINER = re.compile(r"(?<!\w)[\u200c\u200d]+|[\u200c\u200d]+(?!\w)")

EMPTY_ADVICE = "the text is empty; send at least one word"
UNSPEAKABLE_ADVICE = "the text holds nothing that can be spoken; send at least one letter or number"


def check_text(text: object, max_characters: int) -> str:
    """``text`` if it is a string of valid Unicode within the limit.

    Raises:
        InvalidTextError: ``invalid_type``, ``input_too_long``, ``invalid_utf8``.
    """
    if not isinstance(text, str):
        raise InvalidTextError("the text must be a string", code="invalid_type", param="text")
    if len(text) > max_characters:
        raise InvalidTextError(
            f"the text is longer than {max_characters} characters; send it in parts",
            code="input_too_long",
            param="text",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidTextError(
            "the text holds half of a character (a lone surrogate); send valid Unicode",
            code="invalid_utf8",
            param="text",
        ) from None
    return text


def refuse_control_tokens(text: str, param: str = "text") -> None:
    """Raise if ``text`` holds a token that only our own templates may use.

    Raises:
        InvalidTextError: ``special_token_not_allowed``.
    """
    if "<|" in text and CONTROL_PATTERN.search(text):
        raise InvalidTextError(
            "the text holds a control token of the form <|name|>; remove it",
            code="special_token_not_allowed",
            param=param,
        )


def clean_text(text: str) -> str:
    """Drop what is not speech: controls, invisible characters, emoji, mark-up; NFC; one kind of line break.

    Control tokens are refused before and after, because taking characters out may make one.
    Line breaks become single ``\\n``, other white space single spaces; both are stripped at the ends.

    Raises:
        InvalidTextError: ``special_token_not_allowed``.
    """
    refuse_control_tokens(text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        text = _COMBINING_RUN.sub(r"\1", text)
        text = _EMOJI.sub(" ", _EMOJI_BEFORE_MARK.sub("", text)).translate(_SQUEEZED)
    text = _ANY_BREAK.sub("\n", text)
    if not (text.isascii() and text.replace("\n", "").isprintable()):
        text = _TERMINAL_CODE.sub("", text)
        text = "".join(character for character in text if _is_kept(character))
        text = _LOOSE_JOINER.sub("", text)
        text = _STYLED.sub(lambda match: unicodedata.normalize("NFKC", match.group()), text)
    if "<" in text:
        text = MARKUP.sub(" ", text)
    if "&" in text:
        text = _ENTITY.sub(lambda match: _ENTITIES[match.group()], text)
    text = strip_markdown(text)
    text = _MARK_RUN.sub(r"\1\1\1", text)
    text = _drop_unpaired(text)
    text = _SPACES.sub(" ", text)
    text = _BREAK_AND_SPACES.sub("\n", text).strip()
    refuse_control_tokens(text)
    return text


def require_content(cleaned: str, *, is_blank: bool) -> None:
    """Raise if nothing of the cleaned text can be spoken.

    Raises:
        InvalidTextError: ``empty_input`` if the text was blank before cleaning, otherwise ``unpronounceable_input``.
    """
    if is_speakable(cleaned):
        return
    if is_blank:
        raise InvalidTextError(EMPTY_ADVICE, code="empty_input", param="text")
    raise InvalidTextError(UNSPEAKABLE_ADVICE, code="unpronounceable_input", param="text")


def is_blank(text: str) -> bool:
    """Whether ``text`` shows nothing: white space, controls and invisible characters only."""
    return all(character.isspace() or unicodedata.category(character) in ("Cc", "Cf") for character in text)


def squeeze(raw: str, cleaned: str) -> str:
    """``cleaned`` with a space or a line break at its ends where ``raw`` has one."""
    before = " " if raw[:1].isspace() else ""
    tail = raw[len(raw.rstrip()) :]
    return before + cleaned + ("\n" if any(mark in LINE_BREAKS for mark in tail) else " " if tail else "")


def is_speakable(text: str) -> bool:
    """Whether ``text`` holds a letter, a digit or an audible tag."""
    spans = list(TAG_PATTERN.finditer(text))
    if any(match.group() in AUDIBLE_TAGS for match in spans):
        return True
    rest = TAG_PATTERN.sub("", text) if spans else text
    return any(character.isalnum() for character in rest)


def _is_kept(character: str) -> bool:
    if character in "\n\u200c\u200d":
        return True
    if character.isspace():
        return True
    # Control, format (bidi, zero width), private use, unassigned.
    return unicodedata.category(character) not in ("Cc", "Cf", "Co", "Cn")


def _drop_unpaired(text: str) -> str:
    """Remove opening tags without a closing one, and the reverse; pairs do not nest in themselves."""
    for opening, closing in PAIRED_TAGS.items():
        if opening not in text and closing not in text:
            continue
        parts = re.split(f"({re.escape(opening)}|{re.escape(closing)})", text)
        open_at: int | None = None
        for index in range(1, len(parts), 2):
            if parts[index] == opening and open_at is None:
                open_at = index
            elif parts[index] == closing and open_at is not None:
                open_at = None
            else:
                parts[index] = ""
        if open_at is not None:
            parts[open_at] = ""
        text = "".join(parts)
    return text
