"""Products of the DiT's blocks by PyTorch's own library, and the kernels that end them.

The library's products are fast where rows are many, but end in plain bfloat16. Here kernels behind them do the
rest: the norm's end, rotary embedding and pages; gate, residual and the next norm. ``add_projection`` ends that norm
itself, so that products see normed channels: its sums are those of channels whose mean is 0 and deviation 1. Behind it
the first linear layer is a product with a bias and a GELU, which the library has.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from vivace.kernels.dit import Tile, _launch
from vivace.kernels.dit_library_kernels import library_add_kernel, library_qkv_kernel
from vivace.kernels.dit_reference import NORM_EPS, Added, Folded, Normed, Rows


class Library:
    """Holds what the products write, as long as graphs may need it: for one solver."""

    def __init__(self) -> None:
        self._room: Tensor | None = None

    def qkv(
        self,
        rows: Rows,
        x: Normed,
        projection: Folded,
        rope: Tensor,
        query: Tensor,
        heads: int,
        layer_offset: int,
        *,
        tile: Tile,
        pdl: bool = False,
    ) -> None:
        """See ``dit_reference.qkv``. The tile's columns and depth mean nothing."""
        inner = query.shape[1]
        total = self._multiply(x.scaled, projection.weight, rows.num_rows)
        grid = (triton.cdiv(rows.num_rows, tile.rows), 3 * heads)
        _launch(
            library_qkv_kernel, grid, tile, pdl, total, x.sums, projection.folded, rope, query, rows.arena,
            rows.starts, rows.counts, rows.steps, rows.here, rows.num_rows, x.scaled.shape[0], x.tiles,
            projection.folded[0].numel(), rope.shape[1], layer_offset, rows.step_stride, K=x.scaled.shape[1],
            HEADS=heads, DIM_HEAD=inner // heads, CHUNK=rows.chunk, MOST=most(x.tiles), EPS=NORM_EPS,
            BLOCK_M=tile.rows,
        )  # fmt: skip

    def ff_in(
        self, rows: Rows, x: Normed, projection: Folded, out: Tensor, *, tile: Tile, pdl: bool = False
    ) -> None:
        """See ``dit_reference.ff_in``; ``x`` must come from ``add_projection`` here. The tile means nothing."""
        del tile, pdl
        assert x.tiles == 1
        out, bias = out[: rows.num_rows], projection.shift[rows.step]
        a, weight = x.scaled[: rows.num_rows], projection.weight
        if out.is_cpu:  # whose GELU is the exact one
            out.copy_(F.gelu(torch.addmm(bias, a, weight.T), approximate="tanh"))
        else:
            torch._addmm_activation(bias, a, weight.T, use_gelu=True, out=out)

    def add_projection(
        self,
        rows: Rows,
        a: Tensor,
        projection: Added,
        hidden: Tensor,
        out: Normed,
        *,
        tile: Tile,
        pdl: bool = False,
    ) -> None:
        """See ``dit_reference.add_projection``; ``out`` is normed. A tile must hold whole rows."""
        dim = hidden.shape[1]
        assert out.tiles == 1
        assert tile.columns == dim
        total = self._multiply(a, projection.weight, rows.num_rows)
        _launch(
            library_add_kernel, (triton.cdiv(rows.num_rows, tile.rows),), tile, pdl, total, projection.bias,
            projection.gate, projection.scale, hidden, out.scaled, out.sums, rows.steps, rows.num_rows,
            out.scaled.shape[0], N=dim, EPS=NORM_EPS, BLOCK_M=tile.rows,
        )  # fmt: skip

    def _multiply(self, a: Tensor, weight: Tensor, count: int) -> Tensor:
        """``count`` rows of ``a`` ``[rows, K]`` times ``weight`` ``[N, K]``; until the next product."""
        size = count * weight.shape[0]
        if self._room is None or self._room.numel() < size:
            # For all rows, though a launch may have fewer: room that a graph knows must not move.
            self._room = a.new_empty(max(size, a.shape[0] * weight.shape[0]))
        total = self._room[:size].view(count, -1)
        torch.mm(a[:count], weight.T, out=total)
        return total


def most(tiles: int) -> int:
    """For how many sums a row has at most a kernel is compiled."""
    return 1 if tiles == 1 else max(16, 1 << (tiles - 1).bit_length())
