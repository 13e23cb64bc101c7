"""Matrix products of the DiT's blocks over the rows of many streams, in CUDA C++ for Hopper GPUs.

They serve the sizes of CosyVoice 3 in bfloat16. A tile's ``rows`` are 104 or 200: two or four groups of 50 frames, and
what is left of the matrix unit's multiple of eight.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.kernels.cuda import CudaFunction, CudaModule
from vivace.kernels.cuda_driver import call
from vivace.kernels.dit_reference import Added, Folded, Normed, Rows

DIM, INNER, HEADS, CHUNK, DEPTH = 1024, 2048, 16, 50, 64
_SHARED_BYTES, _MOST_STAGES = 224 * 1024, 8
_BFLOAT16, _SWIZZLE_128_BYTES, _PROMOTE_256_BYTES = 9, 3, 3  # of the driver's tensor maps

SHAPES = {
    "qkv": ((64, 104), (128, 104), (192, 104), (128, 200), (192, 200)),
    "ff_in": ((64, 104), (128, 104), (128, 200)),
    "add": ((64, 104), (128, 104), (64, 200), (128, 200)),
}
"""For each kernel the tiles that there are: channels, rows."""


class Shape(NamedTuple):
    """A tile of ``columns`` channels by ``rows``."""

    columns: int
    rows: int

    @property
    def used(self) -> int:
        """Rows that are written: whole groups."""
        return self.rows // 100 * 100

    @property
    def halves(self) -> tuple[int, int]:
        """Rows that each thread block of a cluster fetches."""
        first = (self.rows // 8 + 1) // 2 * 8
        return first, self.rows - first

    @property
    def shared_bytes(self) -> int:
        """The ring of stages, and what aligns it."""
        stage = 2 * DEPTH * (self.columns + self.rows)
        return min(_MOST_STAGES, (_SHARED_BYTES - 1024) // stage) * stage + 1024


class _TensorMap(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class _Arguments(ctypes.Structure):
    """``Arguments`` of ``dit_products.cu``."""

    _fields_ = (
        *((name, _TensorMap) for name in ("weight", "first_rows", "other_rows")),
        *(
            (name, ctypes.c_void_p)
            for name in ("sums", "folded", "bias", "gate", "scale", "hidden", "out_sums")
        ),
        *((name, ctypes.c_void_p) for name in ("out", "arena", "starts", "counts", "steps", "here", "rope")),
        *((name, ctypes.c_longlong) for name in ("layer_offset", "step_stride")),
        *(
            (name, ctypes.c_int)
            for name in ("depth", "num_rows", "padded", "tiles", "steps_size", "positions")
        ),
        ("end", ctypes.c_char * 40),
    )


class Products:
    """The three kinds of products in a block; ``dit_reference`` has their plain definitions.

    Args:
        device: index.

    Raises:
        KernelUnavailableError: they cannot be compiled or loaded here.
    """

    def __init__(self, device: int) -> None:
        source = (files("vivace.kernels") / "dit_products.cu").read_text(encoding="utf-8")
        module = CudaModule(multiplications((104, 200)) + source, name="dit_products", device=device)
        self._functions: dict[tuple[str, Shape], CudaFunction] = {}
        for name, shapes in SHAPES.items():
            for shape in map(Shape._make, shapes):
                function = module.function(f"{name}_{shape.columns // 64}_{shape.rows}")
                function.set_shared_bytes(shape.shared_bytes)
                self._functions[name, shape] = function

    def qkv(
        self,
        rows: Rows,
        x: Normed,
        projection: Folded,
        rope: Tensor,
        query: Tensor,
        layer_offset: int,
        shape: Shape,
    ) -> None:
        """See ``dit_reference.qkv``."""
        assert rows.uniform
        assert rows.chunk == CHUNK
        arguments = self._arguments(rows, x.scaled, projection.weight, query, shape)
        _add_norm(arguments, x, projection)
        arguments.starts, arguments.counts = rows.starts.data_ptr(), rows.counts.data_ptr()
        arguments.here, arguments.arena = rows.here.data_ptr(), rows.arena.data_ptr()
        arguments.rope, arguments.positions = rope.data_ptr(), rope.shape[1]
        arguments.layer_offset, arguments.step_stride = layer_offset, rows.step_stride
        self._launch("qkv", shape, rows, 3 * DIM, arguments)

    def ff_in(self, rows: Rows, x: Normed, projection: Folded, out: Tensor, shape: Shape) -> None:
        """See ``dit_reference.ff_in``."""
        assert rows.uniform
        arguments = self._arguments(rows, x.scaled, projection.weight, out, shape)
        _add_norm(arguments, x, projection)
        self._launch("ff_in", shape, rows, INNER, arguments)

    def add_projection(
        self, rows: Rows, a: Tensor, projection: Added, hidden: Tensor, out: Normed, shape: Shape
    ) -> None:
        """See ``dit_reference.add_projection``. ``out.tiles`` must be the number of column tiles."""
        assert rows.uniform
        assert out.tiles * shape.columns == DIM
        arguments = self._arguments(rows, a, projection.weight, out.scaled, shape)
        arguments.bias, arguments.gate = projection.bias.data_ptr(), projection.gate.data_ptr()
        arguments.scale, arguments.hidden = projection.scale.data_ptr(), hidden.data_ptr()
        arguments.out_sums, arguments.padded = out.sums.data_ptr(), out.scaled.shape[0]
        self._launch("add", shape, rows, DIM, arguments)

    def _arguments(self, rows: Rows, a: Tensor, weight: Tensor, out: Tensor, shape: Shape) -> _Arguments:
        first, other = (_tensor_map(a, count) for count in shape.halves)
        arguments = _Arguments(_tensor_map(weight, shape.columns), first, other)
        arguments.out, arguments.steps = out.data_ptr(), rows.steps.data_ptr()
        arguments.depth, arguments.num_rows = weight.shape[1], rows.num_rows
        return arguments

    def _launch(self, name: str, shape: Shape, rows: Rows, channels: int, arguments: _Arguments) -> None:
        blocks = channels // shape.columns * -(-rows.num_rows // shape.used)
        threads = 2 * shape.columns + 32
        self._functions[name, shape].launch(
            (blocks,), (threads,), [arguments], shape.shared_bytes, cluster=(2,), overlap=True
        )


@cache
def products(device: int) -> Products:
    """Those of a device, compiled once."""
    return Products(device)


def multiplications(widths: tuple[int, ...]) -> str:
    """``multiply<N>``: the matrix unit's product of 64 channels and ``N`` rows, for each of the ``widths``."""
    arguments = "unsigned long long a, unsigned long long b"
    texts = [f"template <int N> __device__ __forceinline__ void multiply(float (&d)[N / 2], {arguments});"]
    for width in widths:
        count = width // 2
        numbers = ", ".join(f"%{index}" for index in range(count))
        sums = ", ".join(f'"+f"(d[{index}])' for index in range(count))
        operation = f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16"
        text = (
            f'"{operation} {{{numbers}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;" : {sums} : "l"(a), "l"(b)'
        )
        head = (
            f"template <> __device__ __forceinline__ void multiply<{width}>(float (&d)[{count}], {arguments})"
        )
        texts.append(f"{head} {{\n  asm volatile({text});\n}}")
    return "\n".join(texts) + "\n"


