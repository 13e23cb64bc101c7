"""The Triton kernels of CosyVoice 2's U-Net against their plain versions, interpreted or compiled on a GPU."""

from __future__ import annotations

from tests import interpreter  # isort: skip  (before anything imports Triton)

import pytest
import torch

from vivace.kernels.chunk_launch import KernelChunkOps
from vivace.kernels.chunk_reference import PlainChunkOps

assert interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHUNK, HEADS, SIZE, BLOCKS, STEPS, PAGES, TABLE = 10, 3, 16, 2, 3, 12, 7
# Sums in another order; a bfloat16 result may round the other way.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# First frame, valid frames, own page, page before, chunks of the stream before it in the launch, then all pages.
STREAMS = [
    (0, 10, 5, 0, 0, (5,)),
    (30, 7, 9, 3, 0, (11, 2, 3, 9)),
    (10, 10, 1, 8, 0, (8, 1)),
    (20, 10, 6, 1, 1, (8, 1, 6)),
    (30, 1, 7, 6, 2, (8, 1, 6, 7)),
]


def random(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def make_ops(step):
    packet = torch.zeros(len(STREAMS), TABLE + 4, dtype=torch.int64)
    for row, (*numbers, pages) in zip(packet, STREAMS, strict=True):
        row[:5], row[TABLE : TABLE + len(pages)] = torch.tensor(numbers), torch.tensor(pages)
    arguments = packet.to(DEVICE), torch.tensor([step], device=DEVICE), TABLE
    return KernelChunkOps(*arguments), PlainChunkOps(*arguments)


def close(got, wanted, dtype):
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("step", "block"), [(0, 0), (2, 1)])
def test_attention(dtype, step, block):
    if DEVICE.type == "cpu" and dtype is torch.bfloat16:
        pytest.skip("the interpreter does not multiply bfloat16")
    pools = [random(PAGES, STEPS, BLOCKS, 2, 2, HEADS, CHUNK, SIZE, seed=1, dtype=dtype) for _ in range(2)]
    qkv = random(2 * len(STREAMS), CHUNK, 3 * HEADS * SIZE, seed=2, dtype=dtype)
    got, wanted = (
        ops.attend_pages(qkv, pool, block) for ops, pool in zip(make_ops(step), pools, strict=True)
    )
    close(got, wanted, dtype)
    assert torch.equal(pools[0], pools[1])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("step", "first", "channels"), [(1, 0, 8), (2, 8, 24)])
def test_context(dtype, step, first, channels):
    kept = [random(PAGES, STEPS, 2, 2, 32, seed=3, dtype=dtype) for _ in range(2)]
    x = random(2 * len(STREAMS), CHUNK, channels, seed=4, dtype=dtype)
    got, wanted = (
        ops.join_context(x, contexts, first) for ops, contexts in zip(make_ops(step), kept, strict=True)
    )
    assert torch.equal(got, wanted)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(got[:, 2:], x)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("extras", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("channels", [32, 40])
def test_layer_norm_mish(dtype, extras, channels):
    y = random(2 * len(STREAMS), CHUNK, channels, seed=5, dtype=dtype) * 3 + 1
    bias, gain, offset = (random(channels, seed=seed, dtype=dtype) for seed in (6, 7, 8))
    shift = random(STEPS, channels, seed=9, dtype=dtype) if extras[0] else None
    residual = random(*y.shape, seed=10, dtype=dtype) if extras[1] else None
    got, wanted = (ops.layer_norm_mish(y, bias, (gain, offset, 1e-5), shift, residual) for ops in make_ops(2))
    close(got, wanted, dtype)
