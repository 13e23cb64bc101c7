"""What the choice of kernels depends on: the GPU behind a device.

A device without memory (``meta``) stands for a GPU inside ``stands_for``: the launches of that GPU can then be found,
and compiled, without one (``vivace.kernels.launches``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

PLANNED = torch.device("meta")
"""Where the tensors of launches lie that are only to be compiled."""

NEEDED = (8, 0)
"""Compute capability from which on the Triton kernels run. Below, Triton has no support and no bfloat16."""

_BLOCK_KB = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_FEWEST_BLOCK_KB = 99  # 8.6, 8.9, 12.0, and what is not known


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        capability: compute capability, such as ``(9, 0)``.
        multiprocessors: how many it has, where that is known.
    """

    capability: tuple[int, int]
    multiprocessors: int = 0

    @property
    def block_bytes(self) -> int:
        """Shared memory that one block may take (CUDA C++ Programming Guide, "Compute Capabilities")."""
        return 1024 * _BLOCK_KB.get(self.capability, _FEWEST_BLOCK_KB)

    @property
    def has_overlap(self) -> bool:
        """Whether a kernel may start while the one before it ends (programmatic dependent launch)."""
        return self.capability >= (9, 0)


_planned: ContextVar[Gpu | None] = ContextVar("planned GPU", default=None)


def planned_gpu() -> Gpu | None:
    """The GPU that the device ``meta`` stands for at present."""
    return _planned.get()


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU behind a device; None where there is none."""
    if device.type == PLANNED.type:
        return _planned.get()
    return Gpu(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


def gpu_name(device: torch.device) -> str:
    """What messages call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the planned GPU"


def num_multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the GPU behind a device has."""
    if device.type == PLANNED.type:
        gpu = _planned.get()
        assert gpu is not None, "no GPU is planned"
        return gpu.multiprocessors
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextmanager
def stands_for(gpu: Gpu) -> Iterator[None]:
    """Inside, the device ``meta`` is such a GPU. Nothing can be computed there."""
    token = _planned.set(gpu)
    try:
        yield
    finally:
        _planned.reset(token)
