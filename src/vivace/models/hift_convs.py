"""Layers of the vocoder as launches: their weights in the order in which a product reads them, and what scales them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from vivace.kernels.hift_plan import Activation, Buffer, Conv, ConvGroup, Param, Rows
from vivace.kernels.hift_reference import to_tf32
from vivace.layers.conv import CausalConv1d, CausalUpsampleConv1d, LookaheadConv1d


def plain_conv(
    name: str,
    rows: Rows,
    conv: LookaheadConv1d | CausalConv1d,
    group: ConvGroup,
    activation: Activation,
    slope: float = 0.0,
    precision: str | None = None,
) -> Conv:
    """One layer that stands alone."""
    return Conv(
        name,
        rows,
        conv.in_channels,
        conv.in_channels,
        conv.out_channels,
        (group,),
        conv.weight.transpose(1, 2).float().flatten().contiguous(),
        cast(Tensor, conv.bias).float()[None].contiguous(),
        activation,
        slope=slope,
        precision=precision,
    )


def reading_mel(op: Conv, row: Param) -> Conv:
    """The same, behind the row of the mel that ``row`` names."""
    return replace(op, mel_row=row)


def grouped(
    name: str,
    rows: Rows,
    members: list[tuple[CausalConv1d, Buffer, int, int, int]],
    alphas: Sequence[Tensor],
) -> Conv:
    """One launch for convolutions of equal width, each with (layer, input, residual, raw, activated)."""
    weights, groups, start = [], [], 0
    for conv, below, residual, raw, activated in members:
        x = below.origin - conv.context * below.channels
        stride = conv.dilation[0] * below.channels
        groups.append(ConvGroup(conv.kernel_size[0], x, stride, start, residual, raw, activated))
        weights.append(conv.weight.transpose(1, 2).float().flatten())
        start += weights[-1].numel()
    width = members[0][0].out_channels
    return Conv(
        name,
        rows,
        width,
        width,
        width,
        tuple(groups),
        torch.cat(weights),
        torch.stack([cast(Tensor, conv.bias) for conv, *_ in members]).float(),
        Activation.SNAKE if alphas else Activation.NONE,
        with_inverse(alphas) if alphas else None,
    )


def upsampling(name: str, rows: Rows, up: CausalUpsampleConv1d, below: Buffer, above: Buffer) -> Conv:
    """All phases of an output row lie side by side: a row of the product is ``rate`` rows of the result."""
    taps = up.context + 1
    weight = torch.einsum("oik,rkt->roti", up.weight, up.tap_sums)
    start = below.origin - up.context * below.channels
    group = ConvGroup(taps, start, below.channels, 0, raw=above.origin)
    bias = cast(Tensor, up.bias).repeat(up.rate)[None]
    return Conv(
        name,
        rows,
        below.channels,
        below.channels,
        up.rate * up.out_channels,
        (group,),
        weight.float().flatten().contiguous(),
        bias.float().contiguous(),
    )


def with_inverse(alphas: Sequence[Tensor]) -> Tensor:
    """What a snake reads: ``alpha`` and its inverse, ``[2, layers, channels]``."""
    alpha = torch.stack(list(alphas)).float()
    return torch.stack((alpha, 1 / (alpha + 1e-9)))


def rounded(op: Conv) -> Conv:
    """With weights in TF32."""
    return replace(op, weight=to_tf32(op.weight))


def halved(op: Conv) -> Conv:
    """With weights in float16: the largest of every output channel becomes 0.5 to 1, so that few are too small."""
    weights, scales, start = torch.empty_like(op.weight, dtype=torch.float16), [], 0
    for group in op.groups:
        assert group.weight == start
        size = op.channels_out * group.taps * op.channels_in
        own = op.weight[start : start + size].view(op.channels_out, -1)
        exponents = torch.frexp(own.abs().amax(dim=1))[1]
        weights[start : start + size] = torch.ldexp(own, -exponents[:, None]).half().flatten()
        scales.append(torch.ldexp(torch.ones_like(own[:, 0]), exponents))
        start += size
    return replace(op, weight=weights, scale=torch.stack(scales))
