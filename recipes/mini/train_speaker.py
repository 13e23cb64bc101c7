"""Train the embedded model's speaker encoder, and turn a corpus into speaker embeddings with it.

    python -m recipes.mini.train_speaker --data CORPUS --out WORK/speaker --minutes 1.5
    python -m recipes.mini.train_speaker embed --data CORPUS --out WORK

Voices are points in a space: a base voice is a corner, a mixture a known weighted mean of corners. So there
are two tasks: tell the voices apart, with a margin that shrinks between voices that are near each other, and
say of which base voices, in which shares, the voice is mixed. The second makes unseen mixtures fall between
their neighbours.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.mini.corpus import Corpus
from recipes.mini.features_gpu import RATE, Speech16k, disturb, fbank80
from recipes.mini.schedule import Ema, Progress
from recipes.mini.speaker_model import SpeakerNet, SpeakerSizes, load_shipped_speaker, load_speaker, save
from recipes.mini.tokenizer_model import round_weights

LONGEST = 6 * RATE


class Voices:
    """The voices of a corpus: a number for each, and the shares of base voices that it is mixed of."""

    def __init__(self, corpus: Corpus) -> None:
        mixes: dict[str, dict[str, float]] = {}
        for item in corpus.items:
            mixes.setdefault(str(item["voice"]), item.get("mix") or {str(item["voice"]): 1.0})
        self.names = sorted(mixes)
        base = sorted({name for mix in mixes.values() for name in mix})
        self.shares = torch.zeros(len(self.names), len(base))
        for row, name in enumerate(self.names):
            for part, weight in mixes[name].items():
                self.shares[row, base.index(part)] = float(weight)
        self.shares /= self.shares.sum(1, keepdim=True)
        place = {name: index for index, name in enumerate(self.names)}
        self.of_item = torch.tensor([place[str(item["voice"])] for item in corpus.items])

    def nearness(self) -> Tensor:
        """Cosine between the shares of every two voices, ``[voices, voices]``."""
        unit = F.normalize(self.shares, dim=1)
        return unit @ unit.T


class Heads(nn.Module):
    """Directions of all voices and of all base voices: they exist only while training."""

    def __init__(self, voices: int, base: int, width: int) -> None:
        super().__init__()
        self.voices = nn.Parameter(torch.randn(voices, width))
        self.base = nn.Parameter(torch.randn(base, width))

    def losses(self, embedding: Tensor, voice: Tensor, shares: Tensor, nearness: Tensor) -> dict[str, Tensor]:
        """Cross-entropies of the voice (margin 0.25 times its distance from the rival) and of the shares."""
        apart = embedding @ F.normalize(self.voices, dim=1).T + 0.25 * (1.0 - nearness[voice])
        mixed = embedding @ F.normalize(self.base, dim=1).T
        return {
            "voice": F.cross_entropy(20.0 * apart, voice),
            "mix": F.cross_entropy(12.0 * mixed, shares[voice]),
        }


@torch.inference_mode()
def embed_all(net: SpeakerNet, speech: Speech16k, items: Tensor) -> Tensor:
    """One embedding of each utterance (its first 30 s), ``[items, 192]`` on the CPU."""
    found = torch.zeros(len(items), net.sizes.embedding)
    order = speech.lengths[items].argsort()
    for part in order[speech.lengths[items[order]] >= 400].split(64):
        size = min(30 * RATE, -(-int(speech.lengths[items[part]].max()) // 6400) * 6400)
        found[part] = net(*fbank80(*speech.batch(items[part], size=size))).cpu()
    return found


def evaluate(net: SpeakerNet, speech: Speech16k, voices: Voices, held: Tensor) -> dict[str, float]:
    """Checks on voices that were never heard in training.

    Each utterance of a held-out voice asks which voice speaks, among the mean of the *other* utterances of
    every held-out voice and of every base voice.
    """
    net = copy.deepcopy(net).eval()
    round_weights(net)
    picked: list[int] = []
    for voice in range(len(voices.names)):
        mine = (voices.of_item == voice).nonzero().flatten()
        if held[voice] or float(voices.shares[voice].max()) == 1.0:
            picked.extend(mine[:8].tolist() if len(mine) > 1 else [])
    if not picked:
        return {}
    items = torch.tensor(picked)
    embedding, of = embed_all(net, speech, items), voices.of_item[items]
    present = of.unique()
    sums = torch.stack([embedding[of == voice].sum(0) for voice in present])
    own = of[:, None] == present[None]
    score = embedding @ F.normalize(sums, dim=1).T
    without = F.normalize(sums[own.float().argmax(1)] - embedding, dim=1)
    score = torch.where(own, (embedding * without).sum(1, keepdim=True), score)
    right = present[score.argmax(1)] == of
    unseen = held[of]
    truth = voices.nearness()[of][:, present]
    return {
        "voices_asked": len(present),
        "first_unseen": round(float(right[unseen].float().mean()), 4) if unseen.any() else -1.0,
        "first_base": round(float(right[~unseen].float().mean()), 4) if (~unseen).any() else -1.0,
        "same_voice_cosine": round(float(score[own].mean()), 4),
        "other_voice_cosine": round(float(score[~own].mean()), 4),
        "nearness_correlation": round(
            float(torch.corrcoef(torch.stack([score[~own], truth[~own]]))[0, 1]), 4
        ),
    }


def train(args: argparse.Namespace) -> None:
    """Train until the time is used up; write ``speaker.pt`` and ``speaker.json``."""
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    corpus = Corpus(args.data)
    speech, voices = Speech16k(corpus, device), Voices(corpus)
    mixed = voices.shares.max(1).values < 1.0
    hidden = torch.tensor([zlib.crc32(name.encode()) % 20 == 0 for name in voices.names])
    held = mixed & hidden
    net = load_speaker(str(args.resume), device) if args.resume else SpeakerNet(SpeakerSizes()).to(device)
    heads = Heads(len(voices.names), voices.shares.shape[1], net.sizes.embedding).to(device)
    items = (~held[voices.of_item] & (speech.lengths >= RATE // 2)).nonzero().flatten()
    counts = torch.bincount(voices.of_item[items], minlength=len(voices.names)).float()
    chance = counts[voices.of_item[items]].rsqrt()  # a voice comes up with the root of its share
    shares, nearness = voices.shares.to(device), voices.nearness().to(device)
    print(
        f"speaker: {len(items)} utterances, {len(voices.names)} voices, {int(held.sum())} of them held out, "
        f"{sum(p.numel() for p in net.parameters()) / 1e6:.2f} M parameters",
        flush=True,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    both = nn.ModuleList([net, heads])
    optimizer = torch.optim.AdamW(both.parameters(), lr=args.rate, weight_decay=0.02)
    ema, progress = Ema(net, span=500.0), Progress(args.minutes, args.steps)
    noise = torch.Generator(device=device).manual_seed(args.seed)
    cpu = torch.Generator().manual_seed(args.seed)
    while not progress.over():
        progress.set_rate(optimizer, args.rate)
        part = items[torch.multinomial(chance, args.batch, generator=cpu)]
        size = int((1.5 + 4.5 * torch.rand(1, generator=cpu).item()) * 10) * RATE // 10
        room = (speech.lengths[part] - size).clamp_min(0)
        begin = (torch.rand(len(part), generator=cpu) * (room + 1)).long().minimum(room)
        samples, lengths = speech.batch(part, begin, size)
        banks, frames = fbank80(disturb(samples, lengths, noise), lengths)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            embedding = net(banks, frames, args.dropout)
        losses = heads.losses(embedding, voices.of_item[part].to(device), shares, nearness)
        optimizer.zero_grad(set_to_none=True)
        (losses["voice"] + losses["mix"]).backward()
        torch.nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        optimizer.step()
        ema.update(net)
        progress.step({name: value.detach() for name, value in losses.items()})
    report = evaluate(ema.model, speech, voices, held) | {"steps": progress.steps}
    save(str(args.out / "speaker.pt"), ema.model, report)
    shutil.copyfile(args.out / "speaker.pt", args.out / "resume.pt")
    (args.out / "speaker.json").write_text(json.dumps(report) + "\n")
    print("speaker done", json.dumps(report), flush=True)


def embed(args: argparse.Namespace) -> None:
    """Write ``speakers.npz``: ``embeddings`` float32 ``[utterances, 192]``, every row of length one."""
    begun = time.monotonic()
    device = torch.device(args.device)
    corpus = Corpus(args.data)
    net = load_shipped_speaker(str(args.model or args.out / "speaker" / "speaker.pt"), device)
    found = embed_all(net, Speech16k(corpus, device), torch.arange(len(corpus)))
    if args.average:
        of = Voices(corpus).of_item
        sums = torch.zeros(int(of.max()) + 1, found.shape[1]).index_add_(0, of, found)
        found = F.normalize(sums, dim=1)[of]
    args.out.mkdir(parents=True, exist_ok=True)
    np.savez(args.out / "speakers.npz", embeddings=found.numpy().astype(np.float32))
    print(f"{len(found)} embeddings in {time.monotonic() - begun:.1f} s")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.mini.train_speaker", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train the speaker encoder (may be left out)")
    command.add_argument("--data", type=Path, required=True, help="corpus folder")
    command.add_argument("--out", type=Path, required=True, help="folder for speaker.pt")
    command.add_argument("--minutes", type=float, default=1.5, help="time for training")
    command.add_argument("--steps", type=int, default=10**9, help="stop earlier, after so many steps")
    command.add_argument("--resume", type=Path, help="speaker.pt to go on from")
    command.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    command.add_argument("--dropout", type=float, default=0.1)
    command.add_argument("--batch", type=int, default=256, help="crops in one step")
    command.add_argument("--seed", type=int, default=1)
    command.set_defaults(run=train)
    command = commands.add_parser("embed", help="corpus to speakers.npz")
    command.add_argument("--data", type=Path, required=True, help="corpus folder")
    command.add_argument("--model", type=Path, help="default: OUT/speaker/speaker.pt")
    command.add_argument("--out", type=Path, required=True, help="folder for speakers.npz")
    command.add_argument("--average", action="store_true", help="every utterance gets the mean of its voice")
    command.set_defaults(run=embed)
    for command in commands.choices.values():
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words = sys.argv[1:] if argv is None else argv
    return parser.parse_args(["train", *words] if words and words[0].startswith("--data") else words)


def main(argv: list[str] | None = None) -> None:
    """Run one subcommand."""
    args = parse_arguments(argv)
    args.run(args)


if __name__ == "__main__":
    main()
