"""Runs stages of the recipe side by side where they allow it, on one or two GPUs, inside a time box.

    PYTHONPATH=src:. python3 -m recipes.mini.run --data CORPUS --work WORK --out OUT --minutes 9 \
        --stages tokenizer speaker vocoder tokens flow lm

Tokenizer and speaker encoder come first, then ``tokens`` (speech tokens and speaker embeddings of the whole corpus),
then flow and speech LM; the vocoder trains beside all of them. A stage whose ``resume.pt`` lies in ``WORK`` goes on
from there. What a later run needs is packed into ``OUT`` in pieces of at most 15 MB
(``cat OUT/parts.* | tar x``), the most important files first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

PIECE_BYTES = 15 * 2**20
MOST_PIECES = 4
KEPT = (
    "tokenizer/tokenizer.pt",
    "speaker/speaker.pt",
    "tokens.npz",
    "lm/lm.pt",
    "flow/flow.pt",
    "vocoder/vocoder.pt",
    "lm/decoded.json",
    "vocoder/resume.pt",
    "vocoder/resume_discriminators.pt",
)


class Stage:
    """One script in its own process, its output in a log file."""

    def __init__(self, name: str, arguments: list[str], work: Path, gpu: int = 0) -> None:
        self.name = name
        self.log = work / f"{name}.log"
        self.started = time.monotonic()
        with self.log.open("a") as log:
            print(f"[{name}] {' '.join(arguments)}", flush=True)
            command = [sys.executable, "-u", "-m", *arguments]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def wait(self, deadline: float) -> None:
        """Wait for the end, at most until ``deadline``, and print the end of the log."""
        try:
            code = str(self.process.wait(max(1.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = "stopped at the deadline"
        print(f"[{self.name}] {code} after {time.monotonic() - self.started:.0f} s", flush=True)
        lines = self.log.read_text(errors="replace").splitlines()
        shown = lines[-8:] if code == "0" else lines[-25:]
        print("\n".join(f"    {line[:300]}" for line in shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--tokenizer-minutes", type=float, default=3.0)
    parser.add_argument("--speaker-minutes", type=float, default=1.2)
    parser.add_argument("--lm-minutes", type=float, default=4.0)
    parser.add_argument(
        "--loading-seconds", type=float, default=30.0, help="what a stage needs besides training"
    )
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument(
        "--vocoder-gpu", type=int, default=0, help="1: the vocoder has a second GPU to itself"
    )
    parser.add_argument("--stages", nargs="+", required=True)
    args = parser.parse_args()
    deadline = time.monotonic() + args.minutes * 60
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    data = ["--data", str(args.data)]

    def left() -> float:
        return max(0.2, (deadline - time.monotonic() - args.loading_seconds) / 60)

    def train(name: str, minutes: float, *extra: str) -> Stage:
        resume = work / name / "resume.pt"
        again = ["--resume", str(resume)] if resume.exists() else []
        options = ["--out", str(work / name), "--minutes", f"{min(minutes, left()):.2f}", *again, *extra]
        gpu = args.vocoder_gpu if name == "vocoder" else 0
        return Stage(name, [f"recipes.mini.train_{name}", *data, *options], work, gpu)

    side: list[Stage] = []
    if "vocoder" in args.stages:
        side.append(train("vocoder", 99))
    encoders = []
    if "speaker" in args.stages:
        encoders.append(train("speaker", args.speaker_minutes))
    if "tokenizer" in args.stages:
        encoders.append(train("tokenizer", args.tokenizer_minutes, "--levels", str(args.levels)))
    for stage in encoders:
        stage.wait(deadline)
    if "tokens" in args.stages:
        both = [
            Stage("tokenize", ["recipes.mini.train_tokenizer", "tokenize", *data, "--out", str(work)], work),
            Stage("embed", ["recipes.mini.train_speaker", "embed", *data, "--out", str(work)], work),
        ]
        for stage in both:
            stage.wait(deadline)
    tokens = ["--tokens", str(work / "tokens.npz")]
    if "flow" in args.stages:
        side.append(train("flow", 99, *tokens, "--speakers", str(work / "speakers.npz")))
    if "lm" in args.stages:
        hints = ["--recogniser", str(work / "tokenizer/tokenizer.pt")]
        train("lm", args.lm_minutes, *tokens, *hints).wait(deadline)
        check = ["--model", str(work / "lm/lm.pt"), "--recogniser", str(work / "tokenizer/tokenizer.pt")]
        out = ["--out", str(work / "lm/decoded.npz"), "--sweep", "--minutes", "0.4"]
        Stage("check", ["recipes.mini.train_lm", "check", *data, *tokens, *check, *out], work).wait(deadline)
    for stage in side:
        stage.wait(deadline)
    pack(work, args.out)


def pack(work: Path, out: Path) -> None:
    """Everything worth keeping, in pieces."""
    archive = work / "parts.tar"
    with tarfile.open(archive, "w") as tar:
        for name in [
            *KEPT,
            *(str(p.relative_to(work)) for p in [*work.glob("*.log"), *work.glob("*/*.json")]),
        ]:
            path = work / name
            if not path.exists():
                continue
            if archive.stat().st_size + path.stat().st_size > PIECE_BYTES * MOST_PIECES:
                print(f"{name}: left out", flush=True)
                continue
            tar.add(path, arcname=name)
            tar.fileobj.flush()  # type: ignore[union-attr]
            print(f"{name}: {path.stat().st_size / 1e6:.2f} MB", flush=True)
    content = archive.read_bytes()
    for index in range(0, len(content), PIECE_BYTES):
        (out / f"parts.{index // PIECE_BYTES}").write_bytes(content[index : index + PIECE_BYTES])


if __name__ == "__main__":
    main()
