"""Attention for Hopper GPUs against its plain version, and streams that run on it; needs such a GPU.

Attention rounds the weights of the keys and its results to bfloat16, 8 bits: some 3e-3 in all.
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


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(("streams", "frames", "pages"), [(1, 50, 1), (1, 37, 13), (3, 50, 8), (2, 21, 30)])
@torch.no_grad()
def test_attention(kernels, model, streams, frames, pages, step):
    flow = DeviceFlow(model, kernels=dit_reference, use_graphs=False)
    weights, layer = flow.weights, flow.layout.layer
    solver = Solver(
        CONFIG, weights, flow.pool.arena, flow._resolve, flow.layout, flow.start.velocities, streams
    )
    taken = [flow.pool.take_many(pages) for _ in range(streams)]
    slabs = [slab.normal_() for _, slab in flow.pool._slabs]
    solver.send([Chunk([1] * 30, 50 * (pages - 1), frames, own, own) for own in taken])
    rows = solver._rows(0, 2 * streams)
    rows = rows._replace(steps=torch.full_like(rows.steps, step), step=step)
    solver._query.normal_()
    arguments = (solver._query, solver._mixed, 16, layer)
    dit_reference.attention(rows, *arguments)
    expected, solver._mixed[:] = solver._mixed.clone(), 0
    before = [slab.clone() for slab in slabs]
    kernels.attention(rows, *arguments)
    count = rows.num_rows
    assert relative(solver._mixed[:count], expected[:count]) < 5e-3
    assert all(torch.equal(slab, old) for slab, old in zip(slabs, before, strict=True))


@pytest.mark.parametrize("chunks", [2, 3, 9])
@torch.no_grad()
def test_attention_of_several_chunks_of_a_stream(kernels, model, chunks):
    """Behind four and behind none; the last one is cut."""
    flow = DeviceFlow(model, kernels=dit_reference, use_graphs=False)
    solver = Solver(
        CONFIG, flow.weights, flow.pool.arena, flow._resolve, flow.layout, flow.start.velocities, 2 * chunks
    )
    sent = []
    for first in (4, 0):
        pages = flow.pool.take_many(first + chunks)
        for number in range(chunks):
            own = pages[: first + number + 1]
            frames = 50 if number < chunks - 1 else 21
            sent.append(Chunk([1] * 30, 50 * (first + number), frames, own, own, number))
    for _, slab in flow.pool._slabs:
        slab.normal_()
    solver.send(sent)
    rows = solver._rows(1, 4 * chunks)
    solver._query.normal_()
    dit_reference.attention(rows, solver._query, solver._mixed, 16, flow.layout.layer)
    expected, solver._mixed[:] = solver._mixed.clone(), 0
    kernels.attention(rows, solver._query, solver._mixed, 16, flow.layout.layer)
    assert relative(solver._mixed[: rows.num_rows], expected[: rows.num_rows]) < 5e-3


@torch.no_grad()
def test_stream(kernels, model):
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
