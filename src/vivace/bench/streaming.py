"""What the n-th second of one utterance costs: flat means that nothing is computed twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from vivace.bench.common import clock_of, heading
from vivace.bench.progress import Count, Progress
from vivace.config import ModelConfig
from vivace.engine.chunking import ChunkPlan
from vivace.engine.flow_runner import FlowRunner
from vivace.engine.loading import load_assets
from vivace.engine.vocoder_runner import VocoderSession
from vivace.errors import InvalidRequestError, VoiceNotFoundError
from vivace.voice import Voice

EARLY, LATE = 2, 20
"""The seconds that are compared; the first second pays for the vocoder's look-ahead."""


@dataclass(frozen=True, slots=True)
class SecondCost:
    """Milliseconds that one second of audio took, ``second`` counted from 1."""

    second: int
    flow_ms: float
    vocoder_ms: float

    @property
    def total_ms(self) -> float:
        return self.flow_ms + self.vocoder_ms


def run(
    model: str = "mini",
    *,
    seconds: int = 22,
    runs: int = 3,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Renders random valid speech tokens through flow and vocoder, one second at a time.

    Args:
        model: folder, or "mini".
        seconds: length of the utterance.
        runs: repetitions after one that warms up; every second's cost is the median over them.
        progress: told of every repetition.

    Returns:
        One document with the field names of the benchmark rows. ``ratio_20_to_2`` is None for an utterance
        shorter than 20 s.

    Raises:
        ModelFolderError, VoiceNotFoundError: the model cannot be used or has no voice of its own.
        InvalidRequestError: ``seconds`` or ``runs`` out of range.
    """
    assets = load_assets(model, device=device, dtype=dtype)
    voice, config = assets.default_voice, assets.model.config
    if voice is None:
        raise VoiceNotFoundError("this model has no built-in voice to measure with", param="voice")
    longest = _longest_seconds(config, voice)
    if not 1 <= seconds <= longest:
        raise InvalidRequestError(f"seconds must lie between 1 and {longest}", param="seconds")
    if not 1 <= runs <= 1000:
        raise InvalidRequestError("runs must lie between 1 and 1000", param="runs")
    flow = FlowRunner(assets.model.flow)
    generator = torch.Generator().manual_seed(seed)
    count = (seconds + 1) * config.token_rate_hz + config.flow.lookahead_tokens
    tokens = torch.randint(config.flow.vocab_size, (count,), generator=generator).tolist()

    spoken = Count(progress, 1 + runs)
    spoken.begin(f"an utterance of {seconds} s")

    def once() -> list[SecondCost]:
        vocoder = VocoderSession(assets.model.vocoder, speed=1.0)
        costs = _costs(flow, vocoder, voice, tokens, seconds, config, clock_of(torch.device(device)))
        spoken.advance()
        return costs

    once()
    repeated = [once() for _ in range(runs)]
    measured = [_median([costs[index] for costs in repeated]) for index in range(seconds)]
    return {
        **heading("streaming", device, config.name, dtype),
        "runs": runs,
        "seconds": [
            {
                "second": cost.second,
                "flow_ms": round(cost.flow_ms, 3),
                "vocoder_ms": round(cost.vocoder_ms, 3),
            }
            for cost in measured
        ],
        "ratio_20_to_2": (
            round(measured[LATE - 1].total_ms / measured[EARLY - 1].total_ms, 3) if seconds >= LATE else None
        ),
    }


def _longest_seconds(config: ModelConfig, voice: Voice) -> int:
    frames = config.flow.noise_frames - len(voice.mel)
    return config.flow.num_tokens(frames) // config.token_rate_hz - 2


@torch.inference_mode()
def _costs(
    flow: FlowRunner,
    vocoder: VocoderSession,
    voice: Voice,
    tokens: list[int],
    seconds: int,
    config: ModelConfig,
    clock: Callable[[], float],
) -> list[SecondCost]:
    """One utterance. The part up to the first chunk border is not counted: it is shorter than a second."""
    plan = ChunkPlan(config.token_rate_hz, config.flow.lookahead_tokens, config.flow.num_frames(1))
    stream = flow.open(voice)
    first = plan.first_audio_tokens(len(voice.speech_tokens))
    vocoder.step(flow.step(stream, tokens[:first], is_last=False), is_last=False)
    costs = []
    for second in range(1, seconds + 1):
        start = first + (second - 1) * config.token_rate_hz
        begun = clock()
        mel = flow.step(stream, tokens[start : start + config.token_rate_hz], is_last=False)
        rendered = clock()
        vocoder.step(mel, is_last=False)
        costs.append(SecondCost(second, (rendered - begun) * 1e3, (clock() - rendered) * 1e3))
    return costs


def _median(costs: list[SecondCost]) -> SecondCost:
    return SecondCost(
        costs[0].second, median(cost.flow_ms for cost in costs), median(cost.vocoder_ms for cost in costs)
    )
