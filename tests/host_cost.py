"""What the host does in a step of many streams, before a device that returns at once.

``python -m tests.host_cost 64,256`` prints a line for each number of streams, ``--profile`` where the time goes. The
engine is real, on the paged stages of a tiny model; launches of speech LM, flow and vocoder compute nothing. What is
left is Python and small tensors: plans, packets, tokens, frames cut into pieces.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from tests.helpers import noise_voice, quiet_engine
from vivace import SamplingParams, SynthesisRequest
from vivace.engine.device_stages import DeviceStages
from vivace.models.flow_solver import Solver
from vivace.models.hift_pieces import PieceRunner
from vivace.models.lm_paged import _DEPTH, PagedLM
from vivace.random_checkpoint import write_random_checkpoint

TEXT = "One fox ran home in the rain, two dogs sat down, and then a cat sang a very long song."
RATIO = 10.0  # speech tokens of a text token: every utterance has the same length
LAUNCHES = {size: 1.0 + size / 32 for size in (1, 2, 4, 8, 12, 16, 24, 32)}  # as the flow has them on an H200


@dataclass
class Cost:
    """Of all steps.

    Attributes:
        times: seconds of the processor in each, in the thread that steps.
    """

    steps: int = 0
    chunks: int = 0
    rows: int = 0
    times: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        step_us = 1e6 * statistics.median(self.times)
        chunks, rows = self.chunks / self.steps, self.rows / self.steps
        return (
            f"{step_us:.0f} us a step (the longest {1e6 * max(self.times):.0f}), {step_us / chunks:.1f} us a chunk;"
            f" {chunks:.1f} chunks and {rows:.1f} rows a step"
        )


def nothing(self: PagedLM, key: tuple[str, int, int]) -> None:
    """In place of a launch of the speech LM: each row gets as many tokens as it asked for, no two alike in a row."""
    kind, _, steps = key
    result = self._results[int(self._launches) % _DEPTH]
    commands, _ = self._inputs[key]
    result[:, 0] = 0
    result[:, 1] = 1
    if kind == "step":
        result[: len(commands), 1] = commands[:, 1].clamp(0, steps)
    result[:, 2:] = torch.arange(result.shape[1] - 2) % 7 + 1
    self._launches += 1


def measure(folder: Path, streams: int, steps: int, profile: cProfile.Profile | None = None) -> Cost:
    """So many steps with ``streams`` requests at any time."""
    engine = quiet_engine(folder, num_steps=2, token_text_ratio=(RATIO, RATIO))
    assets, cost = engine._assets, Cost()
    device = DeviceStages.build(assets.model, assets.limits, max_rows=256)
    device.flow.paged._costs = LAUNCHES
    engine.use_device(device)
    voice = noise_voice(engine._config, 75)
    lives, seed = [], 0
    while cost.steps < steps:
        while len(lives) < streams:
            seed += 1
            request = SynthesisRequest(TEXT, voice=voice, sampling=SamplingParams(seed=seed))
            lives.append(engine.submit(request))
        started = time.thread_time()
        if profile is not None:
            profile.enable()
        engine.step()
        if profile is not None:
            profile.disable()
        cost.times.append(time.thread_time() - started)
        chunks, rows = engine._loop.last_plan
        cost.steps, cost.chunks, cost.rows = cost.steps + 1, cost.chunks + chunks, cost.rows + rows
        for live in lives:
            while engine.take(live) is not None:
                pass
        lives = [live for live in lives if not live.is_done]
    engine.close()
    return cost


def main(streams: list[int], steps: int, is_profiled: bool) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(PagedLM, "_body", nothing),
        mock.patch.object(Solver, "run"),
        mock.patch.object(PieceRunner, "run"),
    ):
        torch.set_num_threads(1)
        path = Path(folder) / "model"
        write_random_checkpoint(path, "tiny", dtype="float32", generation=3)
        for count in streams:
            measure(path, count, 30)
            print(f"{count} streams: {measure(path, count, steps)}")
            if is_profiled:
                profile = cProfile.Profile()
                measure(path, count, steps, profile)
                pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main([int(part) for part in sys.argv[1].split(",")], 300, "--profile" in sys.argv)
