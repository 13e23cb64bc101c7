"""A small writer of ONNX graphs: each method adds one node and gives back the name of its result.

Large weights are kept as int8 with one scale for each output channel, everything else as float32. A runtime
turns them into float32 once, when it loads the file. Needs the package ``onnx`` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from recipes.mini.tokenizer_model import LEAST_INT8

OPSET = 17
FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32

Dimensions = Sequence[int | str]


class Graph:
    """Nodes and constants of a graph under construction."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.count = 0

    def fresh(self, kind: str) -> str:
        """A name that nothing has yet."""
        self.count += 1
        return f"{kind}_{self.count}"

    def constant(self, values: Any, dtype: Any = np.float32, name: str | None = None) -> str:
        """A fixed tensor."""
        name = name or self.fresh("constant")
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype=dtype), name))
        return name

    def node(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """One node with one result, called ``name`` if given."""
        name = name or self.fresh(kind)
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name="node_" + name, **attributes))
        return name

    def halves(self, x: str, size: int) -> tuple[str, str]:
        """The last of four dimensions, ``2 * size``, in two."""
        names = self.fresh("first"), self.fresh("second")
        sizes = self.constant([size, size], np.int64)
        self.nodes.append(helper.make_node("Split", [x, sizes], list(names), name="node_" + names[0], axis=3))
        return names

    def weight(self, parameter: nn.Parameter, transposed: bool = False) -> str:
        """A weight of a linear layer or convolution, whose output channels come first in ``parameter``."""
        values = parameter.detach().float().cpu().numpy()
        if values.size < LEAST_INT8:
            return self.constant(values.T if transposed else values)
        scale = np.maximum(np.abs(values).reshape(len(values), -1).max(axis=1), 1e-12) / 127.0
        whole = np.round(values / scale.reshape(-1, *[1] * (values.ndim - 1))).astype(np.int8)
        scale = scale[None] if transposed else scale.reshape(-1, *[1] * (values.ndim - 1))
        # Not DequantizeLinear: runtimes fuse that with the product and quantise the activations as well.
        restored = self.node("Cast", self.constant(whole.T if transposed else whole, np.int8), to=FLOAT)
        return self.node("Mul", restored, self.constant(scale))

    def linear(self, layer: nn.Linear, x: str) -> str:
        """``[…, in]`` to ``[…, out]``."""
        return self.node(
            "Add",
            self.node("MatMul", x, self.weight(layer.weight, transposed=True)),
            self.constant(layer.bias.detach()),
        )

    def convolution(self, layer: nn.Conv1d, x: str) -> str:
        """``[batch, in, length]`` to ``[batch, out, length]``; groups, stride and padding as in ``layer``."""
        if layer.bias is None:
            raise ValueError("a convolution without bias is not needed here")
        side = int(layer.padding[0])
        return self.node(
            "Conv",
            x,
            self.weight(layer.weight),
            self.constant(layer.bias.detach()),
            kernel_shape=list(layer.kernel_size),
            strides=list(layer.stride),
            group=layer.groups,
            pads=[side, side],
        )

    def norm(self, layer: nn.LayerNorm, x: str) -> str:
        """Layer norm over the last dimension."""
        scale, bias = self.constant(layer.weight.detach()), self.constant(layer.bias.detach())
        return self.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=layer.eps)

    def silu(self, x: str) -> str:
        """x · sigmoid(x)."""
        return self.node("Mul", x, self.node("Sigmoid", x))

    def swapped(self, x: str) -> str:
        """``[batch, a, b]`` to ``[batch, b, a]``."""
        return self.node("Transpose", x, perm=[0, 2, 1])

    def write(
        self,
        path: Path,
        name: str,
        inputs: dict[str, tuple[int, Dimensions]],
        output: tuple[str, int, Dimensions],
    ) -> int:
        """Check the graph and write it; gives the size of the file in bytes.

        Args:
            inputs: ONNX type and dimensions (a string is a free one) of each input.
            output: name, ONNX type and dimensions of the only output.
        """
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info(key, kind, list(shape)) for key, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info(output[0], output[1], list(output[2]))],
            self.constants,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="vivace"
        )
        model.ir_version = 9  # the newest that onnxruntime 1.17 reads
        onnx.checker.check_model(model, full_check=True)
        data = model.SerializeToString()
        path.write_bytes(data)
        return len(data)
