"""The library's products with the kernels behind them against the plain versions, as in ``test_kernels_dit``."""

import pytest
import torch

from tests.test_kernels_dit import (
    HEADS,
    INNER,
    LAYER,
    PADDED,
    STEPS,
    WIDTH,
    Case,
    Tile,
    both,
    folded,
    random,
)
from vivace.kernels import dit_reference
from vivace.kernels.dit_reference import Added

KERNELS = pytest.importorskip("vivace.kernels.dit_library").Library()


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("tiles", [1, 3])
def test_qkv(step, tiles):
    case = Case(step=step)
    rope = random(2, 18, WIDTH // 2)  # fewer positions than rows reach
    query = random(PADDED, INNER)
    arguments = (case.normed(tiles), folded(3 * INNER), rope, query, HEADS, LAYER)
    both("qkv", case, arguments, [query], kernels=KERNELS, tile=Tile(8, WIDTH, 1))


@pytest.mark.parametrize("columns", [32, 33])
def test_ff_in(columns):
    """The library's own GELU; rows of the projection need not be a multiple of anything."""
    dim, case = 64, Case(dim=64)
    added = Added(random(dim, 32), random(dim), random(STEPS, dim), random(STEPS, dim))
    x, out = case.normed(1, filled=False), random(PADDED, columns)
    KERNELS.add_projection(case.rows, random(PADDED, 32), added, case.hidden, x, tile=Tile(4, dim, 1))
    both("ff_in", case, (x, folded(columns, dim), out), [out], kernels=KERNELS, tile=Tile(4, 16, 1))


@pytest.mark.parametrize("step", [0, 2])
def test_add_projection_ends_the_norm(step):
    """What it leaves is normed already; behind the next projection nothing of that is seen."""
    dim = 64
    case, plain = Case(step=step, dim=dim), Case(step=step, dim=dim)
    steps, valid = case.rows.each_row(case.rows.steps), slice(case.rows.num_rows)
    next_norm = folded(32, dim)
    scale = random(STEPS, dim, seed=5)
    next_norm = dit_reference.fold(next_norm.weight, random(32), scale, random(STEPS, dim, seed=6))
    added = Added(random(dim, 32), random(dim), random(STEPS, dim), scale)
    a = random(PADDED, 32)
    out, expected = case.normed(1, filled=False), plain.normed(4, filled=False)
    KERNELS.add_projection(case.rows, a, added, case.hidden, out, tile=Tile(4, dim, 1))
    dit_reference.add_projection(plain.rows, a, added, plain.hidden, expected)
    torch.testing.assert_close(case.hidden, plain.hidden, atol=2e-4, rtol=1e-4)
    y = dit_reference.project_normed(out, next_norm, steps, valid)
    torch.testing.assert_close(
        y, dit_reference.project_normed(expected, next_norm, steps, valid), atol=1e-3, rtol=1e-3
    )
    mean = (out.scaled[valid] / scale[steps]).mean(1)
    assert mean.abs().max() < 1e-4
