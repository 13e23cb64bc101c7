"""The Triton kernels of CosyVoice-300M's speech LM against their plain versions, interpreted or compiled on a GPU."""

from __future__ import annotations

from tests import interpreter  # isort: skip  (before anything imports Triton)

import pytest
import torch

from vivace.kernels.reference import live_rows
from vivace.kernels.relative_launch import RelativeOps
from vivace.kernels.row_state import RowState
from vivace.models.conformer_packed import (
    ConformerLayerWeights,
    ConformerWeights,
    PlainDistanceOps,
    fused_scores,
    scores,
)

assert interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, HEAD_DIM, PAGE, PAGES = 3, 32, 16, 6
LENGTHS = (0, 1, 40, 31, 32, 33, 95)
STOPPED, RESTING = 2, 5
# Sums in another order; a bfloat16 result may round the other way.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random(*shape, seed, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)


def make_ops(splits=None):
    """The kernels and the plain versions on equal states, pages scattered."""
    state = RowState.empty(len(LENGTHS), 4, DEVICE)
    state.length.copy_(torch.tensor(LENGTHS))
    state.remaining.fill_(3)
    state.stop[STOPPED], state.remaining[RESTING] = 1, 0
    pages = torch.randperm(len(LENGTHS) * PAGES, generator=torch.Generator().manual_seed(1)) + 1
    table = pages.view(len(LENGTHS), PAGES).int().to(DEVICE)
    empty = torch.zeros(0, device=DEVICE)
    shared = {"heads": HEADS, "kv_heads": HEADS, "eps": 0.0, "state": state, "table": table}
    shared |= {"cos": empty, "sin": empty}
    kernels = RelativeOps(**shared, head_dim=HEAD_DIM, ids=(50, 51, -1, 50), pdl=False, splits=splits)
    plain = PlainDistanceOps(**shared, speech_token_size=50, draw=None)
    return kernels, plain, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 2, 8, None])
