"""The vocoder as a list of launches over one arena per row: which buffers there are and what reads and writes them.

Rows of a buffer are channels last and count from the piece's first frame, so that every convolution is a product of
stretches of memory with its weights. ``vivace.kernels.hift_plan`` has the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from vivace.kernels.hift_plan import (
    Activation,
    Buffer,
    Conv,
    ConvGroup,
    Join,
    Mean,
    Param,
    Post,
    Rows,
    Source,
    Spectrum,
)
from vivace.layers.conv import CausalConv1d, CausalUpsampleConv1d, LookaheadConv1d
from vivace.models.f0 import F0Predictor
from vivace.models.hift import LAST_SLOPE, MAX_LOG_MAGNITUDE, CausalHiFT
from vivace.models.hift_blocks import ResBlock
from vivace.models.hift_convs import (
    grouped,
    halved,
    plain_conv,
    reading_mel,
    rounded,
    upsampling,
    with_inverse,
)

F0_PRECISION = "tf32x3"  # sums of three products each, in shorter chains: nearer to float64 than float32 is
_ALIGNMENT = 16  # floats: buffers begin at 64 bytes


@dataclass(frozen=True, slots=True)
class History:
    """What of the arena is kept between pieces: ``count`` float32 values from ``start`` on, moved by the frames
    computed. Two float16 values count as one."""

    start: int
    count: int
    field: Param
    per_frame: int


@dataclass(slots=True)
class StagePlan:
    """Launches of one upsampling stage."""

    up: Conv
    source: list[Conv]
    join: Join
    blocks: list[Conv]
    mean: Mean


@dataclass(slots=True)
class Layout:
    """All launches of a piece and the arena that they need.

    Attributes:
        frames: most of a piece.
        size: values of one row's arena.
        histories: of the arena.
        mel: buffer of the input.
    """

    frames: int
    size: int = 0
    histories: list[History] = field(default_factory=list)
    mel: Buffer = field(init=False)
    f0: list[Conv] = field(default_factory=list)
    source: Source = field(init=False)
    spectrum: Spectrum = field(init=False)
    pre: Conv = field(init=False)
    stages: list[StagePlan] = field(default_factory=list)
    post: Post = field(init=False)

    def round_weights(self) -> None:
        """To TF32, except those of F0 and of the last convolution."""
        self._change_weights(rounded)

    def halve_weights(self) -> None:
        """To float16, except those of F0 and of the last convolution; scaled by powers of two, which loses nothing."""
        self._change_weights(halved)

    def share_weights(self, other: Layout) -> None:
        """Takes those of a layout of the same model for pieces of another length, changed as they are there."""
        ops = iter(other.convs)

        def sharing(op: Conv) -> Conv:
            own = next(ops)
            assert own.name == op.name
            return replace(op, weight=own.weight, scale=own.scale)

        self.f0 = [sharing(op) for op in self.f0]
        self._change_weights(sharing)

    def _change_weights(self, change: Callable[[Conv], Conv]) -> None:
        """Of all but F0, in the order of ``convs``."""
        self.pre = change(self.pre)
        for stage in self.stages:
            stage.up = change(stage.up)
            stage.source = [change(op) for op in stage.source]
            stage.blocks = [change(op) for op in stage.blocks]

    @property
    def convs(self) -> list[Conv]:
        """Every launch of convolutions but the last."""
        stages = [conv for s in self.stages for conv in (s.up, *s.source, *s.blocks)]
        return [*self.f0, self.pre, *stages]


class LayoutBuilder:
    """Makes the ``Layout`` of a model for pieces of up to ``frames`` frames.

    Args:
        half: buffers that only products read hold float16; ``Layout.halve_weights`` must follow.
    """

    def __init__(self, model: CausalHiFT, frames: int, half: bool = False) -> None:
        self._model, self._frames, self._half = model, frames, half
        self._config = model.config
        self.layout = Layout(frames)

    def build(self) -> Layout:
        config, layout = self._config, self.layout
        lookahead = self._model.conv_pre.lookahead
        layout.mel = self._buffer(
            config.in_channels, self._frames + 2 * lookahead, Param.NEW_FRAMES, 1, lookahead
        )
        self._add_f0()
        up_input = self._add_pre()
        for stage in range(len(config.upsample_rates)):
            up_input = self._add_stage(stage, up_input)
        self._add_post(up_input)
        return layout

    def _buffer(
        self, channels: int, capacity: int, frames: Param, rate: int, history: int = 0, half: bool = False
    ) -> Buffer:
        """A new stretch of the arena; its history is kept."""
        layout, share = self.layout, 2 if half else 1
        buffer = Buffer(layout.size * share, history, capacity, channels, half)
        if history:
            assert channels % share == 0
            values = channels // share
            layout.histories.append(History(layout.size, history * values, frames, rate * values))
        layout.size += -(-(history + capacity) * channels // (_ALIGNMENT * share)) * _ALIGNMENT
        return buffer

    def _for_rows(self, rows: Rows, channels: int, history: int = 0, half: bool = False) -> Buffer:
        return self._buffer(channels, rows.most(self._frames), rows.field, rows.rate, history, half)

    def _add_f0(self) -> None:
        predictor, layout, source = self._model.f0_predictor, self.layout, self._model.m_source
        convs: list[LookaheadConv1d | CausalConv1d] = [
            cast(LookaheadConv1d, predictor.condnet[0]),
            *_causal_layers(predictor),
        ]
        contexts = [conv.context for conv in convs if isinstance(conv, CausalConv1d)] + [0]
        rows, below = Rows(Param.F0_FRAMES, 1), layout.mel
        for index, (conv, context) in enumerate(zip(convs, contexts, strict=True)):
            above = self._for_rows(rows, conv.out_channels, context)
            taps = conv.kernel_size[0]
            start = below.start if index == 0 else below.origin - (taps - 1) * below.channels
            group = ConvGroup(taps, start, below.channels, 0, activated=above.origin)
            op = plain_conv(f"f0.{index}", rows, conv, group, Activation.ELU, precision=F0_PRECISION)
            layout.f0.append(op if index else reading_mel(op, Param.F0_MEL_ROW))
            below = above
        classifier, mix = predictor.classifier, source.l_linear
        per_frame = source.hop
        before = self._columns_before()
        history = before * self._config.istft_hop + self._config.istft_n_fft // 2
        ahead = self._model.conv_pre.lookahead - F0Predictor.lookahead_frames
        samples = self._buffer(1, (self._frames + ahead) * per_frame, Param.FRAMES, per_frame, history)
        layout.histories[-1] = History(samples.start, history + ahead * per_frame, Param.FRAMES, per_frame)
        layout.source = Source(
            hidden=below.origin,
            channels=below.channels,
            weight=torch.cat((classifier.weight[0], classifier.bias)).double(),
            mix=torch.cat((mix.weight[0], mix.bias)).float(),
            harmonics=source.harmonics,
            hop=source.hop,
            rate_hz=source.rate_hz,
            amplitude=source.amplitude,
            voiced_noise=source.voiced_noise,
            threshold_hz=source.threshold_hz,
            per_sample=source.phase_per_sample,
            f0=self._for_rows(rows, 1).origin,
            starts=self._for_rows(rows, 16).origin,
            samples=samples.origin,
        )
        self._add_spectrum(samples)

    def _columns_before(self) -> int:
        """Columns ahead of a piece that the first stage's source convolution reads."""
        rate = 1
        for later in self._config.upsample_rates[1:]:
            rate *= later
        return rate - 1

    def _add_spectrum(self, samples: Buffer) -> None:
        model, before = self._model, self._columns_before()
        rows = Rows(Param.FRAMES, model.columns_per_frame, 1)
        output = self._buffer(
            2 * model.fourier.bins, rows.most(self._frames) + before, Param.FRAMES, rows.rate, half=self._half
        )
        self.layout.spectrum = Spectrum(
            rows,
            samples.origin,
            output.start,
            before,
            model.fourier.analysis.contiguous(),
            model.fourier.n_fft,
            model.fourier.hop,
            model.hop_samples,
            self._half,
        )

    def _add_pre(self) -> Buffer:
        conv, mel = self._model.conv_pre, self.layout.mel
        rows = Rows(Param.FRAMES, 1)
        up = cast(CausalUpsampleConv1d, self._model.ups[0])
        output = self._for_rows(rows, conv.out_channels, up.context, self._half)
        group = ConvGroup(conv.kernel_size[0], mel.start, mel.channels, 0, activated=output.origin)
        op = plain_conv("pre", rows, conv, group, Activation.LEAKY, slope=self._config.lrelu_slope)
        self.layout.pre = reading_mel(op, Param.MEL_ROW)
        return output

    def _add_stage(self, stage: int, up_input: Buffer) -> Buffer:
        """Launches of one stage. Returns the buffer with its result, which the next convolution reads."""
        model, config = self._model, self._config
        is_last = stage == len(config.upsample_rates) - 1
        up = cast(CausalUpsampleConv1d, model.ups[stage])
        channels = up.out_channels
        below = 1
        for rate in config.upsample_rates[:stage]:
            below *= rate
        rows = Rows(Param.FRAMES, below * up.rate, int(is_last))
        upsampled = self._for_rows(rows, channels, int(is_last))
        source_rows = self._for_rows(rows, channels)
        up_op = upsampling(f"up.{stage}", Rows(Param.FRAMES, below), up, up_input, upsampled)
        source = self._source_block(stage, rows, source_rows)
        blocks = [
            cast(ResBlock, b)
            for b in model.resblocks[stage * len(config.resblock_kernel_sizes) :][
                : len(config.resblock_kernel_sizes)
            ]
        ]
        blocks.sort(key=lambda block: -block.pairs()[0][1].kernel_size[0])  # the longest begins first
        x = self._for_rows(rows, channels)
        firsts, results, convs = self._residual_blocks(f"blocks.{stage}", rows, blocks, x)
        join = Join(
            rows,
            channels,
            upsampled.origin,
            source_rows.origin,
            x.origin,
            tuple(buffer.origin for buffer in firsts),
            with_inverse([block.pairs()[0][0].alpha for block in blocks]),
            int(is_last),
            self._half,
        )
        if is_last:
            history, slope = model.conv_post.context, LAST_SLOPE
        else:
            history, slope = cast(CausalUpsampleConv1d, model.ups[stage + 1]).context, config.lrelu_slope
        half = self._half and not is_last
        output = self._for_rows(rows, channels, history, half)
        mean = Mean(rows, channels, tuple(r.origin for r in results), output.origin, slope, not is_last, half)
        self.layout.stages.append(StagePlan(up_op, source, join, convs, mean))
        return output

    def _source_block(self, stage: int, rows: Rows, x: Buffer) -> list[Conv]:
        """The source's way into a stage: down to its rate, then a residual block, into ``x``."""
        model, spectrum = self._model, self.layout.spectrum
        down = cast(CausalConv1d, model.source_downs[stage])
        block = cast(ResBlock, model.source_resblocks[stage])
        firsts, _, convs = self._residual_blocks(f"source.{stage}", rows, [block], x, into=x)
        columns, kernel, stride = down.in_channels, down.kernel_size[0], down.stride[0]
        start = spectrum.output + (spectrum.before - (stride - 1)) * columns
        group = ConvGroup(1, start, columns, 0, raw=x.origin, activated=firsts[0].origin)
        op = Conv(
            f"down.{stage}",
            rows,
            stride * columns,
            kernel * columns,
            down.out_channels,
            (group,),
            down.weight.transpose(1, 2).float().flatten().contiguous(),
            cast(Tensor, down.bias).float()[None].contiguous(),
            Activation.SNAKE,
            with_inverse([block.pairs()[0][0].alpha]),
        )
        return [op, *convs]

    def _residual_blocks(
        self, name: str, rows: Rows, blocks: list[ResBlock], x: Buffer, into: Buffer | None = None
    ) -> tuple[list[Buffer], list[Buffer], list[Conv]]:
        """Residual blocks side by side on the same ``x``.

        Returns:
            Per block the buffer that must hold the first snake of ``x``; per block its result; the launches.
        """
        pairs = [block.pairs() for block in blocks]
        inputs = [[self._context(rows, conv1) for _, conv1, _, _ in own] for own in pairs]
        middles = [[self._context(rows, conv2) for _, _, _, conv2 in own] for own in pairs]
        results = [into or self._for_rows(rows, x.channels) for _ in blocks]
        ops = []
        for j in range(max(len(own) for own in pairs)):
            active = [i for i, own in enumerate(pairs) if j < len(own)]
            firsts = [(pairs[i][j][1], inputs[i][j], -1, -1, middles[i][j].origin) for i in active]
            ops.append(grouped(f"{name}.{j}.1", rows, firsts, [pairs[i][j][2].alpha for i in active]))
            going_on = [i for i in active if j + 1 < len(pairs[i])]
            for chosen in (going_on, [i for i in active if i not in going_on]):
                seconds = [
                    (
                        pairs[i][j][3],
                        middles[i][j],
                        results[i].origin if j else x.origin,
                        results[i].origin,
                        inputs[i][j + 1].origin if i in going_on else -1,
                    )
                    for i in chosen
                ]
                alphas = [pairs[i][j + 1][0].alpha for i in chosen if i in going_on]
                if seconds:
                    ops.append(grouped(f"{name}.{j}.2", rows, seconds, alphas))
        return [own[0] for own in inputs], results, ops

    def _context(self, rows: Rows, conv: CausalConv1d) -> Buffer:
        return self._for_rows(rows, conv.in_channels, conv.context, self._half)

    def _add_post(self, below: Buffer) -> None:
        model = self._model
        conv, fourier = model.conv_post, model.fourier
        rows = Rows(Param.FRAMES, model.columns_per_frame, 1)
        frames = self._for_rows(rows, fourier.n_fft, fourier.n_fft // fourier.hop - 1)
        self.layout.post = Post(
            rows,
            conv.in_channels,
            conv.kernel_size[0],
            below.origin - conv.context * below.channels,
            conv.weight.transpose(1, 2).float().contiguous(),
            cast(Tensor, conv.bias).float().view(2, -1).contiguous(),
            frames.origin,
            fourier.synthesis.contiguous(),
            fourier.window.contiguous(),
            fourier.bins,
            fourier.n_fft,
            fourier.hop,
            model.hop_samples,
            self._config.audio_limit,
            MAX_LOG_MAGNITUDE,
        )


def _causal_layers(predictor: F0Predictor) -> list[CausalConv1d]:
    return [layer for layer in predictor.condnet if isinstance(layer, CausalConv1d)]
