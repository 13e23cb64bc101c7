"""Train the embedded model's speech LM from the tokens of a corpus, and check what it writes.

    python -m recipes.mini.train_lm --data CORPUS --tokens tokens.npz --out FOLDER --minutes 4
    python -m recipes.mini.train_lm check --data CORPUS --tokens tokens.npz --model FOLDER/lm.pt \\
        [--recogniser tokenizer.pt] [--sweep] --out decoded.npz

Sequence formats and the reasons for them are in ``lm_data``, sizes and the interleaving ratio in ``config``.
``lm.pt`` holds the averaged weights with the lowest held-out loss, in half precision; ``resume.pt`` the plain
weights at the end, from which ``--resume`` goes on. The learning rate follows the time used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.mini.config import mini_lm_config
from recipes.mini.lm_align import follow
from recipes.mini.lm_check import check
from recipes.mini.lm_data import IGNORE, LMData, Plan, add_hints, batches, build, load, plan, silent_ids
from recipes.mini.lm_step import Trainer, autocast, bucketed, loss_function
from recipes.mini.schedule import Ema, Progress
from recipes.mini.train_tokenizer import is_held_out
from vivace.config import SpeechLMConfig
from vivace.models.speech_lm import SpeechLM

SMALLEST_SPEECH_TOKENS = 10
EMA_EVERY = 4
WAIT_EVERY = 20
RISING_STEPS = 300


def new_model(config: SpeechLMConfig, dropout: float, seed: int) -> SpeechLM:
    """Fresh weights: normal with 0.02, the layers' outputs smaller as they add up."""
    torch.manual_seed(seed)
    lm = SpeechLM(config, dropout)
    for name, weight in lm.named_parameters():
        if weight.ndim == 2:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(weight, std=0.02 / (2 * config.num_layers) ** 0.5 if last else 0.02)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)
    return lm


def save(path: Path, lm: SpeechLM, report: dict[str, Any]) -> None:
    """Half-precision weights with sizes and report; about 9 MB."""
    state = {name: value.half().cpu() for name, value in lm.state_dict().items()}
    partial = path.with_suffix(".partial")
    torch.save({"config": asdict(lm.config), "report": report, "state": state}, partial)
    partial.replace(path)


def load_lm(path: Path, device: torch.device, dropout: float = 0.0) -> tuple[SpeechLM, dict[str, Any]]:
    """A saved model in float32 (evaluation mode) and its report."""
    found = torch.load(path, map_location="cpu", weights_only=True)
    sizes = {k: v for k, v in found["config"].items() if k not in ("sampling", "mix_ratio")}
    config = replace(
        mini_lm_config(sizes["speech_token_size"]), **sizes, mix_ratio=tuple(found["config"]["mix_ratio"])
    )
    lm = SpeechLM(config, dropout)
    lm.load_state_dict({name: value.float() for name, value in found["state"].items()})
    return lm.to(device).eval(), found["report"]


def usable(data: LMData) -> np.ndarray:
    """Which items have text and enough speech."""
    return (data.text_length > 1) & (data.speech_length >= SMALLEST_SPEECH_TOKENS)


class HeldOut:
    """Fixed sequences of held-out items, one set per format."""

    def __init__(self, data: LMData, items: np.ndarray, positions: int) -> None:
        self._data, self._positions = data, positions
        random = np.random.default_rng(0)
        self._plans: dict[str, Plan] = {
            "plain": plan(data, items, random, joined=False, varied=False, interleaved=False),
            "streamed": plan(data, items, random, joined=False, varied=False, interleaved=True),
            "prompted": plan(data, items, random, joined=True, varied=True, interleaved=False),
        }

    @torch.inference_mode()
    def losses(self, lm: SpeechLM) -> dict[str, float]:
        """Mean loss per target, by format."""
        lm.eval()
        measure = loss_function(lm)
        out = {}
        for name, rows in self._plans.items():
            total, count = 0.0, 0
            for which in batches(self._data, rows, self._positions, np.random.default_rng(0)):
                ids, targets = build(self._data, rows, which)
                with autocast(ids.device):
                    loss = measure(ids, targets, None)
                wanted = int((targets != IGNORE).sum())
                total, count = total + float(loss) * wanted, count + wanted
            out[name] = round(total / max(1, count), 4)
        return out


