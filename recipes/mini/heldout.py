"""The held-out sentences and speakers on which the embedded model is judged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

VOICES = ("af_heart", "am_puck", "bf_emma")
TEACHER_VOICES = (*VOICES, "bm_daniel")  # what a voice is told apart from


@dataclass(frozen=True)
class Sentence:
    """A sentence as a user writes it, and with its numbers written out."""

    text: str
    spoken: str


@dataclass(frozen=True)
class Speaker:
    """A mixture of the teacher's voices that no training item has, for judging how voices are cloned."""

    name: str
    mix: dict[str, float]
    prompt: str
    text: str


SPEAKERS = (
    Speaker(
        "mixA",
        {"bm_george": 0.47, "am_liam": 0.34, "am_eric": 0.19},
        "The harbor was quiet that morning, and only a few fishing boats had returned before the fog lifted.",
        "We should have the results by the end of the week, and then we can decide together what to do next.",
    ),
    Speaker(
        "mixB",
        {"af_alloy": 0.41, "bf_isabella": 0.36, "af_sarah": 0.23},
        "My sister keeps her paintings in the attic, next to a trunk full of letters from our great aunt.",
        "If the weather holds until Saturday, we will take the table outside and have supper under the trees.",
    ),
)


def sentences() -> list[Sentence]:
    """The sentences of ``heldout.txt``: a text, and after a tab how it is read where it has digits."""
    found = []
    for line in (Path(__file__).parent / "heldout.txt").read_text(encoding="utf-8").splitlines():
        text, _, spoken = line.partition("\t")
        found.append(Sentence(text, spoken or text))
    return found


def bare(text: str) -> str:
    """A text's words only, in lower case, to compare texts by."""
    return " ".join(re.findall(r"[a-z0-9']+", text.lower()))


def seen(texts: list[str], mixes: list[dict[str, float]]) -> list[str]:
    """Which held-out texts or mixtures are among those of the training items (should be none)."""
    known = {bare(text) for text in texts}
    wanted = [form for sentence in sentences() for form in (sentence.text, sentence.spoken)]
    wanted += [text for speaker in SPEAKERS for text in (speaker.prompt, speaker.text)]
    found = [text for text in wanted if bare(text) in known]
    return found + [speaker.name for speaker in SPEAKERS if speaker.mix in mixes]
