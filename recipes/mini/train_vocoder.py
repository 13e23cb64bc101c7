"""Train the embedded model's vocoder: F0 predictor and causal HiFT generator, with discriminators.

    python -m recipes.mini.train_vocoder --data CORPUS --out FOLDER --minutes 9 [--resume FOLDER/resume.pt]

First the spectral loss alone, then the discriminators join; a resumed run continues with them at once. The
generator first gets the true pitch, later more and more its own predictor's. Near the end some mels are
blurred, as a flow's are. Writes ``vocoder.pt`` (mean weights, float32), ``resume.pt`` and
``resume_discriminators.pt`` (to go on from), ``vocoder.json`` (distances on held-out speech) and samples.

On a GPU the whole step is one CUDA graph: at this size the host would otherwise set the speed. If recording fails,
the program starts itself again without graphs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
import wave
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.mini.config import mini_vocoder_config
from recipes.mini.corpus import Corpus
from recipes.mini.mel_gpu import HOP, RATE, FlatSpeech, log_mel
from recipes.mini.pitch_gpu import track
from recipes.mini.schedule import Ema, Progress
from recipes.mini.vocoder_fast import FastGenerator, Speed
from recipes.mini.vocoder_losses import (
    Discriminators,
    Features,
    SpectralLoss,
    discriminator_loss,
    generator_losses,
)
from vivace.models.hift import CausalHiFT

AFTER = 4
"""Mel frames that only feed the look-ahead."""

F0_FRAMES, F0_BEFORE = 64, 11
F0_RATE = 4.0
"""The F0 predictor learns faster than the generator."""

MEAN_MEL = -6.0
RESERVE_S = 12.0
ADVERSARIAL, MATCHING = 0.5, 0.8
"""Weights beside the spectral loss. All three have like gradients then, as with HiFi-GAN's 45 : 1 : 2."""

JUDGE_RATE = 0.6
"""The discriminators learn slower than the generator."""

RISE_STEPS = 200
Losses = dict[str, Tensor]


@dataclass(frozen=True)
class Crop:
    """Mel frames of a training crop."""

    kept: int = 32
    """Frames that count in the losses."""
    before: int = 4
    """Frames before these, which warm the convolutions' states."""
    f0_before: int = 7
    """Frames before all that, which only the F0 predictor sees."""
    judged: int = 24
    """Frames at the end of the kept ones that the discriminators see."""

    @property
    def generated(self) -> int:
        return self.before + self.kept + AFTER


def is_held_out(item: dict[str, Any], share: int = 40) -> bool:
    """One utterance in ``share`` is kept for checking, chosen by its id (as in ``train_tokenizer``)."""
    return zlib.crc32(str(item["id"]).encode()) % share == 0


class Speech:
    """The corpus on the device with its pitch, and random crops of the training part."""

    def __init__(self, corpus: Corpus, device: torch.device, generator: torch.Generator, crop: Crop) -> None:
        self.crop = crop
        self.flat = FlatSpeech(corpus, device)
        self.f0 = track(self.flat)
        self.generator = generator
        self.held_out = [index for index, item in enumerate(corpus.items) if is_held_out(item)]
        barred = torch.zeros(self.flat.num_frames + 1, dtype=torch.int64)
        for index in self.held_out:
            start, length = int(self.flat.starts[index]), int(self.flat.lengths[index])
            barred[start + 1 : start + length + 1] = 1
        barred = barred.cumsum(0)
        longest = max(crop.f0_before + crop.generated, F0_FRAMES)
        free = barred[longest:] == barred[:-longest]
        self.first = free.nonzero()[:, 0].to(device)

    def draw(self, rows: int) -> Tensor:
        """First frames of ``rows`` random crops."""
        place = torch.randint(len(self.first), (rows,), generator=self.generator, device=self.first.device)
        return self.first[place]

    def f0_crops(self, first: Tensor, frames: int) -> Tensor:
        return self.f0[first[:, None] + torch.arange(frames, device=self.f0.device)]


@dataclass
class Batch:
    """Inputs of one step; the tensors stay, their values change (CUDA graphs read fixed addresses)."""

    samples: Tensor  # [B, kept * 480], the frames that count
    mel: Tensor  # [B, 80, f0_before + generated frames]
    f0: Tensor  # [B, generated frames], Hz
    teacher: Tensor  # [B, 1], 1: the generator gets the true pitch
    noise: Tensor  # [B, harmonics, generated samples], uniform
    f0_mel: Tensor  # [4 B, 80, F0_FRAMES]
    f0_true: Tensor  # [4 B, F0_FRAMES - F0_BEFORE - AFTER]

    def copy_from(self, other: Batch) -> None:
        for name in self.__dataclass_fields__:
            getattr(self, name).copy_(getattr(other, name))


