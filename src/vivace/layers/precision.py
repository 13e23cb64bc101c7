"""True float32 convolutions where rounding adds up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Tf32Switch:
    """PyTorch's TF32 switch of convolutions, which is per process: off while anyone is inside, then as it was.

    ``allow_tf32``, its older name, is left alone: PyTorch raises where a program has used both.
    """

    def __init__(self) -> None:
        self._conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self._inside = 0
        self._before = ""

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before, self._conv.fp32_precision = self._conv.fp32_precision, "ieee"
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._conv.fp32_precision = self._before


_SWITCH = _Tf32Switch()


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Inside, convolutions on ``device`` keep all of float32 (no TF32), and nothing is cast automatically.

    Matrix products may still use TF32 where the program has asked for it.
    """
    if device.type == "meta":  # nothing is computed there
        yield
        return
    if device.type != "cuda":
        with torch.autocast(device.type, enabled=False):
            yield
        return
    _SWITCH.enter()
    try:
        with torch.autocast("cuda", enabled=False):
            yield
    finally:
        _SWITCH.leave()