@pytest.mark.parametrize("slots", [(6,), (0, -1, 3, 2), (4, 1, 5, 6, 3, 0)])
def test_attention(dtype, splits, slots):
    kernels, plain, state = make_ops(splits)
    width = HEADS * HEAD_DIM
    qkv, bias = random(len(slots), 3 * width, seed=2, dtype=dtype), random(3 * width, seed=3, dtype=dtype)
    positions = (
        random(HEADS, HEAD_DIM, seed=4, dtype=dtype),
        random(HEADS, HEAD_DIM, seed=5, dtype=dtype),
        random(HEADS, 97, HEAD_DIM, seed=6, dtype=dtype),
    )
    chosen = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    shape = 2, len(LENGTHS) * PAGES + 1, HEADS, PAGE, HEAD_DIM
    pools = [random(*shape, seed=7, dtype=dtype) for _ in range(2)]
    got = kernels.attend_distances(qkv, bias, positions, pools[0], chosen)
    wanted = plain.attend_distances(qkv, bias, positions, pools[1], chosen)
    live = live_rows(state, chosen)
    assert live.any()
    torch.testing.assert_close(got[live], wanted[live], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(pools[0], pools[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert got.dtype is dtype
    assert bool(got[live].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 72, 1000])
@pytest.mark.parametrize("adds", [True, False])
def test_layer_norm(dtype, width, adds):
    kernels, plain, _ = make_ops()
    gain, offset = random(width, seed=1, dtype=dtype), random(width, seed=2, dtype=dtype)
    delta = random(5, width, seed=3, dtype=dtype) if adds else None
    streams = [random(5, width, seed=4, scale=3.0) + 7 for _ in range(2)]
    got = kernels.add_layer_norm(streams[0], delta, gain, offset, 1e-5)
    wanted = plain.add_layer_norm(streams[1], delta, gain, offset, 1e-5)
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(streams[0], streams[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("relu", [True, False])
def test_layer_norm_linear(dtype, rows, relu):
    kernels, plain, _ = make_ops()
    norm = random(72, seed=1, dtype=dtype), random(72, seed=2, dtype=dtype), 1e-5
    weight, bias = random(50, 72, seed=3, dtype=dtype, scale=0.1), random(50, seed=4) if relu else None
    x = random(rows, 72, seed=5, scale=3.0) + 7
    got = kernels.layer_norm_linear(x, norm, weight, bias, relu=relu, dtype=torch.float32)
    y = plain.add_layer_norm(x.clone(), None, *(part.float() for part in norm[:2]), norm[2])
    wanted = y @ weight.float().t() + (0.0 if bias is None else bias)
    wanted = wanted.relu() if relu else wanted
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("splits", [1, 8])
def test_parts_of_the_attention_join_in_the_product_behind_it(splits):
    """With its bias, as one after the other."""
    width, slots = HEADS * HEAD_DIM, torch.tensor([6, 3], dtype=torch.int32, device=DEVICE)
    qkv, bias = random(2, 3 * width, seed=2), random(3 * width, seed=3)
    positions = (
        random(HEADS, HEAD_DIM, seed=4),
        random(HEADS, HEAD_DIM, seed=5),
        random(HEADS, 97, HEAD_DIM, seed=6),
    )
    weight, added = random(40, width, seed=8, scale=0.1), random(40, seed=9)
    residuals = [random(2, 40, seed=10) for _ in range(2)]
    pools = [random(2, len(LENGTHS) * PAGES + 1, HEADS, PAGE, HEAD_DIM, seed=7) for _ in range(2)]
    kernels, _, _ = make_ops(splits)
    parts = kernels.attend_distances_parts(qkv, bias, positions, pools[0], slots)
    kernels.linear_add(*parts, weight, residuals[0], added)
    _, plain, _ = make_ops(splits)
    attended = plain.attend_distances(qkv, bias, positions, pools[1], slots)
    residuals[1] += attended @ weight.t() + added
    torch.testing.assert_close(*residuals, atol=2e-5, rtol=2e-5)


def layer_weights(seed):
    width = HEADS * HEAD_DIM

    def linear(size, width, number):
        return random(size, width, seed=seed + number, scale=width**-0.5), random(
            size, seed=seed + number + 1
        )

    qkv, qkv_bias = linear(3 * width, width, 0)
    return ConformerLayerWeights(
        before=(random(width, seed=seed + 2), random(width, seed=seed + 3), 1e-5),
        qkv=qkv,
        qkv_bias=qkv_bias,
        positions=(
            random(HEADS, HEAD_DIM, seed=seed + 4),
            random(HEADS, HEAD_DIM, seed=seed + 5),
            random(HEADS, 97, HEAD_DIM, seed=seed + 6),
        ),
        out=linear(width, width, 7),
        between=(random(width, seed=seed + 9), random(width, seed=seed + 10), 1e-12),
        up=linear(40, width, 11),
        down=linear(width, 40, 13),
    )


def test_a_step_in_few_kernels_gives_the_scores_of_one_by_one():
    """Weights, biases and sums of all layers at their places."""
    width = HEADS * HEAD_DIM
    weights = ConformerWeights(
        layers=(layer_weights(100), layer_weights(200)),
        speech=random(51, width, seed=1),
        last=(random(width, seed=2), random(width, seed=3), 1e-5),
        head=random(64, width, seed=4, scale=width**-0.5),
        head_bias=random(64, seed=5),
    )
    kernels, plain, state = make_ops(splits=2)
    state.token.copy_(torch.arange(len(LENGTHS)) + 7)
    chosen = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    pools = [random(2, 2, len(LENGTHS) * PAGES + 1, HEADS, PAGE, HEAD_DIM, seed=6) for _ in range(2)]
    got = fused_scores(kernels, weights, pools[0], chosen)
    torch.testing.assert_close(got, scores(plain, weights, pools[1], chosen), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(*pools, atol=2e-4, rtol=2e-4)
