"""Train the embedded model's speech tokenizer, and turn a corpus into tokens with it.

    python -m recipes.mini.train_tokenizer --data CORPUS --out WORK/tokenizer --minutes 3.5 [--levels 5]
    python -m recipes.mini.train_tokenizer tokenize --data CORPUS --out WORK

The networks are in ``tokenizer_model``. Three losses: CTC on what was said, before and after the quantiser,
and the mel that a decoder gives back; the last is small, so that it fills with prosody only what the phonemes
leave free. The learning rate follows the time used, so a run of any length ends well.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.mini.corpus import Corpus
from recipes.mini.features_gpu import HOP, RATE, Speech16k, disturb, log_mel128, played_faster
from recipes.mini.schedule import Ema, Progress, batches
from recipes.mini.symbols import alphabet, choose, error_rate, numbers
from recipes.mini.tokenizer_model import (
    TokenizerSizes,
    TokenizerTrainer,
    greedy,
    load,
    load_shipped,
    round_weights,
    save,
    valid,
)

MEL_SCALE = 2.5  # brings the log-mel to a deviation of about one
SAMPLES_PER_TOKEN_24K = 960


@dataclass
class Targets:
    """Symbols of every utterance: padded on the device, lengths on the CPU."""

    names: list[str]
    kind: str
    padded: Tensor
    lengths: Tensor

    def rows(self, items: Tensor) -> list[list[int]]:
        chosen = self.padded[items.to(self.padded.device)].tolist()
        return [row[:length] for row, length in zip(chosen, self.lengths[items].tolist(), strict=True)]


def targets(corpus: Corpus, kind: str, device: torch.device, names: list[str] | None = None) -> Targets:
    """Spell every text; the alphabet is made from the corpus unless ``names`` gives it."""
    kind, spell = choose(corpus, kind)
    spelled = [spell(item) for item in corpus.items]
    names = names or alphabet(spelled)
    rows = [numbers(symbols, names) for symbols in spelled]
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=torch.long)
    return Targets(names, kind, padded.to(device), torch.tensor([len(row) for row in rows]))


def is_held_out(item: dict[str, Any], share: int = 40) -> bool:
    """One utterance in ``share`` is kept for checking, chosen by its id."""
    return zlib.crc32(str(item["id"]).encode()) % share == 0


def mask_spectrum(mel: Tensor, lengths: Tensor, generator: torch.Generator, amount: float) -> Tensor:
    """SpecAugment: two bands of up to 16 bins and one stretch of up to 0.12 s set to zero, in every row."""

    def stripe(size: int, most: int) -> Tensor:
        rows = len(mel)
        wide = torch.rand(rows, 1, device=mel.device, generator=generator) * most * amount
        begin = torch.rand(rows, 1, device=mel.device, generator=generator) * (size - most)
        place = torch.arange(size, device=mel.device)[None]
        return (place >= begin) & (place < begin + wide)

    bands = stripe(mel.shape[1], 16) | stripe(mel.shape[1], 16)
    return mel.masked_fill(bands[:, :, None] | stripe(mel.shape[2], 12)[:, None], 0.0)


def half_rate(mel: Tensor) -> Tensor:
    """Log-mel ``[batch, 128, frames]`` to pairs' means at 50 Hz, ``[batch, frames / 2, 128]``, scaled."""
    frames = mel.shape[2] // 2 * 2
    pairs: Tensor = mel[:, :, :frames].unflatten(2, (-1, 2)).mean(3).transpose(1, 2) * MEL_SCALE
    return pairs


def ctc(logits: Tensor, wanted: Tensor, counts: list[int], lengths: list[int]) -> Tensor:
    """CTC loss per symbol, in nats."""
    scores = logits.float().log_softmax(-1).transpose(0, 1)
    total = F.ctc_loss(scores, wanted, counts, lengths, reduction="sum", zero_infinity=True)
    return total / max(1, sum(lengths))


