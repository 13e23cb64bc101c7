"""What the machine allows: measured bandwidth and matrix rate, and the work that each stage cannot avoid."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from vivace.checkpoint import weight_shapes
from vivace.config import FlowConfig, SpeechLMConfig
from vivace.layers.int8 import gain_over_bfloat16, products_are_exact

if TYPE_CHECKING:
    from vivace.config import ModelConfig

CONTEXT_FRAMES = 500
"""Frames that a frame of the flow attends to, for the count of its arithmetic."""


_OF_TIME = (".time_mlp.", ".mlp.")
"""Weights of a U-Net whose results depend on time alone, so that they are kept and not read again."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on the device: bytes per second (read and written) and operations of matrix products per second."""

    bandwidth: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class StageWork:
    """What one second of audio needs at least, batch 1.

    Attributes:
        lm_weight_bytes: read once per speech token.
        flow_weight_bytes: read once per Euler step of a one-second chunk (what depends on time alone left out).
        flow_flops, vocoder_flops: arithmetic; the flow's behind ``CONTEXT_FRAMES``.
        flow_attention_flops: the flow's for each frame before it, contained in ``flow_flops``.
    """

    tokens: int
    lm_weight_bytes: int
    flow_weight_bytes: int
    flow_steps: int
    flow_flops: float
    flow_attention_flops: float
    vocoder_flops: float


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A large copy and a large matrix product on ``device``; well under a second."""
    on_cpu = device.type == "cpu"
    elements = (1 << 26) if on_cpu else (1 << 30)
    source = torch.empty(elements // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source), device)
    size = 1536 if on_cpu else 8192
    left, right = (torch.empty(size, size, device=device).normal_().to(dtype) for _ in range(2))
    multiply = torch._int_mm if dtype == torch.int8 else torch.mm
    matrix_s = _median_s(lambda: multiply(left, right), device)
    return Ceilings(2 * source.numel() * 4 / copy_s, 2 * size**3 / matrix_s)


def int8_ceilings(device: torch.device) -> Ceilings | None:
    """Those of 8-bit products, on a CPU that is good at them; None elsewhere."""
    if device.type != "cpu" or not products_are_exact() or gain_over_bfloat16() <= 1:
        return None
    return measure_ceilings(device, torch.int8)


def stage_work(config: ModelConfig, dtype: torch.dtype) -> StageWork:
    """Counts the model's own sizes."""
    lm, flow = config.lm, config.flow
    if not isinstance(lm, SpeechLMConfig) or not isinstance(flow, FlowConfig):
        return _older_stage_work(config, dtype)
    dit = flow.dit
    width = lm.num_heads * lm.head_dim
    shared = lm.num_kv_heads * lm.head_dim
    layer = lm.hidden_size * (2 * width + 2 * shared + 3 * lm.intermediate_size)
    lm_weights = lm.num_layers * layer + lm.num_speech_rows * lm.hidden_size
    inner = dit.heads * dit.dim_head
    block = dit.dim * (4 * inner + 2 * dit.ff_mult * dit.dim)
    position = 2 * dit.dim * (dit.dim // 16) * 31
    passes = dit.depth * block + position + dit.dim * (dit.mel_dim + dit.out_channels)
    rows = 2.0 * config.token_rate_hz * flow.token_mel_ratio * flow.num_steps  # both guidance branches
    attention = 4 * dit.depth * inner
    size = dtype.itemsize
    return StageWork(
        tokens=config.token_rate_hz,
        lm_weight_bytes=lm_weights * size,
        flow_weight_bytes=passes * size,
        flow_steps=flow.num_steps,
        flow_flops=rows * (2 * passes + attention * CONTEXT_FRAMES),
        flow_attention_flops=rows * attention,
        vocoder_flops=flow.num_frames(config.token_rate_hz) * _vocoder_flops_per_frame(config),
    )


def _older_stage_work(config: ModelConfig, dtype: torch.dtype) -> StageWork:
    """CosyVoice 2 and 300M: every weight but the embeddings counts once a token or frame."""
    flow, size = config.flow, dtype.itemsize
    shapes = weight_shapes(config, "lm")
    embeddings = ("embed_tokens.weight", "text_embedding.weight", "speech_embedding.weight")
    lm_weights = sum(math.prod(shape) for name, shape in shapes.items() if name not in embeddings)
    passes = _estimator_weights(weight_shapes(config, "flow"))
    attention = flow.kept_values // flow.num_steps
    rows = 2.0 * flow.num_frames(config.token_rate_hz) * flow.num_steps  # both guidance branches
    return StageWork(
        tokens=config.token_rate_hz,
        lm_weight_bytes=lm_weights * size,
        flow_weight_bytes=passes * size,
        flow_steps=flow.num_steps,
        flow_flops=rows * (2 * passes + attention * CONTEXT_FRAMES),
        flow_attention_flops=rows * attention,
        vocoder_flops=flow.num_frames(config.token_rate_hz) * _vocoder_flops_per_frame(config),
    )


def _estimator_weights(shapes: Mapping[str, Sequence[int]]) -> int:
    """Numbers that every Euler step reads: those of the flow's estimator, but for what depends on time alone."""
    counted = [
        math.prod(shape)
        for name, shape in shapes.items()
        if name.startswith("unet.") and not any(part in name for part in _OF_TIME)
    ]
    assert counted, "no weight of the flow is known to be read by its Euler steps: name its estimator here"
    return sum(counted)


def floor_rtf(work: StageWork, ceilings: Ceilings) -> float:
    """Seconds of work per second of audio, each stage at its own limit, one after the other."""
    lm_s = work.tokens * work.lm_weight_bytes / ceilings.bandwidth
    flow_s = max(
        work.flow_steps * work.flow_weight_bytes / ceilings.bandwidth, work.flow_flops / ceilings.matrix_rate
    )
    return lm_s + flow_s + work.vocoder_flops / ceilings.matrix_rate


def _vocoder_flops_per_frame(config: ModelConfig) -> float:
    vocoder = config.vocoder
    total = 2.0 * vocoder.in_channels * vocoder.base_channels * 5
    columns, channels = 1, vocoder.base_channels
    spectrum = vocoder.istft_n_fft + 2
    for stage, (rate, kernel) in enumerate(
        zip(vocoder.upsample_rates, vocoder.upsample_kernel_sizes, strict=True)
    ):
        columns *= rate
        taps = -(-(kernel - 1) // rate) + 1
        total += 2.0 * columns * channels * (channels // 2) * taps
        channels //= 2
        pairs = sum(
            2 * size * len(dilations)
            for size, dilations in zip(
                vocoder.resblock_kernel_sizes, vocoder.resblock_dilation_sizes, strict=True
            )
        )
        source = (
            2
            * vocoder.source_resblock_kernel_sizes[stage]
            * len(vocoder.source_resblock_dilation_sizes[stage])
        )
        total += 2.0 * columns * channels * channels * (pairs + source)
    total += 2.0 * columns * channels * spectrum * 7
    f0 = 2.0 * vocoder.f0_cond_channels * (4 * vocoder.in_channels + 12 * vocoder.f0_cond_channels)
    return total + f0


def _median_s(work: Callable[[], object], device: torch.device, runs: int = 7) -> float:
    times = []
    for _ in range(runs + 2):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return median(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