@dataclass(frozen=True)
class GivenNoise:
    """Noise drawn beforehand."""

    values: Tensor

    def uniform(self, start: int, count: int, channels: int, device: torch.device) -> Tensor:
        return self.values[:, :channels, start : start + count]


def blur(mel: Tensor, generator: torch.Generator, share: float) -> Tensor:
    """Make a share of the rows of ``[B, 80, T]`` smoother in time and frequency, with a little noise."""
    rows, device = len(mel), mel.device
    chosen = (torch.rand(rows, 1, 1, generator=generator, device=device) < share).float()
    strength = 0.25 * torch.rand(rows, 1, 1, generator=generator, device=device) * chosen
    padded = F.pad(mel, (1, 1, 1, 1), mode="replicate")
    around = (padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:] + padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1]) / 4
    spread = 0.12 * torch.rand(rows, 1, 1, generator=generator, device=device) * chosen
    noise = torch.randn(mel.shape, generator=generator, device=device)
    return mel.lerp(around, strength) + spread * noise


def make_batch(speech: Speech, rows: int, harmonics: int, teacher_share: float, blur_share: float) -> Batch:
    crop, generator = speech.crop, speech.generator
    early, frames = crop.f0_before, crop.generated
    first, f0_first = speech.draw(rows), speech.draw(4 * rows)
    device = first.device
    return Batch(
        samples=speech.flat.crops(first + early + crop.before, crop.kept),
        mel=blur(speech.flat.mel_crops(first, early + frames), generator, blur_share),
        f0=speech.f0_crops(first + early, frames),
        teacher=(torch.rand(rows, 1, generator=generator, device=device) < teacher_share).float(),
        noise=torch.rand(rows, harmonics, frames * HOP, generator=generator, device=device),
        f0_mel=blur(speech.flat.mel_crops(f0_first, F0_FRAMES), generator, 0.5),
        f0_true=speech.f0_crops(f0_first + F0_BEFORE, F0_FRAMES - F0_BEFORE - AFTER),
    )


