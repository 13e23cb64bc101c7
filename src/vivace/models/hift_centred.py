"""HiFT vocoder of CosyVoice 2 and CosyVoice-300M, whose convolutions look to both sides.

``forward`` on a whole mel is the definition. ``step`` computes the same samples piece by piece: every layer keeps what
it still needs and waits for what it looks ahead on, so that no frame is computed twice and no seam can be heard; the
samples follow the mel by the look-ahead of all layers together: 20.3 frames (0.41 s) in CosyVoice 2, 18.2 frames
(0.21 s) in CosyVoice-300M. ``hift_fade`` has the reference's own scheme: it waits for 8 or 20 frames and cross-fades.
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
from vivace.layers.centred import CentredConv1d, CentredUpsampleConv1d, Joint, Pending, UpsampleState
from vivace.layers.precision import full_float32
from vivace.layers.stft import AnalysisState, ShortTimeFourier, SynthesisState
from vivace.models.hift_blocks import Snake
from vivace.models.source import CounterNoise, NoiseSource
from vivace.models.source_normal import NormalSource, SourceState

MAX_LOG_MAGNITUDE = math.log(100.0)
LAST_SLOPE = 0.01  # of the activation before the last convolution


class CentredF0Predictor(nn.Module):
    """Mel ``[B, 80, T]`` to F0 ``[B, T]`` in Hz: five convolutions of kernel 3 and a linear layer, in true float32."""

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__()
        channels, layers = config.f0_cond_channels, list[nn.Module]()
        for index in range(5):
            layers += [CentredConv1d(channels if index else config.in_channels, channels, 3), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 1)

    def convolutions(self) -> list[CentredConv1d]:
        return [layer for layer in self.condnet if isinstance(layer, CentredConv1d)]

    def forward(self, mel: Tensor) -> Tensor:
        """Whole sequence."""
        with full_float32(mel.device):
            return self.read_out(self.condnet(mel.float()))

    def step(self, mel: Tensor, state: list[Tensor], is_last: bool) -> Tensor:
        """Next frames ``[B, 80, n]``: F0 of all frames whose look-ahead is complete. Changes ``state``."""
        with full_float32(mel.device):
            x = mel.float()
            for index, layer in enumerate(self.convolutions()):
                x, state[index] = layer.step(x, state[index], is_last)
                x = F.elu(x)
            return self.read_out(x)

    def read_out(self, x: Tensor) -> Tensor:
        """F0 from the last layer ``[B, C, T]``, added up in float64."""
        weight, bias = self.classifier.weight.double(), self.classifier.bias.double()
        return F.linear(x.transpose(1, 2).double(), weight, bias).squeeze(-1).abs().float()


@dataclass(slots=True)
class PairState:
    """Of one pair of convolutions: their inputs, and the skip connection's."""

    first: Tensor
    second: Tensor
    skip: Pending


