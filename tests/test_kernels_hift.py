"""Triton kernels of the vocoder against their plain versions: odd widths, rows at different places of their streams.

Without a GPU they run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.test_hift_stream import make_model, random_mel
from vivace.config import VocoderConfig
from vivace.kernels import hift_reference
from vivace.kernels.hift_plan import Conv, Param
from vivace.layers.precision import full_float32
from vivace.models.hift_device import DeviceVocoder
from vivace.models.source import CounterNoise
from vivace.models.vocoder_slots import DeviceStream

pytest.importorskip("tests.interpreter")  # before anything imports Triton
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FRAMES = 6

SMALL = VocoderConfig(
    base_channels=24,
    f0_cond_channels=9,
    upsample_rates=(2, 3),
    upsample_kernel_sizes=(5, 7),
    resblock_kernel_sizes=(3, 5),
    resblock_dilation_sizes=((1, 3), (2,)),
    source_resblock_kernel_sizes=(3, 5),
    source_resblock_dilation_sizes=((1,), (1, 2)),
    conv_pre_lookahead_frames=5,
    source_phase="sample",
)
CONFIGS = {
    "small": SMALL,
    "wide": VocoderConfig(
        base_channels=68,
        f0_cond_channels=33,
        upsample_rates=(3, 2),
        upsample_kernel_sizes=(7, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 5),),
        source_resblock_kernel_sizes=(7, 3),
        source_resblock_dilation_sizes=((1,), (3,)),
    ),
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def kernels() -> Any:
    from vivace.kernels import hift

    return hift


def make_vocoder(name: str, precision: str = "ieee", **options: Any) -> DeviceVocoder:
    model = make_model(CONFIGS[name]).to(DEVICE)
    return DeviceVocoder(model, slots=3, buckets=(FRAMES,), max_rows=3, precision=precision, **options)


class Bench:
    """A vocoder with random contents: a row that begins, one that goes on, one that ends; a fourth of no frames."""

    def __init__(self, name: str, precision: str = "ieee") -> None:
        torch.manual_seed(5)
        self.vocoder = make_vocoder(name, precision, use_kernels=False, use_graphs=False)
        self.layout = self.vocoder.runner.places[0].layout
        streams = ((0, 6, False), (11, 3, False), (20, 1, True), (0, 2, False))
        rows = [
            self.vocoder.describe(DeviceStream(slot % 3, 77 + slot, before), new, is_last)[0]
            for slot, (before, new, is_last) in enumerate(streams)
        ]
        rows[3][Param.SLOT] = 3  # the spare slot
        self.params = torch.tensor(rows, device=DEVICE)
        self.arena = torch.randn(4, self.layout.size, device=DEVICE)
        self.states = self.vocoder.runner.states
        self.states.pool.normal_()
        self.states.phases.uniform_()
        self.out = torch.randn(4, self.vocoder.runner.width(FRAMES), device=DEVICE)
        self.out[:, 0] = 0.0
        f0 = self.layout.source.f0
        self.arena[:, f0 : f0 + FRAMES] = torch.rand(4, FRAMES, device=DEVICE) * 40

    def changed_by(self, launch: Callable[[Tensor, Tensor], None]) -> list[Tensor]:
        """Everything that a launch may write, afterwards; what it wrote is undone."""
        arena, out = self.arena.clone(), self.out.clone()
        pool, phases = self.states.pool.clone(), self.states.phases.clone()
        launch(arena, out)
        after = [arena, out, self.states.pool.clone(), self.states.phases.clone()]
        self.states.pool.copy_(pool)
        self.states.phases.copy_(phases)
        return after

    def check(self, plain: Callable[[Tensor, Tensor], None], fast: Callable[[Tensor, Tensor], None]) -> None:
        """Both write the same values, and nothing else."""
        expected, actual = self.changed_by(plain), self.changed_by(fast)
        before = [self.arena, self.out, self.states.pool, self.states.phases]
        assert any(not torch.equal(a, b) for a, b in zip(expected, before, strict=True))
        for one, other in zip(actual, expected, strict=True):
            # Orders of summation differ, and an exponential multiplies what they differ by.
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_convolutions(name: str, kernels: Any) -> None:
    bench = Bench(name)
    for op in bench.layout.convs:
        bench.check(
            lambda arena, _, op=op: hift_reference.conv(op, arena, bench.params, FRAMES, "ieee"),
            lambda arena, _, op=op: kernels.conv(op, arena, bench.params, FRAMES, "ieee"),
        )


def test_results_are_rounded_to_tf32(kernels: Any) -> None:
    bench = Bench("wide")
    bench.arena = hift_reference.to_tf32(bench.arena)
    bench.layout.round_weights()
    op, params = bench.layout.stages[0].blocks[0], bench.params
    expected, *_ = bench.changed_by(lambda arena, _: hift_reference.conv(op, arena, params, FRAMES, "tf32"))
    actual, *_ = bench.changed_by(lambda arena, _: kernels.conv(op, arena, params, FRAMES, "tf32"))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=2.0**-9)
    for result in (expected, actual):
        assert (result.view(torch.int32) & 0x1FFF == 0).all()
    assert not torch.equal(expected, bench.arena)


def test_tiles_smaller_and_larger_than_the_matrix(kernels: Any) -> None:
    bench = Bench("wide")
    op: Conv = bench.layout.stages[0].blocks[0]
    tiles = kernels.Tile(16, 16, 16), kernels.Tile(64, 64, 32), kernels.Tile(32, 16, 64)
    for tile in (*tiles, kernels.Tile(64, 32, 16, swapped=True)):
        bench.check(
            lambda arena, _: hift_reference.conv(op, arena, bench.params, FRAMES, "ieee"),
            lambda arena, _, tile=tile: kernels.conv(op, arena, bench.params, FRAMES, "ieee", tile=tile),
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_all_but_convolutions(name: str, kernels: Any) -> None:
    bench = Bench(name)
    layout, params, states = bench.layout, bench.params, bench.states

    def launches(module: Any) -> list[Callable[[Tensor, Tensor], None]]:
        stage = layout.stages[-1]
        return [
            lambda arena, out: module.load_states(states, arena, params),
            lambda arena, out: module.save_states(states, arena, params),
            lambda arena, out: module.readout(layout.source, arena, params, FRAMES),
            lambda arena, out: module.phases(layout.source, arena, params, states, out.view(torch.int32)),
            lambda arena, out: module.samples(layout.source, arena, params, FRAMES),
            lambda arena, out: module.spectrum(layout.spectrum, arena, params, FRAMES, "ieee"),
            lambda arena, out: module.join(layout.stages[0].join, arena, params, FRAMES, "ieee"),
            lambda arena, out: module.join(stage.join, arena, params, FRAMES, "ieee"),
            lambda arena, out: module.mean(stage.mean, arena, params, FRAMES, "ieee"),
            lambda arena, out: module.post(layout.post, arena, params, FRAMES, "ieee"),
            lambda arena, out: module.inverse(layout.post, arena, params, FRAMES, out, 4),
        ]

    for plain, fast in zip(launches(hift_reference), launches(kernels), strict=True):
        bench.check(plain, fast)


def test_a_stream_through_the_kernels_equals_the_plain_model(kernels: Any) -> None:
    vocoder = make_vocoder("small", use_kernels=True)
    mel = random_mel(7, seed=2).to(DEVICE)
    with torch.inference_mode(), full_float32(torch.device(DEVICE)):
        whole = make_model(SMALL).to(DEVICE)(mel[None], noise=CounterNoise(6))[0].cpu().numpy()
    stream = vocoder.open(6)
    parts = [vocoder.step(stream, mel[:, :6], False), vocoder.step(stream, mel[:, 6:], True)]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=3e-5, rtol=0)


def test_a_value_that_is_no_number_sets_the_flag_of_its_row(kernels: Any) -> None:
    bench = Bench("small")
    place = bench.layout.post.frames + 30
    bench.arena[1, place] = torch.nan
    kernels.inverse(bench.layout.post, bench.arena, bench.params, FRAMES, bench.out, 4)
    assert bench.out[:, 0].view(torch.int32).tolist() == [0, 1, 0, 0]
