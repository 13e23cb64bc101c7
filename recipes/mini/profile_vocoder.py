"""Times the vocoder's training steps on a GPU, with random tensors in place of a corpus.

    PYTHONPATH=src:. python3 -m recipes.mini.profile_vocoder [--seconds 60]

Every variant's steps are recorded as CUDA graphs, as in training; then its parts are timed in the same way. The
fastest variant's kernels are listed. A variant that fails prints why, and the next one goes on.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from recipes.mini.config import mini_vocoder_config
from recipes.mini.mel_gpu import HOP
from recipes.mini.train_vocoder import (
    AFTER,
    F0_BEFORE,
    F0_FRAMES,
    Batch,
    Crop,
    Losses,
    Training,
    initialise,
    recorded,
)
from recipes.mini.vocoder_fast import Speed
from vivace.config import VocoderConfig
from vivace.models.hift import CausalHiFT


@dataclass(frozen=True)
class Variant:
    name: str
    speed: Speed
    crop: Crop = field(default_factory=Crop)
    batch: int = 16
    config: VocoderConfig | None = None


def variants() -> list[Variant]:
    plain = Speed()
    first_run = replace(
        mini_vocoder_config(), base_channels=128, resblock_kernel_sizes=(3, 5, 9),
        source_resblock_kernel_sizes=(3, 5, 7), f0_cond_channels=104,
    )  # fmt: skip
    return [
        Variant("tf32", plain),
        Variant("batch 24", plain, batch=24),
        Variant("tf32, snake step by step", replace(plain, fused_snake=False)),
        Variant("bf16", replace(plain, bf16=True)),
        Variant(
            "first run's generator and batch", Speed(channels_last=False, fused=False),
            Crop(kept=41, before=3, judged=41), 32, first_run,
        ),
    ]  # fmt: skip


def random_batch(variant: Variant, harmonics: int, device: torch.device) -> Batch:
    rows, crop = variant.batch, variant.crop
    generator = torch.Generator(device).manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    return Batch(
        samples=0.2 * (uniform(rows, crop.kept * HOP) - 0.5),
        mel=-6.0 + 2.0 * uniform(rows, 80, crop.f0_before + crop.generated),
        f0=100.0 + 100.0 * uniform(rows, crop.generated),
        teacher=torch.ones(rows, 1, device=device),
        noise=uniform(rows, harmonics, crop.generated * HOP),
        f0_mel=-6.0 + 2.0 * uniform(4 * rows, 80, F0_FRAMES),
        f0_true=100.0 + 100.0 * uniform(4 * rows, F0_FRAMES - F0_BEFORE - AFTER),
    )


def milliseconds(step: Callable[[], object], times: int = 20) -> float:
    step()
    torch.cuda.synchronize()
    begun = time.monotonic()
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    return (time.monotonic() - begun) / times * 1000


def parts(training: Training) -> dict[str, Callable[[], Losses]]:
    """Parts of the steps, forward and backward."""
    batch, crop = training.batch, training.crop
    weights = [p for name, p in training.model.named_parameters() if not name.startswith("f0_predictor.")]
    made = (0.2 * torch.rand_like(batch.samples) - 0.1).requires_grad_()
    judges = training.discriminators

    def generator() -> Losses:
        loss = training.generate().square().mean()
        torch.autograd.grad(loss, weights)
        return {"loss": loss.detach()}

    def generator_forward() -> Losses:
        with torch.no_grad():
            return {"loss": training.generate().mean()}

    def f0() -> Losses:
        loss = training.f0_loss()
        torch.autograd.grad(loss, list(training.model.f0_predictor.parameters()))
        return {"loss": loss.detach()}

    def spectral() -> Losses:
        loss = training.spectral(made, batch.samples)
        torch.autograd.grad(loss, made)
        return {"loss": loss.detach()}

    def judge(members: list[torch.nn.Module]) -> Callable[[], Losses]:
        def run() -> Losses:
            end = made[:, -crop.judged * HOP :]
            true = batch.samples[:, -crop.judged * HOP :]
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                both = [one(torch.cat((true, end.detach()))) for one in members]
                blame = sum(features[-1].float().square().mean() for features in both)
                torch.autograd.grad(blame, [p for one in members for p in one.parameters()])
                fooled = sum(feature.float().abs().mean() for one in members for feature in one(end))
                torch.autograd.grad(fooled, made)
            return {"loss": fooled.detach()}

        return run

    def optimizers() -> Losses:
        for optimizer in training.optimizers:
            optimizer.step()
        return {"loss": torch.zeros((), device=made.device)}

    return {
        "generator": generator, "generator forward": generator_forward, "f0": f0, "spectral loss": spectral,
        "periods": judge(list(judges.periods)), "spectra": judge(list(judges.spectra)), "AdamW": optimizers,
    }  # fmt: skip


def measure(variant: Variant, device: torch.device, with_parts: bool) -> tuple[float, Callable[[], Losses]]:
    begun = time.monotonic()
    torch.manual_seed(0)
    model = CausalHiFT(variant.config or mini_vocoder_config()).to(device)
    initialise(model)
    batch = random_batch(variant, model.m_source.harmonics, device)
    training = Training(model, batch, 1e-4, variant.speed, variant.crop)
    training.set_rate(0.1, 1000, 1000)
    spectral, adversarial = recorded(training.step_spectral), recorded(training.step_adversarial)
    ready = time.monotonic() - begun
    times = milliseconds(spectral), milliseconds(adversarial)
    losses = {name: float(value) for name, value in adversarial().items()}
    finite = all(abs(value) < 1e9 for value in losses.values())
    shown = " ".join(f"{name} {value:.4f}" for name, value in losses.items())
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{variant.name}: spectral {times[0]:.2f} ms, adversarial {times[1]:.2f} ms; recorded in {ready:.1f} s, "
        f"{memory:.1f} GiB; {'finite' if finite else 'NOT FINITE'}: {shown}",
        flush=True,
    )
    if with_parts:
        for name, part in parts(training).items():
            try:
                print(f"    {name}: {milliseconds(recorded(part)):.2f} ms", flush=True)
            except Exception as error:
                print(f"    {name}: {error}", flush=True)
    return times[1], adversarial


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="no new variant after these")
    parser.add_argument("--only", nargs="*", help="names of variants")
    args = parser.parse_args()
    begun = time.monotonic()
    device = torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    best: tuple[float, str, Callable[[], Losses]] | None = None
    for index, variant in enumerate(variants()):
        if args.only and variant.name not in args.only:
            continue
        if time.monotonic() - begun > args.seconds:
            print(f"{variant.name}: no time left", flush=True)
            continue
        torch.cuda.reset_peak_memory_stats()
        try:
            taken, step = measure(variant, device, with_parts=index == 0)
        except Exception:
            traceback.print_exc()
            torch.cuda.synchronize()
            continue
        if best is None or taken < best[0]:
            best = taken, variant.name, step
    if best is None:
        return
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            best[2]()
        torch.cuda.synchronize()
    print(f"kernels of three adversarial steps: {best[1]}")
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=90))


if __name__ == "__main__":
    main()
