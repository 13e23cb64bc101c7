"""Launches of many streams with the kernels and tiles that a Hopper GPU takes, against the plain flow in float32.

bfloat16 keeps 8 bits, and so do the library's products, once more than the other kernels do. With random weights these
leave 58 dB of signal over noise at full depth; 40 dB are asked for.
"""

import pytest
import torch

from vivace.config import DiTConfig, FlowConfig
from vivace.models.flow import FlowModel
from vivace.models.flow_device import DeviceFlow

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")

CONFIG = FlowConfig(
    dit=DiTConfig(dim=1024, depth=2, heads=16, dim_head=64, ff_mult=2), vocab_size=100, num_steps=2
)
SIZES = (2, 4, 8, 12, 16, 24, 32)
LEAST_DB = 40.0


def tokens_of(index):
    """Between one chunk and two and a half; most end in a chunk that is not whole."""
    return [(7 * at * at + 3 * at + index) % 100 for at in range(25 + index * 11 % 38)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return FlowModel(CONFIG).eval().cuda().bfloat16()


@pytest.fixture(scope="module")
def expected(model):
    """Mel of each stream, in float32."""
    exact = FlowModel(CONFIG).eval().cuda()
    exact.load_state_dict(model.state_dict())
    voice = torch.zeros(0, 80).cuda(), torch.ones(192).cuda()
    with torch.no_grad():
        return [
            exact.generate(torch.tensor(tokens_of(index)).cuda(), *voice, True).squeeze(0)
            for index in range(max(SIZES))
        ]


def run(flow, count):
    streams = [flow.open(torch.ones(192), torch.zeros(0, 80)) for _ in range(count)]
    handles = flow.launch_batch([(stream, tokens_of(index), True) for index, stream in enumerate(streams)])
    mels = [handle.check() for handle in handles]
    for stream in streams:
        flow.close(stream)
    return mels


@pytest.mark.parametrize("size", SIZES)
def test_launches_of_each_size(model, expected, size):
    """The second time what all streams share is known; the third time a row is padding."""
    flow = DeviceFlow(model, max_streams=size, costs={size: 1.0})
    for count in (size, size, size - 1):
        for mel, wanted in zip(run(flow, count), expected, strict=False):
            noise = (mel.double() - wanted.double()).square().sum()
            assert 10 * torch.log10(wanted.double().square().sum() / noise) > LEAST_DB
    assert flow.pages_in_use == 0
    assert flow.launches_halved == 0


@pytest.mark.parametrize("size", SIZES[:5])
def test_chunks_of_one_stream_in_a_launch(model, size):
    """Whole ones, and a last one that is cut, behind none and behind one."""
    flow = DeviceFlow(model, costs={1: 1.0, size: 1.0}, most_in_wave=16)
    flow.warm_up(20 * 50)
    exact = FlowModel(CONFIG).eval().cuda()
    exact.load_state_dict(model.state_dict())
    launches = []
    run_launch = flow._run
    flow._run = lambda works: launches.append(len(works)) or run_launch(works)
    for count, first in ((25 * size, 0), (25 * size - 7, 0), (25 * size + 20, 28)):
        tokens = [(5 * at * at + at) % 100 for at in range(count)]
        stream = flow.open(torch.ones(192), torch.zeros(0, 80))
        parts = [flow.step(stream, tokens[:first], False)] if first else []
        launches.clear()
        parts.append(flow.step(stream, tokens[first:], True))
        assert launches == [size]
        with torch.no_grad():
            voice = torch.zeros(0, 80).cuda(), torch.ones(192).cuda()
            wanted = exact.generate(torch.tensor(tokens).cuda(), *voice, True).squeeze(0).double()
        noise = (torch.cat(parts, 1).double() - wanted).square().sum()
        assert 10 * torch.log10(wanted.square().sum() / noise) > LEAST_DB
        flow.close(stream)
    assert flow.pages_in_use == 0


def test_sizes_are_those_that_are_chosen():
    from vivace.kernels.dit_packed import CHOICES

    assert set(SIZES) == set(CHOICES)
