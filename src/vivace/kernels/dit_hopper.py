"""The DiT's blocks on Hopper GPUs: CUDA kernels of ``dit_hopper.cu`` in place of the Triton ones, for few rows.

They have the arguments of ``dit_reference``. They serve the sizes of CosyVoice 3 in bfloat16, with all groups at one
Euler step; everything else goes to ``dit``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vivace.kernels import dit
from vivace.kernels.cuda import CudaFunction, CudaModule
from vivace.kernels.cuda_driver import call, current_context, launch_config
from vivace.kernels.dit_reference import Added, Folded, Normed, Rows

_ROWS, _DEPTH, _THREADS = 104, 256, 256
_DIM, _WIDTH, _MOST_PAGES = 1024, 64, 512
_ALIGNMENT = 1024
_SHARES = 4
_QKV_COLUMNS, _FF_IN_COLUMNS = 96, 64
_ADD = {1024: ("add_1024", 32, 4), 2048: ("add_2048", 64, 8)}
"""By depth: kernel, columns of a tile, blocks of a cluster."""

_ATTENTION_BYTES = _ALIGNMENT + 7 * 64 * 128 + 64 * (_WIDTH + 8) * 4
"""Queries, three blocks of keys and values, what the cluster exchanges."""


def serves(dim: int, heads: int, dim_head: int, inner: int, chunk: int, dtype: torch.dtype) -> bool:
    """Whether the kernels fit these sizes: channels of the model, of a head, of the feed-forward; frames of a chunk."""
    sizes = dim == _DIM and heads * dim_head == _DIM and dim_head == _WIDTH and inner in _ADD
    return sizes and chunk <= 64 and dtype == torch.bfloat16


_RESIDENT_BYTES = _ALIGNMENT + (_ROWS + 96 + 32 + 2 * 32) * _DEPTH * 2 + 9 * 64 * 128
_RESIDENT_BLOCKS, _PHASES, RESIDENT_TILES = 128, 5, 32


class Resident(NamedTuple):
    """What ``HopperKernels.run_blocks`` keeps between launches.

    Attributes:
        layers: addresses of the blocks' weights, int64 ``[depth, 12]``.
        done: counters of each Euler step, zeroed before the first of them, int32 ``[steps, depth * 5]``.
    """

    layers: Tensor
    done: Tensor


class _Arguments(ctypes.Structure):
    """``Arguments`` of ``dit_resident.cu``."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("layers", "scaled", "sums", "hidden", "query", "mixed", "inner")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("arena", "starts", "counts", "steps", "here", "table", "rope", "done")
        ),
        *((name, ctypes.c_longlong) for name in ("layer_size", "step_stride")),
        *((name, ctypes.c_int) for name in ("num_layers", "rows", "padded", "first_tiles", "num_steps")),
        *((name, ctypes.c_int) for name in ("positions", "chunk", "table_stride")),
        ("scale", ctypes.c_float),
    )


class HopperKernels:
    """Looks like the module ``dit``.

    Raises:
        KernelUnavailableError: they cannot be compiled or loaded here.
    """

    def __init__(self, device: int | None = None) -> None:
        folder = files("vivace.kernels")
        names = ("dit_hopper.cu", "dit_resident.cu")
        source = "".join((folder / name).read_text(encoding="utf-8") for name in names)
        module = CudaModule(source, name="dit_hopper", device=device)
        self._functions: dict[str, CudaFunction] = {}
        for name in ("qkv", "ff_in", "add_1024", "add_2048", "attention", "blocks"):
            self._functions[name] = module.function(name)
            self._functions[name].set_shared_bytes(_shared_bytes(name))
        if not self._all_fit():  # they would wait for each other for ever
            self.resident = None  # type: ignore[method-assign,assignment]
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

    def resident(self, blocks: Sequence[tuple[Folded, Added, Folded, Added]], steps: int) -> Resident:
        """For ``run_blocks``: the weights of the blocks (attention in and out, feed-forward in and out)."""
        rows = [
            (
                qkv.weight, qkv.folded, out.weight, out.bias, out.gate, out.scale,
                ff_in.weight, ff_in.folded, ff_out.weight, ff_out.bias, ff_out.gate, ff_out.scale,
            )
            for qkv, out, ff_in, ff_out in blocks
        ]  # fmt: skip
        device = rows[0][0].device
        layers = torch.tensor([[tensor.data_ptr() for tensor in row] for row in rows], device=device)
        return Resident(layers, torch.zeros(steps, _PHASES * len(rows), dtype=torch.int32, device=device))

    def run_blocks(
        self,
        rows: Rows,
        resident: Resident,
        step: int,
        x: Normed,
        hidden: Tensor,
        rope: Tensor,
        buffers: tuple[Tensor, Tensor, Tensor],
        layer_size: int,
    ) -> bool:
        """All blocks of one Euler step in one launch; False if the rows are too many for it.

        Args:
            step: which counters to use.
            x: norm of the first block; afterwards that of the last, with ``RESIDENT_TILES`` tiles.
            buffers: queries, mixed values and inner values of the feed-forward.
            layer_size: elements from one layer's keys to the next layer's.
        """
        if rows.num_rows > _ROWS or rows.table.shape[1] > 304:
            return False
        tensors = (
            resident.layers, x.scaled, x.sums, hidden, *buffers, rows.arena, rows.starts, rows.counts, rows.steps,
            rows.here, rows.table, rope, resident.done[step],
        )  # fmt: skip
        numbers = (
            layer_size, rows.step_stride, len(resident.layers), rows.num_rows, x.scaled.shape[0], x.tiles,
            self._num_steps(resident), rope.shape[1], rows.chunk, rows.table.stride(0),
        )  # fmt: skip
        arguments = _Arguments(*(tensor.data_ptr() for tensor in tensors), *numbers, dit.LOG2_E / _WIDTH**0.5)
        self._functions["blocks"].launch(
            (_RESIDENT_BLOCKS,), (_THREADS,), [arguments], _RESIDENT_BYTES, cluster=(4,), overlap=True
        )
        return True

    def _all_fit(self) -> bool:
        """Whether all thread blocks of the resident kernel run at once."""
        clusters = ctypes.c_int()
        config = launch_config((_RESIDENT_BLOCKS,), (_THREADS,), _RESIDENT_BYTES, 0, cluster=(4,))
        function = self._functions["blocks"]
        with current_context(function.device):
            call(
                "cuOccupancyMaxActiveClusters", ctypes.byref(clusters), function._handle, ctypes.byref(config)
            )
        return 4 * clusters.value >= _RESIDENT_BLOCKS

    @staticmethod
    def _num_steps(resident: Resident) -> int:
        return resident.done.shape[0]

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
    if name in ("attention", "blocks"):
        return _ATTENTION_BYTES if name == "attention" else _RESIDENT_BYTES
    columns = {"qkv": _QKV_COLUMNS, "ff_in": _FF_IN_COLUMNS, "add_1024": 32, "add_2048": 64}[name]
    return _ALIGNMENT + (_ROWS + columns) * _DEPTH * 2
