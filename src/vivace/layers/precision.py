"""True float32 arithmetic where rounding adds up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Inside, convolutions and matrix products on ``device`` keep all of float32: no autocast, no TF32.

    The TF32 switches of PyTorch are per process; they are put back at the end.
    """
    if device.type != "cuda":
        with torch.autocast(device.type, enabled=False):
            yield
        return
    matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, conv
