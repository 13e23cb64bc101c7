"""Makes the samples of ``docs/mini.md``: audio files, their transcripts, and a spectrogram picture (needs matplotlib).

python -m recipes.mini.samples --out docs/samples [--clone PROMPT.wav --clone-text WORDS]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from vivace import Engine, SynthesisRequest
from vivace.audio.features import mel_24k
from vivace.audio.formats import open_writer

SAMPLES = (
    ("heart", "Hello! This is Vivace, speaking on your own computer. It is 8:05, and the answer is 42."),
    ("puck", "Would you like to hear a story, or shall we play some music instead?"),
    ("emma", "The first train to Cambridge leaves at 6:45 from platform 9."),
    ("daniel", "Good evening. Here is the weather for tomorrow: clouds in the morning, and rain by noon."),
)
CLONE_TEXT = "I have never said this sentence before, but it should sound like me."


def draw(mels: list[tuple[str, np.ndarray]], path: Path) -> None:
    """Log-mel spectrograms one above the other, 50 frames a second."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    figure, axes = plt.subplots(len(mels), 1, figsize=(10, 2.1 * len(mels)), layout="constrained")
    longest = max(len(mel) for _, mel in mels) / 50
    for axis, (title, mel) in zip(np.atleast_1d(axes), mels, strict=True):
        axis.imshow(mel.T, origin="lower", aspect="auto", extent=(0, len(mel) / 50, 0, 80), vmin=-9, vmax=1)
        axis.set_title(title, loc="left", fontsize=9)
        axis.set_xlim(0, longest)
        axis.set_ylabel("mel band")
    axes[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=80)
    with Image.open(path) as picture:  # 64 colours are enough, and a third of the bytes
        picture.convert("RGB").quantize(64).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clone", type=Path, help="recording of a speaker to clone")
    parser.add_argument("--clone-text", default="", help="what it says")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    mels = []
    with Engine.open("mini") as engine:
        jobs = [(name, engine.voices.get(name), text) for name, text in SAMPLES]
        if args.clone is not None:
            jobs.append(("clone", engine.make_voice(args.clone, args.clone_text), CLONE_TEXT))
        for name, voice, text in jobs:
            result = engine.synthesize(SynthesisRequest(text, voice=voice))
            with open_writer(args.out / f"{name}.mp3", result.sample_rate_hz) as writer:
                writer.write(result.samples)
            mels.append((f"{name}: {text}", mel_24k(result.samples)))
            print(f"| [{name}.mp3](samples/{name}.mp3) | {name} | {text} |")
    draw(mels, args.out / "spectrograms.png")


if __name__ == "__main__":
    main()
