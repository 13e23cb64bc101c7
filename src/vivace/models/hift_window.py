"""A vocoder that looks to both sides, computed for windows of many utterances at once, with fixed shapes.

``CentredHiFT`` defines the samples. A stream's window holds the last frames before the new ones and the new ones: the
samples of the frames that lie ``reach_frames`` away from a border that is not the utterance's own are those of the
whole. Nothing here depends on values that the host would have to read, so that one CUDA graph serves every window of
its size: how many frames a row has, where it stands in its utterance and which slot keeps its past are numbers on the
device. Rows are padded; what lies behind a row's last frame is kept at zero before every convolution, as behind the end
of an utterance alone.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.config import VocoderConfig
from vivace.layers.centred import CentredConv1d
from vivace.layers.precision import full_float32
from vivace.models.hift_blocks import Snake
from vivace.models.hift_centred import LAST_SLOPE, CentredHiFT, CentredResBlock
from vivace.models.source import hashed_uniform
from vivace.models.source_normal import HALF

F0_REACH_FRAMES = 5
"""Frames to each side that a frame's F0 depends on."""

_PHASE_FRAMES = F0_REACH_FRAMES + 1  # behind it frames come whose F0, and so whose phase, is not known yet


class Column(IntEnum):
    """Of the numbers that describe a row's window, int64 ``[rows, len(Column)]``."""

    SLOT = 0
    BEFORE = 1  # frames of the utterance that came before the new ones
    NEW = 2
    NOISE_KEY = 3


