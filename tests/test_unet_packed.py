"""The packed U-Net of CosyVoice-300M against its definition, and its Triton kernels against their plain versions."""

from __future__ import annotations

from tests import interpreter  # isort: skip  (before anything imports Triton)

import pytest
import torch

from tests.test_flow_regulated import model  # noqa: F401  (fixture)
from vivace.config import UNetConfig
from vivace.kernels.unet_launch import KernelUNetOps
from vivace.kernels.unet_reference import PlainUNetOps
from vivace.models.unet import UNet
from vivace.models.unet_conv import FrameConv
from vivace.models.unet_packed import PackedUNet

assert interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TIMES = (0.0, 0.1, 0.55)
# Sums in another order; a bfloat16 result may round the other way.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


def random(*shape, seed, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)


def close(got, wanted, dtype):
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def scales_of(packed, lengths, joined):
    scales = packed.new_scales(len(lengths), joined.shape[1], joined)
    packed.set_scales(scales, lengths)
    return scales


@torch.inference_mode()
@pytest.mark.parametrize("step", [0, 2])
def test_rows_of_their_own_lengths_equal_the_definition(model, step):  # noqa: F811
    packed = PackedUNet(model.unet, TIMES, PlainUNetOps())
    lengths = torch.tensor([64, 33, 1, 50])
    x, mu, cond = (random(4, 80, 64, seed=seed).cpu() for seed in range(3))
    speakers = random(4, 80, seed=3).cpu()
    times = torch.full((4,), TIMES[step])
    wanted = model.unet(x, mu, cond, speakers, times, False, lengths)
    joined = torch.cat((x, mu, speakers[..., None].expand(-1, -1, 64), cond), dim=1).transpose(1, 2)
    valid = (torch.arange(64) < lengths[:, None])[..., None]
    got = packed.velocity(
        torch.where(valid, joined, 0.0), torch.tensor([step]), scales_of(packed, lengths, joined)
    )
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(got[row, :length].T, wanted[row, :, :length], atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_a_unet_of_one_level():
    torch.manual_seed(0)
    unet = UNet(UNetConfig((16,), dim_head=8, heads=2, num_blocks=1, num_mid_blocks=1)).eval()
    packed = PackedUNet(unet, TIMES, PlainUNetOps())
    x, mu, cond = (torch.randn(2, 80, 9) for _ in range(3))
    speakers, lengths = torch.randn(2, 80), torch.tensor([9, 5])
    wanted = unet(x, mu, cond, speakers, torch.full((2,), TIMES[1]), False, lengths)
    joined = torch.cat((x, mu, speakers[..., None].expand(-1, -1, 9), cond), dim=1).transpose(1, 2)
    valid = (torch.arange(9) < lengths[:, None])[..., None]
    scales = scales_of(packed, lengths, joined)
    got = packed.velocity(torch.where(valid, joined, 0.0), torch.tensor([1]), scales)
    torch.testing.assert_close(got[1, :5].T, wanted[1, :, :5], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("frames", "channels", "groups"), [(5, 32, 8), (70, 24, 8), (33, 80, 1), (3000, 32, 2)]
)
@pytest.mark.parametrize("extras", [(False, False), (True, False), (False, True)])
def test_group_norm_mish(dtype, frames, channels, groups, extras):
    y = random(3, frames, channels, seed=1, dtype=dtype, scale=3.0) + 2
    bias, gain, offset = (random(channels, seed=seed, dtype=dtype) for seed in (2, 3, 4))
    counts = torch.tensor([frames, frames // 2 + 1, 0], dtype=torch.int32, device=DEVICE)
    step = torch.tensor([1], device=DEVICE)
    shift = (random(2, channels, seed=5, dtype=dtype), step) if extras[0] else None
    residual = random(3, frames, channels, seed=6, dtype=dtype) if extras[1] else None
    arguments = y, bias, (gain, offset, 1e-5), groups, counts, shift, residual
    got, wanted = KernelUNetOps().group_norm_mish(*arguments), PlainUNetOps().group_norm_mish(*arguments)
    close(got, wanted, dtype)
    assert not got[1, frames // 2 + 1 :].any()
    assert not got[2].any()


def test_counts_may_be_a_column_of_a_packet():
    """As in the length regulator of CosyVoice-300M: the numbers beside it are no counts."""
    packet = torch.tensor([[1, 5, 900], [1, 2, 900], [1, 4, 900]], device=DEVICE)
    y = random(3, 6, 32, seed=1, dtype=torch.float32)
    norm = random(32, seed=2, dtype=torch.float32), random(32, seed=3, dtype=torch.float32), 1e-5
    bias = random(32, seed=4, dtype=torch.float32)
    got, wanted = (
        ops.group_norm_mish(y, bias, norm, 1, packet[:, 1]) for ops in (KernelUNetOps(), PlainUNetOps())
    )
    close(got, wanted, torch.float32)
    got, wanted = (ops.masked_add(y, packet[:, 1], bias=bias) for ops in (KernelUNetOps(), PlainUNetOps()))
    close(got, wanted, torch.float32)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("with_bias", [True, False])
def test_masked_add_stops_what_is_behind_a_row(dtype, with_bias):
    x = random(2, 9, 40, seed=1, dtype=dtype)
    x[1, 4:] = torch.nan
    bias = random(40, seed=3, dtype=dtype) if with_bias else None
    counts = torch.tensor([9, 4], dtype=torch.int32, device=DEVICE)
    got, wanted = (ops.masked_add(x, counts, bias) for ops in (KernelUNetOps(), PlainUNetOps()))
    close(got, wanted, dtype)
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("frames", "width", "size"), [(7, 48, 80), (75, 32, 33)])
@pytest.mark.parametrize(("with_bias", "gelu"), [(True, True), (False, False)])
def test_norm_linear(dtype, frames, width, size, with_bias, gelu):
    if DEVICE.type == "cpu" and dtype is torch.bfloat16:
        pytest.skip("the interpreter does not multiply bfloat16")
    norm = random(width, seed=1, dtype=dtype), random(width, seed=2, dtype=dtype), 1e-5
    x = random(2, frames, width, seed=3, dtype=dtype, scale=2.0) + 1
    weight = random(size, width, seed=4, dtype=dtype, scale=width**-0.5)
    bias = random(size, seed=5, dtype=dtype) if with_bias else None
    got, wanted = (
        ops.norm_linear(x, norm, weight, bias, gelu=gelu) for ops in (KernelUNetOps(), PlainUNetOps())
    )
    close(got, wanted, dtype)


def test_many_rows_of_float32_are_multiplied_by_a_library(monkeypatch):
    norm = random(48, seed=1), random(48, seed=2), 1e-5
    x, weight, bias = random(2, 200, 48, seed=3), random(80, 48, seed=4), random(80, seed=5)
    for kernel in ("block_norm_linear_kernel", "block_linear_add_kernel"):
        monkeypatch.setattr(f"vivace.kernels.unet_launch.{kernel}", None)
    sums = []
    for ops in (KernelUNetOps(), PlainUNetOps()):
        total = random(2, 200, 48, seed=6)
        ops.linear_add(
            total, ops.norm_linear(x, norm, weight, bias, gelu=True), (weight.t().contiguous(), bias[:48])
        )
        sums.append(total)
    assert torch.equal(*sums)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("frames", "width", "size"), [(7, 48, 80), (75, 256, 33)])
def test_linear_add(dtype, frames, width, size):
    if DEVICE.type == "cpu" and dtype is torch.bfloat16:
        pytest.skip("the interpreter does not multiply bfloat16")
    y = random(2, frames, width, seed=1, dtype=dtype)
    linear = random(size, width, seed=2, dtype=dtype, scale=width**-0.5), random(size, seed=3, dtype=dtype)
    streams = [random(2, frames, size, seed=4, dtype=dtype) for _ in range(2)]
    for ops, x in zip((KernelUNetOps(), PlainUNetOps()), streams, strict=True):
        ops.linear_add(x, y, linear)
    close(*streams, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (1, 0), (2, 1)])
def test_convolutions_as_products(dtype, stride, padding):
    """And as the library makes them, are those of the layer."""
    layer = torch.nn.Conv1d(24, 40, 3, stride=stride, padding=padding, bias=False)
    layer.weight.data = random(40, 24, 3, seed=1, scale=0.1).cpu()
    layer, x = layer.to(DEVICE, dtype), random(2, 10, 24, seed=2, dtype=dtype)
    wanted = layer(x.transpose(1, 2)).transpose(1, 2)
    for as_product in (True, False):
        conv = FrameConv.of(layer.weight, stride=stride, as_product=as_product)
        got = conv.run(x, padding)
        assert got.is_contiguous()
        close(got, wanted, dtype)
    assert FrameConv.of(layer.weight).product is None or dtype is torch.float32