def train(args: argparse.Namespace) -> None:
    """Train until the time is over; keep the best averaged weights."""
    begun = time.monotonic()
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    with np.load(args.tokens) as packed:
        codes = int(packed["codes"])
    config = mini_lm_config(codes)
    data = load(args.data, args.tokens, config, device, args.seed)
    held = np.array([is_held_out(item) for item in data.items])
    training, checking = (usable(data) & ~held).nonzero()[0], (usable(data) & held).nonzero()[0][:400]
    if args.resume:
        lm, _ = load_lm(args.resume, device, args.dropout)
    else:
        lm = new_model(config, args.dropout, args.seed).to(device)
    print(
        f"lm: {sum(p.numel() for p in lm.parameters()) / 1e6:.2f} M parameters, {codes} codes, "
        f"{len(training)} utterances, {data.speech_length[training].sum() / 90_000:.2f} h, {len(checking)} held out, "
        f"ready in {time.monotonic() - begun:.1f} s",
        flush=True,
    )
    held_out = HeldOut(data, checking, args.positions)
    if args.recogniser:  # after the held-out rows were chosen, so that those are never cut
        align(data, args.recogniser)
    torch.manual_seed(args.seed)
    random = np.random.default_rng(args.seed)
    progress = Progress(args.minutes, args.steps, begun)
    trainer = Trainer(
        lm.train(),
        data,
        mode=args.mode,
        decay=args.decay,
        smoothing=args.smoothing,
        most_noise=args.noise,
        hint_share=args.hint_share,
    )
    ema = Ema(lm, span=args.ema / EMA_EVERY)
    best, epoch, checked = float("inf"), 0, time.monotonic()
    since, printed = 0, time.monotonic()

    def look() -> None:
        nonlocal best, checked
        losses = held_out.losses(ema.model)
        mean = sum(losses.values()) / len(losses)
        print(f"       epoch {epoch} held out: {losses}{' best' if mean < best else ''}", flush=True)
        if mean < best:
            best = mean
            report = {"held_out": losses, "steps": progress.steps, "epoch": epoch}
            save(args.out / "lm.pt", ema.model, report)
        checked = time.monotonic()

    while not progress.over():
        rows = plan(data, random.permutation(training), random)
        trainer.new_plan(rows)
        for which, width in bucketed(rows.totals(data), args.positions, random):
            # The first steps take long (graphs, compiler), so the rate must also rise with their number.
            trainer.set_rate(progress.rate(args.rate) * min(1.0, (progress.steps + 1) / RISING_STEPS))
            trainer.step(torch.from_numpy(which).to(device), width)
            progress.steps += 1
            if progress.steps % EMA_EVERY == 0:
                ema.update(lm)
            # Only here does the host wait for the device, so that the clock is true.
            if progress.steps % WAIT_EVERY == 0 or progress.steps <= 3:
                since += trainer.steps_summed
                mean = trainer.mean_loss()
                if time.monotonic() - printed > 5:
                    speed = since / (time.monotonic() - printed)
                    done = f"{progress.fraction():6.1%} epoch {epoch} step {progress.steps}"
                    print(f"{done} loss {mean:.4f} {speed:.1f} it/s {trainer.mode}", flush=True)
                    since, printed = 0, time.monotonic()
            if progress.over():
                break
            if time.monotonic() - checked > args.check_seconds:
                look()
        epoch += 1
    look()
    save(args.out / "resume.pt", lm, {"steps": progress.steps, "epoch": epoch})
    print(
        f"{progress.steps} steps, {epoch} epochs, best {best:.4f}, {time.monotonic() - begun:.1f} s",
        flush=True,
    )


