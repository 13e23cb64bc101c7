"""Which kernels an engine compiles when it opens: its stages, without weights, run once on the device ``meta``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vivace.checkpoint.files import ModelPaths
from vivace.checkpoint.loading import planned_stage, stage_dtype
from vivace.checkpoint.model import Model
from vivace.config import Limits, ModelConfig
from vivace.engine.device_stages import DeviceStages
from vivace.kernels.gpu import NEEDED, PLANNED, Gpu
from vivace.models.kinds import make_flow, make_lm, make_vocoder

if TYPE_CHECKING:
    from vivace.kernels.launches import AnyKernel


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What decides which kernels an engine needs.

    Attributes:
        config: of the model. dtype: of its speech LM and flow.
        gpu: where it runs.
        max_streams, deterministic: as ``Engine.open``.
    """

    config: ModelConfig
    dtype: torch.dtype
    gpu: Gpu
    max_streams: int
    deterministic: bool = False


def plan(kind: EngineKind, found: Callable[[AnyKernel], None]) -> None:
    """Tells ``found`` of every kernel, as soon as it is known; of none where the GPU takes the plain way."""
    if kind.gpu.capability < NEEDED:
        return
    from vivace.kernels.launches import recorded

    config = kind.config
    model = Model(
        config=config,
        lm=planned_stage(lambda: make_lm(config.lm), stage_dtype("lm", kind.dtype)),
        flow=planned_stage(lambda: make_flow(config.flow), stage_dtype("flow", kind.dtype)),
        vocoder=planned_stage(lambda: make_vocoder(config.vocoder), stage_dtype("vocoder", kind.dtype)),
        folder=Path(),
        paths=ModelPaths(None, None, None, None),
        missing={},
        device=PLANNED,
        dtype=kind.dtype,
    )
    limits = Limits()
    limits = replace(limits, stream_frames=min(limits.stream_frames, config.flow.noise_frames))
    with torch.no_grad(), recorded(kind.gpu, found):
        stages = DeviceStages.build(model, limits, kind.max_streams, deterministic=kind.deterministic)
        stages.rehearse()
