"""The DiT's blocks on Hopper GPUs: CUDA kernels of ``dit_hopper.cu`` in place of the Triton ones, for few rows.

They have the arguments of ``dit_reference``. They serve the sizes of CosyVoice 3 in bfloat16, with all groups at one
Euler step; everything else goes to ``dit``.
"""

from __future__ import annotations

import ctypes
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from vivace.kernels import dit
from vivace.kernels.cuda import CudaFunction, CudaModule
from vivace.kernels.dit_reference import Added, Folded, Normed, Rows

_ROWS, _DEPTH, _THREADS = 104, 256, 256
_DIM, _WIDTH, _MOST_PAGES = 1024, 64, 512
_ALIGNMENT = 1024
_SHARES = 4
_QKV_COLUMNS, _FF_IN_COLUMNS = 96, 64
_ADD = {1024: ("add_1024", 32, 4), 2048: ("add_2048", 64, 8)}
"""By depth: kernel, columns of a tile, blocks of a cluster."""

_ATTENTION_BYTES = _ALIGNMENT + 9 * 64 * 128 + _SHARES * 16 * (_WIDTH + 8) * 4
"""Queries, four blocks of keys and values, what the cluster exchanges."""


def serves(dim: int, heads: int, dim_head: int, inner: int, chunk: int, dtype: torch.dtype) -> bool:
    """Whether the kernels fit these sizes: channels of the model, of a head, of the feed-forward; frames of a chunk."""
    sizes = dim == _DIM and heads * dim_head == _DIM and dim_head == _WIDTH and inner in _ADD
    return sizes and chunk <= 64 and dtype == torch.bfloat16


class HopperKernels:
    """Looks like the module ``dit``.

    Raises:
        KernelUnavailableError: they cannot be compiled or loaded here.
    """

    def __init__(self, device: int | None = None) -> None:
        source = (files("vivace.kernels") / "dit_hopper.cu").read_text(encoding="utf-8")
        module = CudaModule(source, name="dit_hopper", device=device)
        self._functions: dict[str, CudaFunction] = {}
        for name in ("qkv", "ff_in", "add_1024", "add_2048", "attention"):
            self._functions[name] = module.function(name)
            self._functions[name].set_shared_bytes(_shared_bytes(name))
        self.embed_input, self.convolve, self.convolve_add = dit.embed_input, dit.convolve, dit.convolve_add
        self.advance = dit.advance

    def default_options(self, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
        """Keyword arguments for each call of the solver; it also learns from them how many tiles a row has."""
        options = dit.default_options(dtype)
        for name, depth in (("add_attention", 1024), ("add_ff", 2048)):
            options[name] = {"tile": dit.Tile(_ROWS, _ADD[depth][1], _DEPTH)}
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
        **_: Any,
    ) -> None:
        """See ``dit_reference.qkv``."""
        assert rows.uniform
        inner = query.shape[1]
        numbers = (
            rows.num_rows, x.scaled.shape[0], x.tiles, projection.folded.shape[1], rope.shape[1], rows.chunk, inner,
            x.scaled.shape[1],
        )  # fmt: skip
        self._launch(
            "qkv", 3 * inner // _QKV_COLUMNS, 4, rows.num_rows,
            [
                x.scaled, x.sums, projection.weight, projection.folded, rope, query, rows.arena, rows.starts,
                rows.counts, rows.steps, rows.here, ctypes.c_longlong(layer_offset),
                ctypes.c_longlong(rows.step_stride), *map(ctypes.c_int, numbers),
            ],
        )  # fmt: skip

    def attention(
        self, rows: Rows, query: Tensor, mixed: Tensor, heads: int, layer_offset: int, **_: Any
    ) -> None:
        """See ``dit_reference.attention``."""
        assert rows.table.shape[1] <= _MOST_PAGES
        self._functions["attention"].launch(
            (rows.groups * heads * _SHARES,), (128,),
            [
                query, mixed, rows.arena, rows.starts, rows.counts, rows.steps, rows.table,
                ctypes.c_longlong(layer_offset), ctypes.c_longlong(rows.step_stride),
                ctypes.c_int(rows.table.stride(0)), ctypes.c_int(rows.chunk), ctypes.c_int(heads),
                ctypes.c_float(dit.LOG2_E / _WIDTH**0.5),
            ],
            _ATTENTION_BYTES, cluster=(_SHARES,), overlap=True,
        )  # fmt: skip

    def add_projection(
        self, rows: Rows, a: Tensor, projection: Added, hidden: Tensor, out: Normed, **_: Any
    ) -> None:
        """See ``dit_reference.add_projection``."""
        assert rows.uniform
        dim, depth = projection.weight.shape
        name, columns, cluster = _ADD[depth]
        assert out.tiles * columns == dim
        self._launch(
            name, out.tiles, cluster, rows.num_rows,
            [
                a, projection.weight, projection.bias, projection.gate, projection.scale, hidden, out.scaled, out.sums,
                rows.steps, *map(ctypes.c_int, (rows.num_rows, out.scaled.shape[0], dim)),
            ],
        )  # fmt: skip

    def ff_in(self, rows: Rows, x: Normed, projection: Folded, out: Tensor, **_: Any) -> None:
        """See ``dit_reference.ff_in``."""
        assert rows.uniform
        columns, depth = projection.weight.shape
        numbers = (rows.num_rows, x.scaled.shape[0], x.tiles, projection.folded.shape[1], columns, depth)
        self._launch(
            "ff_in", columns // _FF_IN_COLUMNS, 4, rows.num_rows,
            [
                x.scaled, x.sums, projection.weight, projection.folded, out, rows.steps, *map(ctypes.c_int, numbers)
            ],
        )  # fmt: skip

    def _launch(self, name: str, tiles: int, cluster: int, rows: int, args: list[Any]) -> None:
        self._functions[name].launch(
            (tiles * cluster, -(-rows // _ROWS)),
            (_THREADS,),
            args,
            _shared_bytes(name),
            cluster=(cluster,),
            overlap=True,
        )


def _shared_bytes(name: str) -> int:
    if name == "attention":
        return _ATTENTION_BYTES
    columns = {"qkv": _QKV_COLUMNS, "ff_in": _FF_IN_COLUMNS, "add_1024": 32, "add_2048": 64}[name]
    return _ALIGNMENT + (_ROWS + columns) * _DEPTH * 2