def align(data: LMData, recogniser: Path) -> None:
    """Hints from the recogniser; without them where it or the corpus does not allow them."""
    begun = time.monotonic()
    try:
        space, marks = silent_ids()
        places = follow(data, recogniser, space, frozenset(marks))
        add_hints(data, places, [space, *marks])
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        print(f"lm: no hints ({type(error).__name__}: {error})", flush=True)
        return
    print(
        f"lm: hints for {(places >= 0).mean():.1%} of the speech, {time.monotonic() - begun:.1f} s",
        flush=True,
    )


def check_command(args: argparse.Namespace) -> None:
    """Decode held-out items and write their tokens; a table of error rates where a recogniser is given."""
    device = torch.device(args.device)
    lm, report = load_lm(args.model, device)
    data = load(args.data, args.tokens, lm.config, device)
    held = np.array([is_held_out(item) for item in data.items])
    items = (usable(data) & held).nonzero()[0][: args.items]
    decoded, table = check(
        lm, data, items, args.data, args.recogniser, sweep=args.sweep, most_seconds=args.minutes * 60
    )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        offsets = np.cumsum([0, *map(len, decoded)], dtype=np.int64)
        flat = np.array([i for row in decoded for i in row], dtype=np.uint16)
        ids = np.array([str(data.items[i]["id"]) for i in items])
        np.savez(args.out, tokens=flat, offsets=offsets, codes=np.int64(lm.config.speech_token_size), ids=ids)
        args.out.with_suffix(".json").write_text(
            json.dumps({"report": report, "table": table}, indent=1) + "\n"
        )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.mini.train_lm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train (also without this word)")
    command.add_argument("--out", type=Path, required=True, help="folder for lm.pt and resume.pt")
    command.add_argument("--minutes", type=float, default=4.0, help="time for all, loading included")
    command.add_argument("--steps", type=int, default=10**9, help="stop earlier, after so many steps")
    command.add_argument("--resume", type=Path, help="resume.pt or lm.pt to go on from")
    command.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    command.add_argument("--decay", type=float, default=0.1, help="weight decay")
    command.add_argument("--dropout", type=float, default=0.2)
    command.add_argument("--mode", choices=("compiled", "graph", "eager"), default="compiled")
    command.add_argument(
        "--recogniser", type=Path, help="tokenizer.pt, for hints which phoneme is said where"
    )
    command.add_argument("--hint-share", type=float, default=0.3, help="weight of the loss on the hints")
    command.add_argument("--noise", type=float, default=0.3, help="most of a row's speech tokens made random")
    command.add_argument("--smoothing", type=float, default=0.03)
    command.add_argument("--positions", type=int, default=32_768, help="tokens in one step, padding included")
    command.add_argument("--ema", type=float, default=1500.0, help="steps that the average spans")
    command.add_argument(
        "--check-seconds", type=float, default=20.0, help="between looks at the held-out loss"
    )
    command.add_argument("--seed", type=int, default=1)
    command.set_defaults(run=train)
    command = commands.add_parser("check", help="decode held-out items")
    command.add_argument("--model", type=Path, required=True, help="lm.pt")
    command.add_argument("--out", type=Path, help="decoded.npz (and .json with the table)")
    command.add_argument("--recogniser", type=Path, help="tokenizer.pt, to measure phoneme errors")
    command.add_argument("--items", type=int, default=200, help="how many held-out items")
    command.add_argument("--sweep", action="store_true", help="try several sampling settings")
    command.add_argument(
        "--minutes", type=float, default=1.5, help="start no further setting after this time"
    )
    command.set_defaults(run=check_command)
    for command in commands.choices.values():
        command.add_argument("--data", type=Path, required=True, help="corpus folder")
        command.add_argument("--tokens", type=Path, help="tokens.npz of the corpus (default: in its folder)")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] not in (*commands.choices, "-h", "--help"):
        words.insert(0, "train")
    args = parser.parse_args(words)
    args.tokens = args.tokens or args.data / "tokens.npz"
    return args


def main(argv: list[str] | None = None) -> None:
    """Run one subcommand."""
    args = parse_arguments(argv)
    args.run(args)


if __name__ == "__main__":
    main()