def mel_loss(painted: Tensor, clean: Tensor, lengths: Tensor) -> Tensor:
    """Mean absolute error of the mel and, with half the weight, of its change from frame to frame."""
    size = min(painted.shape[1], clean.shape[1])
    inside = valid(lengths // 2, size)
    error = (painted[:, :size].float() - clean[:, :size]) * inside
    count = inside.sum() * clean.shape[2]
    return (error.abs().sum() + 0.5 * (error[:, 1:] - error[:, :-1]).abs().sum()) / count


@torch.inference_mode()
def evaluate(model: TokenizerTrainer, speech: Speech16k, wanted: Targets, items: Tensor) -> dict[str, float]:
    """Held-out phoneme error rates, use of the codes, error of the mel; weights rounded as shipped."""
    model = copy.deepcopy(model).eval()
    round_weights(model.encoder)
    said: dict[str, list[list[int]]] = {"early": [], "late": []}
    meant: list[list[int]] = []
    indices: list[Tensor] = []
    error = 0.0
    parts = items[speech.lengths[items].argsort()].split(64)
    for part in parts:
        samples, lengths = speech.batch(part)
        mel, frames = log_mel128(samples, lengths)
        clean = half_rate(mel)
        out = model(mel, clean, frames, 0.0)
        error += float(mel_loss(out["mel"], clean, frames)) / len(parts)
        for name, rows in said.items():
            rows.extend(greedy(out[name], 2 * out["counts"]))
        meant.extend(wanted.rows(part))
        indices.extend(row[:count] for row, count in zip(out["index"], out["counts"].tolist(), strict=True))
    flat = torch.cat(indices)
    share = torch.bincount(flat, minlength=model.encoder.sizes.codes).float() / len(flat)
    return {
        "per_before": round(error_rate(said["early"], meant), 4),
        "per_after": round(error_rate(said["late"], meant), 4),
        "codes_used": int((share > 0).sum()),
        "perplexity": round(float(torch.special.entr(share).sum().exp()), 1),
        "repeats": round(float((flat[1:] == flat[:-1]).float().mean()), 4),
        "mel_error": round(error, 4),
    }


def build(args: argparse.Namespace, corpus: Corpus, device: torch.device) -> tuple[TokenizerTrainer, Targets]:
    """Networks and targets, fresh or from a checkpoint."""
    if args.resume:
        model, names, kind = load(args.resume, device)
        return model, targets(corpus, kind, device, names)
    wanted = targets(corpus, args.symbols, device)
    return TokenizerTrainer(TokenizerSizes(levels=args.levels), len(wanted.names)).to(device), wanted


def train(args: argparse.Namespace) -> None:
    """Train until the time is used up; write ``tokenizer.pt`` and ``tokenizer.json``."""
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    corpus = Corpus(args.data)
    model, wanted = build(args, corpus, device)
    begun = time.monotonic()
    speech = Speech16k(corpus, device)
    seconds = speech.lengths.double() / RATE
    held = torch.tensor([is_held_out(item) for item in corpus.items])
    fits = (seconds > 0.5) & (seconds < 15.0) & (wanted.lengths > 0)
    training, checking = (fits & ~held).nonzero().flatten(), (fits & held).nonzero().flatten()[:256]
    print(
        f"tokenizer: {float(seconds.sum()) / 3600:.2f} h, {len(training)} + {len(checking)} utterances, "
        f"{len(wanted.names) - 1} {wanted.kind} symbols, encoder "
        f"{sum(p.numel() for p in model.encoder.parameters()) / 1e6:.2f} M, all "
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"speech loaded in {time.monotonic() - begun:.1f} s",
        flush=True,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.02, fused=device.type == "cuda"
    )
    ema, progress = Ema(model), Progress(args.minutes, args.steps, begun if args.count_loading else None)
    noise = torch.Generator(device=device).manual_seed(args.seed)
    cpu = torch.Generator().manual_seed(args.seed)
    rows: Iterator[Tensor] = batches(seconds, training, args.batch_seconds, cpu)
    while not progress.over():
        part = next(rows)
        fraction = progress.fraction()
        progress.set_rate(optimizer, args.rate)
        amount = 1.0 - max(0.0, (fraction - 0.8) / 0.2)  # the last fifth sees speech more and more as it is
        samples, lengths = speech.batch(part)
        host_lengths = speech.lengths[part]
        if torch.rand(1, generator=cpu).item() < args.tape * amount:
            rate = 0.9 + 0.2 * torch.rand(1, generator=cpu).item()
            samples, change = played_faster(samples, rate)
            host_lengths = (host_lengths * change).long()
            lengths = host_lengths.to(device)
        clean_mel, frames = log_mel128(samples, lengths)
        mel, _ = log_mel128(disturb(samples, lengths, noise, amount), lengths)
        mel = mask_spectrum(mel, frames, noise, amount)
        clean = half_rate(clean_mel)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model(mel, clean, frames, args.dropout)
        sizes = wanted.lengths[part].tolist()
        counts = (2 * ((host_lengths // HOP + 3) // 4)).tolist()
        said = wanted.padded[part.to(device)][:, : max(sizes)]
        losses = {
            "late": ctc(out["late"], said, counts, sizes),
            "early": ctc(out["early"], said, counts, sizes),
            "mel": mel_loss(out["mel"], clean, frames),
            "alike": out["alike"],
        }
        loss = losses["late"] + args.early_weight * losses["early"] + args.mel_weight * losses["mel"]
        loss = loss + args.alike_weight * losses["alike"]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model)
        progress.step({name: value.detach() for name, value in losses.items()})
        if args.check_every and progress.steps % args.check_every == 0:
            print("check", json.dumps(evaluate(ema.model, speech, wanted, checking)), flush=True)
    report = evaluate(ema.model, speech, wanted, checking) if len(checking) else {}
    report |= {"steps": progress.steps, "hours": round(float(seconds[training].sum()) / 3600, 3)}
    save(str(args.out / "tokenizer.pt"), ema.model, wanted.names, wanted.kind, report)
    shutil.copyfile(args.out / "tokenizer.pt", args.out / "resume.pt")
    (args.out / "tokenizer.json").write_text(json.dumps(report) + "\n")
    print("tokenizer done", json.dumps(report), flush=True)


@torch.inference_mode()
def tokens_of(checkpoint: Path, corpus: Corpus, device: torch.device) -> tuple[list[np.ndarray], int]:
    """Tokens of every utterance with the shipped encoder, and the size of the codebook.

    The official relation holds: as many tokens as pairs of 50 Hz frames, ``num_samples // 960`` at 24 kHz.
    """
    model, _, _ = load_shipped(str(checkpoint), device)
    speech = Speech16k(corpus, device)
    found: list[np.ndarray] = [np.zeros(0, dtype=np.uint16)] * len(corpus)
    order = speech.lengths.argsort()
    for part in order[speech.lengths[order] > HOP * 4].split(64):
        samples, lengths = speech.batch(part)
        mel, frames = log_mel128(samples, lengths)
        index, counts = model.encoder(mel, frames)
        rows = zip(part.tolist(), index.cpu().numpy(), counts.tolist(), strict=True)
        for item, row, count in rows:
            size = min(int(speech.num_samples_24k[item]) // SAMPLES_PER_TOKEN_24K, count)
            found[item] = row[:size].astype(np.uint16)
    return found, model.encoder.sizes.codes


def tokenize(args: argparse.Namespace) -> None:
    """Write ``tokens.npz``: ``tokens`` (uint16, one utterance after the other), ``offsets`` (int64), ``codes``."""
    begun = time.monotonic()
    found, codes = tokens_of(
        args.model or args.out / "tokenizer" / "tokenizer.pt", Corpus(args.data), torch.device(args.device)
    )
    offsets = np.cumsum([0, *map(len, found)], dtype=np.int64)
    flat = np.concatenate(found)
    args.out.mkdir(parents=True, exist_ok=True)
    np.savez(args.out / "tokens.npz", tokens=flat, offsets=offsets, codes=np.int64(codes))
    print(f"{len(found)} utterances, {len(flat)} tokens of {codes} codes in {time.monotonic() - begun:.1f} s")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.mini.train_tokenizer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train the tokenizer (may be left out)")
    command.add_argument("--data", type=Path, required=True, help="corpus folder")
    command.add_argument("--out", type=Path, required=True, help="folder for tokenizer.pt")
    command.add_argument("--minutes", type=float, default=3.5, help="time for training")
    command.add_argument(
        "--count-loading", action="store_true", help="loading the speech uses that time, too"
    )
    command.add_argument("--steps", type=int, default=10**9, help="stop earlier, after so many steps")
    command.add_argument("--resume", type=Path, help="tokenizer.pt to go on from")
    command.add_argument(
        "--levels", type=int, choices=(4, 5, 6), default=5, help="places of three levels each"
    )
    command.add_argument("--symbols", choices=("auto", "teacher", "frontend", "letters"), default="auto")
    command.add_argument("--early-weight", type=float, default=0.3, help="CTC before the quantiser")
    command.add_argument("--mel-weight", type=float, default=0.4, help="giving back the mel")
    command.add_argument("--alike-weight", type=float, default=0.1, help="places of the code that correlate")
    command.add_argument("--rate", type=float, default=1.5e-3, help="highest learning rate")
    command.add_argument("--dropout", type=float, default=0.1)
    command.add_argument("--tape", type=float, default=0.5, help="share of steps at another tape speed")
    command.add_argument("--batch-seconds", type=float, default=400.0, help="speech in one step")
    command.add_argument("--check-every", type=int, default=0, help="steps between checks on held-out speech")
    command.add_argument("--seed", type=int, default=1)
    command.set_defaults(run=train)
    command = commands.add_parser("tokenize", help="corpus to tokens.npz")
    command.add_argument("--data", type=Path, required=True, help="corpus folder")
    command.add_argument("--model", type=Path, help="default: OUT/tokenizer/tokenizer.pt")
    command.add_argument("--out", type=Path, required=True, help="folder for tokens.npz")
    command.set_defaults(run=tokenize)
    for command in commands.choices.values():
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words = sys.argv[1:] if argv is None else argv
    return parser.parse_args(["train", *words] if words and words[0].startswith("--data") else words)


def main(argv: list[str] | None = None) -> None:
    """Run one subcommand."""
    # cuDNN would prepare its attention anew for each of the many shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    args = parse_arguments(argv)
    args.run(args)


if __name__ == "__main__":
    main()
