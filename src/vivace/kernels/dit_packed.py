"""The DiT's kernels for launches of many streams: ``dit_reference`` has their plain definitions, ``dit`` the idea.

With one stream every kernel waits for weights, so there are many small tiles. Rows of many streams are a matrix
product like any other: tiles are wide, so that what a multiprocessor fetches is used often, and are fetched by the
chip's copy engine. What is left to ``dit`` are the kernels around the blocks, with other tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vivace.config import DiTConfig
from vivace.kernels import dit
from vivace.kernels.dit import LOG2_E, Tile, _blocks, _launch
from vivace.kernels.dit_packed_kernels import (
    packed_add_kernel,
    packed_attention_kernel,
    packed_ff_in_kernel,
    packed_qkv_kernel,
)
from vivace.kernels.dit_products import Shape, products
from vivace.kernels.dit_reference import NORM_EPS, Added, Folded, Normed, Rows

CUDA_ROWS = (104, 200)
"""Tiles of so many rows are those of ``dit_products``."""

_AROUND = {
    "embed_input": Tile(64, 64, 128, 4, 2),
    "convolve": Tile(64, 64, 64, 4, 4),
    "convolve_add": Tile(64, 64, 64, 4, 4),
    "advance": Tile(16, 16, 128),
}

TILES: dict[int, dict[str, Tile]] = {
    2: {
        "qkv": Tile(64, 64, 64, 4, 4),
        "attention": Tile(64, 64, 1, 4, 3),
        "add_attention": Tile(64, 32, 64, 4, 4),
        "ff_in": Tile(64, 64, 64, 4, 4),
        "add_ff": Tile(64, 32, 64, 4, 4),
        **_AROUND,
    },
    8: {
        "qkv": Tile(128, 128, 64, 8, 3),
        "attention": Tile(64, 64, 1, 4, 3),
        "add_attention": Tile(128, 64, 64, 4, 4),
        "ff_in": Tile(128, 128, 64, 8, 3),
        "add_ff": Tile(128, 64, 64, 4, 4),
        **_AROUND,
    },
    16: {
        "qkv": Tile(128, 256, 64, 8, 4),
        "attention": Tile(64, 64, 1, 4, 3),
        "add_attention": Tile(128, 128, 64, 8, 4),
        "ff_in": Tile(128, 256, 64, 8, 4),
        "add_ff": Tile(128, 128, 64, 8, 4),
        **_AROUND,
    },
}
"""From so many streams on, for each call of the solver. The depth of the attention is its pages at once."""


def serves(config: DiTConfig, dtype: torch.dtype) -> bool:
    """Whether the tiles fit these sizes."""
    widths = config.heads * config.dim_head, config.dim, config.dim * config.ff_mult
    whole = all(width % 256 == 0 for width in widths)
    return whole and dtype == torch.bfloat16 and config.dim_head == 64 and config.static_chunk_frames <= 64


class PackedKernels:
    """Looks like the module ``dit``, tuned for launches of ``streams`` streams on Hopper GPUs in bfloat16."""

    def __init__(self, streams: int) -> None:
        assert streams > 1
        self._streams = streams
        self.embed_input, self.convolve, self.convolve_add = dit.embed_input, dit.convolve, dit.convolve_add
        self.advance = dit.advance

    def default_options(self, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, Any]]:
        """Keyword arguments for each call of the solver."""
        del dtype
        tiles = TILES[max(count for count in TILES if count <= self._streams)]
        return {name: {"tile": tile, "pdl": device.type == "cuda"} for name, tile in tiles.items()}

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
        """See ``dit_reference.qkv``."""
        if tile.rows in CUDA_ROWS:
            shape = Shape(tile.columns, tile.rows)
            products(query.device.index).qkv(rows, x, projection, rope, query, layer_offset, shape)
            return
        inner = query.shape[1]
        assert inner % tile.columns == 0
        grid = (triton.cdiv(rows.num_rows, tile.rows), 3 * inner // tile.columns)
        _launch(
            packed_qkv_kernel, grid, tile, pdl, _tiles(x.scaled, tile.rows, tile), x.sums,
            _tiles(projection.weight, tile.columns, tile), projection.folded, rope, query, rows.arena,
            rows.starts, rows.counts, rows.steps, rows.here, rows.num_rows, x.scaled.shape[0],
            x.tiles, projection.folded[0].numel(), rope.shape[1], layer_offset, rows.step_stride, K=x.scaled.shape[1],
            HEADS=heads, DIM_HEAD=inner // heads, CHUNK=rows.chunk, MOST=_most(x.tiles), EPS=NORM_EPS,
            UNIFORM=rows.uniform, **_blocks(tile),
        )  # fmt: skip

    def attention(
        self,
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
            packed_attention_kernel, (rows.groups * heads,), tile, pdl, query, mixed, rows.arena, rows.starts,
            rows.counts, rows.steps, rows.table, rows.table.stride(0), layer_offset, rows.step_stride,
            LOG2_E / width**0.5, HEADS=heads, DIM_HEAD=width, CHUNK=rows.chunk, BLOCK_Q=tile.rows,
            BLOCK_N=tile.columns, PAGES=tile.depth,
        )  # fmt: skip

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
        """See ``dit_reference.add_projection``. ``out.tiles`` must be the number of column tiles."""
        if tile.rows in CUDA_ROWS:
            shape = Shape(tile.columns, tile.rows)
            products(a.device.index).add_projection(rows, a, projection, hidden, out, shape)
            return
        dim, depth = projection.weight.shape
        assert out.tiles * tile.columns == dim
        grid = (triton.cdiv(rows.num_rows, tile.rows), out.tiles)
        _launch(
            packed_add_kernel, grid, tile, pdl, _tiles(a, tile.rows, tile),
            _tiles(projection.weight, tile.columns, tile), projection.bias, projection.gate, projection.scale,
            hidden, out.scaled, out.sums, rows.steps, rows.num_rows, out.scaled.shape[0], N=dim, K=depth,
            CHUNK=rows.chunk, TILES=out.tiles, UNIFORM=rows.uniform, **_blocks(tile),
        )  # fmt: skip

    def ff_in(
        self, rows: Rows, x: Normed, projection: Folded, out: Tensor, *, tile: Tile, pdl: bool = False
    ) -> None:
        """See ``dit_reference.ff_in``."""
        if tile.rows in CUDA_ROWS:
            shape = Shape(tile.columns, tile.rows)
            products(out.device.index).ff_in(rows, x, projection, out, shape)
            return
        width, depth = projection.weight.shape
        assert width % tile.columns == 0
        grid = (triton.cdiv(rows.num_rows, tile.rows), width // tile.columns)
        _launch(
            packed_ff_in_kernel, grid, tile, pdl, _tiles(x.scaled, tile.rows, tile), x.sums,
            _tiles(projection.weight, tile.columns, tile), projection.folded, out, rows.steps, rows.num_rows,
            x.scaled.shape[0], x.tiles, projection.folded[0].numel(), N=width, K=depth, CHUNK=rows.chunk,
            MOST=_most(x.tiles), EPS=NORM_EPS, UNIFORM=rows.uniform, **_blocks(tile),
        )  # fmt: skip


def _most(tiles: int) -> int:
    """For how many sums a row has at most a kernel is compiled."""
    return max(16, 1 << (tiles - 1).bit_length())


def _tiles(matrix: Tensor, count: int, tile: Tile) -> TensorDescriptor:
    """``count`` rows by the tile's depth at once."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [count, tile.depth])
