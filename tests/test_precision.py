"""The switch of true float32 convolutions. It exists without a GPU too, so a device's name is enough."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from vivace.layers.precision import full_float32

CUDA = torch.device("cuda")
CONV = torch.backends.cudnn.conv


@pytest.fixture(autouse=True, params=["tf32", "ieee"])
def before(request, monkeypatch):
    """Where the switch stood; without the autocast of a device that is not there, which would warn."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    # A program that uses the newer switches, in which PyTorch raises for the older ones.
    switches = CONV, torch.backends.cuda.matmul
    start = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = request.param
    yield request.param
    for switch, value in zip(switches, start, strict=True):
        switch.fp32_precision = value


def test_tf32_is_off_inside_and_as_before_outside(before):
    with full_float32(CUDA), full_float32(CUDA):
        assert CONV.fp32_precision == "ieee"
    assert CONV.fp32_precision == before
    with pytest.raises(ZeroDivisionError), full_float32(CUDA):
        raise ZeroDivisionError
    assert CONV.fp32_precision == before


def test_one_thread_does_not_put_back_what_another_needs(before):
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with full_float32(CUDA):
            inside.set()
            go_on.wait(60)

    other = threading.Thread(target=hold)
    with full_float32(CUDA):
        other.start()
        assert inside.wait(60)
    assert CONV.fp32_precision == "ieee"
    go_on.set()
    other.join()
    assert CONV.fp32_precision == before