class Training:
    """Both networks, both optimisers and the two kinds of step, on a fixed batch."""

    def __init__(
        self, model: CausalHiFT, batch: Batch, lr: float, speed: Speed | None = None, crop: Crop | None = None
    ) -> None:
        device = batch.mel.device
        self.model, self.batch = model, batch
        self.speed, self.crop = speed or Speed(), crop or Crop()
        self.fast = FastGenerator(model, self.speed)
        self.discriminators = Discriminators().to(device)
        self.spectral = SpectralLoss().to(device)
        pitch = list(model.f0_predictor.parameters())
        rest = [p for name, p in model.named_parameters() if not name.startswith("f0_predictor.")]
        self.lr = lr
        self.optimizers = [
            self._adam([(pitch, F0_RATE), (rest, 1.0)]),
            self._adam([(list(self.discriminators.parameters()), JUDGE_RATE)]),
        ]

    def _adam(self, parts: list[tuple[list[nn.Parameter], float]]) -> torch.optim.AdamW:
        """One group per part; the second number multiplies the learning rate."""
        device = self.batch.mel.device
        groups = [
            {
                "params": part,
                "lr": torch.tensor(1e-6, device=device),
                "share": share,
                "usual": torch.tensor(0.0, device=device),
            }
            for part, share in parts
        ]
        on_gpu = device.type == "cuda"
        fused = on_gpu and self.speed.fused
        return torch.optim.AdamW(
            groups, torch.tensor(1e-6, device=device), (0.8, 0.99), weight_decay=1e-3,
            capturable=on_gpu, foreach=on_gpu and not fused, fused=fused,
        )  # fmt: skip

    def set_rate(self, done: float, steps: int, judge_steps: int) -> None:
        """A short rise for each network, then half a cosine; ``done`` is the share of the run that is over."""
        fall = 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * done))
        for optimizer, own_steps in zip(self.optimizers, (steps, judge_steps), strict=True):
            rise = min(1.0, (own_steps + 1) / RISE_STEPS)
            for group in optimizer.param_groups:
                group["lr"].fill_(self.lr * group["share"] * rise * fall)

    def generate(self) -> Tensor:
        b, crop = self.batch, self.crop
        mel = b.mel[..., crop.f0_before :]
        with torch.no_grad():
            own = self.model.f0_predictor(b.mel)[:, crop.f0_before :]
            f0 = torch.where(b.teacher > 0, b.f0, own)
        noise = GivenNoise(b.noise)
        samples = self.fast(mel, f0, noise) if self.speed.channels_last else self.model(mel, f0, noise)
        return samples[:, crop.before * HOP : (crop.before + crop.kept) * HOP]

    def f0_loss(self) -> Tensor:
        predicted = self.model.f0_predictor(self.batch.f0_mel)[:, F0_BEFORE:-AFTER]
        true = self.batch.f0_true
        weight = torch.where(true > 0, 1.0, 0.5)
        return ((predicted - true).abs() * weight).mean() / 100.0

    def judge(self, samples: Tensor) -> list[Features]:
        """What every discriminator makes of the samples."""
        device = samples.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            return cast(list[Features], self.discriminators(samples))

    def judged(self, samples: Tensor) -> Tensor:
        """The end of the crop: there the generator knows most of the past."""
        return samples[:, -self.crop.judged * HOP :]

    def step_spectral(self) -> Losses:
        made = self.generate()
        spectral, f0 = self.spectral(made, self.batch.samples), self.f0_loss()
        self._gradients(0, spectral + f0)
        self.optimizers[0].step()
        return {"spectral": spectral.detach(), "f0": f0.detach()}

    def step_adversarial(self) -> Losses:
        made, true = self.generate(), self.batch.samples
        # One pass serves both sides, which therefore move at the same time.
        both = self.judge(torch.cat((self.judged(true), self.judged(made))))
        wanted = [[feature.chunk(2)[0] for feature in features] for features in both]
        found = [[feature.chunk(2)[1] for feature in features] for features in both]
        blame = discriminator_loss([f[-1] for f in wanted], [f[-1] for f in found])
        self._gradients(1, blame, keep=True)
        spectral, f0 = self.spectral(made, true), self.f0_loss()
        fooled, matching = generator_losses([[one.detach() for one in row] for row in wanted], found)
        self._gradients(0, spectral + f0 + ADVERSARIAL * fooled + MATCHING * matching)
        for optimizer in self.optimizers:
            optimizer.step()
        losses = {"spectral": spectral, "f0": f0, "blame": blame, "fooled": fooled, "match": matching}
        return {name: loss.detach() for name, loss in losses.items()}

    def _gradients(self, which: int, loss: Tensor, keep: bool = False) -> None:
        """Give the parameters of one optimiser their limited gradients; ``keep`` the graph for the other."""
        groups = self.optimizers[which].param_groups
        # Only these gradients: either loss also reaches the other network.
        parameters = [p for group in groups for p in group["params"]]
        gradients = torch.autograd.grad(loss, parameters, retain_graph=keep)
        rest = iter(gradients)
        for group in groups:
            own = [next(rest).contiguous() for _ in group["params"]]
            limit_norm(own, group["usual"])
            for parameter, gradient in zip(group["params"], own, strict=True):
                parameter.grad = gradient


def limit_norm(gradients: list[Tensor], usual: Tensor, most: float = 2.5) -> None:
    """Scale gradients in place to at most ``most`` times their usual norm, which ``usual`` follows.

    ``usual`` 0: none is known yet.
    """
    with torch.no_grad():
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        known = torch.where(usual > 0, usual, norm)
        limit = most * known
        scale = (limit / norm.clamp_min(1e-12)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
        seen = torch.minimum(norm, limit)
        usual.copy_(known.lerp(seen, 0.02))


def recorded(step: Callable[[], Losses], warm_steps: int = 4) -> Callable[[], Losses]:
    """The step as a CUDA graph; the warm steps before the recording are real steps."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_steps):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = step()

    def replay() -> Losses:
        graph.replay()
        return losses

    return replay


def initialise(model: CausalHiFT) -> None:
    """Start near the identity, quiet, for mels around their mean, and with a pitch of the right size in Hz.

    Otherwise the first steps of an optimiser that knows no scale drive the output into its limits.
    """
    bins = model.fourier.bins
    with torch.no_grad():
        for conv in (model.conv_pre, model.f0_predictor.condnet[0]):
            conv.weight.mul_(0.4)
            conv.bias.add_(-MEAN_MEL * conv.weight.sum(dim=(1, 2)))
        for name, parameter in model.named_parameters():
            if "convs2" in name:
                parameter.mul_(0.3)
        model.conv_post.weight.mul_(0.5)
        model.conv_post.bias[:bins] -= 3.0
        model.f0_predictor.classifier.weight.mul_(30.0)
        model.f0_predictor.classifier.bias.fill_(80.0)


def moments(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """The optimiser's running means, halved in size."""
    state = optimizer.state_dict()["state"]
    return {
        index: {name: v.bfloat16() if v.dim() else v for name, v in values.items()}
        for index, values in state.items()
    }


def restore(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Tensor]]) -> None:
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def discriminators_path(resume: Path) -> Path:
    return resume.with_name(f"{resume.stem}_discriminators.pt")


