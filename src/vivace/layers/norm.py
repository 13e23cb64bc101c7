"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, the mean taken in float32.

    Args:
        size: length of the last axis.
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` to the same shape and dtype; a float32 stream of a float16 model to float16."""
        if self.weight.dtype == torch.float16 and x.dtype == torch.float32:
            normed = nn.functional.rms_norm(x, self.weight.shape, self.weight.float(), self.eps)
            return normed.to(torch.float16)
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
