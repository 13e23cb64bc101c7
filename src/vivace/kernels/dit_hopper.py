"""Faster kernels of the DiT's blocks for Hopper GPUs, in CUDA C++: attention, and all blocks of a step in one launch.

They serve the sizes of CosyVoice 3 in bfloat16, with all groups at one Euler step; everything else goes to ``dit``.
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

_DIM, _WIDTH, _INNER = 1024, 64, 2048
_ROWS, _DEPTH, _THREADS = 104, 256, 256
_ALIGNMENT, _BLOCK_OF_KEYS = 1024, 64 * _WIDTH * 2
_SHARES = 4
_ATTENTION_BYTES = _ALIGNMENT + 7 * _BLOCK_OF_KEYS + 64 * (_WIDTH + 8) * 4
"""Queries, three blocks of keys and values, what the cluster exchanges."""

_MOST_PAGES = 304
_RESIDENT_BLOCKS, _RESIDENT_CLUSTER, _PHASES, _RESIDENT_TILES = 120, 4, 5, 26
_RESIDENT_BYTES = _ALIGNMENT + (_ROWS + 104 + 3 * 40) * _DEPTH * 2 + 7 * _BLOCK_OF_KEYS
"""Rows, weights of all phases, queries, three blocks of keys and values."""


def serves(dim: int, heads: int, dim_head: int, inner: int, chunk: int, dtype: torch.dtype) -> bool:
    """Whether the kernels fit these sizes: channels of the model, of a head, of the feed-forward; frames of a chunk."""
    sizes = (dim, heads * dim_head, dim_head, inner) == (_DIM, _DIM, _WIDTH, _INNER)
    return sizes and chunk <= 64 and dtype == torch.bfloat16


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

    Args:
        use_resident: all blocks of a step in one launch, where they fit.

    Raises:
        KernelUnavailableError: they cannot be compiled or loaded here.
    """

    def __init__(self, device: int | None = None, *, use_resident: bool = False) -> None:
        folder = files("vivace.kernels")
        source = "".join(
            (folder / name).read_text(encoding="utf-8") for name in ("dit_hopper.cu", "dit_resident.cu")
        )
        module = CudaModule(source, name="dit_hopper", device=device)
        self._attention: CudaFunction = module.function("attention")
        self._attention.set_shared_bytes(_ATTENTION_BYTES)
        self._blocks: CudaFunction = module.function("blocks")
        self._blocks.set_shared_bytes(_RESIDENT_BYTES)
        self.has_resident = use_resident and self._all_fit()
        self.embed_input, self.convolve, self.convolve_add = dit.embed_input, dit.convolve, dit.convolve_add
        self.qkv, self.add_projection, self.ff_in = dit.qkv, dit.add_projection, dit.ff_in
        self.advance, self.default_options = dit.advance, dit.default_options

    def attention(
        self, rows: Rows, query: Tensor, mixed: Tensor, heads: int, layer_offset: int, **_: Any
    ) -> None:
        """See ``dit_reference.attention``."""
        assert rows.table.shape[1] <= _MOST_PAGES
        self._attention.launch(
            (rows.groups * heads * _SHARES,), (128,),
            [
                query, mixed, rows.arena, rows.starts, rows.counts, rows.steps, rows.table,
                ctypes.c_longlong(layer_offset), ctypes.c_longlong(rows.step_stride),
                ctypes.c_int(rows.table.stride(0)), ctypes.c_int(rows.chunk), ctypes.c_int(heads),
                ctypes.c_float(dit.LOG2_E / _WIDTH**0.5),
            ],
            _ATTENTION_BYTES, cluster=(_SHARES,), overlap=True,
        )  # fmt: skip

    def resident(self, blocks: Sequence[tuple[Folded, Added, Folded, Added]], steps: int) -> Resident | None:
        """For ``run_blocks``: the weights of the blocks (attention in and out, feed-forward in and out).

        None where the thread blocks of the resident kernel do not run all at once: they would wait for ever.
        """
        if not self.has_resident:
            return None
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
    ) -> Normed | None:
        """All blocks of one Euler step in one launch; None if the rows are too many for it.

        Args:
            step: which counters to use.
            x: norm of the first block. What is returned is that of the last.
            buffers: queries, mixed values and inner values of the feed-forward.
            layer_size: elements from one layer's keys to the next layer's.
        """
        if rows.num_rows > _ROWS or rows.table.shape[1] > _MOST_PAGES:
            return None
        tensors = (
            resident.layers, x.scaled, x.sums, hidden, *buffers, rows.arena, rows.starts, rows.counts, rows.steps,
            rows.here, rows.table, rope, resident.done[step],
        )  # fmt: skip
        numbers = (
            layer_size, rows.step_stride, len(resident.layers), rows.num_rows, x.scaled.shape[0], x.tiles,
            resident.done.shape[0], rope.shape[1], rows.chunk, rows.table.stride(0),
        )  # fmt: skip
        arguments = _Arguments(*(tensor.data_ptr() for tensor in tensors), *numbers, dit.LOG2_E / _WIDTH**0.5)
        self._blocks.launch(
            (_RESIDENT_BLOCKS,), (_THREADS,), [arguments], _RESIDENT_BYTES,
            cluster=(_RESIDENT_CLUSTER,), overlap=True,
        )  # fmt: skip
        return x._replace(tiles=_RESIDENT_TILES)

    def _all_fit(self) -> bool:
        """Whether all thread blocks of the resident kernel run at once."""
        clusters, size = ctypes.c_int(), _RESIDENT_CLUSTER
        config = launch_config((_RESIDENT_BLOCKS,), (_THREADS,), _RESIDENT_BYTES, 0, cluster=(size,))
        with current_context(self._blocks.device):
            call(
                "cuOccupancyMaxActiveClusters",
                ctypes.byref(clusters),
                self._blocks._handle,
                ctypes.byref(config),
            )
        return size * clusters.value >= _RESIDENT_BLOCKS
