"""Triton kernels of the streaming DiT; ``dit_reference`` holds their plain definitions.

A *group* is the frames of one chunk in one guidance branch; the rows of all groups lie behind each other, and
each group has its own pages and position, so that chunks of several streams can share a launch, and
successive chunks of one stream too: a kernel writes what the groups behind look back on, and the next one reads it.
Five kernels make a block:

1. ``qkv``: adaptive norm, joined projection, rotary embedding of head 0, keys and values into their page
2. ``attention``: over the pages of the group, its own chunk included
3. ``add_projection``: output projection, gate, residual
4. ``ff_in``: adaptive norm, first linear layer, tanh GELU
5. ``add_projection``: second linear layer, gate, residual

The norm costs no pass of its own. With ``s`` and ``b`` the scale and shift of the time, and ``m``, ``r`` the mean
and inverse deviation of a row, ``norm(x) W = r (x s) W - r m (s W) + (b W)``. Whoever writes ``x`` also writes ``x s``
and sums of its tile's channels; ``s W`` and ``b W`` are known beforehand (``Folded``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from vivace.kernels.dit_kernels import (
    add_kernel,
    attention_kernel,
    ff_in_kernel,
    input_kernel,
    output_kernel,
    position_add_kernel,
    position_kernel,
    qkv_kernel,
)
from vivace.kernels.dit_reference import NORM_EPS, Added, Folded, Guidance, Normed, Positions, Rows
from vivace.kernels.gpu import gpu_of

LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """How a kernel cuts its work: rows, columns, depth of a tile; warps; stages of the pipeline."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4


QKV_TILE = Tile(64, 32, 128)
ATTENTION_TILE = Tile(16, 128, 64, 4, 2)
OUT_TILE = Tile(64, 16, 256, 4, 3)
FF_IN_TILE = Tile(64, 32, 128)
FF_OUT_TILE = Tile(64, 16, 128, 4, 6)
POSITION_TILE = Tile(64, 16, 64)
INPUT_TILE = Tile(64, 32, 128, 4, 2)
OUTPUT_TILE = Tile(16, 16, 128)

WIDE_INPUT_TILE = Tile(64, 16, 128, 8, 2)
"""For float32 weights: with the other one a thread spills 6 KB of registers."""

TILES = {
    "embed_input": INPUT_TILE,
    "convolve": POSITION_TILE,
    "convolve_add": POSITION_TILE,
    "qkv": QKV_TILE,
    "attention": ATTENTION_TILE,
    "add_attention": OUT_TILE,
    "ff_in": FF_IN_TILE,
    "add_ff": FF_OUT_TILE,
    "advance": OUTPUT_TILE,
}
"""For each call of the solver; tuned on an H200 for one stream in bfloat16."""


def default_options(dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, Any]]:
    """Keyword arguments for each call of the solver."""
    # Weights of twice the bytes: half of the stages fit into shared memory.
    tiles = TILES if dtype.itemsize <= 2 else {name: tile._replace(stages=2) for name, tile in TILES.items()}
    gpu = gpu_of(device)
    if gpu is not None:
        if dtype.itemsize > 2 and gpu.capability != (9, 0):  # there it runs as it was measured
            tiles["embed_input"] = WIDE_INPUT_TILE
        tiles = {name: _fitting(tile, dtype.itemsize, gpu.block_bytes) for name, tile in tiles.items()}
    pdl = gpu is not None and gpu.has_overlap
    return {name: {"tile": tile, "pdl": pdl} for name, tile in tiles.items()}


