"""Matrix products in CUDA C++ against their plain versions, at odd numbers of streams; those need a Hopper GPU.

Results are rounded to bfloat16, 8 bits: some 2e-3 in all.
"""

import ctypes

import pytest
import torch

from vivace.kernels import dit_reference
from vivace.kernels.dit_reference import Added, Normed, Rows, fold

products = pytest.importorskip("vivace.kernels.dit_products")
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")
ALL = sorted({shape for shapes in products.SHAPES.values() for shape in shapes})
STEPS, PADDED, POSITIONS, PAGES = 2, 640, 160, 3
LAYER = 2 * products.HEADS * products.CHUNK * 64
MOST_SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize("shape", ALL)
def test_shapes_fit_the_chip(shape):
    columns, rows = shape
    shape = products.Shape(columns, rows)
    norms_and_barriers = 8 * rows + 2 * 8 * 8
    assert shape.shared_bytes + norms_and_barriers <= MOST_SHARED_BYTES
    assert sum(shape.halves) == rows
    assert all(half % 8 == 0 for half in shape.halves)  # whole groups of swizzled rows
    staged = rows * (columns + 4) * 4  # what the end of a product puts where its operands were
    assert staged + 1024 <= shape.shared_bytes
    assert 0 <= rows - shape.used < 8


def test_arguments_are_laid_out_as_in_cuda():
    """Tensor maps lie at multiples of 64 bytes, and so does the end."""
    assert ctypes.sizeof(products._Arguments) % 64 == 0
    assert products._Arguments.sums.offset == 3 * 128
    assert products._Arguments.end.offset == 3 * 128 + 14 * 8 + 2 * 8 + 6 * 4


@pytest.mark.parametrize("width", [104, 200])
def test_multiplications_name_every_sum_once(width):
    text = products.multiplications((width,))
    for index in range(width // 2):
        assert text.count(f'"+f"(d[{index}])') == 1
    assert f"m64n{width}k16" in text
    assert f"%{width // 2}, %{width // 2 + 1}, 1, 1, 1, 0, 0;" in text


def random(*shape, scale=1.0):
    return torch.randn(shape, device="cuda") * scale


class Case:
    """Three streams, two branches each, at different frames; the last chunk of some is not whole."""

    def __init__(self, streams):
        groups, at = 2 * streams, torch.arange(2 * streams)
        self.arena = random(groups * PAGES * LAYER).bfloat16()
        table = (torch.randperm(groups * PAGES) * LAYER).view(groups, PAGES)
        starts = (at % PAGES * products.CHUNK).int().cuda()
        counts = torch.where(at % 2 == 1, 37, products.CHUNK).int().cuda()
        here = table[at, at % PAGES].cuda()
        self.rows = Rows(
            products.CHUNK, 30, starts, counts, torch.ones_like(starts), here, here, table.cuda(), 0, LAYER,
            self.arena, lambda offset: self.arena[offset:],
        )  # fmt: skip
        self.hidden = random(PADDED, products.DIM)

    def normed(self, tiles):
        normed = Normed(random(PADDED, products.DIM).bfloat16(), random(2 * PADDED * products.DIM), tiles)
        steps = self.rows.each_row(self.rows.steps).long()
        hidden = random(self.rows.num_rows, products.DIM) + 0.5
        dit_reference.store_normed(hidden, random(STEPS, products.DIM)[steps], normed)
        return normed


def compare(run, plain, outputs):
    before = [output.clone() for output in outputs]
    run()
    got = [output.clone() for output in outputs]
    for output, old in zip(outputs, before, strict=True):
        output.copy_(old)
    plain()
    for output, old, own in zip(outputs, before, got, strict=True):
        change = (output.float() - old.float()).norm()
        assert change > 0
        assert (own.float() - output.float()).norm() < 1e-2 * change


@needs_hopper
@pytest.mark.parametrize("streams", [1, 3, 5])
@pytest.mark.parametrize("shape", products.SHAPES["qkv"])
def test_qkv(shape, streams):
    case = Case(streams)
    query = torch.zeros(PADDED, products.DIM, device="cuda", dtype=torch.bfloat16)
    dim = products.DIM
    projection = fold(
        random(3 * dim, dim, scale=dim**-0.5).bfloat16(),
        random(3 * dim),
        random(STEPS, dim),
        random(STEPS, dim),
    )
    x, rope = case.normed(8), random(2, POSITIONS, 32)
    run = products.products(0)
    compare(
        lambda: run.qkv(case.rows, x, projection, rope, query, 0, products.Shape(*shape)),
        lambda: dit_reference.qkv(case.rows, x, projection, rope, query, products.HEADS, 0),
        [query, case.arena],
    )


@needs_hopper
@pytest.mark.parametrize("streams", [1, 3, 5])
@pytest.mark.parametrize("shape", products.SHAPES["ff_in"])
def test_ff_in(shape, streams):
    case, dim, inner = Case(streams), products.DIM, products.INNER
    out = torch.zeros(PADDED, inner, device="cuda", dtype=torch.bfloat16)
    projection = fold(
        random(inner, dim, scale=dim**-0.5).bfloat16(), random(inner), random(STEPS, dim), random(STEPS, dim)
    )
    x = case.normed(16)
    compare(
        lambda: products.products(0).ff_in(case.rows, x, projection, out, products.Shape(*shape)),
        lambda: dit_reference.ff_in(case.rows, x, projection, out),
        [out],
    )


@needs_hopper
@pytest.mark.parametrize("depth", [1024, 2048])
@pytest.mark.parametrize("streams", [1, 3, 5])
@pytest.mark.parametrize("shape", products.SHAPES["add"])
def test_add_projection(shape, streams, depth):
    case, dim = Case(streams), products.DIM
    out = case.normed(dim // shape[0])
    a = random(PADDED, depth).bfloat16()
    added = Added(
        random(dim, depth, scale=depth**-0.5).bfloat16(), random(dim), random(STEPS, dim), random(STEPS, dim)
    )
    compare(
        lambda: products.products(0).add_projection(
            case.rows, a, added, case.hidden, out, products.Shape(*shape)
        ),
        lambda: dit_reference.add_projection(case.rows, a, added, case.hidden, out),
        [case.hidden, out.scaled, *out.view()],
    )
