"""Runs the stages of the recipe on one GPU, side by side where they allow it, inside a time box.

    PYTHONPATH=src:. python3 -m recipes.mini.run --data CORPUS --work WORK --out OUT --minutes 9.5

Order: speech tokenizer, with the vocoder and the speaker encoder beside it; then tokens and speaker embeddings of
the whole corpus; then the flow and the speech LM, with the vocoder still going on. Every stage resumes from files in
``WORK``; what a later run needs is copied to ``OUT`` (each file at most 16 MB). Logs go to ``WORK/*.log``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path


class Stage:
    """One training script in its own process, its output in a log file."""

    def __init__(self, name: str, arguments: list[str], work: Path) -> None:
        self.name = name
        self.log = work / f"{name}.log"
        self.started = time.monotonic()
        with self.log.open("a") as log:
            command = [sys.executable, "-u", "-m", *arguments]
            print(f"[{name}] {' '.join(arguments)}", flush=True)
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ)

    def wait(self) -> bool:
        code = self.process.wait()
        seconds = time.monotonic() - self.started
        print(f"[{self.name}] exit {code} after {seconds:.0f} s", flush=True)
        lines = self.log.read_text(errors="replace").splitlines()
        shown = lines[-6:] if code == 0 else lines[-30:]
        print("\n".join(f"    {line[:220]}" for line in shown), flush=True)
        return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--tokenizer-minutes", type=float, default=3.0)
    parser.add_argument("--speaker-minutes", type=float, default=1.2)
    parser.add_argument("--lm-minutes", type=float, default=3.0)
    parser.add_argument("--levels", type=int, default=6)
    parser.add_argument("--skip", nargs="*", default=[], help="stages whose files are already in WORK")
    args = parser.parse_args()
    deadline = time.monotonic() + args.minutes * 60
    work, out = args.work, args.out
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    data = ["--data", str(args.data)]

    def left(reserve_s: float) -> float:
        return max(0.3, (deadline - time.monotonic() - reserve_s) / 60)

    def stage(name: str, module: str, *extra: str, folder: str | None = None) -> Stage:
        target = ["--out", str(work / (folder or name))]
        return Stage(name, [f"recipes.mini.{module}", *extra[:1], *data, *target, *extra[1:]], work)

    def train(name: str, minutes: float, *extra: str) -> Stage:
        resume = work / name / "resume.pt"
        again = ["--resume", str(resume)] if resume.exists() else []
        arguments = [*data, "--out", str(work / name), "--minutes", f"{minutes:.2f}", *again, *extra]
        return Stage(name, [f"recipes.mini.train_{name}", *arguments], work)

    running: dict[str, Stage] = {}
    if "vocoder" not in args.skip:
        running["vocoder"] = train("vocoder", left(20))
    if "speaker" not in args.skip:
        running["speaker"] = train("speaker", args.speaker_minutes)
    if "tokenizer" not in args.skip:
        train("tokenizer", args.tokenizer_minutes, "--levels", str(args.levels)).wait()
    if "speaker" in running:
        running.pop("speaker").wait()
    both = [
        Stage("tokenize", ["recipes.mini.train_tokenizer", "tokenize", *data, "--out", str(work)], work),
        Stage("embed", ["recipes.mini.train_speaker", "embed", *data, "--out", str(work)], work),
    ]
    for one in both:
        one.wait()
    shared = ["--tokens", str(work / "tokens.npz"), "--speakers", str(work / "speakers.npz")]
    if "flow" not in args.skip:
        running["flow"] = train("flow", left(20), *shared)
    if "lm" not in args.skip:
        running["lm"] = train("lm", min(args.lm_minutes, left(20)), *shared[:2])
    for one in running.values():
        one.wait()
    collect(work, out)


def collect(work: Path, out: Path) -> None:
    """Copies what is worth keeping, logs in one archive."""
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        for path in sorted([*work.glob("*.log"), *work.glob("*/*.json"), *work.glob("*/*.wav")]):
            archive.add(path, arcname=str(path.relative_to(work)))
    for path in sorted([*work.glob("*/*.pt"), *work.glob("*.npz")]):
        name = path.name if path.parent == work else f"{path.parent.name}-{path.name}"
        size = path.stat().st_size
        print(
            f"{name}: {size / 1e6:.1f} MB{'' if size <= 16 * 2**20 else ' (over 16 MB, not copied)'}",
            flush=True,
        )
        if size <= 16 * 2**20:
            shutil.copyfile(path, out / name)


if __name__ == "__main__":
    main()
