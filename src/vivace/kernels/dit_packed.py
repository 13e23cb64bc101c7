"""The DiT's kernels for launches of many streams: ``dit_reference`` has their plain definitions, ``dit`` the idea.

With one stream every kernel waits for weights, so there are many small tiles. Rows of many streams are a matrix
product like any other: tiles are wide, so that what a multiprocessor fetches is used often, and are fetched by the
chip's copy engine. What is left to ``dit`` are the kernels around the blocks, with other tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vivace.config import DiTConfig
from vivace.kernels import dit, dit_library
from vivace.kernels.dit import LOG2_E, Tile, _blocks, _launch
from vivace.kernels.dit_library import most
from vivace.kernels.dit_packed_kernels import (
    packed_add_kernel,
    packed_attention_kernel,
    packed_ff_in_kernel,
    packed_qkv_kernel,
)
from vivace.kernels.dit_reference import NORM_EPS, Added, Folded, Normed, Rows


class Way(Enum):
    """How a kernel of a block is computed.

    SINGLE: as for one stream (``dit``). WIDE: wide tiles in Triton. LIBRARY: PyTorch's products, with kernels behind
    them (``dit_library``).
    """

    SINGLE = 1
    WIDE = 2
    LIBRARY = 3


class Choice(NamedTuple):
    """One kernel's way and tile."""

    way: Way
    tile: Tile


def _single(*tile: int) -> Choice:
    return Choice(Way.SINGLE, Tile(*tile))


def _wide(*tile: int) -> Choice:
    return Choice(Way.WIDE, Tile(*tile))


def _library(*tile: int) -> Choice:
    return Choice(Way.LIBRARY, Tile(*tile))


CHOICES: dict[int, dict[str, Choice]] = {
    2: {
        "qkv": _wide(64, 64, 128, 4, 3),
        "attention": _wide(64, 64, 1, 4, 5),
        "add_attention": _wide(64, 32, 128),
        "ff_in": _single(64, 32, 128),
        "add_ff": _wide(64, 32, 128),
        "convolve": _single(64, 32, 64),
        "convolve_add": _single(64, 32, 64),
        "embed_input": _single(64, 32, 128, 4, 2),
        "advance": _single(16, 16, 128),
    },
    4: {
        "qkv": _library(16, 64, 1),
        "attention": _wide(64, 64, 1, 4, 5),
        "add_attention": _wide(64, 32, 128),
        "ff_in": _library(16, 128, 1),
        "add_ff": _library(1, 1024, 1, 8),
        "convolve": _single(64, 64, 64, 4, 6),
        "convolve_add": _single(64, 64, 64, 4, 6),
        "embed_input": _single(64, 64, 128, 4, 2),
        "advance": _single(64, 16, 128),
    },
    8: {
        "qkv": _library(16, 64, 1),
        "attention": _wide(64, 64, 1, 4, 5),
        "add_attention": _library(1, 1024, 1, 8),
        "ff_in": _library(16, 128, 1),
        "add_ff": _library(1, 1024, 1, 8),
        "convolve": _single(64, 64, 64, 4, 6),
        "convolve_add": _single(64, 64, 64, 4, 6),
        "embed_input": _single(64, 64, 128, 4, 2),
        "advance": _single(64, 16, 128),
    },
    12: {
        "qkv": _library(16, 64, 1),
        "attention": _wide(64, 64, 1, 4, 5),
        "add_attention": _library(2, 1024, 1),
        "ff_in": _library(16, 128, 1),
        "add_ff": _library(2, 1024, 1),
        "convolve": _single(64, 64, 64, 4, 3),
        "convolve_add": _single(64, 64, 64, 4, 3),
        "embed_input": _single(64, 64, 128, 4, 2),
        "advance": _single(64, 16, 128),
    },
    16: {
        "qkv": _library(16, 64, 1),
        "attention": _wide(64, 64, 1),
        "add_attention": _wide(128, 128, 64, 8),
        "ff_in": _library(8, 256, 1),
        "add_ff": _wide(128, 128, 64, 8),
        "convolve": _single(64, 64, 64, 4, 3),
        "convolve_add": _single(64, 64, 64, 4, 3),
        "embed_input": _single(64, 64, 128, 4, 2),
        "advance": _single(64, 16, 128),
    },
    24: {
        "qkv": _wide(256, 128, 64, 8),
        "attention": _wide(64, 64, 1, 4, 5),
        "add_attention": _library(1, 1024, 1, 8),
        "ff_in": _library(8, 256, 1),
        "add_ff": _library(1, 1024, 1, 8),
        "convolve": _single(64, 64, 64, 4, 3),
        "convolve_add": _single(64, 64, 64, 4, 3),
        "embed_input": _single(64, 64, 128, 4, 2),
        "advance": _single(64, 16, 128),
    },
    32: {
        "qkv": _wide(256, 128, 64, 8),
        "attention": _wide(64, 64, 1, 4, 5),
        "add_attention": _library(1, 1024, 1, 8),
        "ff_in": _library(8, 256, 1),
        "add_ff": _library(1, 1024, 1, 8),
        "convolve": _single(64, 64, 64, 4, 3),
        "convolve_add": _single(64, 64, 64, 4, 3),
        "embed_input": _single(64, 64, 128, 4, 2),
        "advance": _single(64, 16, 128),
    },
}
"""Up to so many streams, for each call of the solver: the fastest of each kernel alone, on an H200 behind 400 frames.
The depth of the wide attention is its pages at once."""

