"""The Hopper kernels of the streaming DiT against the plain versions; needs such a GPU.

Products of bfloat16 operands are summed in float32 on both sides; what differs is the rounding of results to bfloat16
(one step in 256) where sums lie close to the middle of two values. Attention rounds the weights of the keys too.
"""

import dataclasses

import pytest
import torch

from vivace.config import DiTConfig, FlowConfig
from vivace.kernels import dit_reference
from vivace.models.flow import FlowModel
from vivace.models.flow_device import DeviceFlow
from vivace.models.flow_solver import Chunk, Solver

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")

CONFIG = FlowConfig(
    dit=DiTConfig(dim=1024, depth=2, heads=16, dim_head=64, ff_mult=2), vocab_size=100, num_steps=2
)
LARGEST_ERROR = {"attention": 5e-3}


@pytest.fixture(scope="module")
def kernels():
    from vivace.kernels.dit_hopper import HopperKernels

    return HopperKernels()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return FlowModel(CONFIG).eval().cuda().bfloat16()


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("streams", "frames", "pages"), [(1, 50, 1), (1, 37, 13), (3, 50, 8), (2, 21, 30)])
@torch.no_grad()
def test_each_kernel(kernels, model, streams, frames, pages):
    flow = DeviceFlow(model, kernels=dit_reference, use_graphs=False)
    weights, layer = flow.weights, flow.layout.layer
    solver = Solver(
        CONFIG, weights, flow.pool.arena, flow._resolve, flow.layout, flow.start.velocities, streams
    )
    taken = [flow.pool.take_many(pages) for _ in range(streams)]
    slabs = [slab.normal_() for _, slab in flow.pool._slabs]
    solver.send([Chunk([1] * 30, 50 * (pages - 1), frames, own, own) for own in taken])
    rows = solver._rows(1, 2 * streams)
    buffers = (solver._hidden, solver._query, solver._mixed, solver._inner)
    for buffer in buffers:
        buffer.normal_()
    block, normed = weights.blocks[0], solver._normed
    dit_reference.store_normed(
        solver._hidden[: rows.num_rows],
        block.norm.scale[rows.each_row(rows.steps)],
        normed._replace(tiles=64),
    )
    calls = {
        "qkv": (normed._replace(tiles=64), block.qkv, weights.rope, solver._query, 16, layer),
        "ff_in": (normed._replace(tiles=64), block.ff_in, solver._inner),
        "attention": (solver._query, solver._mixed, 16, layer),
        "out": (solver._mixed, block.out, solver._hidden, normed._replace(tiles=32)),
        "ff_out": (solver._inner, block.ff_out, solver._hidden, normed._replace(tiles=16)),
    }
    outputs = [*buffers, normed.scaled, normed.sums, *slabs]
    for name, arguments in calls.items():
        function = "add_projection" if name.endswith("out") else name
        before = [output.clone() for output in outputs]
        getattr(dit_reference, function)(rows, *arguments)
        expected = [output.clone() for output in outputs]
        for output, old in zip(outputs, before, strict=True):
            output.copy_(old)
        getattr(kernels, function)(rows, *arguments)
        for output, wanted in zip(outputs, expected, strict=True):
            assert relative(output, wanted) < LARGEST_ERROR.get(name, 1e-3), name


@pytest.mark.parametrize("resident", [False, True])
def test_stream(kernels, model, resident, monkeypatch):
    if not resident:
        monkeypatch.setattr(kernels, "resident", None)
    tokens = [(7 * index) % 100 for index in range(110)]
    flow = DeviceFlow(model, kernels=kernels)
    exact = FlowModel(dataclasses.replace(CONFIG)).eval().cuda()
    exact.load_state_dict(model.state_dict())
    expected = exact.generate(
        torch.tensor(tokens).cuda(), torch.zeros(0, 80).cuda(), torch.ones(192).cuda(), True
    )
    mels = []
    for cuts in ((110,), (28, 60, 110)):
        stream, parts, start = flow.open(torch.ones(192), torch.zeros(0, 80)), [], 0
        for end in cuts:
            parts.append(flow.step(stream, tokens[start:end], end == 110))
            start = end
        mels.append(torch.cat(parts, 1))
        flow.close(stream)
    assert torch.equal(*mels)
    assert relative(mels[0], expected) < 10 ** (-30 / 20)
    assert flow.pages_in_use == 0
