"""What is captured on a CUDA device holds nothing that a CUDA graph cannot, and lies on the device that it is for.

The kernels are launched with the arguments that they get on a GPU and compute nothing here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import tests.interpreter  # noqa: F401  (before anything that imports Triton)

import torch  # isort: skip

from tests.simulated_cuda import CaptureError, simulated_cuda
from vivace.bench.llm_steps import StaticSteps, capture_step
from vivace.config import DiTConfig
from vivace.engine.flow_runner import to_device
from vivace.engine.lm_device import LMDevice
from vivace.models.capture import capturing
from vivace.models.conformer_rows import ConformerRows
from vivace.models.device_kinds import make_device_flow, make_piece_flow
from vivace.models.flow import FlowModel
from vivace.models.hift_centred_device import CentredDeviceVocoder
from vivace.models.hift_device import DeviceVocoder
from vivace.models.kinds import make_flow, make_lm, make_vocoder
from vivace.random_checkpoint import tiny_config

if torch.cuda.is_available():
    pytest.skip("there is a real one", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NARROW = replace(tiny_config().flow, num_steps=2)
WIDE = replace(NARROW, dit=DiTConfig(dim=256, depth=1, heads=4, dim_head=64, ff_mult=2))
DEVICE = torch.device("cuda:1")  # what forgets to say where goes to the other one


def moved(module, dtype=torch.float32):
    return module.to(DEVICE, dtype).eval().requires_grad_(False)


@pytest.fixture
def cuda():
    with simulated_cuda(computes=False) as simulator, torch.cuda.device(DEVICE), torch.no_grad():
        yield simulator


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("generation", [1, 2, 3])
def test_speech_lms(cuda, generation, dtype):
    lm = moved(make_lm(tiny_config(generation).lm), dtype)
    made = LMDevice(lm, max_rows=2, cache_tokens=256, max_positions=128)
    made.paged.warm_up(2, steps=(2,), prompts=(32,))
    assert cuda.launches
    assert all(made.paged._graphs.values())


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_first_flow(cuda, dtype):
    flow = moved(make_flow(tiny_config(1).flow), dtype)
    make_piece_flow(flow, 2).solver(2, 64)
    assert cuda.launches


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_second_flow(cuda, dtype):
    made = make_device_flow(moved(make_flow(tiny_config(2).flow), dtype), 1 << 24, 2)
    made.solver(2).capture(2)
    assert cuda.launches


@pytest.mark.parametrize("dtype", DTYPES)
def test_third_flow(cuda, dtype):
    """Half precision has no kernels: the plain ones read on the host, so that there must not be graphs."""
    made = make_device_flow(moved(FlowModel(WIDE), dtype), 1 << 26, 1)
    assert made._use_graphs == (dtype is not torch.float16)
    if made._use_graphs:
        for solver in (made.solver(1), made.solver(2)):
            solver.warm_up()
        graphs = [graph for solver in made._solvers.values() for graph in solver._graphs.values()]
        assert len(graphs) == 4
        assert len({graph.pool() for graph in graphs}) == 1
        assert cuda.launches


def test_third_flow_without_kernels():
    """On the device chunk by chunk as on the host."""
    torch.manual_seed(0)
    flow = FlowModel(NARROW).eval().requires_grad_(False)
    tokens, mel, speaker = list(range(60)), torch.zeros(0, 80), torch.randn(192)
    wanted = flow.generate(torch.tensor(tokens), mel, speaker, streaming=True)
    with simulated_cuda(), torch.cuda.device(DEVICE), torch.no_grad():
        made = make_device_flow(moved(flow), 1 << 24, 1)
        assert not made._use_graphs
        stream = made.open(speaker, mel)
        got = made.launch_batch([(stream, tokens, True)])[0].check().cpu()
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_whole_sequences_of_the_third_flow(seed):
    """Side by side on the device, nothing waited for before the end, as alone on the host."""
    torch.manual_seed(0)
    flow = FlowModel(NARROW).eval().requires_grad_(False)
    mel, speaker = torch.randn(6, 80), torch.randn(192)
    texts = [list(range(count)) for count in (20, 26, 24)]
    wanted = [flow.generate(torch.tensor(text), mel, speaker, streaming=False) for text in texts]
    with simulated_cuda(seed=seed), torch.cuda.device(DEVICE), torch.no_grad():
        made = make_device_flow(moved(flow), 1 << 24, 4)
        torch.cuda.synchronize()
        items = [(text, to_device(mel.numpy(), DEVICE), to_device(speaker.numpy(), DEVICE)) for text in texts]
        handles = made.generate_batch(items)
        got = [handle.check().cpu() for handle in handles]
    for own, each in zip(got, wanted, strict=True):
        torch.testing.assert_close(own, each, atol=5e-5, rtol=0)


@pytest.mark.parametrize("generation", [1, 2, 3])
def test_vocoders(cuda, generation):
    vocoder = moved(make_vocoder(tiny_config(generation).vocoder))
    kind = DeviceVocoder if generation == 3 else CentredDeviceVocoder
    kind(vocoder, slots=2, max_rows=2, buckets=(8,)).warm_up([2])


def test_one_request_without_the_kernels(cuda):
    """CosyVoice-300M on an old GPU."""
    config = tiny_config(1)
    lm, flow = moved(make_lm(config.lm)), moved(make_flow(replace(config.flow, num_steps=1)))
    rows = ConformerRows(lm, 1, 16, by_token=False)
    rows.add(0, torch.zeros(1, 5, config.lm.decoder.input_size, device=DEVICE))
    rows.step()
    mel = torch.zeros(1, 80, 70, device=DEVICE)
    flow.solve(mel, mel, mel, torch.zeros(1, 80, device=DEVICE), streaming=False)
    assert flow._graphs is not None


def test_step_of_the_benchmark(cuda):
    capture_step(StaticSteps(moved(make_lm(tiny_config().lm)), 2, 5, 8))


def test_graphs_of_a_device_need_a_stream_of_it():
    """What ``torch.cuda.graph`` does when it is given none."""
    with simulated_cuda(), torch.cuda.device(DEVICE):
        x = torch.zeros(3, device=DEVICE)
        with pytest.raises(CaptureError, match="another stream"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x += 1
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, DEVICE):
            x += 1
        graph.replay()
        assert x.tolist() == [1.0] * 3
