"""Which kernels the flow runs on; decided once, when a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from vivace.config import FlowConfig
from vivace.kernels import dit_reference
from vivace.kernels.cuda_compile import KernelUnavailableError
from vivace.kernels.gpu import NEEDED, gpu_name, gpu_of
from vivace.models.dit import POSITION_GROUPS

_LEAST_PRODUCT = 16  # channels of each group of the position convolutions, as Triton's products need

_log = logging.getLogger(__name__)


class Kernels(Protocol):
    """``vivace.kernels.dit_reference`` or what has its functions."""

    def default_options(self, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, Any]]: ...


def kernels_run_on(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Triton kernels can be used; says why not where a GPU has to do without them."""
    gpu = gpu_of(device)
    if gpu is None:
        return False
    try:
        import vivace.kernels.dit  # noqa: F401
    except ImportError:
        _log.warning("Triton is not installed: the flow takes the plain way, which is slower")
        return False
    if gpu.capability < NEEDED or dtype == torch.float16:
        _log.warning(
            "%s with %s weights: the flow takes the plain way, which is slower; its kernels need compute capability "
            "8.0 and bfloat16 or float32",
            gpu_name(device),
            str(dtype).removeprefix("torch."),
        )
        return False
    return True


def choose_packed(
    single: Kernels, config: FlowConfig, dtype: torch.dtype, device: torch.device, chunks: int
) -> Kernels:
    """Those for launches of ``chunks`` chunks, beside those chosen for one."""
    if chunks == 1 or launch_costs(single, config, dtype, device) is None:
        return single
    from vivace.kernels import dit_packed

    return dit_packed.PackedKernels(chunks, single=single)


def launch_costs(
    single: Kernels, config: FlowConfig, dtype: torch.dtype, device: torch.device
) -> Mapping[int, float] | None:
    """Milliseconds of a launch by its chunks where there are kernels for many; None if not."""
    gpu = gpu_of(device)
    if single is dit_reference or gpu is None or gpu.capability[0] != 9:
        return None
    from vivace.kernels import dit_packed

    return dit_packed.LAUNCH_MS if dit_packed.serves(config.dit, dtype) else None


def choose_kernels(config: FlowConfig, dtype: torch.dtype, device: torch.device) -> Kernels:
    """The fastest kernels that fit, as far as measured."""
    if not kernels_run_on(dtype, device):
        return dit_reference
    if config.dit.dim < _LEAST_PRODUCT * POSITION_GROUPS:
        _log.warning(
            "the model is too narrow for the flow's kernels: it takes the plain way, which is slower"
        )
        return dit_reference
    from vivace.kernels import dit, dit_hopper

    gpu = gpu_of(device)
    if gpu is None or gpu.capability != (9, 0) or not dit_hopper.serves(config.dit, dtype):
        return dit
    try:
        return dit_hopper.HopperKernels(device.index)
    except KernelUnavailableError as error:
        _log.warning("the flow's attention for Hopper GPUs is not used: %s", error)
        return dit
