"""The generator's forward pass for training on a GPU: the same numbers as ``CausalHiFT.forward``, laid out for speed.

Signals are ``[B, T, C]``. Convolutions run as two-dimensional ones of height 1 in channels-last layout, which
cuDNN's tensor-core kernels take without transposing; blocks that do not depend on each other may run on streams
of their own, because one of them does not fill the device. Works on the CPU too (for tests).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.layers.conv import CausalConv1d, CausalDownsampleConv1d, CausalUpsampleConv1d
from vivace.models.hift import CausalHiFT
from vivace.models.hift_blocks import ResBlock
from vivace.models.source import NoiseSource

Result = TypeVar("Result")


@dataclass(frozen=True)
class Speed:
    """How the step is computed; every choice but ``bf16`` gives the same numbers up to rounding."""

    channels_last: bool = True
    """False: the model's own ``forward``."""
    bf16: bool = False
    """Convolutions of the generator in bfloat16 instead of TF32; the residual signal stays float32."""
    compiled: bool = False
    """Snake activations fused by ``torch.compile``."""
    streams: int = 0
    """Streams for independent blocks and discriminators; 0: one after the other."""
    fused: bool = True
    """One kernel for AdamW."""


class Lanes:
    """Runs independent jobs on streams of their own, or simply one after the other."""

    def __init__(self, count: int) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(count)]

    def run(self, jobs: Sequence[Callable[[], Result]], inputs: Sequence[Tensor]) -> list[Result]:
        """Results in the order of the jobs; ``inputs`` are the tensors made outside that the jobs read."""
        if not self.streams:
            return [job() for job in jobs]
        main = torch.cuda.current_stream()
        used = self.streams[: len(jobs)]
        for stream in used:
            stream.wait_stream(main)
            for value in inputs:
                value.record_stream(stream)
        results = []
        for job, stream in zip(jobs, cycle(used), strict=False):
            with torch.cuda.stream(stream):
                results.append(job())
        for stream in used:
            main.wait_stream(stream)
        for tensor in _tensors(results):
            tensor.record_stream(main)
        return results


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def snake_pad(x: Tensor, alpha: Tensor, context: int, dtype: torch.dtype) -> Tensor:
    """Snake of ``[B, T, C]``, in ``dtype``, after ``context`` zero steps."""
    sine = torch.sin(x * alpha)
    return F.pad(torch.addcmul(x, sine / (alpha + 1e-9), sine).to(dtype), (0, 0, context, 0))


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, dilation: int = 1) -> Tensor:
    """``[B, T, in] -> [B, T - (K - 1) * dilation, out]``."""
    image = x.to(dtype).transpose(1, 2).unsqueeze(2)
    kernel = weight.to(dtype).unsqueeze(2).contiguous(memory_format=torch.channels_last)
    y = F.conv2d(image, kernel, None if bias is None else bias.to(dtype), dilation=(1, dilation))
    return y.squeeze(2).transpose(1, 2)


class FastGenerator:
    """Computes ``model(mel, f0, noise)`` in training mode."""

    def __init__(self, model: CausalHiFT, speed: Speed, lanes: Lanes) -> None:
        self.model, self.lanes = model, lanes
        self.dtype = torch.bfloat16 if speed.bf16 else torch.float32
        self.snake_pad = snake_pad
        if speed.compiled:
            # One variant for each width, data type and layout.
            torch._dynamo.config.recompile_limit = 64
            self.snake_pad = torch.compile(snake_pad, dynamic=True)

    def __call__(self, mel: Tensor, f0: Tensor, noise: NoiseSource) -> Tensor:
        """``[B, 80, T]``, ``[B, T]`` to samples ``[B, T * 480]``, not limited."""
        model, dtype = self.model, self.dtype
        count = len(model.config.resblock_kernel_sizes)
        source, _ = model.m_source(f0, model.m_source.initial_phase(len(mel)), 0, noise)
        spectrum = model.fourier.analyse(source).transpose(1, 2).contiguous()
        pre = model.conv_pre
        x = convolve(F.pad(mel.transpose(1, 2), (0, 0, 0, pre.lookahead)), pre.weight, pre.bias, dtype)
        for stage, up in enumerate(model.ups):
            x = self._up(F.leaky_relu(x.float(), model.config.lrelu_slope), cast(CausalUpsampleConv1d, up))
            if stage == len(model.ups) - 1:
                x = torch.cat((x[:, 1:2], x), dim=1)  # the mirrored first step
            down, own = model.source_downs[stage], cast(ResBlock, model.source_resblocks[stage])
            x = x + self._block(self._down(spectrum, down), own)
            blocks = [cast(ResBlock, b) for b in model.resblocks[stage * count : (stage + 1) * count]]
            x = self._sum(x, blocks) / count
        post = model.conv_post
        x = F.pad(F.leaky_relu(x, 0.01), (0, 0, post.context, 0))
        more = -post.out_channels % 8  # outputs of zero make the count even enough for tensor cores
        weight, bias = F.pad(post.weight, (0, 0, 0, 0, 0, more)), F.pad(cast(Tensor, post.bias), (0, more))
        x = convolve(x, weight, bias, torch.float32)[..., : post.out_channels].transpose(1, 2)
        return model._limit(model.fourier.synthesise(model._spectrum(x)))

    def _sum(self, x: Tensor, blocks: list[ResBlock]) -> Tensor:
        def job(block: ResBlock) -> Callable[[], Tensor]:
            return lambda: self._block(x, block)

        parts = self.lanes.run([job(block) for block in blocks], [x])
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _block(self, x: Tensor, block: ResBlock) -> Tensor:
        for snake1, conv1, snake2, conv2 in block._pairs():
            y = self._causal(self.snake_pad(x, snake1.alpha, conv1.context, self.dtype), conv1)
            x = x + self._causal(self.snake_pad(y, snake2.alpha, conv2.context, self.dtype), conv2)
        return x

    def _causal(self, padded: Tensor, conv: CausalConv1d) -> Tensor:
        return convolve(padded, conv.weight, conv.bias, self.dtype, conv.dilation[0])

    def _up(self, x: Tensor, up: CausalUpsampleConv1d) -> Tensor:
        # Phases before channels, so that the result only has to be looked at in another shape.
        weight = torch.einsum("oik,rkt->roit", up.weight, up.tap_sums).flatten(0, 1)
        y = convolve(F.pad(x, (0, 0, up.context, 0)), weight, None, self.dtype)
        return y.reshape(len(x), -1, up.out_channels).float() + cast(Tensor, up.bias)

    def _down(self, spectrum: Tensor, down: nn.Module) -> Tensor:
        if not isinstance(down, CausalDownsampleConv1d):
            conv = cast(CausalConv1d, down)
            return F.linear(spectrum, conv.weight[..., 0], conv.bias)
        # Kernel 2 * rate, stride rate: each output is a product with two neighbouring blocks of the input.
        padded = F.pad(spectrum, (0, 0, down.rate - 1, 0))
        blocks = padded.reshape(len(padded), -1, down.rate * padded.shape[2])
        both = torch.cat((blocks[:, :-1], blocks[:, 1:]), dim=2)
        return F.linear(both, down.weight.transpose(1, 2).flatten(1), down.bias)
