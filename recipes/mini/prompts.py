"""Lets the teacher speak the prompts of the embedded model's built-in voices.

    python -m recipes.mini.prompts --teacher TEACHER --out PROMPTS

Writes ``NAME.wav`` and ``NAME.txt`` (its words) for each voice, as ``assemble`` reads them. Needs espeak-ng.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.mini.corpus import Item
from recipes.mini.generate import write_wav

FOX = "The quick brown fox jumps over the lazy dog near the river."
JACKET = "Please bring a warm jacket, because the evenings are getting cold."
PROMPTS = {
    "heart": ("af_heart", FOX),
    "puck": ("am_puck", JACKET),
    "emma": ("bf_emma", JACKET),
    "daniel": ("bm_daniel", FOX),
}
"""Name of the built-in voice: the teacher's voice, and what it says."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--teacher", type=Path, required=True, help="folder with all that generate pack wrote"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the WAV files")
    parser.add_argument("--seed", type=int, default=1, help="seed of the excitation's noise")
    args = parser.parse_args(argv)

    from recipes.mini.phonemes import is_british, phonemes
    from recipes.mini.teacher import Teacher

    items: list[Item] = [
        {"id": name, "voice": voice, "text": text, "phonemes": phonemes(text, is_british(voice))}
        for name, (voice, text) in PROMPTS.items()
    ]
    for item, samples in Teacher(args.teacher).speak(items, seed=args.seed):
        write_wav(args.out / f"{item['id']}.wav", samples)
        (args.out / f"{item['id']}.txt").write_text(f"{item['text']}\n", encoding="utf-8")
        print(f"{item['id']}: {len(samples) / 24_000:.2f} s")


if __name__ == "__main__":
    main()