def reach_frames(config: VocoderConfig) -> int:
    """Frames to each side that a sample depends on, rounded up."""
    rates, hop = config.upsample_rates, config.istft_hop
    behind = config.istft_n_fft + 3 * hop  # samples: overlap-add and the last convolution
    furthest = 0
    for stage in reversed(range(len(rates))):
        row = hop * math.prod(rates[stage + 1 :])  # samples of one row of this stage
        blocks = zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
        behind += row * max(_reach(kernel, dilations) for kernel, dilations in blocks)
        source = _reach(
            config.source_resblock_kernel_sizes[stage], config.source_resblock_dilation_sizes[stage]
        )
        f0 = config.hop_samples * (F0_REACH_FRAMES + int(config.source_phase == "linear"))
        furthest = max(furthest, behind + row * (source + 2) + config.istft_n_fft + f0)
        behind += row * config.upsample_kernel_sizes[stage] // 2
    furthest = max(furthest, behind + 3 * config.hop_samples)
    return -(-furthest // config.hop_samples)


def _reach(kernel: int, dilations: tuple[int, ...]) -> int:
    return sum((kernel - 1) // 2 * (dilation + 1) for dilation in dilations)


class WindowVocoder:
    """The computation of windows, with the past of every utterance in a slot.

    Args:
        model: lives on the device that is to be used.
        slots: utterances that may be under way; one more is scratch.

    Attributes:
        reach: see ``reach_frames``. kept: frames of the past in a window: ``2 * reach``.
    """

    def __init__(self, model: CentredHiFT, slots: int) -> None:
        self.model, self.config = model, model.config
        self.reach = reach_frames(model.config)
        self.kept = 2 * self.reach
        self.device = model.conv_pre.weight.device
        self._mels = torch.zeros(slots + 1, self.config.in_channels, self.kept, device=self.device)
        harmonics = model.m_source.harmonics
        self._phases = torch.zeros(slots + 1, harmonics, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def run(self, numbers: Tensor, new: Tensor) -> Tensor:
        """Samples of every frame of the windows; moves the slots on. Does not wait for the device.

        Args:
            numbers: ``[B, len(Column)]``.
            new: mel ``[B, 80, N]``, the new frames first.

        Returns:
            ``[B, (kept + N) * hop_samples]``; a row's window begins with the ``min(before, kept)`` frames before the
            new ones.
        """
        slots, before = numbers[:, Column.SLOT], numbers[:, Column.BEFORE]
        past = before.clamp(max=self.kept)
        count = past + numbers[:, Column.NEW]
        joined = torch.cat((self._mels.index_select(0, slots), new), dim=2)
        mel = _shifted(joined, self.kept - past)
        mel = torch.where(
            _valid(count, mel.shape[2]) > 0, mel, 0.0
        )  # others' frames lie behind: never times zero
        self._mels.index_copy_(0, slots, _shifted(joined, numbers[:, Column.NEW])[..., : self.kept])
        source = self._source(mel, numbers, past, count)
        return self._decode(mel, source, count)

    # -- the harmonic source -------------------------------------------------------------------------------------

    def _source(self, mel: Tensor, numbers: Tensor, past: Tensor, count: Tensor) -> Tensor:
        """The excitation ``[B, T * hop]``; the phase is known at one frame border and runs from there to both sides."""
        source, slots = self.model.m_source, numbers[:, Column.SLOT]
        f0 = self._f0(mel, count)
        steps = source.cycles_per_sample(f0) * _valid(count, f0.shape[1])
        moves = F.pad(torch.cumsum(steps * source.hop, dim=-1), (1, 0))  # since the window's first border
        known = (past - _PHASE_FRAMES).clamp(min=0)
        begins = torch.where((numbers[:, Column.BEFORE] == 0)[:, None], 0.0, self._phases[slots])
        phases = begins[..., None] + moves - _at(moves, known)
        self._phases.index_copy_(
            0, slots, torch.remainder(_at(phases, (count - _PHASE_FRAMES).clamp(min=0))[..., 0], 1.0)
        )
        first = numbers[:, Column.BEFORE] - past  # absolute number of the window's first frame
        cycles = self._cycles(phases, steps, first, numbers[:, Column.NOISE_KEY])
        waves = (torch.sin(torch.remainder(cycles, 1.0) * (2 * math.pi)) * source.amplitude).to(f0.dtype)
        voiced = (f0 > source.threshold_hz).to(f0.dtype)[:, None].repeat_interleave(source.hop, dim=2)
        level = voiced * source.voiced_noise + (1 - voiced) * (source.amplitude / 3)
        normal = self._normal(first, waves.shape[2], numbers[:, Column.NOISE_KEY])
        waves = torch.addcmul(waves * voiced, level, normal.to(f0.dtype))
        mixed = torch.einsum("bht,h->bt", waves, source.l_linear.weight[0]) + source.l_linear.bias
        return torch.tanh(mixed)

    def _f0(self, mel: Tensor, count: Tensor) -> Tensor:
        predictor, valid = self.model.f0_predictor, _valid(count, mel.shape[2])
        with full_float32(mel.device):
            x = mel
            for layer in predictor.convolutions():
                x = F.elu(layer(x)) * valid
            return predictor.read_out(x)

    def _cycles(self, phases: Tensor, steps: Tensor, first: Tensor, keys: Tensor) -> Tensor:
        """Cycles at every sample ``[B, harmonics, T * hop]``, float64.

        ``phases [B, harmonics, T + 1]`` are those at the frames' borders where the phase is summed from sample to
        sample. Where it moves in lines they are those at the frames' middles, the first one that before the window's.
        """
        source, hop = self.model.m_source, self.model.m_source.hop
        if not source.linear:
            inside = torch.arange(1, hop + 1, device=steps.device, dtype=torch.float64)
            channels = torch.arange(source.harmonics, device=steps.device)
            drawn = hashed_uniform(channels + keys[:, None]).double() - 0.5
            drawn = torch.where(channels == 0, 0.0, drawn)[..., None, None]
            return (phases[..., :-1, None] + steps[..., None] * inside + drawn).flatten(-2)
        before, middles, into = phases[..., :-1].clone(), phases[..., 1:], steps * hop
        begins = (first == 0)[:, None]  # the phase stands still before the first middle
        before[..., 0] = torch.where(begins, middles[..., 0], before[..., 0])
        out = F.pad(into[..., 1:], (0, 1))
        into = torch.cat((torch.where(begins, 0.0, into[..., 0])[..., None], into[..., 1:]), dim=-1)
        place = (torch.arange(hop, device=steps.device, dtype=torch.float64) + 0.5) / hop
        left, right = place[: hop // 2] + 0.5, place[hop // 2 :] - 0.5
        parts = (
            before[..., None] + into[..., None] * left,
            middles[..., None] + out[..., None] * right,
        )
        return torch.cat(parts, dim=-1).flatten(-2)

    def _normal(self, first: Tensor, count: int, keys: Tensor) -> Tensor:
        """The source's noise, a function of the absolute sample: ``[B, harmonics, count]``, float64."""
        harmonics = self.model.m_source.harmonics
        samples = (first * self.model.hop_samples)[:, None] + torch.arange(count, device=first.device)
        index = samples[:, None] * harmonics + torch.arange(harmonics, device=first.device)[:, None]
        draws = hashed_uniform(index + keys[:, None, None])
        return torch.erfinv(2 * draws.double() - 1 + HALF) * math.sqrt(2)

    # -- the generator -------------------------------------------------------------------------------------------

    def _decode(self, mel: Tensor, source: Tensor, count: Tensor) -> Tensor:
        """As ``CentredHiFT.decode`` for rows of ``count`` frames."""
        model, config = self.model, self.config
        columns = config.hop_samples // config.istft_hop
        spectrum = self._analyse(source, count)
        x, rows = model.conv_pre(mel), 1
        valid = _valid(count, mel.shape[2])
        for stage, up in enumerate(model.ups):
            x = up(F.leaky_relu(x, config.lrelu_slope) * valid)
            rows, is_last = rows * config.upsample_rates[stage], stage == len(model.ups) - 1
            if is_last:
                x = F.pad(x, (1, 0), mode="reflect")
            valid = _valid(count * rows + int(is_last), x.shape[2])
            down = cast(CentredConv1d, model.source_downs[stage])
            block = cast(CentredResBlock, model.source_resblocks[stage])
            x = x + _residual(block, down(spectrum), valid)
            blocks = model.blocks(stage)
            x = torch.stack([_residual(each, x, valid) for each in blocks]).sum(dim=0) / len(blocks)
        x = model.conv_post(F.leaky_relu(x, LAST_SLOPE) * valid)
        return self._synthesise(model.spectrum_of(x), count * columns + 1)

    def _analyse(self, source: Tensor, count: Tensor) -> Tensor:
        """Spectrum of a source that is mirrored at its beginning and its end, zero behind its last column."""
        fourier, half = self.model.fourier, self.config.istft_n_fft // 2
        place = torch.arange(-half, source.shape[1] + half, device=source.device).abs()
        end = (count * self.config.hop_samples)[:, None]
        place = torch.where(place >= end, 2 * (end - 1) - place, place).clamp(0, source.shape[1] - 1)
        columns = fourier.columns(source.gather(1, place))
        return columns * _valid(count * (self.config.hop_samples // fourier.hop) + 1, columns.shape[2])

    def _synthesise(self, spectrum: Tensor, columns: Tensor) -> Tensor:
        """Overlap-add of the first ``columns`` of every row."""
        fourier, half = self.model.fourier, self.config.istft_n_fft // 2
        valid = _valid(columns, spectrum.shape[2])
        sums = fourier.add_blocks((spectrum * valid).transpose(1, 2) @ fourier.synthesis)
        squares = fourier.add_blocks(valid.transpose(1, 2) * fourier.window.square())
        limit = self.config.audio_limit
        # Behind a row's end no window is left: nothing over nothing.
        samples = sums[:, half:-half] / squares[:, half:-half].clamp(min=1e-6)
        return samples.clamp(-limit, limit)


def _residual(block: CentredResBlock, x: Tensor, valid: Tensor) -> Tensor:
    """A residual block; rows end where ``valid`` does."""
    for snake1, conv1, snake2, conv2 in block.pairs():
        x = x + conv2(_snake(snake2, conv1(_snake(snake1, x, valid)), valid))
    return x


def _snake(snake: Snake, x: Tensor, valid: Tensor) -> Tensor:
    y: Tensor = snake(x) * valid
    return y


def _valid(count: Tensor, length: int) -> Tensor:
    """1 for the first ``count [B]`` places, float32 ``[B, 1, length]``."""
    return (torch.arange(length, device=count.device) < count[:, None])[:, None].float()


def _shifted(x: Tensor, start: Tensor) -> Tensor:
    """Row ``b`` of ``x [B, C, T]`` from ``start[b]`` on; its last column comes again behind its end."""
    place = (start[:, None] + torch.arange(x.shape[2], device=x.device)).clamp(max=x.shape[2] - 1)
    return x.gather(2, place[:, None].expand(-1, x.shape[1], -1))


def _at(x: Tensor, place: Tensor) -> Tensor:
    """Column ``place[b]`` of row ``b``: ``[B, C, T] → [B, C, 1]``."""
    return x.gather(2, place[:, None, None].expand(-1, x.shape[1], 1))
