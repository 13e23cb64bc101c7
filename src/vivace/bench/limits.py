"""Lower bounds for this machine and model: ``vivace limits``. What no implementation can beat, and where the engine is.

A stage takes at least the time to read its weights and kept values once, and the time for its arithmetic; its floor is
the larger of the two at the rates that were measured here. Whole figures add the stages one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from vivace.bench.common import heading
from vivace.bench.floors import (
    CONTEXT_FRAMES,
    Ceilings,
    StageWork,
    int8_ceilings,
    measure_ceilings,
    stage_work,
)
from vivace.bench.limits_measure import measure_engine, num_measured
from vivace.bench.progress import Count, Progress
from vivace.bench.single import RANDOM
from vivace.checkpoint import weight_shapes
from vivace.checkpoint.loading import resolve_device
from vivace.config import SpeechLMConfig
from vivace.engine.chunking import ChunkPlan
from vivace.engine.loading import load_assets
from vivace.engine.routing import MANY_STREAMS
from vivace.errors import InvalidRequestError
from vivace.random_checkpoint import full_config

if TYPE_CHECKING:
    from vivace.config import ModelConfig

BATCHES = (1, 8, 32, 128)
CONTEXT_TOKENS = 500
TEXT_TOKENS = 100
"""Of a request with its prompt's text, for the pass over the prompt."""

FULL_PROMPT_TOKENS = 75
"""Three seconds: the voice of a model that has no voice of its own."""

STREAM_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored, and the rate at which they multiply."""

    name: str
    weight_bytes: float
    kept_bytes: int
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class Work:
    """Counted once from the sizes of a model.

    Attributes:
        lm_weights, flow_weights, vocoder_weights: numbers that are read once per step or pass.
        lm_kept: keys and values of one position. flow_kept: those of one frame, all Euler steps and branches.
        lm_attention_flops: of one new position for each position before it.
        flow_flops, vocoder_flops: of one second of audio; the flow's behind ``CONTEXT_FRAMES``.
        flow_attention_flops: of one second of audio, for each frame before it.
    """

    tokens_per_s: int
    lm_weights: int
    lm_kept: int
    lm_attention_flops: int
    flow_weights: int
    flow_steps: int
    flow_kept: int
    flow_flops: float
    flow_attention_flops: float
    vocoder_weights: int
    vocoder_flops: float
    frames_per_s: int


def count_work(config: ModelConfig) -> Work:
    """The model's own sizes as numbers of weights and operations."""
    counted: StageWork = stage_work(config, torch.float32)
    lm, flow = config.lm, config.flow
    if isinstance(lm, SpeechLMConfig):
        kept = 2 * lm.num_layers * lm.num_kv_heads * lm.head_dim
        attention = 4 * lm.num_layers * lm.num_heads * lm.head_dim
    else:
        kept, attention = 2 * lm.num_layers * lm.hidden_size, 4 * lm.num_layers * lm.hidden_size
    vocoder = sum(math.prod(shape) for shape in weight_shapes(config, "vocoder").values())
    return Work(
        tokens_per_s=config.token_rate_hz,
        lm_weights=counted.lm_weight_bytes // 4,
        lm_kept=kept,
        lm_attention_flops=attention,
        flow_weights=counted.flow_weight_bytes // 4,
        flow_steps=counted.flow_steps,
        flow_kept=flow.kept_values,
        flow_flops=counted.flow_flops,
        flow_attention_flops=counted.flow_attention_flops,
        vocoder_weights=vocoder,
        vocoder_flops=counted.vocoder_flops,
        frames_per_s=flow.num_frames(config.token_rate_hz),
    )