def save(value: Any, path: Path) -> None:
    part = path.with_suffix(".part")
    torch.save(value, part)
    part.rename(path)


def save_all(out: Path, training: Training, ema: Ema, steps: int) -> None:
    mean = {name: value.cpu().clone() for name, value in ema.model.state_dict().items()}
    config = asdict(training.model.config)  # type: ignore[call-overload]
    save({"model": mean, "config": config, "steps": steps}, out / "vocoder.pt")
    own, other = training.optimizers
    state = {"model": training.model.state_dict(), "moments": moments(own), "steps": steps}
    save(state, out / "resume.pt")
    state = {"model": training.discriminators.state_dict(), "moments": moments(other)}
    save(state, discriminators_path(out / "resume.pt"))


def load_all(path: Path, training: Training, ema: Ema) -> int:
    """Go on from ``resume.pt`` and the mean in ``vocoder.pt`` beside it; returns the steps.

    Without the discriminators' file these start anew.
    """
    state = torch.load(path, map_location=training.batch.mel.device, weights_only=True)
    training.model.load_state_dict(state["model"])
    mean = torch.load(path.with_name("vocoder.pt"), map_location="cpu", weights_only=True)
    ema.model.load_state_dict(mean["model"])
    restore(training.optimizers[0], state["moments"])
    other = discriminators_path(path)
    if other.exists():
        found = torch.load(other, map_location=training.batch.mel.device, weights_only=True)
        training.discriminators.load_state_dict(found["model"])
        restore(training.optimizers[1], found["moments"])
    else:
        print(f"{other.name} is not there: the discriminators start anew", flush=True)
    return int(state["steps"])


def write_wav(path: Path, samples: Tensor) -> None:
    pcm = (samples.clamp(-1.0, 1.0) * 32767.0).round().to(torch.int16).cpu().numpy()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(pcm.tobytes())


@torch.no_grad()
def evaluate(model: CausalHiFT, speech: Speech, out: Path | None, most: int = 24) -> dict[str, float]:
    """Distances on held-out utterances, with the model's own pitch; the first six go to ``out`` as WAV."""
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False  # shapes differ
    sums = {"mel_l1": 0.0, "f0_cents": 0.0, "voicing_error": 0.0, "frames": 0.0, "voiced": 0.0, "peak": 0.0}
    model.eval()
    for place, index in enumerate(speech.held_out[:most]):
        start, count = int(speech.flat.starts[index]), int(speech.flat.lengths[index])
        first = torch.tensor([start], device=speech.first.device)
        mel, true = speech.flat.mel_crops(first, count), speech.f0_crops(first, count)
        f0 = model.f0_predictor(mel)
        made = model(mel, f0=f0)
        both = (f0 > model.config.nsf_voiced_threshold) & (true > 0)
        sums["mel_l1"] += float((log_mel(made) - mel).abs().mean()) * count
        sums["voicing_error"] += float(((f0 > model.config.nsf_voiced_threshold) != (true > 0)).sum())
        sums["f0_cents"] += float((1200.0 * (f0[both] / true[both]).log2().abs()).sum())
        sums["voiced"] += float(both.sum())
        sums["frames"] += count
        sums["peak"] = max(sums["peak"], float(made.abs().max()))
        if out is not None and place < 6:
            write_wav(out / f"sample{place}.wav", made[0])
            write_wav(out / f"sample{place}_true.wav", speech.flat.crops(first, count)[0])
    torch.backends.cudnn.benchmark = benchmark
    frames, voiced = max(sums["frames"], 1.0), max(sums["voiced"], 1.0)
    return {
        "mel_l1": sums["mel_l1"] / frames,
        "f0_cents": sums["f0_cents"] / voiced,
        "voicing_error": sums["voicing_error"] / frames,
        "peak": sums["peak"],
    }


class WeightMean:
    """The weights' running mean in ``ema.model``, without looking the tensors up at every step."""

    def __init__(self, model: nn.Module, span: float) -> None:
        self.ema = Ema(model, span)
        self.model = self.ema.model
        self._mean = list(self.model.parameters())
        self._weights = list(model.parameters())

    @torch.no_grad()
    def update(self) -> None:
        self.ema.steps += 1
        share = max(1.0 / self.ema.span, 9.0 / (10.0 + self.ema.steps))
        torch._foreach_lerp_(self._mean, self._weights, share)


