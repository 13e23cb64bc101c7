"""Convolutions of the U-Nets, channels last: by the library's kernels, or as products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.models.flow_whole import windows


@dataclass(frozen=True, slots=True)
class FrameConv:
    """A convolution along the frames, without its bias.

    Attributes:
        weight: ``[out, in, 1, taps]``, channels last.
        stride: 2: to the half rate, or from it if ``is_up``.
        product: the same as ``[out, taps * in]``; None: the library's convolution is taken.
    """

    weight: Tensor
    stride: int = 1
    is_up: bool = False
    product: Tensor | None = None

    @classmethod
    def of(
        cls, weight: Tensor, *, stride: int = 1, is_up: bool = False, as_product: bool | None = None
    ) -> FrameConv:
        """The convolution of a layer with ``weight [out, in, taps]``, or ``[in, out, taps]`` if ``is_up``.

        Args:
            as_product: None: in float32 on a GPU (``docs/log.md`` says why).
        """
        weight, product = weight.detach(), None
        if as_product is None:
            as_product = weight.is_cuda and weight.dtype == torch.float32
        if as_product and not is_up:
            product = weight.transpose(1, 2).flatten(1).contiguous()
        return cls(weight[:, :, None].contiguous(memory_format=torch.channels_last), stride, is_up, product)

    def run(self, x: Tensor, padding: int) -> Tensor:
        """``[rows, T, in] → [rows, T', out]``.

        Args:
            padding: zeros to each side.
        """
        if self.product is not None:
            y = windows(F.pad(x, (0, 0, padding, padding)), self.product, None)
            return y if self.stride == 1 else y[:, :: self.stride].contiguous()
        x = x[:, None].permute(0, 3, 1, 2)
        if self.is_up:
            y = F.conv_transpose2d(x, self.weight, stride=(1, self.stride), padding=(0, padding))
        else:
            y = F.conv2d(x, self.weight, stride=(1, self.stride), padding=(0, padding))
        return y.permute(0, 2, 3, 1).squeeze(1).contiguous()