@dataclass(frozen=True, slots=True)
class Floors:
    """Shortest times of one model in one format.

    Args:
        bandwidth: bytes per second.
        vocoder: its format, whatever that of the other stages is (``vocoder_format``).
    """

    work: Work
    form: Format
    bandwidth: float
    vocoder: Format

    def lm_step_s(self, batch: int = 1, context: int = CONTEXT_TOKENS) -> float:
        """One token for each of ``batch`` rows."""
        work, form = self.work, self.form
        read = work.lm_weights * form.weight_bytes + batch * context * work.lm_kept * form.kept_bytes
        flops = batch * (2 * work.lm_weights + context * work.lm_attention_flops)
        return max(read / self.bandwidth, flops / form.matrix_rate)

    def lm_prompt_s(self, positions: int) -> float:
        """The pass over the prompt."""
        work, form = self.work, self.form
        flops = positions * (2 * work.lm_weights + positions / 2 * work.lm_attention_flops)
        return max(work.lm_weights * form.weight_bytes / self.bandwidth, flops / form.matrix_rate)

    def flow_s(self, batch: int = 1, context_frames: int = CONTEXT_FRAMES) -> float:
        """One chunk of a second behind so many frames for each of ``batch`` streams, all Euler steps."""
        work, form = self.work, self.form
        read = work.flow_steps * work.flow_weights * form.weight_bytes
        read += batch * context_frames * work.flow_kept * form.kept_bytes
        flops = work.flow_flops + (context_frames - CONTEXT_FRAMES) * work.flow_attention_flops
        return max(read / self.bandwidth, batch * flops / form.matrix_rate)

    def vocoder_s(self, batch: int = 1, seconds: float = 1.0) -> float:
        """The same for the vocoder."""
        work, form = self.work, self.vocoder
        flops = batch * seconds * work.vocoder_flops
        return max(work.vocoder_weights * form.weight_bytes / self.bandwidth, flops / form.matrix_rate)

    def rtf(self) -> float:
        """Seconds of work for a second of audio, one stream."""
        return 1 / self.throughput(1)

    def throughput(
        self, batch: int, context: int = CONTEXT_TOKENS, context_frames: int = CONTEXT_FRAMES
    ) -> float:
        """Seconds of audio per second with ``batch`` streams side by side."""
        lm_s = self.work.tokens_per_s * self.lm_step_s(batch, context)
        return batch / (lm_s + self.flow_s(batch, context_frames) + self.vocoder_s(batch))

    def ttfb_s(
        self,
        tokens: int,
        prompt_tokens: int,
        *,
        text_tokens: int = TEXT_TOKENS,
        cold_chunks: int = 0,
        context_frames: int = CONTEXT_FRAMES,
    ) -> float:
        """First audio behind ``tokens`` new speech tokens; ``cold_chunks`` of the voice's prompt come before it."""
        prompt = text_tokens + prompt_tokens
        flow = (1 + cold_chunks) * self.flow_s(context_frames=context_frames)
        steps = (tokens - 1) * self.lm_step_s(context=prompt)
        return (
            self.lm_prompt_s(prompt) + steps + flow + self.vocoder_s(seconds=tokens / self.work.tokens_per_s)
        )

    def stream_bytes(
        self, prompt_tokens: int, *, text_tokens: int = TEXT_TOKENS, seconds: float = STREAM_SECONDS
    ) -> int:
        """What a stream of ``seconds`` keeps behind a shared prompt."""
        work, size = self.work, self.form.kept_bytes
        positions = text_tokens + prompt_tokens + seconds * work.tokens_per_s
        return round(size * (seconds * work.frames_per_s * work.flow_kept + positions * work.lm_kept))


def formats(full: Ceilings, half: Ceilings, small: Ceilings | None = None) -> list[Format]:
    """float32 and halves as measured; smaller weights multiply at the halves' rate once they are unpacked.

    Args:
        small: of 8-bit products, where the engine has them: then int8 weights multiply at their rate.
    """
    return [
        Format("float32", 4, 4, full.matrix_rate),
        Format("float16", 2, 2, half.matrix_rate),
        Format("int8", 1, 2, (small or half).matrix_rate),
        Format("int4", 0.5, 2, half.matrix_rate),
    ]


def vocoder_format(device: torch.device, forms: Sequence[Format]) -> Format:
    """Of ``formats``, the fastest that a vocoder multiplies in: halves on a GPU (``DeviceVocoder``), else float32."""
    return forms[1] if device.type == "cuda" else forms[0]


