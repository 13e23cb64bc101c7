"""Plain PyTorch versions of the kernels in ``unet_rows`` and ``block_rows``: the definition; they run without Triton.

None of them waits for the device, so that they can be captured in a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

Norm = tuple[Tensor, Tensor, float]
"""Gain, offset, epsilon."""

Linear = tuple[Tensor, Tensor]
"""Weight, bias."""


class PlainUNetOps:
    """Frames lie behind each other, channels last; a row counts as far as ``counts [rows]`` says."""

    def group_norm_mish(
        self,
        y: Tensor,
        bias: Tensor,
        norm: Norm,
        groups: int,
        counts: Tensor,
        shift: tuple[Tensor, Tensor] | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``mish(group_norm(y + bias))`` of ``[rows, frames, C]``, zero behind each row's end.

        Args:
            shift: what is added behind it by Euler step, ``[steps, C]``, and the step, int64 ``[1]``.
            residual: what is added then, as ``y``.
        """
        gain, offset, eps = norm
        valid = _valid(y, counts)
        x = (y.float() + bias.float()) * valid
        grouped = x.unflatten(2, (groups, -1))  # type: ignore[no-untyped-call]
        size = counts.clamp(min=1)[:, None, None, None] * grouped.shape[3]
        centred = (grouped - grouped.sum(dim=(1, 3), keepdim=True) / size) * valid[..., None]
        variance = centred.square().sum(dim=(1, 3), keepdim=True) / size
        normal = (centred * torch.rsqrt(variance + eps)).flatten(2)
        z = F.mish(normal * gain.float() + offset.float())
        if shift is not None:
            table, step = shift
            z = z + table.index_select(0, step).float()
        if residual is not None:
            z = z + residual.float()
        return (z * valid).to(y.dtype)

    def norm_linear(
        self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False
    ) -> Tensor:
        """``layer_norm(x) @ weight.T + bias`` of ``[rows, frames, C]``, then GELU if so."""
        gain, offset, eps = norm
        y = F.layer_norm(x.float(), gain.shape, gain.float(), offset.float(), eps).to(gain.dtype)
        out = F.linear(y, weight, bias)
        return F.gelu(out) if gelu else out

    def linear_add(self, x: Tensor, y: Tensor, linear: Linear) -> None:
        """``x += y @ weight.T + bias`` in place; ``x [rows, frames, C]``, contiguous."""
        x += F.linear(y, *linear)

    def masked_add(self, x: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x + bias`` of ``[rows, frames, C]``, zero behind each row's end."""
        total = x.float() if bias is None else x.float() + bias.float()
        return torch.where(_valid(x, counts) > 0, total, 0.0).to(x.dtype)


def _valid(x: Tensor, counts: Tensor) -> Tensor:
    """1 where a row counts, ``[rows, frames, 1]``."""
    return (torch.arange(x.shape[1], device=x.device) < counts[:, None]).float()[..., None]
