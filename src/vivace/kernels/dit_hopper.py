"""The DiT's kernels for few chunks on Hopper GPUs: attention in CUDA C++, everything else from ``dit``.

They serve the sizes of CosyVoice 3 in bfloat16.
"""

from __future__ import annotations

import ctypes
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from vivace.config import DiTConfig
from vivace.kernels import dit
from vivace.kernels.cuda import open_module
from vivace.kernels.dit import Tile
from vivace.kernels.dit_reference import Rows

_CHUNK, _HEADS, _WIDTH = 50, 16, 64
_THREADS, _QUERIES = 256, 16
_TILE_BYTES, _ALONE, _TWO = 4096, 31, 27
"""A tile of 16 keys and values; how many of them a block has that has a multiprocessor alone, and one of two there."""


def serves(config: DiTConfig, dtype: torch.dtype) -> bool:
    """Whether the kernels fit these sizes."""
    sizes = (config.heads, config.dim_head, config.static_chunk_frames)
    return sizes == (_HEADS, _WIDTH, _CHUNK) and dtype == torch.bfloat16


class HopperKernels:
    """Looks like the module ``dit``.

    Args:
        device: index; None takes PyTorch's current one.

    Raises:
        KernelUnavailableError: they cannot be compiled or loaded here.
    """

    def __init__(self, device: int | None = None) -> None:
        source = (files("vivace.kernels") / "dit_hopper.cu").read_text(encoding="utf-8")
        self._attention = open_module(source, name="dit_hopper", device=device).function("attention")
        self._attention.set_shared_bytes(_ALONE * _TILE_BYTES)
        self.embed_input, self.convolve, self.convolve_add = dit.embed_input, dit.convolve, dit.convolve_add
        self.qkv, self.add_projection, self.ff_in = dit.qkv, dit.add_projection, dit.ff_in
        self.advance = dit.advance

    def default_options(self, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, Any]]:
        """Keyword arguments for each call of the solver."""
        return {**dit.default_options(dtype, device), "attention": {"pdl": True}}

    def attention(
        self,
        rows: Rows,
        query: Tensor,
        mixed: Tensor,
        heads: int,
        layer_offset: int,
        *,
        tile: Tile | None = None,
        pdl: bool = False,
    ) -> None:
        """See ``dit_reference.attention``. The tile means nothing."""
        del tile
        assert (heads, query.shape[1], rows.chunk) == (_HEADS, _HEADS * _WIDTH, _CHUNK)
        blocks = rows.groups * heads * -(-_CHUNK // _QUERIES)
        tiles = _ALONE if rows.groups <= 2 else _TWO
        arguments = (
            query, mixed, rows.arena, rows.starts, rows.counts, rows.steps, rows.ahead, rows.table,
            ctypes.c_longlong(layer_offset), ctypes.c_longlong(rows.step_stride), ctypes.c_int(rows.table.stride(0)),
            ctypes.c_int(tiles),
            ctypes.c_float(dit.LOG2_E / _WIDTH**0.5),
        )  # fmt: skip
        self._attention.launch((blocks,), (_THREADS,), arguments, tiles * _TILE_BYTES, overlap=pdl)
