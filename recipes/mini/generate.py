"""Make the speech that the embedded model is trained on (teacher: Kokoro-82M, Apache-2.0)."""

from __future__ import annotations

import argparse
import io
import json
import lzma
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recipes.mini.corpus import CorpusWriter, Item
from recipes.mini.speech import SAMPLE_RATE, prepare


def read_items(path: Path, language: str | None = None, limit: int | None = None) -> list[Item]:
    """Read an item list (JSON lines, plain or .xz), optionally one language and the first few."""
    opened = lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else open(path, encoding="utf-8")
    with opened as lines:
        items = [json.loads(line) for line in lines if line.strip()]
    if language:
        items = [item for item in items if item["lang"] == language]
    return items[:limit]


def opus_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every ``(id, Opus file)`` of the tar shards in ``folder``."""
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                opened = archive.extractfile(member)
                if opened is not None and member.name.endswith(".opus"):
                    yield Path(member.name).stem, opened.read()


def unpack(args: argparse.Namespace) -> None:
    """Turn Opus shards that exist already into a corpus folder."""
    import soundfile

    known = {item["id"]: item for item in read_items(args.shards / "items.jsonl.xz", args.language)}
    with CorpusWriter(args.out) as writer:
        for name, data in opus_files(args.shards):
            if args.limit and len(writer.done) >= args.limit:
                break
            if name not in known or name in writer.done:
                continue
            samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
            if rate != SAMPLE_RATE:
                raise ValueError(f"{name}: {rate} Hz instead of {SAMPLE_RATE}")
            writer.add({"mix": None} | known[name], prepare(samples))
        print(f"{len(writer.done)} utterances, {writer.num_samples / SAMPLE_RATE / 3600:.3f} h in {args.out}")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.mini.generate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("unpack", help="turn ready Opus shards into a corpus folder")
    command.add_argument("shards", type=Path, help="folder with *.tar and items.jsonl.xz")
    command.add_argument("--out", type=Path, required=True, help="corpus folder to write")
    command.add_argument("--language", default="en", help="language to take (default: en)")
    command.add_argument("--limit", type=int, help="stop after so many utterances")
    command.set_defaults(run=unpack)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run one subcommand."""
    args = parse_arguments(argv)
    args.run(args)


if __name__ == "__main__":
    main()
