"""Builds the three stage modules and puts checked weights into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vivace.checkpoint.shapes import STAGES, Stage, num_parameters
from vivace.checkpoint.torch_file import check_finite
from vivace.config import ModelConfig
from vivace.errors import ModelFolderError
from vivace.kernels.gpu import PLANNED, gpu_of

M = TypeVar("M", bound=nn.Module)


class _SkipInitialisation(TorchFunctionMode):
    """Leaves new parameters unset: values that are replaced at once cost seconds and memory at full size."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":  # these fill the tensor that they are given
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def stage_dtype(stage: Stage, dtype: torch.dtype) -> torch.dtype:
    """The vocoder stays in float32: its phase is a running sum of F0, which half precision would detune."""
    return torch.float32 if stage == "vocoder" else dtype


def default_dtype(device: torch.device) -> torch.dtype:
    """What a device computes fast without loss to the ear: float32 on a CPU; on a GPU bfloat16, and float16 where it
    has no units for that (before compute capability 8.0)."""
    gpu = gpu_of(device)
    if gpu is None:
        return torch.float32
    return torch.bfloat16 if gpu.capability >= (8, 0) else torch.float16


def resolve_device(device: str | torch.device) -> torch.device:
    """Raises ModelFolderError (exit code 2) for a device that this machine does not have."""
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ModelFolderError(
            "--device must be cpu, cuda or cuda:N", code="invalid_device", param="device"
        ) from error
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (resolved.index or 0) >= count:
            raise ModelFolderError(
                f"--device {resolved}: this machine has {count} usable CUDA devices; use --device cpu",
                code="invalid_device",
                param="device",
            )
    elif resolved.type != "cpu":
        raise ModelFolderError("--device must be cpu, cuda or cuda:N", code="invalid_device", param="device")
    return resolved


def check_memory(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ModelFolderError if the weights alone do not fit the GPU."""
    if device.type != "cuda":
        return
    needed = sum(num_parameters(config, stage) * stage_dtype(stage, dtype).itemsize for stage in STAGES)
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ModelFolderError(
            f"the model needs {needed / 2**30:.1f} GiB for its weights, {device} has {free / 2**30:.1f} GiB "
            f"free; "
            "free some memory, use bfloat16 or another device"
        )


def planned_stage(build: Callable[[], M], dtype: torch.dtype) -> M:
    """A module as ``build_stage`` makes it, without weights: on the device ``meta``, for launches that only compile."""
    with _SkipInitialisation():
        module = build().to(PLANNED)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module.eval().requires_grad_(False)


def build_stage(
    build: Callable[[], M],
    weights: Mapping[str, Tensor],
    file: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    keep_mapped: bool,
) -> M:
    """A module in eval mode on ``device`` whose parameters are ``weights`` in ``dtype``.

    Buffers keep the dtype that the module gave them.

    Args:
        build: constructs the module on the CPU.
        weights: every parameter, by the module's names; shapes already checked.
        file: for messages.
        device: where to.
        dtype: of the parameters.
        keep_mapped: take weights that already have the dtype and the device without a copy, so that they stay a
            view of their memory-mapped file. Only for files that nobody writes in place: a mapping of a file that
            is cut short ends the process.

    Raises:
        ModelFolderError: a value is not finite or does not fit ``dtype``.
    """
    with _SkipInitialisation():
        module = build()
    state: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        check_finite(tensor, name, file, dtype)
        state[name] = tensor.to(device, dtype, copy=not keep_mapped)
    result = module.load_state_dict(state, strict=False, assign=True)
    buffers = {name for name, _ in module.named_buffers()}
    assert not result.unexpected_keys, "the shape table and the module disagree"
    assert set(result.missing_keys) <= buffers, "the shape table and the module disagree"
    return module.to(device).eval().requires_grad_(False)
