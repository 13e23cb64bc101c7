"""Time of the speech LM's training steps on this machine, in several ways, with random data: under a minute.

PYTHONPATH=src:. python3 -m recipes.mini.profile_lm [--seconds 50]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from recipes.mini.config import mini_lm_config
from recipes.mini.lm_data import LMData, plan
from recipes.mini.lm_step import Trainer, bucketed, synthetic_data
from recipes.mini.train_lm import new_model

VARIANTS = (
    ("compiled", 32_768),
    ("compiled", 24_576),
    ("compiled", 49_152),
    ("graph", 32_768),
    ("eager", 32_768),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=float, default=50.0, help="start no further variant after this time"
    )
    parser.add_argument("--steps", type=int, default=60, help="steps timed for each variant")
    args = parser.parse_args()
    begun, device = time.monotonic(), torch.device(args.device)
    config = mini_lm_config(243)
    data = synthetic_data(config, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"torch {torch.__version__}, {name}", flush=True)
    for mode, positions in VARIANTS:
        if time.monotonic() - begun > args.seconds:
            print("no time for further variants", flush=True)
            return
        started = time.monotonic()
        try:
            print(f"{mode} {positions}: {measure(data, mode, positions, args.steps)}", end="", flush=True)
        except Exception as error:
            print(f"{mode} {positions}: {type(error).__name__}: {str(error)[:500]}", end="")
        print(f"  ({time.monotonic() - started:.1f} s)", flush=True)


def measure(data: LMData, mode: str, positions: int, steps: int) -> str:
    """Milliseconds per step over a mixture of lengths, after every length was seen twice."""
    device, random = data.device, np.random.default_rng(0)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    lm = new_model(data.config, 0.1, 0).to(device).train()
    trainer = Trainer(lm, data, mode=mode, decay=0.05, smoothing=0.03, most_noise=0.3)
    rows = plan(data, np.arange(len(data.text_length)).repeat(4), random)
    trainer.new_plan(rows)
    trainer.set_rate(1e-3)
    batches = [
        (torch.from_numpy(which).to(device), width)
        for which, width in bucketed(rows.totals(data), positions, random)
    ]
    warm = min(steps, len(batches))
    started = time.monotonic()
    for width in sorted({width for _, width in batches[:warm]}):
        same = [batch for batch in batches if batch[1] == width]
        for index in range(2 if warm > 3 else 1):
            trainer.step(*same[index % len(same)])
    first = trainer.mean_loss()
    wait()
    ready, started = time.monotonic() - started, time.monotonic()
    for index in range(steps):
        trainer.step(*batches[index % warm])
    host = time.monotonic() - started
    wait()
    took = (time.monotonic() - started) / steps
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return (
        f"{took * 1e3:.1f} ms a step = {1 / took:.1f} it/s (host {host / steps * 1e3:.1f} ms), "
        f"ready in {ready:.1f} s, {len({w for _, w in batches})} widths, loss {first:.3f} -> "
        f"{trainer.mean_loss():.3f}, {memory:.1f} GiB, really {trainer.mode}"
    )


if __name__ == "__main__":
    main()
