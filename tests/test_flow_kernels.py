"""Which kernels the flow takes, without a GPU: what the device says of itself is made up."""

import dataclasses
import logging

import pytest
import torch

from tests.virtual_time import Costs
from vivace.kernels import dit_reference
from vivace.models import flow_kernels
from vivace.models.flow_kernels import choose_kernels, choose_packed, launch_costs
from vivace.random_checkpoint import full_config, tiny_config

pytest.importorskip("tests.interpreter")  # before anything imports Triton
dit = pytest.importorskip("vivace.kernels.dit")
dit_hopper = pytest.importorskip("vivace.kernels.dit_hopper")
dit_packed = pytest.importorskip("vivace.kernels.dit_packed")

CONFIG = full_config().flow
NARROW = dataclasses.replace(CONFIG, dit=dataclasses.replace(CONFIG.dit, heads=8))
HALF, GPU = torch.bfloat16, torch.device("cuda", 0)


class FakeHopper:
    """Is asked for and takes its device."""

    def __init__(self, device):
        self.device = device


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of some compute capability, on which the CUDA module compiles or not."""

    def make(capability, compiles=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
        monkeypatch.setattr(flow_kernels, "kernels_run_on", lambda *_: True)

        def hopper(device):
            if not compiles:
                raise flow_kernels.KernelUnavailableError("no compiler")
            return FakeHopper(device)

        monkeypatch.setattr(dit_hopper, "HopperKernels", hopper)

    return make


def test_hopper_takes_its_own_attention(gpu, caplog):
    gpu((9, 0))
    chosen = choose_kernels(CONFIG, HALF, GPU)
    assert isinstance(chosen, FakeHopper)
    assert chosen.device == 0
    assert choose_packed(chosen, CONFIG, HALF, GPU, 1) is chosen
    assert isinstance(choose_packed(chosen, CONFIG, HALF, GPU, 5), dit_packed.PackedKernels)
    assert not caplog.records


@pytest.mark.parametrize(
    ("capability", "config", "dtype"),
    [
        ((8, 0), CONFIG, HALF),
        ((10, 0), CONFIG, HALF),
        ((9, 0), NARROW, HALF),
        ((9, 0), CONFIG, torch.float32),
    ],
)
def test_others_take_triton(gpu, capability, config, dtype, caplog):
    gpu(capability)
    assert choose_kernels(config, dtype, GPU) is dit
    assert not caplog.records


def test_tiles_of_float32(gpu):
    for capability, tile in (((8, 0), dit.WIDE_INPUT_TILE), ((9, 0), dit.TILES["embed_input"])):
        gpu(capability)
        options = dit.default_options(torch.float32, GPU)
        assert options["embed_input"]["tile"] == tile._replace(stages=2)
        assert options["add_ff"]["tile"] == dit.TILES["add_ff"]._replace(stages=2)
    assert dit.TILES["embed_input"] is dit.INPUT_TILE


def test_a_narrow_model_takes_the_plain_way_with_one_warning(gpu, caplog):
    gpu((9, 0))
    with caplog.at_level(logging.WARNING):
        assert choose_kernels(tiny_config().flow, HALF, GPU) is dit_reference
    assert len(caplog.records) == 1


def test_without_a_compiler_one_warning_says_so(gpu, caplog):
    gpu((9, 0), compiles=False)
    with caplog.at_level(logging.WARNING):
        assert choose_kernels(CONFIG, HALF, GPU) is dit
    (record,) = caplog.records
    assert "no compiler" in record.message
    assert launch_costs(dit, CONFIG, HALF, GPU) == dit_packed.LAUNCH_MS


def test_no_gpu_takes_the_plain_way():
    assert choose_kernels(CONFIG, torch.float32, torch.device("cpu")) is dit_reference
    assert launch_costs(dit_reference, CONFIG, torch.float32, torch.device("cpu")) is None


def test_the_scheduler_is_tried_with_the_times_of_launches_that_are_known():
    assert Costs().flow == dit_packed.LAUNCH_MS


def test_each_measured_size_has_its_tiles():
    assert {1, *dit_packed.CHOICES} <= set(dit_packed.LAUNCH_MS)
    assert max(dit_packed.CHOICES) == max(dit_packed.LAUNCH_MS)
    costs = [cost / size for size, cost in sorted(dit_packed.LAUNCH_MS.items())]
    assert min(costs) < costs[0] / 4  # what launches of many are for


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_tiles_are_as_measured_where_a_block_has_room(gpu, capability):
    gpu(capability)
    options = dit.default_options(HALF, GPU)
    assert {name: own["tile"] for name, own in options.items()} == dit.TILES


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)])
def test_tiles_have_fewer_stages_where_a_block_has_99_kb(gpu, capability):
    gpu(capability)
    options = dit.default_options(HALF, GPU)
    tile = options["add_ff"]["tile"]
    assert tile == dit.TILES["add_ff"]._replace(stages=5)
    assert (tile.stages - 1) * (tile.rows + tile.columns) * tile.depth * HALF.itemsize <= 99 * 1024