class CentredResBlock(nn.Module):
    """Pairs of a dilated and a plain convolution, each pair around a skip connection."""

    def __init__(self, channels: int, kernel_size: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.channels = channels
        self.convs1 = nn.ModuleList(
            CentredConv1d(channels, channels, kernel_size, dilation=d) for d in dilations
        )
        self.convs2 = nn.ModuleList(CentredConv1d(channels, channels, kernel_size) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def pairs(self) -> list[tuple[Snake, CentredConv1d, Snake, CentredConv1d]]:
        rows = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        return [cast(tuple[Snake, CentredConv1d, Snake, CentredConv1d], row) for row in rows]

    def forward(self, x: Tensor) -> Tensor:
        """Whole sequence: ``[B, C, T] -> [B, C, T]``."""
        for snake1, conv1, snake2, conv2 in self.pairs():
            x = x + conv2(snake2(conv1(snake1(x))))
        return x

    def initial_state(self, batch: int) -> list[PairState]:
        return [
            PairState(first.initial_state(batch), second.initial_state(batch), Pending(_empty(first, batch)))
            for _, first, _, second in self.pairs()
        ]

    def step(self, x: Tensor, states: list[PairState], is_last: bool) -> Tensor:
        """Next piece: the outputs that are complete. Changes ``states``."""
        for (snake1, conv1, snake2, conv2), state in zip(self.pairs(), states, strict=True):
            state.skip.add(x)
            y, state.first = conv1.step(snake1(x), state.first, is_last)
            y, state.second = conv2.step(snake2(y), state.second, is_last)
            x = state.skip.take(y.shape[-1]) + y
        return x


@dataclass(slots=True)
class CentredStage:
    """States of one upsampling stage. ``mirror`` holds its first outputs back until the mirrored one is known."""

    up: UpsampleState
    source_down: Tensor
    source_block: list[PairState]
    fusion: Joint
    blocks: list[list[PairState]]
    sum: Joint
    mirror: Tensor | None


@dataclass(slots=True)
class CentredStream:
    """Everything that one utterance's vocoder remembers between pieces."""

    noise: NoiseSource
    f0: list[Tensor]
    source: SourceState
    analysis: AnalysisState
    pre: Tensor
    stages: list[CentredStage]
    last: Tensor
    synthesis: SynthesisState


class CentredHiFT(nn.Module):
    """The vocoder. Runs in float32. Parameter names are those of the reference without weight norm."""

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__()
        self.config = config
        self.hop_samples = config.hop_samples
        rates, depth = config.upsample_rates, len(config.upsample_rates)
        channels = [config.base_channels >> i for i in range(depth + 1)]
        spectrum = config.istft_n_fft + 2
        self.f0_predictor = CentredF0Predictor(config)
        self.m_source = NormalSource(config)
        self.fourier = ShortTimeFourier(config.istft_n_fft, config.istft_hop)
        self.conv_pre = CentredConv1d(config.in_channels, config.base_channels, 7)
        sizes = zip(pairwise(channels), config.upsample_kernel_sizes, rates, strict=True)
        self.ups = nn.ModuleList(
            CentredUpsampleConv1d(before, after, kernel, rate) for (before, after), kernel, rate in sizes
        )
        self.source_downs, self.source_resblocks = nn.ModuleList(), nn.ModuleList()
        self.resblocks = nn.ModuleList()
        for stage in range(depth):
            width, rate = channels[stage + 1], math.prod(rates[stage + 1 :])
            down = (
                CentredConv1d(spectrum, width, 1)
                if rate == 1
                else CentredConv1d(spectrum, width, 2 * rate, stride=rate, padding=rate // 2)
            )
            self.source_downs.append(down)
            kernel = config.source_resblock_kernel_sizes[stage]
            dilations = config.source_resblock_dilation_sizes[stage]
            self.source_resblocks.append(CentredResBlock(width, kernel, dilations))
            for kernel, dilations in zip(
                config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
            ):
                self.resblocks.append(CentredResBlock(width, kernel, dilations))
        self.conv_post = CentredConv1d(channels[-1], spectrum, 7)

    def forward(self, mel: Tensor, f0: Tensor | None = None, noise: NoiseSource | None = None) -> Tensor:
        """Samples of a whole mel; see ``CausalHiFT.forward``."""
        if mel.shape[-1] == 0:
            return mel.new_zeros(mel.shape[0], 0)
        return self.decode(mel, self.source(mel, f0, noise))

    def source(
        self,
        mel: Tensor,
        f0: Tensor | None = None,
        noise: NoiseSource | None = None,
        start_frame: int = 0,
    ) -> Tensor:
        """The excitation of a whole mel, ``[B, T * hop_samples]``; the noise is that of the frames from
        ``start_frame``."""
        f0 = self.f0_predictor(mel) if f0 is None else f0
        samples: Tensor = self.m_source(f0, noise or CounterNoise(), start_frame)
        return samples

    def decode(self, mel: Tensor, source: Tensor) -> Tensor:
        """Samples ``[B, T * hop_samples]`` of a mel ``[B, 80, T]`` and its excitation."""
        spectrum = self.fourier.analyse(source)
        x = self.conv_pre(mel)
        for stage, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, self.config.lrelu_slope))
            if stage == len(self.ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")
            x = x + self.source_resblocks[stage](self.source_downs[stage](spectrum))
            blocks = self.blocks(stage)
            x = torch.stack([block(x) for block in blocks]).sum(dim=0) / len(blocks)
        return self._limit(self.fourier.synthesise(self.spectrum_of(self.conv_post(_activate(x)))))

    def new_stream(self, seed: int = 0, noise: NoiseSource | None = None, batch: int = 1) -> CentredStream:
        """State of an utterance that has not begun; ``noise`` replaces ``CounterNoise(seed)``."""
        return CentredStream(
            noise=noise or CounterNoise(seed),
            f0=[layer.initial_state(batch) for layer in self.f0_predictor.convolutions()],
            source=self.m_source.initial_state(batch),
            analysis=self.fourier.analysis_state(batch),
            pre=self.conv_pre.initial_state(batch),
            stages=[self._new_stage(stage, batch) for stage in range(len(self.ups))],
            last=self.conv_post.initial_state(batch),
            synthesis=self.fourier.synthesis_state(batch),
        )

    def _new_stage(self, stage: int, batch: int) -> CentredStage:
        up, down, block = self._stage(stage)
        blocks = self.blocks(stage)
        empty = up.weight.new_zeros(batch, up.out_channels, 0)
        return CentredStage(
            up=up.initial_state(batch),
            source_down=down.initial_state(batch),
            source_block=block.initial_state(batch),
            fusion=Joint(empty, 2),
            blocks=[each.initial_state(batch) for each in blocks],
            sum=Joint(empty, len(blocks)),
            mirror=empty if stage == len(self.ups) - 1 else None,
        )

    @torch.inference_mode()
    def step(self, stream: CentredStream, mel: Tensor, is_last: bool) -> Tensor:
        """Next frames of one utterance, ``[80, n]`` → samples ``[m]``; see ``CausalHiFT.step``."""
        return self.step_batch(stream, mel[None], is_last)[0]

    @torch.inference_mode()
    def step_batch(self, stream: CentredStream, mel: Tensor, is_last: bool) -> Tensor:
        """The same for a batch of utterances in step: ``[B, 80, n] -> [B, m]``."""
        f0 = self.f0_predictor.step(mel, stream.f0, is_last)
        source = self.m_source.step(f0, stream.source, stream.noise, is_last)
        columns = self.fourier.analyse_step(source, stream.analysis, is_last)
        x, stream.pre = self.conv_pre.step(mel, stream.pre, is_last)
        for stage, state in enumerate(stream.stages):
            x = self._step_stage(stage, state, x, columns, is_last)
        x, stream.last = self.conv_post.step(_activate(x), stream.last, is_last)
        spectrum = self.spectrum_of(x)
        if spectrum.shape[-1] == 0 and not is_last:
            return mel.new_zeros(mel.shape[0], 0)
        if is_last and spectrum.shape[-1] == 0 and not stream.source.started:
            return mel.new_zeros(mel.shape[0], 0)
        return self._limit(self.fourier.synthesise_step(spectrum, stream.synthesis, is_last))

    def _step_stage(
        self, stage: int, state: CentredStage, x: Tensor, columns: Tensor, is_last: bool
    ) -> Tensor:
        up, down, source_block = self._stage(stage)
        x = up.step(F.leaky_relu(x, self.config.lrelu_slope), state.up, is_last)
        if state.mirror is not None:
            x = torch.cat((state.mirror, x), dim=-1)
            state.mirror = x if x.shape[-1] < 2 else None
            x = x[..., :0] if state.mirror is not None else F.pad(x, (1, 0), mode="reflect")
        source, state.source_down = down.step(columns, state.source_down, is_last)
        x = state.fusion.add((x, source_block.step(source, state.source_block, is_last)))
        blocks = self.blocks(stage)
        parts = [block.step(x, own, is_last) for block, own in zip(blocks, state.blocks, strict=True)]
        return state.sum.add(parts) / len(blocks)

    def _stage(self, stage: int) -> tuple[CentredUpsampleConv1d, CentredConv1d, CentredResBlock]:
        row = self.ups[stage], self.source_downs[stage], self.source_resblocks[stage]
        return cast(tuple[CentredUpsampleConv1d, CentredConv1d, CentredResBlock], row)

    def blocks(self, stage: int) -> list[CentredResBlock]:
        """The residual blocks behind one upsampling."""
        count = len(self.config.resblock_kernel_sizes)
        return [cast(CentredResBlock, b) for b in self.resblocks[stage * count : (stage + 1) * count]]

    def spectrum_of(self, x: Tensor) -> Tensor:
        """Log magnitudes and phases ``[B, 2 * bins, columns]`` to real and imaginary parts."""
        log_magnitude, phase = torch.chunk(x, 2, dim=1)
        magnitude = log_magnitude.clamp(max=MAX_LOG_MAGNITUDE).exp()
        phase = torch.sin(phase)
        return torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), dim=1)

    def _limit(self, samples: Tensor) -> Tensor:
        return samples.clamp(-self.config.audio_limit, self.config.audio_limit)


def _activate(x: Tensor) -> Tensor:
    return F.leaky_relu(x, LAST_SLOPE)


def _empty(layer: CentredConv1d, batch: int) -> Tensor:
    return layer.weight.new_zeros(batch, layer.in_channels, 0)
