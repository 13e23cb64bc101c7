"""Writes small ONNX files without the ``onnx`` package.

An ONNX file is a protocol-buffers message; the few fields that a small graph needs are numbered here as in
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto. A test reads the result with the ``onnx`` package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOAT, INT32, INT64 = 1, 6, 7
_DTYPES = {"float32": FLOAT, "int32": INT32, "int64": INT64}
_IR_VERSION = 8
_OPSET = 17


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field_number: int, value: int) -> bytes:
    return _varint(field_number << 3) + _varint(value)


def _bytes(field_number: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return _varint(field_number << 3 | 2) + _varint(len(raw)) + raw


def _tensor(name: str, array: NDArray[Any]) -> bytes:
    dims = b"".join(_number(1, size) for size in array.shape)
    return dims + _number(2, _DTYPES[array.dtype.name]) + _bytes(8, name) + _bytes(9, array.tobytes())


def _value_info(name: str, kind: int, shape: Sequence[int | str]) -> bytes:
    dims = b"".join(
        _bytes(1, _number(1, size) if isinstance(size, int) else _bytes(2, size)) for size in shape
    )
    return _bytes(1, name) + _bytes(2, _bytes(1, _number(1, kind) + _bytes(2, dims)))


@dataclass(slots=True)
class GraphWriter:
    """A graph under construction: add constants and nodes in order, then :meth:`serialise`.

    Args:
        name: of the graph.
    """

    name: str
    _nodes: list[bytes] = field(default_factory=list)
    _constants: list[bytes] = field(default_factory=list)
    _inputs: list[bytes] = field(default_factory=list)
    _outputs: list[bytes] = field(default_factory=list)

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Declares an input; a text in ``shape`` is a size that may vary."""
        self._inputs.append(_value_info(name, kind, shape))

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Declares an output."""
        self._outputs.append(_value_info(name, kind, shape))

    def constant(self, name: str, array: NDArray[Any]) -> None:
        """Adds a float32, int32 or int64 constant."""
        self._constants.append(_tensor(name, np.ascontiguousarray(array)))

    def node(
        self,
        operator: str,
        inputs: Sequence[str],
        output: str,
        attributes: dict[str, int | list[int]] | None = None,
    ) -> None:
        """Adds a node with one output."""
        message = b"".join(_bytes(1, name) for name in inputs) + _bytes(2, output)
        message += _bytes(3, f"{operator}_{len(self._nodes)}") + _bytes(4, operator)
        for name, value in (attributes or {}).items():
            if isinstance(value, int):
                attribute = _number(3, value) + _number(20, 2)
            else:
                attribute = b"".join(_number(8, item) for item in value) + _number(20, 7)
            message += _bytes(5, _bytes(1, name) + attribute)
        self._nodes.append(message)

    def serialise(self) -> bytes:
        """The whole file."""
        graph = b"".join(_bytes(1, node) for node in self._nodes) + _bytes(2, self.name)
        graph += b"".join(_bytes(5, constant) for constant in self._constants)
        graph += b"".join(_bytes(11, value) for value in self._inputs)
        graph += b"".join(_bytes(12, value) for value in self._outputs)
        opset = _bytes(8, _bytes(1, "") + _number(2, _OPSET))
        return _number(1, _IR_VERSION) + _bytes(2, "vivace") + _bytes(7, graph) + opset
