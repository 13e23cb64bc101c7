"""The generator's forward pass for training on a GPU: the same numbers as ``CausalHiFT.forward``, laid out for speed.

Signals are ``[B, T, C]``. Convolutions run as two-dimensional ones of height 1 in channels-last layout, which
cuDNN's tensor-core kernels take without transposing, and a snake activation is one kernel. Works on the CPU too
(for tests).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.layers.conv import CausalConv1d, CausalDownsampleConv1d, CausalUpsampleConv1d
from vivace.models.hift import CausalHiFT
from vivace.models.hift_blocks import ResBlock
from vivace.models.source import NoiseSource


@dataclass(frozen=True)
class Speed:
    """How the step is computed; every choice but ``bf16`` gives the same numbers up to rounding."""

    channels_last: bool = True
    """False: the model's own ``forward``."""
    bf16: bool = False
    """Convolutions of the generator in bfloat16 instead of TF32; the residual signal stays float32."""
    fused_snake: bool = True
    """Snake activations as one kernel, where that works."""
    fused: bool = True
    """One kernel for AdamW."""


_FORWARD = """
template <typename T> T snake(T x, T alpha) {
    T sine = sin(alpha * x);
    return x + sine * sine / (alpha + T(1e-9));
}
"""
_BACKWARD = """
template <typename T> void snake_gradients(T x, T alpha, T given, T& to_x, T& to_alpha) {
    T angle = alpha * x;
    T sine = sin(angle);
    T both = T(2) * sine * cos(angle);
    T inverse = T(1) / (alpha + T(1e-9));
    to_x = given * (T(1) + both);
    to_alpha = given * inverse * (x * both - sine * sine * inverse);
}
"""


class SnakeKernels:
    """Snake and its gradients, each as one kernel on a GPU (compiled by NVRTC), or step by step."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused
        if fused:
            jiterator = torch.cuda.jiterator
            self._forward = jiterator._create_jit_fn(_FORWARD)
            self._backward = jiterator._create_multi_output_jit_fn(_BACKWARD, 2)

    def forward(self, x: Tensor, alpha: Tensor) -> Tensor:
        if self.fused:
            return cast(Tensor, self._forward(x, alpha))
        sine = torch.sin(x * alpha)
        return torch.addcmul(x, sine / (alpha + 1e-9), sine)

    def gradients(self, x: Tensor, alpha: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Of ``x`` and, for every element, of ``alpha``."""
        if self.fused:
            to_x, to_alpha = self._backward(x, alpha, given)
            return to_x, to_alpha
        angle = alpha * x
        sine, inverse = angle.sin(), 1.0 / (alpha + 1e-9)
        both = 2.0 * sine * angle.cos()
        return given * (1.0 + both), given * inverse * (x * both - sine * sine * inverse)

    @classmethod
    def best(cls, device: torch.device) -> SnakeKernels:
        """Fused on a GPU if the fused kernels work there and give the right numbers."""
        plain = cls(False)
        if device.type != "cuda":
            return plain
        try:
            fused = cls(True)
            x = torch.randn(3, 50, 24, device=device)
            given = F.pad(torch.randn(3, 50, 24, device=device), (0, 0, 4, 0))[:, 4:]
            alpha = 0.5 + torch.rand(24, device=device)
            expected = plain.forward(x, alpha), *plain.gradients(x, alpha, given)
            made = fused.forward(x, alpha), *fused.gradients(x, alpha, given)
            for one, other in zip(made, expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        except Exception as error:
            print(f"snake without fused kernels: {error}", flush=True)
            return plain
        print("snake with fused kernels", flush=True)
        return fused


class SnakePad(torch.autograd.Function):
    """Snake of ``[B, T, C]``, in ``dtype``, after ``context`` zero steps."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, alpha: Tensor, context: int, dtype: torch.dtype, kernels: SnakeKernels
    ) -> Tensor:
        ctx.save_for_backward(x, alpha)
        ctx.context, ctx.kernels = context, kernels
        batch, steps, channels = x.shape
        y = torch.empty(batch, context + steps, channels, dtype=dtype, device=x.device)
        y[:, :context].zero_()
        y[:, context:].copy_(kernels.forward(x, alpha))
        return y

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, alpha = ctx.saved_tensors
        given = given[:, ctx.context :].to(x.dtype)
        to_x, to_alpha = ctx.kernels.gradients(x, alpha, given)
        return to_x, to_alpha.sum(dim=(0, 1)), None, None, None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, dilation: int = 1) -> Tensor:
    """``[B, T, in] -> [B, T - (K - 1) * dilation, out]``."""
    image = x.to(dtype).transpose(1, 2).unsqueeze(2)
    kernel = weight.to(dtype).unsqueeze(2).contiguous(memory_format=torch.channels_last)
    y = F.conv2d(image, kernel, None if bias is None else bias.to(dtype), dilation=(1, dilation))
    return y.squeeze(2).transpose(1, 2)


class FastGenerator:
    """Computes ``model(mel, f0, noise)`` in training mode."""

    def __init__(self, model: CausalHiFT, speed: Speed) -> None:
        self.model = model
        self.dtype = torch.bfloat16 if speed.bf16 else torch.float32
        device = model.conv_post.weight.device
        self.kernels = SnakeKernels.best(device) if speed.fused_snake else SnakeKernels(False)

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
            x = sum((self._block(x, block) for block in blocks[1:]), self._block(x, blocks[0])) / count
        post = model.conv_post
        x = F.pad(F.leaky_relu(x, 0.01), (0, 0, post.context, 0))
        more = -post.out_channels % 8  # outputs of zero make the count even enough for tensor cores
        weight, bias = F.pad(post.weight, (0, 0, 0, 0, 0, more)), F.pad(cast(Tensor, post.bias), (0, more))
        x = convolve(x, weight, bias, torch.float32)[..., : post.out_channels].transpose(1, 2)
        return model._limit(model.fourier.synthesise(model._spectrum(x)))

    def _block(self, x: Tensor, block: ResBlock) -> Tensor:
        for snake1, conv1, snake2, conv2 in block.pairs():
            y = self._causal(self._snake(x, snake1.alpha, conv1), conv1)
            x = x + self._causal(self._snake(y, snake2.alpha, conv2), conv2)
        return x

    def _snake(self, x: Tensor, alpha: Tensor, conv: CausalConv1d) -> Tensor:
        return cast(Tensor, SnakePad.apply(x.float(), alpha, conv.context, self.dtype, self.kernels))

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
