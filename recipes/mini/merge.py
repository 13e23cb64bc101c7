"""Joins corpus folders that were made side by side (on several GPUs) into one.

python -m recipes.mini.merge PART PART … --out CORPUS
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path


def merge(parts: list[Path], out: Path) -> int:
    """Write ``audio.i16`` and ``items.jsonl`` of all parts, offsets moved; returns the number of items."""
    out.mkdir(parents=True, exist_ok=True)
    samples, count = 0, 0
    with (out / "audio.i16").open("wb") as audio, (out / "items.jsonl").open("w", encoding="utf-8") as items:
        for part in parts:
            for line in (part / "items.jsonl").read_text(encoding="utf-8").splitlines():
                item = json.loads(line)
                item["offset"] += samples
                items.write(json.dumps(item, ensure_ascii=False) + "\n")
                count += 1
            with (part / "audio.i16").open("rb") as source:
                shutil.copyfileobj(source, audio, 1 << 24)
            samples += (part / "audio.i16").stat().st_size // 2
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(f"{merge(args.parts, args.out)} utterances in {args.out}")


if __name__ == "__main__":
    main()
