"""What several test files build on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.conftest import GOLDEN
from vivace import Voice
from vivace.audio.pcm import pcm16, wav_header
from vivace.config import Limits, ModelConfig
from vivace.engine.engine import Engine
from vivace.engine.loading import load_assets


def golden_vectors() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "cosyvoice3-tiny" / "vectors.npz") as packed:
        return dict(packed)


def quiet_engine(
    folder: Path,
    *,
    voices: Path | None = None,
    limits: Limits | None = None,
    num_steps: int | None = None,
    token_text_ratio: tuple[float, float] | None = None,
    **options,
) -> Engine:
    """An engine without warm-up.

    Fewer Euler steps make it faster, and a narrow ``token_text_ratio`` bounds what random weights say: they
    seldom sample the end of sequence.
    """
    assets = load_assets(folder, voices_folder=voices, limits=limits)
    if token_text_ratio is not None:
        config = replace(assets.model.config, token_text_ratio=token_text_ratio)
        assets.model = replace(assets.model, config=config)
    if num_steps is not None:
        flow = assets.model.flow
        flow.config = replace(flow.config, num_steps=num_steps)
        flow.train(False).prepare()
    return Engine(assets, **options)


def noise_voice(
    config: ModelConfig, num_tokens: int = 40, *, seed: int = 1, text: str = "A noisy prompt."
) -> Voice:
    """A voice of random numbers."""
    rng = np.random.default_rng(seed)
    return Voice(
        name=f"noise-{seed}",
        prompt_text=text,
        speech_tokens=rng.integers(0, config.flow.vocab_size, num_tokens).astype(np.int32),
        mel=rng.standard_normal((2 * num_tokens, config.flow.output_size)).astype(np.float32) - 4,
        embedding=rng.standard_normal(config.flow.spk_embed_dim).astype(np.float32),
    )


def speech_like_wav(seconds: float = 2.0, rate_hz: int = 16_000) -> bytes:
    """A recording that passes for speech: a gliding tone with syllables and some noise."""
    time = np.arange(int(seconds * rate_hz)) / rate_hz
    tone = np.sin(2 * np.pi * (120 * time + 15 * np.sin(2 * np.pi * time)))
    noise = 0.05 * np.random.default_rng(0).standard_normal(len(time))
    samples = (0.3 * (0.6 + 0.4 * np.sin(2 * np.pi * 4 * time)) * tone + noise).astype(np.float32)
    data = pcm16(samples)
    return wav_header(rate_hz, len(data)) + data