def run(args: argparse.Namespace, begun: float) -> None:
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 6  # of the kernels that might be best; each one tried costs time
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    args.out.mkdir(parents=True, exist_ok=True)
    crop = Crop(kept=args.kept, judged=min(args.judged, args.kept))
    speech = Speech(Corpus(args.data), device, torch.Generator(device).manual_seed(args.seed), crop)
    voiced = float((speech.f0 > 0).float().mean())
    print(f"{len(speech.first)} crops, voiced {voiced:.1%}, {time.monotonic() - begun:.1f} s", flush=True)

    model = CausalHiFT(mini_vocoder_config()).to(device)
    initialise(model)
    harmonics = model.m_source.harmonics
    batch = make_batch(speech, args.batch, harmonics, 1.0, 0.0)
    speed = Speed(args.channels_last, args.bf16, args.fused_snake, args.fused)
    training = Training(model, batch, args.lr * (0.6 if args.resume else 1.0), speed, crop)
    ema = WeightMean(model, span=1000.0)
    steps_before = load_all(args.resume, training, ema.ema) if args.resume else 0

    training.set_rate(0.0, 0, 0)
    spectral, adversarial = training.step_spectral, training.step_adversarial
    if args.graphs:
        # Both now, so that a device where recording fails loses no training.
        spectral, adversarial = recorded(spectral), recorded(adversarial)
        print(f"both steps recorded, {time.monotonic() - begun:.1f} s", flush=True)
    progress = Progress(max(args.minutes - RESERVE_S / 60, 0.02), args.steps, begun)
    resumed = args.resume is not None
    warm = 0.0 if resumed else args.warm
    joined, joined_at, saved, start = False, 0, time.monotonic(), min(progress.fraction(), 0.9)
    while not progress.over():
        done = (progress.fraction() - start) / (1.0 - start)  # without loading and recording
        training.set_rate(done, progress.steps, progress.steps - joined_at if joined else 0)
        late = 1.0 if resumed else min(1.0, max(0.0, 2.5 * done - 1.0))
        batch.copy_from(make_batch(speech, args.batch, harmonics, 1.0 - late, 0.4 * late))
        if not joined and done >= warm:
            joined, joined_at = True, progress.steps
            print(f"discriminators join; {evaluate(ema.model, speech, None, 4)}", flush=True)
        losses = adversarial() if joined else spectral()
        ema.update()
        progress.step(losses)
        if time.monotonic() - saved > 120.0:
            save_all(args.out, training, ema.ema, steps_before + progress.steps)
            saved = time.monotonic()
    save_all(args.out, training, ema.ema, steps_before + progress.steps)
    report = evaluate(ema.model, speech, args.out) | {"steps": steps_before + progress.steps}
    (args.out / "vocoder.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept", type=int, default=32, help="mel frames of a crop that count")
    parser.add_argument("--judged", type=int, default=24, help="how many of them the discriminators see")
    parser.add_argument("--warm", type=float, default=0.12, help="share of the run without discriminators")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false")
    parser.add_argument("--no-channels-last", dest="channels_last", action="store_false")
    parser.add_argument("--bf16", action="store_true", help="generator's convolutions in bfloat16")
    parser.add_argument("--no-fused-snake", dest="fused_snake", action="store_false")
    parser.add_argument("--no-fused", dest="fused", action="store_false", help="AdamW kernel by kernel")
    parser.add_argument("--safe", action="store_true", help="none of the risky choices but graphs")
    args = parser.parse_args()
    if args.safe:
        args.fused_snake = args.fused = False
    args.graphs = args.graphs and args.device.startswith("cuda")
    begun = time.monotonic()
    try:
        run(args, begun)
    except Exception as error:
        if not args.graphs:
            raise
        # A recording that failed may leave the device's state unusable, so a new process goes on. What is risky
        # goes first (``--safe``), then the graphs.
        traceback.print_exc()
        safe = "--safe" in sys.argv or not (args.fused_snake or args.fused)
        print(f"{error}; once more {'without graphs' if safe else 'with graphs only'}", flush=True)
        left = args.minutes - (time.monotonic() - begun) / 60
        again = [*sys.argv[1:], "--no-graphs" if safe else "--safe", "--minutes", f"{max(left, 0.5):.2f}"]
        if (args.out / "resume.pt").exists() and args.resume is None:
            again += ["--resume", str(args.out / "resume.pt")]
        command = [sys.executable, "-u", "-m", "recipes.mini.train_vocoder", *again]
        os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