def _fitting(tile: Tile, itemsize: int, block_bytes: int) -> Tile:
    """The tile with as many stages as a block has shared memory for: all but one lie there at once."""
    stage_bytes = (tile.rows + tile.columns) * tile.depth * itemsize
    return tile._replace(stages=min(tile.stages, 1 + block_bytes // stage_bytes))


def _launch(kernel: Any, grid: tuple[int, ...], tile: Tile, pdl: bool, *args: Any, **constants: Any) -> None:
    extra = {"launch_pdl": True} if pdl else {}
    kernel[grid](*args, **constants, PDL=pdl, num_warps=tile.warps, num_stages=tile.stages, **extra)


def qkv(
    rows: Rows,
    x: Normed,
    projection: Folded,
    rope: Tensor,
    query: Tensor,
    heads: int,
    layer_offset: int,
    *,
    tile: Tile = QKV_TILE,
    pdl: bool = False,
) -> None:
    """See ``dit_reference.qkv``."""
    inner = query.shape[1]
    grid = (triton.cdiv(rows.num_rows, tile.rows), 3 * inner // tile.columns)
    _launch(
        qkv_kernel, grid, tile, pdl, x.scaled, x.sums, projection.weight, projection.folded, rope, query, rows.arena,
        rows.starts, rows.counts, rows.steps, rows.here, rows.num_rows, x.scaled.shape[0], projection.folded[0].numel(),
        rope.shape[1], layer_offset, rows.step_stride, K=x.scaled.shape[1], HEADS=heads, DIM_HEAD=inner // heads,
        CHUNK=rows.chunk, TILES=x.tiles, EPS=NORM_EPS, **_blocks(tile),
    )  # fmt: skip


def attention(
    rows: Rows,
    query: Tensor,
    mixed: Tensor,
    heads: int,
    layer_offset: int,
    *,
    tile: Tile = ATTENTION_TILE,
    pdl: bool = False,
) -> None:
    """See ``dit_reference.attention``."""
    width = query.shape[1] // heads
    grid = (rows.groups * heads, triton.cdiv(rows.chunk, tile.rows))
    _launch(
        attention_kernel, grid, tile, pdl, query, mixed, rows.arena, rows.starts, rows.counts, rows.steps, rows.table,
        rows.table.stride(0), layer_offset, rows.step_stride, LOG2_E / width**0.5, HEADS=heads, DIM_HEAD=width,
        CHUNK=rows.chunk, BLOCK_Q=tile.rows, BLOCK_N=tile.columns,
    )  # fmt: skip


def add_projection(
    rows: Rows,
    a: Tensor,
    projection: Added,
    hidden: Tensor,
    out: Normed,
    *,
    tile: Tile = OUT_TILE,
    pdl: bool = False,
) -> None:
    """See ``dit_reference.add_projection``. ``out.tiles`` must be the number of column tiles."""
    dim, depth = projection.weight.shape
    assert out.tiles * tile.columns == dim
    grid = (triton.cdiv(rows.num_rows, tile.rows), out.tiles)
    _launch(
        add_kernel, grid, tile, pdl, a, projection.weight, projection.bias, projection.gate, projection.scale, hidden,
        out.scaled, out.sums, rows.steps, rows.num_rows, out.scaled.shape[0], N=dim, K=depth,
        TILES=out.tiles, **_blocks(tile),
    )  # fmt: skip


def ff_in(
    rows: Rows, x: Normed, projection: Folded, out: Tensor, *, tile: Tile = FF_IN_TILE, pdl: bool = False
) -> None:
    """See ``dit_reference.ff_in``."""
    width, depth = projection.weight.shape
    grid = (triton.cdiv(rows.num_rows, tile.rows), width // tile.columns)
    _launch(
        ff_in_kernel, grid, tile, pdl, x.scaled, x.sums, projection.weight, projection.folded, out, rows.steps,
        rows.num_rows, x.scaled.shape[0], projection.folded[0].numel(), N=width, K=depth,
        TILES=x.tiles, EPS=NORM_EPS, **_blocks(tile),
    )  # fmt: skip


def embed_input(
    rows: Rows,
    x: Tensor,
    weight: Tensor,
    condition: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    tile: Tile = INPUT_TILE,
    pdl: bool = False,
) -> None:
    """See ``dit_reference.embed_input``. A tile must hold a chunk and all channels of the mel."""
    dim, mel = weight.shape
    _launch(
        input_kernel, (rows.groups, dim // tile.columns), tile, pdl, x, weight, condition, first, second, rows.arena,
        rows.starts, rows.steps, rows.here, rows.before, rows.ahead, x.shape[0], rows.context_offset, rows.step_stride,
        N=dim, MEL=mel, CHUNK=rows.chunk, LOOK_BACK=rows.look_back, **_blocks(tile),
    )  # fmt: skip


def convolve(
    rows: Rows,
    joined: Tensor,
    positions: Positions,
    following: Tensor,
    *,
    tile: Tile = POSITION_TILE,
    pdl: bool = False,
) -> None:
    """See ``dit_reference.convolve``."""
    _, dim, width = positions.weight.shape
    _launch(
        position_kernel, (rows.groups, dim // tile.columns), tile, pdl, joined, positions.weight, positions.bias,
        following, rows.arena, rows.steps, rows.here, rows.ahead, rows.context_offset, rows.step_stride, N=dim,
        WIDTH=width, CHUNK=rows.chunk, LOOK_BACK=rows.look_back, BLOCK_M=tile.rows, BLOCK_N=tile.columns,
    )  # fmt: skip


def convolve_add(
    rows: Rows,
    joined: Tensor,
    positions: Positions,
    first: Tensor,
    scale: Tensor,
    hidden: Tensor,
    out: Normed,
    *,
    tile: Tile = POSITION_TILE,
    pdl: bool = False,
) -> None:
    """See ``dit_reference.convolve_add``. ``out.tiles`` must be the number of column tiles."""
    _, dim, width = positions.weight.shape
    assert out.tiles * tile.columns == dim
    _launch(
        position_add_kernel, (rows.groups, out.tiles), tile, pdl, joined, positions.weight, positions.bias, first,
        scale, hidden, out.scaled, out.sums, rows.steps, out.scaled.shape[0], N=dim, WIDTH=width, CHUNK=rows.chunk,
        LOOK_BACK=rows.look_back, TILES=out.tiles, BLOCK_M=tile.rows, BLOCK_N=tile.columns,
    )  # fmt: skip


def advance(
    rows: Rows,
    h: Normed,
    projection: Folded,
    guidance: Guidance,
    x: Tensor,
    fault: Tensor,
    *,
    tile: Tile = OUTPUT_TILE,
    pdl: bool = False,
) -> None:
    """See ``dit_reference.advance``."""
    mel, depth = projection.weight.shape
    streams = x.shape[0]
    grid = (streams, triton.cdiv(rows.chunk, tile.rows), mel // tile.columns)
    shared = 2 if guidance.use_shared else int(guidance.keep_shared)
    _launch(
        output_kernel, grid, tile, pdl, h.scaled, h.sums, projection.weight, projection.folded, x, guidance.shared,
        fault, guidance.dt, rows.starts, rows.counts, rows.steps, streams, h.scaled.shape[0],
        projection.folded[0].numel(), guidance.scale, N=mel, K=depth, CHUNK=rows.chunk, TILES=h.tiles, EPS=NORM_EPS,
        SHARED=shared, **_blocks(tile),
    )  # fmt: skip


def _blocks(tile: Tile) -> dict[str, int]:
    return {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth}