def _add_norm(arguments: _Arguments, x: Normed, projection: Folded) -> None:
    arguments.sums, arguments.tiles, arguments.padded = x.sums.data_ptr(), x.tiles, x.scaled.shape[0]
    arguments.folded, arguments.steps_size = projection.folded.data_ptr(), projection.folded[0].numel()


def _tensor_map(matrix: Tensor, count: int) -> _TensorMap:
    """How the copy engine fetches ``count`` rows of a stage's depth; rows of 128 bytes, swizzled."""
    assert matrix.dtype == torch.bfloat16
    assert matrix.is_contiguous()
    room = ctypes.create_string_buffer(128 + 64)
    aligned = (ctypes.addressof(room) + 63) // 64 * 64
    rows, width = matrix.shape
    call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(aligned), ctypes.c_int(_BFLOAT16), ctypes.c_uint(2),
        ctypes.c_void_p(matrix.data_ptr()), (ctypes.c_ulonglong * 2)(width, rows), (ctypes.c_ulonglong * 1)(2 * width),
        (ctypes.c_uint * 2)(DEPTH, count), (ctypes.c_uint * 2)(1, 1), ctypes.c_int(0), ctypes.c_int(_SWIZZLE_128_BYTES),
        ctypes.c_int(_PROMOTE_256_BYTES), ctypes.c_int(0),
    )  # fmt: skip
    result = _TensorMap()
    ctypes.memmove(ctypes.addressof(result), aligned, 128)
    return result
