"""Faster kernels of the DiT's blocks for Hopper GPUs, in CUDA C++, for the chunk of one stream.

They serve the sizes of CosyVoice 3 in bfloat16, with all groups at one Euler step; everything else goes to ``dit``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from vivace.kernels import dit
from vivace.kernels.cuda import CudaFunction, CudaModule
from vivace.kernels.dit_reference import Added, Folded, Normed, Rows

_CHUNK, _HEADS, _DIM, _WIDTH, _INNER = 50, 16, 1024, 64, 2048
_THREADS, _TILES = 256, 64
_SHARED_BYTES = {
    "qkv": 48 * (2 * _DIM + 64),
    "ff_in": 32 * (2 * _DIM + 64),
    "add_attention": 16 * (2 * _DIM + 64),
    "add_ff": 16 * (2 * _INNER + 64),
    "attention": 31 * 4096,
}
"""Weights of a tile of channels; tiles of 16 keys and values."""

_ATTENTION_TILE = 16


def serves(dim: int, heads: int, dim_head: int, inner: int, chunk: int, dtype: torch.dtype) -> bool:
    """Whether the kernels fit these sizes: channels of the model, of a head, of the feed-forward; frames of a chunk."""
    sizes = (dim, heads, dim_head, inner, chunk) == (_DIM, _HEADS, _WIDTH, _INNER, _CHUNK)
    return sizes and dtype == torch.bfloat16


class _Arguments(ctypes.Structure):
    """``Arguments`` of ``dit_hopper.cu``."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("rows", "weight", "sums", "folded", "bias", "gate", "scale", "hidden", "out_sums")
        ),
        *((name, ctypes.c_void_p) for name in ("out", "arena", "starts", "counts", "steps", "here", "rope")),
        *((name, ctypes.c_longlong) for name in ("layer_offset", "step_stride")),
        *((name, ctypes.c_int) for name in ("padded", "steps_size", "positions")),
    )


class HopperKernels:
    """Looks like the module ``dit``.

    Raises:
        KernelUnavailableError: they cannot be compiled or loaded here.
    """

    def __init__(self, device: int | None = None, *, options: Sequence[str] = ()) -> None:
        source = (files("vivace.kernels") / "dit_hopper.cu").read_text(encoding="utf-8")
        module = CudaModule(source, options=options, name="dit_hopper", device=device)
        self._functions: dict[str, CudaFunction] = {}
        for name, size in _SHARED_BYTES.items():
            self._functions[name] = module.function(name)
            self._functions[name].set_shared_bytes(size)
        self.embed_input, self.convolve, self.convolve_add = dit.embed_input, dit.convolve, dit.convolve_add
        self.advance, self.default_options = dit.advance, dit.default_options

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
        assert heads == _HEADS
        arguments = _folded(rows, x, projection, query)
        arguments.starts, arguments.counts = rows.starts.data_ptr(), rows.counts.data_ptr()
        arguments.here, arguments.arena = rows.here.data_ptr(), rows.arena.data_ptr()
        arguments.rope, arguments.positions = rope.data_ptr(), rope.shape[1]
        arguments.layer_offset, arguments.step_stride = layer_offset, rows.step_stride
        self._launch("qkv", (_TILES, rows.groups), arguments)

    def attention(
        self, rows: Rows, query: Tensor, mixed: Tensor, heads: int, layer_offset: int, **_: Any
    ) -> None:
        """See ``dit_reference.attention``."""
        assert rows.uniform
        assert heads == _HEADS
        blocks = rows.groups * heads * -(-_CHUNK // _ATTENTION_TILE)
        self._launch(
            "attention", (blocks,), query, mixed, rows.arena, rows.starts, rows.counts, rows.steps, rows.table,
            ctypes.c_longlong(layer_offset), ctypes.c_longlong(rows.step_stride), ctypes.c_int(rows.table.stride(0)),
            ctypes.c_float(dit.LOG2_E / _WIDTH**0.5),
        )  # fmt: skip

    def add_projection(
        self, rows: Rows, a: Tensor, projection: Added, hidden: Tensor, out: Normed, **_: Any
    ) -> None:
        """See ``dit_reference.add_projection``. ``out.tiles`` must be 64."""
        assert rows.uniform
        assert out.tiles == _TILES
        arguments = _Arguments(rows=a.data_ptr(), weight=projection.weight.data_ptr())
        arguments.bias, arguments.gate = projection.bias.data_ptr(), projection.gate.data_ptr()
        arguments.scale, arguments.hidden = projection.scale.data_ptr(), hidden.data_ptr()
        arguments.out, arguments.out_sums = out.scaled.data_ptr(), out.sums.data_ptr()
        arguments.padded, arguments.steps = out.scaled.shape[0], rows.steps.data_ptr()
        name = "add_attention" if projection.weight.shape[1] == _DIM else "add_ff"
        self._launch(name, (_TILES, rows.groups), arguments)

    def ff_in(self, rows: Rows, x: Normed, projection: Folded, out: Tensor, **_: Any) -> None:
        """See ``dit_reference.ff_in``."""
        self._launch("ff_in", (_TILES, rows.groups), _folded(rows, x, projection, out))

    def _launch(self, name: str, grid: tuple[int, ...], *arguments: Any) -> None:
        self._functions[name].launch(grid, (_THREADS,), arguments, _SHARED_BYTES[name], overlap=True)


def _folded(rows: Rows, x: Normed, projection: Folded, out: Tensor) -> _Arguments:
    assert rows.uniform
    assert rows.chunk == _CHUNK
    assert x.tiles == _TILES
    arguments = _Arguments(rows=x.scaled.data_ptr(), weight=projection.weight.data_ptr(), out=out.data_ptr())
    arguments.sums, arguments.padded = x.sums.data_ptr(), x.scaled.shape[0]
    arguments.folded, arguments.steps_size = projection.folded.data_ptr(), projection.folded[0].numel()
    arguments.steps = rows.steps.data_ptr()
    return arguments
