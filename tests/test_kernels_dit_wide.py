"""Triton kernels with wide tiles against their plain versions, as in ``test_kernels_dit``."""

import pytest
import torch

from tests.test_kernels_dit import (
    DIM,
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
from vivace.kernels.dit_reference import Added

KERNELS = pytest.importorskip("vivace.kernels.dit_wide")


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("tile", [Tile(16, 16, 16), Tile(32, 64, 16), Tile(16, 32, 48 // 3)])
def test_qkv(step, tile):
    """Tiles of one head, of part of it and of several."""
    heads = 4 if tile.columns == 64 else 2
    case = Case(step=step, heads=heads)
    rope = random(2, 18, WIDTH // 2)
    query = random(PADDED, heads * WIDTH)
    arguments = (case.normed(3), folded(3 * heads * WIDTH), rope, query, heads, 2 * heads * 5 * WIDTH)
    both("qkv", case, arguments, [query], kernels=KERNELS, tile=tile)


@pytest.mark.parametrize("pages", [1, 2])
def test_attention(pages):
    case = Case(groups=4)
    mixed = torch.zeros(PADDED, INNER, device=case.arena.device)
    query = random(PADDED, INNER)
    tile = Tile(16, 16, pages)
    both("attention", case, (query, mixed, HEADS, LAYER), [mixed], kernels=KERNELS, tile=tile)


@pytest.mark.parametrize("step", [0, 2])
def test_add_projection(step):
    case = Case(step=step)
    out = case.normed(3, filled=False)
    added = Added(random(DIM, 32), random(DIM), random(STEPS, DIM), random(STEPS, DIM, seed=5))
    arguments = (random(PADDED, 32), added, case.hidden, out)
    outputs = [case.hidden, out.scaled, *out.view()]
    both("add_projection", case, arguments, outputs, kernels=KERNELS, tile=Tile(16, 16, 16))


def test_qkv_behind_a_norm_that_is_ended():
    """One tile of sums is what the library's products leave."""
    case = Case()
    query = random(PADDED, INNER)
    arguments = (case.normed(1), folded(3 * INNER), random(2, 18, WIDTH // 2), query, HEADS, LAYER)
    both("qkv", case, arguments, [query], kernels=KERNELS, tile=Tile(16, 16, 16))
