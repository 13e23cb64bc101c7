"""Triton kernels of the DiT's blocks with wide tiles, for the rows of many chunks; ``dit_reference`` defines them.

Rows of many chunks are a matrix product like any other: what a multiprocessor fetches is used often, and tiles are
fetched by the chip's copy engine.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vivace.kernels.dit import LOG2_E, Tile, _blocks, _launch
from vivace.kernels.dit_library import most
from vivace.kernels.dit_reference import NORM_EPS, Added, Folded, Normed, Rows
from vivace.kernels.dit_wide_kernels import wide_add_kernel, wide_attention_kernel, wide_qkv_kernel


def qkv(
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
    """See ``dit_reference.qkv``."""
    inner = query.shape[1]
    assert inner % tile.columns == 0
    grid = (triton.cdiv(rows.num_rows, tile.rows), 3 * inner // tile.columns)
    _launch(
        wide_qkv_kernel, grid, tile, pdl, _tiles(x.scaled, tile.rows, tile), x.sums,
        _tiles(projection.weight, tile.columns, tile), projection.folded, rope, query, rows.arena,
        rows.starts, rows.counts, rows.steps, rows.here, rows.num_rows, x.scaled.shape[0],
        x.tiles, projection.folded[0].numel(), rope.shape[1], layer_offset, rows.step_stride, K=x.scaled.shape[1],
        HEADS=heads, DIM_HEAD=inner // heads, CHUNK=rows.chunk, MOST=most(x.tiles), EPS=NORM_EPS,
        **_blocks(tile),
    )  # fmt: skip


def attention(
    rows: Rows,
    query: Tensor,
    mixed: Tensor,
    heads: int,
    layer_offset: int,
    *,
    tile: Tile,
    pdl: bool = False,
) -> None:
    """See ``dit_reference.attention``. A tile holds a whole chunk of queries, and ``depth`` pages of keys."""
    width = query.shape[1] // heads
    assert tile.rows >= rows.chunk <= tile.columns
    _launch(
        wide_attention_kernel, (rows.groups * heads,), tile, pdl, query, mixed, rows.arena, rows.starts,
        rows.counts, rows.steps, rows.table, rows.table.stride(0), layer_offset, rows.step_stride,
        LOG2_E / width**0.5, HEADS=heads, DIM_HEAD=width, CHUNK=rows.chunk, BLOCK_Q=tile.rows,
        BLOCK_N=tile.columns, PAGES=tile.depth,
    )  # fmt: skip


def add_projection(
    rows: Rows,
    a: Tensor,
    projection: Added,
    hidden: Tensor,
    out: Normed,
    *,
    tile: Tile,
    pdl: bool = False,
) -> None:
    """See ``dit_reference.add_projection``. ``out.tiles`` must be the number of column tiles."""
    dim, depth = projection.weight.shape
    assert out.tiles * tile.columns == dim
    grid = (triton.cdiv(rows.num_rows, tile.rows), out.tiles)
    _launch(
        wide_add_kernel, grid, tile, pdl, _tiles(a, tile.rows, tile),
        _tiles(projection.weight, tile.columns, tile), projection.bias, projection.gate, projection.scale,
        hidden, out.scaled, out.sums, rows.steps, rows.num_rows, out.scaled.shape[0], N=dim, K=depth,
        TILES=out.tiles, **_blocks(tile),
    )  # fmt: skip


def _tiles(matrix: Tensor, count: int, tile: Tile) -> TensorDescriptor:
    """``count`` rows by the tile's depth at once."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [count, tile.depth])