def run(
    model: str = "mini",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    measure: bool = False,
    seconds: float = 5.0,
    requests: int = 3,
    streams: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The floors of every format; with ``measure`` the engine beside those of ``dtype``.

    Args:
        model: folder, "mini" or "random" (full size; only its sizes count unless ``measure``).
        seconds: of audio per utterance. requests: one after the other. streams: side by side; None: 32 on a GPU, 4 on
            a CPU.
        progress: told of what the machine was asked, and of every utterance.

    Raises:
        ModelFolderError, InvalidRequestError: the model cannot be used, or a number is out of range.
    """
    if requests < 1:
        raise InvalidRequestError("requests must be 1 or more", param="requests")
    if streams is not None and not 1 <= streams <= MANY_STREAMS:
        raise InvalidRequestError(f"streams must lie between 1 and {MANY_STREAMS}", param="streams")
    target = resolve_device(device)
    count = Count(progress, 1 + (num_measured(target.type, requests, streams) if measure else 0))
    count.begin("the machine")
    half_type = torch.float16 if target.type == "cuda" else torch.bfloat16
    full, half = measure_ceilings(target, torch.float32), measure_ceilings(target, half_type)
    bandwidth = max(full.bandwidth, half.bandwidth)
    config, prompt_tokens = _sizes(model)
    work = count_work(config)
    forms = formats(full, half, int8_ceilings(target))
    count.advance()
    ladder = [Floors(work, form, bandwidth, vocoder_format(target, forms)) for form in forms]
    document: dict[str, Any] = {
        **heading("limits", device, config.name, dtype),
        "bandwidth_bytes_per_second": round(bandwidth),
        "matrix_flops_per_second": {"float32": round(full.matrix_rate), "float16": round(half.matrix_rate)},
        "prompt_tokens": prompt_tokens,
        "context_tokens": CONTEXT_TOKENS,
        "work": asdict(work),
        "formats": [describe(floors, config, prompt_tokens) for floors in ladder],
        "measured": None,
    }
    if measure:
        own = ladder[{torch.float32: 0, torch.int8: 2}.get(dtype, 1)]
        document["measured"] = measure_engine(
            model,
            device,
            dtype,
            seconds=seconds,
            requests=requests,
            streams=streams,
            floors=own,
            count=count,
        )
    return document


def describe(floors: Floors, config: ModelConfig, prompt_tokens: int) -> dict[str, Any]:
    """All floors of one format in the units of the table."""
    plan = ChunkPlan(config.chunk_tokens, config.flow.lookahead_tokens, config.flow.num_frames(1))
    early = plan.first_audio_tokens(prompt_tokens)
    late = config.chunk_tokens + -prompt_tokens % config.chunk_tokens + config.flow.lookahead_tokens
    cold = plan.ready_border(prompt_tokens) // config.chunk_tokens
    work, form = floors.work, floors.form
    return {
        "format": form.name,
        "lm": [
            {
                "batch": batch,
                "bytes_per_step": round(
                    work.lm_weights * form.weight_bytes
                    + batch * CONTEXT_TOKENS * work.lm_kept * form.kept_bytes
                ),
                "flops_per_step": batch * (2 * work.lm_weights + CONTEXT_TOKENS * work.lm_attention_flops),
                "us_per_step": round(floors.lm_step_s(batch) * 1e6, 2),
                "tps": round(batch / floors.lm_step_s(batch), 1),
                "audio_seconds_per_second": round(floors.throughput(batch), 2),
            }
            for batch in BATCHES
        ],
        "flow_ms_per_chunk": round(floors.flow_s() * 1e3, 4),
        "vocoder_ms_per_second": round(floors.vocoder_s() * 1e3, 4),
        "rtf": round(floors.rtf(), 6),
        "ttfb_ms": round(floors.ttfb_s(early, prompt_tokens) * 1e3, 3),
        "ttfb_tokens": early,
        "ttfb_late_border_ms": round(floors.ttfb_s(late, prompt_tokens) * 1e3, 3),
        "ttfb_cold_voice_ms": round(floors.ttfb_s(early, prompt_tokens, cold_chunks=cold) * 1e3, 3),
        "weight_bytes": round(
            (work.lm_weights + work.flow_weights) * form.weight_bytes
            + work.vocoder_weights * floors.vocoder.weight_bytes
        ),
        "stream_bytes": floors.stream_bytes(prompt_tokens),
    }


def _sizes(model: str) -> tuple[ModelConfig, int]:
    """Configuration and length of the default voice's prompt."""
    if model == RANDOM:
        return full_config(), FULL_PROMPT_TOKENS
    assets = load_assets(model)
    voice = assets.default_voice
    return assets.model.config, FULL_PROMPT_TOKENS if voice is None else len(voice.speech_tokens)
