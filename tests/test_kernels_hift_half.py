"""The vocoder with operands in float16: kernels against plain versions, and how far it is from float32.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.test_hift_stream import make_model, random_mel
from tests.test_kernels_hift import DEVICE, FRAMES, SMALL, Bench, make_vocoder
from vivace.kernels import hift_reference
from vivace.kernels.hift_plan import Conv
from vivace.models.hift_device import DeviceVocoder
from vivace.models.hift_layout import LayoutBuilder
from vivace.models.source import CounterNoise

if TYPE_CHECKING:
    from vivace.datatypes import Samples

pytest.importorskip("tests.interpreter")  # before anything imports Triton


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def kernels() -> Any:
    from vivace.kernels import hift

    return hift


class HalfBench(Bench):
    """Random float16 everywhere; pairs of them are finite float32 too."""

    def __init__(self) -> None:
        super().__init__("small", "half")
        f0 = slice(self.layout.source.f0, self.layout.source.f0 + FRAMES)
        kept = self.arena[:, f0].clone()
        self.arena = torch.randn(*self.arena.shape, 2, device=DEVICE).half().flatten(1).view(torch.float32)
        self.arena[:, f0] = kept

    def check(self, plain: Callable[[Tensor, Tensor], None], fast: Callable[[Tensor, Tensor], None]) -> None:
        """Both write the same places, with the same values as one type or the other."""
        expected, actual = self.changed_by(plain)[0], self.changed_by(fast)[0]
        written = expected.view(torch.int32) != self.arena.view(torch.int32)
        assert written.any()
        assert torch.equal(written, actual.view(torch.int32) != self.arena.view(torch.int32))
        as_single = torch.isclose(actual, expected, atol=1e-4, rtol=1e-4)
        one, other = (t.view(torch.float16).float().unflatten(-1, (-1, 2)) for t in (actual, expected))
        as_halves = torch.isclose(one, other, atol=1e-4, rtol=2.0**-9).all(-1)
        assert (as_single | as_halves).all()


def test_launches_write_what_the_plain_ones_do(kernels: Any) -> None:
    bench = HalfBench()
    layout, params = bench.layout, bench.params
    assert sum(op.is_half for op in layout.convs) == len(layout.convs) - len(layout.f0)

    def launches(module: Any) -> list[Callable[[Tensor, Tensor], None]]:
        work = [lambda arena, _, op=op: module.conv(op, arena, params, FRAMES, "half") for op in layout.convs]
        work.append(lambda arena, _: module.spectrum(layout.spectrum, arena, params, FRAMES, "half"))
        for stage in layout.stages:
            work += [
                lambda arena, _, op=stage.join: module.join(op, arena, params, FRAMES, "half"),
                lambda arena, _, op=stage.mean: module.mean(op, arena, params, FRAMES, "half"),
            ]
        return work

    for plain, fast in zip(launches(hift_reference), launches(kernels), strict=True):
        bench.check(plain, fast)


def test_channels_as_rows_of_the_product(kernels: Any) -> None:
    bench = HalfBench()
    op: Conv = bench.layout.stages[1].blocks[0]
    tile = kernels.Tile(32, 16, 16, swapped=True)
    bench.check(
        lambda arena, _: hift_reference.conv(op, arena, bench.params, FRAMES, "half"),
        lambda arena, _: kernels.conv(op, arena, bench.params, FRAMES, "half", tile=tile),
    )


@pytest.mark.parametrize("is_plain", [True, False])
def test_values_beyond_float16_become_its_largest_and_what_is_no_number_stays(
    is_plain: bool, kernels: Any
) -> None:
    bench = HalfBench()
    op = bench.layout.stages[0].mean
    for place in op.inputs:
        bench.arena[0, place : place + 4] = torch.tensor([1e6, -1e8, torch.nan, torch.inf])
    module = hift_reference if is_plain else kernels
    module.mean(op, bench.arena, bench.params, FRAMES, "half")
    result = bench.arena[0].view(torch.float16)[op.output : op.output + 4].float().cpu()
    expected = torch.tensor([65504.0, -65504.0, torch.nan, 65504.0])
    torch.testing.assert_close(result, expected, equal_nan=True)


def test_weights_lose_no_more_than_with_tf32() -> None:
    """Channels of very small and very large weights too."""
    model = make_model(SMALL)
    weight = cast(Tensor, model.ups[0].weight)
    weight *= 10.0 ** torch.linspace(-9, 5, len(weight))[:, None, None]
    plain = LayoutBuilder(model, FRAMES).build().stages[0].up
    layout = LayoutBuilder(model, FRAMES, half=True).build()
    layout.halve_weights()
    op = layout.stages[0].up
    assert op.scale is not None
    restored = op.weight.view(op.channels_out, -1).float() * op.scale[0][:, None]
    expected = plain.weight.view(op.channels_out, -1)
    floor = expected.abs().amax(1, keepdim=True) * 2.0**-24
    assert ((restored - expected).abs() <= expected.abs() * 2.0**-11 + floor).all()


def in_pieces(vocoder: DeviceVocoder, mel: Tensor, cuts: tuple[int, ...]) -> Samples:
    stream = vocoder.open(6)
    borders = (0, *cuts, mel.shape[1])
    parts = [vocoder.step(stream, mel[:, a:b], b == mel.shape[1]) for a, b in pairwise(borders)]
    vocoder.close(stream)
    return np.concatenate(parts)


# Rows of a tile behind the piece's end are computed, from whatever lies there, and not written.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("use_kernels", [False, True])
def test_streams_are_as_near_to_float32_as_with_tf32(use_kernels: bool) -> None:
    """Whatever the pieces are. Errors relative to the loudest sample."""
    mel = random_mel(9, seed=2).to(DEVICE)
    with torch.inference_mode():
        exact = make_model(SMALL).to(DEVICE)(mel[None], noise=CounterNoise(6))[0].cpu().numpy()
    is_interpreted = use_kernels and DEVICE == "cpu"  # which takes its time
    all_cuts = ((1, 6),) if is_interpreted else ((4,), (1, 6))
    errors = []
    for precision in ("half", "tf32"):
        graphs = None if use_kernels else False  # the plain versions read the rows back: not to be captured
        vocoder = make_vocoder("small", precision, use_kernels=use_kernels, use_graphs=graphs)
        parts = [in_pieces(vocoder, mel, cuts) for cuts in all_cuts]
        errors.append(max(np.abs(part - exact).max() for part in parts) / np.abs(exact).max())
    half, tf32 = errors
    assert 0 < half < 2 * tf32
    assert half < 5e-3
