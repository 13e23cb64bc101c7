"""The DiT's kernels for launches of many chunks: ``dit_reference`` has their plain definitions, ``dit`` the idea.

With one chunk every kernel waits for weights, so there are many small tiles. Rows of many chunks are a matrix
product like any other. Each kernel has the way and the tile that took least time for so many chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch

from vivace.config import DiTConfig
from vivace.kernels import dit, dit_wide
from vivace.kernels.dit import Tile
from vivace.kernels.dit_library import Library
from vivace.kernels.gpu import gpu_of


class Way(Enum):
    """Whose kernel it is.

    SINGLE: that of one chunk (``dit``, ``dit_hopper``). WIDE: wide tiles (``dit_wide``, all of a block but ``ff_in``).
    LIBRARY: PyTorch's products, with kernels behind them (``dit_library``, all but attention).
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


_AROUND = {
    "convolve": _single(64, 64, 64, 4, 3),
    "convolve_add": _single(64, 64, 64, 4, 3),
    "embed_input": _single(64, 64, 128, 4, 2),
    "advance": _single(64, 16, 128),
}
_AROUND_FEW = _AROUND | dict.fromkeys(("convolve", "convolve_add"), _single(64, 64, 64, 4, 6))

CHOICES: dict[int, dict[str, Choice]] = {
    2: {
        "qkv": _wide(64, 64, 128, 4, 3),
        "attention": _single(16, 128, 64, 4, 2),
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
        "add_attention": _library(1, 1024, 1, 8),
        "ff_in": _library(1, 1, 1),
        "add_ff": _library(1, 1024, 1, 8),
        **_AROUND_FEW,
    },
    8: {
        "qkv": _library(16, 64, 1),
        "attention": _wide(64, 64, 1, 4, 5),
        "add_attention": _library(1, 1024, 1, 8),
        "ff_in": _library(1, 1, 1),
        "add_ff": _library(1, 1024, 1, 8),
        **_AROUND_FEW,
    },
    12: {
        "qkv": _library(16, 64, 1),
        "attention": _wide(64, 64, 1, 4, 5),
        "add_attention": _library(1, 1024, 1, 8),
        "ff_in": _library(1, 1, 1),
        "add_ff": _library(1, 1024, 1, 8),
        **_AROUND,
    },
    16: {
        "qkv": _library(16, 64, 1),
        "attention": _wide(64, 64, 1),
        "add_attention": _library(1, 1024, 1, 8),
        "ff_in": _library(1, 1, 1),
        "add_ff": _library(1, 1024, 1, 8),
        **_AROUND,
    },
    24: {
        "qkv": _wide(256, 128, 64, 8),
        "attention": _wide(64, 64, 1, 4, 5),
        "add_attention": _library(1, 1024, 1, 8),
        "ff_in": _library(1, 1, 1),
        "add_ff": _library(1, 1024, 1, 8),
        **_AROUND,
    },
    32: {
        "qkv": _wide(256, 128, 64, 8),
        "attention": _wide(64, 64, 1, 4, 5),
        "add_attention": _library(1, 1024, 1, 8),
        "ff_in": _library(1, 1, 1),
        "add_ff": _library(1, 1024, 1, 8),
        **_AROUND,
    },
}
"""Up to so many chunks, for each call of the solver: the fastest of each kernel alone, on an H200 behind 400 frames,
or of whole launches behind 100 and 400. The depth of the wide attention is its pages at once."""

LAUNCH_MS = {
    1: 6.2,
    2: 8.6,
    4: 11.2,
    6: 12.6,
    8: 14.2,
    10: 16.6,
    12: 17.8,
    16: 23.3,
    24: 30.0,
    32: 40.0,
}
"""A launch by its chunks on an H200. Up to 16 rounded from what whole launches took, between those behind 100 and 400
frames. Beyond, the times of the kernels alone, 6 % longer as that of 16 was; no such launch was timed."""

_DIM = 1024  # a tile of the library's ``add_projection`` holds whole rows


def serves(config: DiTConfig, dtype: torch.dtype) -> bool:
    """Whether the tiles fit these sizes."""
    whole = config.heads * config.dim_head % 256 == 0 and config.dim == _DIM
    return whole and dtype == torch.bfloat16 and config.dim_head == 64 and config.static_chunk_frames <= 64


def _by_way(name: str) -> Callable[..., None]:
    def run(self: PackedKernels, *args: Any, way: Way, **options: Any) -> None:
        getattr(self._kernels[way], name)(*args, **options)

    run.__doc__ = f"See ``dit_reference.{name}``. ``way``: whose kernel; the other options are that kernel's."
    return run


class PackedKernels:
    """Looks like the module ``dit``, tuned for launches of ``chunks`` chunks on Hopper GPUs in bfloat16.

    Args:
        choices: for each call of the solver; None: the fastest, as far as measured.
        single: the kernels of one chunk.
    """

    def __init__(self, chunks: int, choices: Mapping[str, Choice] | None = None, single: Any = dit) -> None:
        assert chunks > 1
        nearest = min((count for count in CHOICES if count >= chunks), default=max(CHOICES))
        self._choices = CHOICES[nearest] if choices is None else choices
        self._kernels: dict[Way, Any] = {Way.SINGLE: single, Way.WIDE: dit_wide, Way.LIBRARY: Library()}

    def default_options(self, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, Any]]:
        """Keyword arguments for each call of the solver."""
        del dtype
        pdl = gpu_of(device) is not None
        return {name: {"way": way, "tile": tile, "pdl": pdl} for name, (way, tile) in self._choices.items()}

    embed_input, convolve, convolve_add = _by_way("embed_input"), _by_way("convolve"), _by_way("convolve_add")
    qkv, attention, ff_in = _by_way("qkv"), _by_way("attention"), _by_way("ff_in")
    add_projection, advance = _by_way("add_projection"), _by_way("advance")
