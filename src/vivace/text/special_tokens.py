"""The special tokens that CosyVoice 2 and 3 add to the Qwen2 vocabulary, as data.

Their ids follow the base vocabulary in this order: with Qwen2's 151 643 base entries ``<|endoftext|>`` is
151 643, ``<|endofprompt|>`` 151 646 and so on; a smaller base vocabulary shifts them all.
The list is the one of the reference's ``CosyVoice3Tokenizer`` (``tests/golden/frontend/special_tokens.json``).
"""

from __future__ import annotations

import re

from vivace.text.tables import words

END_OF_TEXT = "<|endoftext|>"
END_OF_PROMPT = "<|endofprompt|>"

_EVENTS = words(
    "[breath] <strong> </strong> [noise] [laughter] [cough] [clucking] [accent] [quick_breath] <laughter> "
    "</laughter> [hissing] [sigh] [vocalized-noise] [lipsmack] [mn]"
)

# ARPAbet phonemes with stress digits, for English words.
_PHONEMES = words("""
AA AA0 AA1 AA2 AE AE0 AE1 AE2 AH AH0 AH1 AH2 AO AO0 AO1 AO2 AW AW0 AW1 AW2 AY AY0 AY1 AY2 B CH D DH
EH EH0 EH1 EH2 ER ER0 ER1 ER2 EY EY0 EY1 EY2 F G HH IH IH0 IH1 IH2 IY IY0 IY1 IY2 JH K L M N NG OW
OW0 OW1 OW2 OY OY0 OY1 OY2 P R S SH T TH UH UH0 UH1 UH2 UW UW0 UW1 UW2 V W Y Z ZH
""")

# Pinyin initials and finals with tone marks, for Chinese characters.
_PINYIN = words("""
a ai an ang ao b c ch d e ei en eng f g h i ian in ing iu ià iàn iàng iào iá ián iáng iáo iè ié iòng
ióng iù iú iā iān iāng iāo iē iě iōng iū iǎ iǎn iǎng iǎo iǒng iǔ j k l m n o ong ou p q r s sh t u
uang ue un uo uà uài uàn uàng uá uái uán uáng uè ué uì uí uò uó uā uāi uān uāng uē uě uī uō uǎ uǎi
uǎn uǎng uǐ uǒ vè w x y z zh à ài àn àng ào á ái án áng áo è èi èn èng èr é éi én éng ér ì ìn ìng í
ín íng ò òng òu ó óng óu ù ùn ú ún ā āi ān āng āo ē ēi ēn ēng ě ěi ěn ěng ěr ī īn īng ō ōng ōu ū ūn
ǎ ǎi ǎn ǎng ǎo ǐ ǐn ǐng ǒ ǒng ǒu ǔ ǔn ǘ ǚ ǜ
""")

PHONEME_TAGS: tuple[str, ...] = tuple(f"[{name}]" for name in _PHONEMES)
PINYIN_TAGS: tuple[str, ...] = tuple(f"[{name}]" for name in _PINYIN)
EVENT_TAGS: tuple[str, ...] = tuple(_EVENTS)

COSYVOICE2_TOKENS: tuple[str, ...] = (
    END_OF_TEXT,
    "<|im_start|>",
    "<|im_end|>",
    END_OF_PROMPT,
    *EVENT_TAGS,
)
"""CosyVoice 2's, in id order."""

COSYVOICE3_TOKENS: tuple[str, ...] = (
    *COSYVOICE2_TOKENS,
    "<|endofsystem|>",
    *PHONEME_TAGS,
    *PINYIN_TAGS,
)
"""All special tokens in id order."""

CONTROL_TOKENS: frozenset[str] = frozenset(token for token in COSYVOICE3_TOKENS if token.startswith("<|"))
"""Tokens with which a prompt is built. Never allowed in a user's text."""

TEXT_TAGS: frozenset[str] = frozenset(COSYVOICE3_TOKENS) - CONTROL_TOKENS
"""Tags that a user may write into a text."""

AUDIBLE_TAGS: frozenset[str] = TEXT_TAGS - {"<strong>", "</strong>", "<laughter>", "</laughter>", "[accent]"}
"""Tags that make a sound of their own, so a text of nothing else can be spoken."""

PAIRED_TAGS: dict[str, str] = {"<strong>": "</strong>", "<laughter>": "</laughter>"}
"""Opening tag to closing tag."""

LONGEST_TAG = max(len(token) for token in TEXT_TAGS)

TAG_PATTERN = re.compile("|".join(re.escape(tag) for tag in sorted(TEXT_TAGS, key=len, reverse=True)))
"""Matches one tag of ``TEXT_TAGS``."""

CONTROL_PATTERN = re.compile(r"<\|[^\s<>|]{1,64}\|>")
"""Anything of the shape of a control token, known or not."""