LAUNCH_MS = {1: 6.2, 2: 8.4, 4: 10.4, 8: 13.4, 12: 16.7, 16: 22.0, 24: 28.0, 32: 37.8}
"""A launch by its streams, behind 400 frames on an H200, calculated: the kernels of a layer, measured alone, for each
layer and step, and what launches took besides with other tiles. One stream: measured at 150 and at 500 frames."""

_DIM = 1024  # a tile of the library's ``add_projection`` holds whole rows
_IN_BLOCKS = ("qkv", "attention", "add_attention", "ff_in", "add_ff")


def serves(config: DiTConfig, dtype: torch.dtype) -> bool:
    """Whether the tiles fit these sizes."""
    whole = config.heads * config.dim_head % 256 == 0 and config.dim == _DIM
    return whole and dtype == torch.bfloat16 and config.dim_head == 64 and config.static_chunk_frames <= 64


class PackedKernels:
    """Looks like the module ``dit``, tuned for launches of ``streams`` streams on Hopper GPUs in bfloat16.

    Args:
        choices: for each call of the solver; None: the fastest, as far as measured.
    """

    def __init__(self, streams: int, choices: Mapping[str, Choice] | None = None) -> None:
        assert streams > 1
        nearest = min((count for count in CHOICES if count >= streams), default=max(CHOICES))
        self._choices = CHOICES[nearest] if choices is None else choices
        self._library = dit_library.Library()
        self.embed_input, self.convolve, self.convolve_add = dit.embed_input, dit.convolve, dit.convolve_add
        self.advance = dit.advance

    def default_options(self, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, Any]]:
        """Keyword arguments for each call of the solver."""
        del dtype
        options: dict[str, dict[str, Any]] = {}
        for name, (way, tile) in self._choices.items():
            options[name] = {"tile": tile, "pdl": device.type == "cuda"}
            if name in _IN_BLOCKS:
                options[name]["way"] = way
        return options

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
        way: Way = Way.WIDE,
    ) -> None:
        """See ``dit_reference.qkv``."""
        if way is Way.SINGLE:
            return dit.qkv(rows, x, projection, rope, query, heads, layer_offset, tile=tile, pdl=pdl)
        if way is Way.LIBRARY:
            return self._library.qkv(rows, x, projection, rope, query, heads, layer_offset, tile, pdl)
        inner = query.shape[1]
        assert inner % tile.columns == 0
        grid = (triton.cdiv(rows.num_rows, tile.rows), 3 * inner // tile.columns)
        _launch(
            packed_qkv_kernel, grid, tile, pdl, _tiles(x.scaled, tile.rows, tile), x.sums,
            _tiles(projection.weight, tile.columns, tile), projection.folded, rope, query, rows.arena,
            rows.starts, rows.counts, rows.steps, rows.here, rows.num_rows, x.scaled.shape[0],
            x.tiles, projection.folded[0].numel(), rope.shape[1], layer_offset, rows.step_stride, K=x.scaled.shape[1],
            HEADS=heads, DIM_HEAD=inner // heads, CHUNK=rows.chunk, MOST=most(x.tiles), EPS=NORM_EPS,
            UNIFORM=rows.uniform, **_blocks(tile),
        )  # fmt: skip
        return None

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
        way: Way = Way.WIDE,
    ) -> None:
        """See ``dit_reference.attention``. A tile holds a whole chunk of queries, and ``depth`` pages of keys."""
        if way is Way.SINGLE:
            return dit.attention(rows, query, mixed, heads, layer_offset, tile=tile, pdl=pdl)
        width = query.shape[1] // heads
        assert tile.rows >= rows.chunk <= tile.columns
        _launch(
            packed_attention_kernel, (rows.groups * heads,), tile, pdl, query, mixed, rows.arena, rows.starts,
            rows.counts, rows.steps, rows.table, rows.table.stride(0), layer_offset, rows.step_stride,
            LOG2_E / width**0.5, HEADS=heads, DIM_HEAD=width, CHUNK=rows.chunk, BLOCK_Q=tile.rows,
            BLOCK_N=tile.columns, PAGES=tile.depth,
        )  # fmt: skip
        return None

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
        way: Way = Way.WIDE,
    ) -> None:
        """See ``dit_reference.add_projection``. ``out.tiles`` must be the number of column tiles."""
        if way is Way.SINGLE:
            return dit.add_projection(rows, a, projection, hidden, out, tile=tile, pdl=pdl)
        if way is Way.LIBRARY:
            return self._library.add_projection(rows, a, projection, hidden, out, tile, pdl)
        dim, depth = projection.weight.shape
        assert out.tiles * tile.columns == dim
        grid = (triton.cdiv(rows.num_rows, tile.rows), out.tiles)
        _launch(
            packed_add_kernel, grid, tile, pdl, _tiles(a, tile.rows, tile),
            _tiles(projection.weight, tile.columns, tile), projection.bias, projection.gate, projection.scale,
            hidden, out.scaled, out.sums, rows.steps, rows.num_rows, out.scaled.shape[0], N=dim, K=depth,
            CHUNK=rows.chunk, TILES=out.tiles, UNIFORM=rows.uniform, **_blocks(tile),
        )  # fmt: skip
        return None

    def ff_in(
        self,
        rows: Rows,
        x: Normed,
        projection: Folded,
        out: Tensor,
        *,
        tile: Tile,
        pdl: bool = False,
        way: Way = Way.WIDE,
    ) -> None:
        """See ``dit_reference.ff_in``."""
        if way is Way.SINGLE:
            return dit.ff_in(rows, x, projection, out, tile=tile, pdl=pdl)
        if way is Way.LIBRARY:
            return self._library.ff_in(rows, x, projection, out, tile, pdl)
        width, depth = projection.weight.shape
        assert width % tile.columns == 0
        grid = (triton.cdiv(rows.num_rows, tile.rows), width // tile.columns)
        _launch(
            packed_ff_in_kernel, grid, tile, pdl, _tiles(x.scaled, tile.rows, tile), x.sums,
            _tiles(projection.weight, tile.columns, tile), projection.folded, out, rows.steps, rows.num_rows,
            x.scaled.shape[0], x.tiles, projection.folded[0].numel(), N=width, K=depth, CHUNK=rows.chunk,
            MOST=most(x.tiles), EPS=NORM_EPS, UNIFORM=rows.uniform, **_blocks(tile),
        )  # fmt: skip
        return None


def _tiles(matrix: Tensor, count: int, tile: Tile) -> TensorDescriptor:
    """``count`` rows by the tile's depth at once."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [count, tile.depth])
