"""Causal HiFT vocoder: mel to samples (HiFTNet, https://arxiv.org/abs/2309.09493, made causal).

The mel is upsampled by convolutions to one spectrum every four samples, and an inverse STFT of 16 points
finishes the signal. The spectrum of the harmonic source joins at every stage. ``forward`` is the definition
on a whole mel; ``step`` computes the same samples piece by piece: every convolution keeps its state, so no
frame is computed twice. After ``n`` frames, ``(n - 4) * hop - 4`` samples are out: the look-ahead of the
first convolution, and four samples that the next spectrum still overlaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.config import VocoderConfig
from vivace.layers.conv import CausalConv1d, CausalDownsampleConv1d, CausalUpsampleConv1d, LookaheadConv1d
from vivace.layers.stft import AnalysisState, ShortTimeFourier, SynthesisState
from vivace.models.f0 import F0Predictor, F0State
from vivace.models.hift_blocks import BlockState, ResBlock
from vivace.models.source import CounterNoise, HarmonicSource, NoiseSource

MAX_LOG_MAGNITUDE = math.log(100.0)
LAST_SLOPE = 0.01  # of the activation before the last convolution


@dataclass(slots=True)
class VocoderStream:
    """Everything that one utterance's vocoder remembers between pieces; tensors are ``[batch, …]``.

    Attributes:
        noise: the stream's noise.
        f0: states of the F0 predictor.
        f0_frames: frames whose F0 is known.
        phase: of every harmonic after those frames, in cycles.
        analysis: samples of the source that wait for the next column of its spectrum.
        columns: columns of the source's spectrum that wait for the mel.
        lookahead: mel frames that wait for their future.
        frames: mel frames that went into the upsampling stages.
        stages: states of these, in order.
        last: state of the last convolution.
        synthesis: overlap-add sums of the inverse STFT.
    """

    noise: NoiseSource
    f0: F0State
    f0_frames: int
    phase: Tensor
    analysis: AnalysisState
    columns: Tensor
    lookahead: Tensor
    frames: int
    stages: list[StageState]
    last: Tensor
    synthesis: SynthesisState


@dataclass(slots=True)
class StageState:
    """States of one upsampling stage."""

    up: Tensor
    source_down: Tensor
    source_block: BlockState
    blocks: list[BlockState]


class CausalHiFT(nn.Module):
    """The vocoder. Runs in float32. Parameter names are those of the reference without weight norm."""

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__()
        if config.conv_pre_lookahead_frames <= F0Predictor.lookahead_frames:
            # The spectrum of the source at the end of a frame reaches into the next frame.
            raise ValueError(
                "conv_pre_lookahead_frames must exceed the three that the F0 predictor looks ahead"
            )
        self.config = config
        self.hop_samples = config.hop_samples
        rates, depth = config.upsample_rates, len(config.upsample_rates)
        channels = [config.base_channels >> i for i in range(depth + 1)]
        spectrum = config.istft_n_fft + 2
        self.columns_per_frame = config.hop_samples // config.istft_hop

        self.f0_predictor = F0Predictor(config)
        self.m_source = HarmonicSource(config)
        self.fourier = ShortTimeFourier(config.istft_n_fft, config.istft_hop)
        self.conv_pre = LookaheadConv1d(
            config.in_channels, config.base_channels, config.conv_pre_lookahead_frames + 1
        )
        self.ups = nn.ModuleList(
            CausalUpsampleConv1d(before, after, kernel, rate)
            for (before, after), kernel, rate in zip(
                pairwise(channels), config.upsample_kernel_sizes, rates, strict=True
            )
        )
        self.source_downs, self.source_resblocks = nn.ModuleList(), nn.ModuleList()
        self.resblocks = nn.ModuleList()
        for stage in range(depth):
            width, rate = channels[stage + 1], 1
            for later in rates[stage + 1 :]:
                rate *= later
            down = CausalConv1d(spectrum, width, 1) if rate == 1 else None
            self.source_downs.append(down or CausalDownsampleConv1d(spectrum, width, rate))
            self.source_resblocks.append(
                ResBlock(
                    width,
                    config.source_resblock_kernel_sizes[stage],
                    config.source_resblock_dilation_sizes[stage],
                )
            )
            for kernel, dilations in zip(
                config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
            ):
                self.resblocks.append(ResBlock(width, kernel, dilations))
        self.conv_post = CausalConv1d(channels[-1], spectrum, 7)

    def forward(self, mel: Tensor, f0: Tensor | None = None, noise: NoiseSource | None = None) -> Tensor:
        """Samples of a whole mel.

        Args:
            mel: log-mel ``[B, 80, T]``, float32.
            f0: ``[B, T]`` in Hz; the model's own prediction when None.
            noise: the source's noise; ``CounterNoise(0)`` when None.

        Returns:
            Samples ``[B, T * hop_samples]`` in ``-audio_limit … audio_limit`` (not limited in training mode).
        """
        batch, _, frames = mel.shape
        if frames == 0:
            return mel.new_zeros(batch, 0)
        f0 = self.f0_predictor(mel) if f0 is None else f0
        source, _ = self.m_source(f0, self.m_source.initial_phase(batch), 0, noise or CounterNoise())
        spectrum = self.fourier.analyse(source)
        x = self.conv_pre(mel)
        for stage, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, self.config.lrelu_slope))
            if stage == len(self.ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")
            x = x + self.source_resblocks[stage](self.source_downs[stage](spectrum))
            blocks = self._blocks(stage)
            x = torch.stack([block(x) for block in blocks]).sum(dim=0) / len(blocks)
        return self._limit(self.fourier.synthesise(self._spectrum(self.conv_post(self._activate(x)))))

    def new_stream(self, seed: int = 0, noise: NoiseSource | None = None, batch: int = 1) -> VocoderStream:
        """State of an utterance that has not begun; ``noise`` replaces ``CounterNoise(seed)``."""
        stages = [
            StageState(
                up.initial_state(batch),
                down.initial_state(batch),
                block.initial_state(batch),
                [each.initial_state(batch) for each in self._blocks(stage)],
            )
            for stage, (up, down, block) in enumerate(self._stages())
        ]
        analysis = self.fourier.analysis_state(batch)
        return VocoderStream(
            noise=noise or CounterNoise(seed),
            f0=self.f0_predictor.initial_state(batch),
            f0_frames=0,
            phase=self.m_source.initial_phase(batch),
            analysis=analysis,
            columns=analysis.samples.new_zeros(batch, 2 * self.fourier.bins, 0),
            lookahead=self.conv_pre.initial_state(batch),
            frames=0,
            stages=stages,
            last=self.conv_post.initial_state(batch),
            synthesis=self.fourier.synthesis_state(batch),
        )

    @torch.inference_mode()
    def step(self, stream: VocoderStream, mel: Tensor, is_last: bool) -> Tensor:
        """Next frames of one utterance.

        Args:
            stream: of this utterance; changed.
            mel: ``[80, n]`` float32; ``n`` may be 0.
            is_last: nothing follows; the rest comes out.

        Returns:
            Samples ``[m]`` that continue those of the step before. Together they are those of ``forward``.
        """
        return self.step_batch(stream, mel[None], is_last)[0]

    @torch.inference_mode()
    def step_batch(self, stream: VocoderStream, mel: Tensor, is_last: bool) -> Tensor:
        """The same for a batch of utterances in step: ``[B, 80, n] -> [B, m]``."""
        self._extend_source(stream, mel, is_last)
        x, stream.lookahead = self.conv_pre.step(mel, stream.lookahead, is_last)
        if x.shape[-1] == 0:
            return mel.new_zeros(mel.shape[0], 0)
        # Columns 0 … frames * columns_per_frame: one more than a whole number of frames.
        first = stream.frames == 0
        count = x.shape[-1] * self.columns_per_frame + int(first)
        stream.frames += x.shape[-1]
        spectrum, stream.columns = stream.columns[..., :count], stream.columns[..., count:].clone()
        for stage, (up, down, source_block) in enumerate(self._stages()):
            state = stream.stages[stage]
            x, state.up = up.step(F.leaky_relu(x, self.config.lrelu_slope), state.up)
            if first and stage == len(stream.stages) - 1:
                x = F.pad(x, (1, 0), mode="reflect")
            source, state.source_down = down.step(spectrum, state.source_down)
            x = x + source_block.step(source, state.source_block)
            blocks = self._blocks(stage)
            parts = [block.step(x, own) for block, own in zip(blocks, state.blocks, strict=True)]
            x = torch.stack(parts).sum(dim=0) / len(blocks)
        x, stream.last = self.conv_post.step(self._activate(x), stream.last)
        return self._limit(self.fourier.synthesise_step(self._spectrum(x), stream.synthesis, is_last))

    def _extend_source(self, stream: VocoderStream, mel: Tensor, is_last: bool) -> None:
        """F0, source and its spectrum, as far as the new mel frames allow."""
        f0 = self.f0_predictor.step(mel, stream.f0, is_last)
        source, stream.phase = self.m_source(f0, stream.phase, stream.f0_frames, stream.noise)
        stream.f0_frames += f0.shape[-1]
        columns = self.fourier.analyse_step(source, stream.analysis, is_last)
        stream.columns = torch.cat((stream.columns, columns), dim=-1)

    def _stages(self) -> list[tuple[CausalUpsampleConv1d, CausalConv1d | CausalDownsampleConv1d, ResBlock]]:
        rows = zip(self.ups, self.source_downs, self.source_resblocks, strict=True)
        return [cast(tuple[CausalUpsampleConv1d, CausalConv1d, ResBlock], row) for row in rows]

    def _blocks(self, stage: int) -> list[ResBlock]:
        count = len(self.config.resblock_kernel_sizes)
        return [cast(ResBlock, b) for b in self.resblocks[stage * count : (stage + 1) * count]]

    @staticmethod
    def _activate(x: Tensor) -> Tensor:
        return F.leaky_relu(x, LAST_SLOPE)

    def _spectrum(self, x: Tensor) -> Tensor:
        """Log magnitudes and phases ``[B, 2 * bins, columns]`` to real and imaginary parts."""
        log_magnitude, phase = torch.chunk(x, 2, dim=1)
        magnitude = log_magnitude.clamp(max=MAX_LOG_MAGNITUDE).exp()
        phase = torch.sin(phase)
        return torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), dim=1)

    def _limit(self, samples: Tensor) -> Tensor:
        if self.training:  # a clipped sample has no gradient: an overshoot could never be unlearned
            return samples
        return samples.clamp(-self.config.audio_limit, self.config.audio_limit)
