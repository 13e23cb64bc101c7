"""Launches the Triton kernels of CosyVoice-300M's speech LM.

The methods of ``vivace.models.conformer_packed.PlainDistanceOps``, and those of ``fused_scores`` beside them.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vivace.kernels import relative_rows
from vivace.kernels.lm_launch import KernelOps


class RelativeOps(KernelOps):
    """``KernelOps`` with layer norm, and attention over distances in place of rotary positions."""

    def add_layer_norm(
        self, x: Tensor, delta: Tensor | None, gain: Tensor, offset: Tensor, eps: float
    ) -> Tensor:
        """``x += delta``; the layer norm of it in the weights' dtype."""
        rows, hidden = x.shape
        out = torch.empty(rows, hidden, dtype=gain.dtype, device=x.device)
        relative_rows.add_layer_norm_kernel[(rows,)](
            x,
            x if delta is None else delta,
            gain,
            offset,
            out,
            eps,
            H=hidden,
            BLOCK=triton.next_power_of_2(hidden),
            ADD=delta is not None,
            num_warps=4,
            **self._pdl,
        )
        return out

    def attend_distances(
        self,
        qkv: Tensor,
        bias: Tensor,
        positions: tuple[Tensor, Tensor, Tensor],
        pool: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Bias, cache write and attention of one position per row, see ``relative_reference``."""
        out, meta = self.attend_distances_parts(qkv, bias, positions, pool, slots)
        return out if meta is None else self._combine(out, meta, qkv.dtype)

    def attend_distances_parts(
        self,
        qkv: Tensor,
        bias: Tensor,
        positions: tuple[Tensor, Tensor, Tensor],
        pool: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """The same, not joined yet where the past is divided: parts and their ``meta``."""
        state, rows, width = self._state, qkv.shape[0], self._heads * self._head_dim
        splits, device = self.splits(rows), qkv.device
        meta: Tensor | None = None
        if splits == 1:
            out = torch.empty(rows, width, dtype=qkv.dtype, device=device)
        else:
            out = torch.empty(rows, splits, width, dtype=torch.float32, device=device)
            meta = torch.empty(rows, splits, self._heads, 2, dtype=torch.float32, device=device)
        for_keys, for_distances, distances = positions
        relative_rows.attend_distances_kernel[(rows, self._heads, splits)](
            qkv,
            bias,
            for_keys,
            for_distances,
            distances,
            pool,
            self._table,
            slots,
            state.length,
            state.stop,
            state.remaining,
            out,
            out if meta is None else meta,
            pool.stride(0),
            self._table.stride(0),
            distances.stride(0),
            self._head_dim**-0.5,
            HEADS=self._heads,
            D=self._head_dim,
            PAGE=pool.shape[3],
            BLOCK_T=32,
            SPLITS=splits,
            num_warps=4,
            num_stages=2,
            **self._pdl,
        )
        return out, meta

    def layer_norm_linear(
        self,
        x: Tensor,
        norm: tuple[Tensor, Tensor, float],
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        relu: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """``layer_norm(x) @ weight.T + bias`` of few rows, then ReLU if so."""
        return self._norm_linear(x, norm, weight, bias, relu=relu, dtype=dtype)
