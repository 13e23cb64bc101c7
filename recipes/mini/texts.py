"""Makes the list of what the teacher says: texts, and who says each.

    python -m recipes.mini.texts --wordnet /usr/share/wordnet --sentences 19000 --out items.jsonl.xz

Two thirds are example sentences of WordNet 3.0 (its ``data.*`` files, Debian package ``wordnet-base``), one third
sentences from templates: times, dates, prices, codes, names, questions. Numbers are written out, so that text and
phonemes agree. Four base voices say three quarters; the rest is said by mixtures of voices, speakers that exist
nowhere else, eight sentences each. Held-out sentences are left out.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path

from recipes.mini.corpus import Item
from recipes.mini.heldout import bare, sentences
from vivace.text.normalize import normalize

VOICES = {"af_heart": 0.41, "am_puck": 0.15, "bf_emma": 0.10, "bm_daniel": 0.10}
"""Shares of the base voices; the rest are mixtures."""
BASES = (
    *("af_heart", "af_kore", "af_sarah", "af_alloy", "af_bella", "bf_emma", "bf_isabella"),
    *("am_puck", "am_liam", "am_eric", "am_michael", "am_fenrir", "bm_daniel", "bm_george"),
)
ITEMS_OF_A_MIX = 8
MOST_WORDS = 20

WORDS = {
    "name": "Alice Anna Diana Emily George Grace Henry Hugo Irene James Laura Nina Olivia Oscar Samuel Victor",
    "city": "Beijing Berlin Boston Chicago Delhi Dublin London Moscow Paris Prague Rome Seattle Tokyo Warsaw",
    "thing": "bicycle bridge camera garden kitchen library market order password picture printer recipe ticket",
    "kind": "careful familiar golden heavy honest old safe simple slow small warm wooden",
    "deed": "borrowed built crossed described followed found opened painted repaired watched",
    "month": "January February March April May June July August September October November December",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "turn": "first second third fourth fifth",
    "half": "a.m. p.m.",
}
NUMBERS = {"small": (2, 30), "percent": (5, 95), "hundreds": (100, 900), "many": (10_000, 990_000)}
NUMBERS |= {"date": (1, 28), "year": (1900, 2099), "hour": (1, 12), "minute": (10, 59), "digit": (0, 9)}

TEMPLATES = (
    "The train to {city} leaves at {hour}:{minute} {half} from platform {small}.",
    "Please call {name} at {hour}:{minute} {half} and ask about the {thing}.",
    "The {thing} will be ready on {day}, {month} {date}.",
    "In {year}, {name} moved from {city} to {city}.",
    "That comes to ${small}.{minute}.",
    "Your code is {digit}, {digit}, {digit}, {digit}.",
    "Your code is {digit}, {digit}, {digit}, {digit}, {digit}, {digit}.",
    "It is {small} degrees in {city} with a {percent}% chance of rain.",
    "Turn right after {hundreds} meters, then take the {turn} exit.",
    "About {many} people live within {small} miles of {city}.",
    "{name} {deed} the {kind} {thing} and {deed} the {thing}.",
    "The {kind} {thing} near the {thing} belongs to {name}.",
    "Why has nobody {deed} the {thing} in {city}?",
    "Is the {thing} {kind}?",
    "Hello {name}, how can I help you today?",
    "I'm sorry, {name}, I could not find your {thing}.",
    "Certainly, I have updated the {thing}.",
)


def examples(folder: Path) -> list[str]:
    """WordNet's example sentences that can be spoken as they are, each once, in the files' order."""
    found: dict[str, str] = {}
    for kind in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{kind}").read_text(encoding="latin-1").splitlines():
            for quoted in re.findall(r'"([^"]+)"', line.partition(" | ")[2]):
                text = quoted.strip(" ;,")
                if re.fullmatch(r"[A-Za-z][A-Za-z ,;:'!?.-]+", text) and 3 <= len(text.split()) <= MOST_WORDS:
                    text = text[0].upper() + text[1:]
                    found.setdefault(bare(text), text if text[-1] in ".!?" else f"{text}.")
    return list(found.values())


def from_templates(rng: random.Random) -> Iterator[str]:
    """Endless sentences, numbers written out."""

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        return str(rng.randint(*NUMBERS[name])) if name in NUMBERS else rng.choice(WORDS[name].split())

    while True:
        yield normalize(re.sub(r"\{(\w+)\}", fill, rng.choice(TEMPLATES)), "en")


def mixture(rng: random.Random) -> dict[str, float]:
    """Three base voices in random shares."""
    shares = [rng.expovariate(1.0) for _ in range(3)]
    return {
        name: round(share / sum(shares), 3) for name, share in zip(rng.sample(BASES, 3), shares, strict=True)
    }


def make_items(folder: Path, count: int, seed: int) -> Iterator[Item]:
    """``count`` items; the same seed and WordNet give the same ones."""
    rng = random.Random(seed)
    left_out = {bare(form) for sentence in sentences() for form in (sentence.text, sentence.spoken)}
    known = [text for text in examples(folder) if bare(text) not in left_out]
    rng.shuffle(known)
    made = (text for text in from_templates(rng) if bare(text) not in left_out)
    mixes, mix = -1, {}
    left = 0
    for index in range(count):
        text = known.pop() if known and rng.random() < 2 / 3 else next(made)
        item: Item = {"id": f"en{index:05d}", "lang": "en", "text": text}
        if rng.random() < sum(VOICES.values()):
            item["voice"] = rng.choices(list(VOICES), list(VOICES.values()))[0]
        else:
            if left == 0:
                mixes, mix, left = mixes + 1, mixture(rng), ITEMS_OF_A_MIX
            left -= 1
            item |= {"voice": f"mix{mixes:03d}", "mix": mix}
        yield item


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--wordnet", type=Path, required=True, help="folder with WordNet's data.noun and so on"
    )
    parser.add_argument("--sentences", type=int, default=19_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="file to write (.jsonl.xz)")
    args = parser.parse_args(argv)
    with lzma.open(args.out, "wt", encoding="utf-8") as out:
        for item in make_items(args.wordnet, args.sentences, args.seed):
            out.write(json.dumps(item, ensure_ascii=False) + "\n")
    print(f"{args.sentences} items in {args.out}")


if __name__ == "__main__":
    main()
