"""CUDA C++ kernels, compiled at run time and launched on PyTorch's streams through the driver.

    module = CudaModule(source, name="scale")
    scale = module.function("scale")
    scale.launch((blocks,), (128,), [tensor, ctypes.c_float(2.0), ctypes.c_int(tensor.numel())])

Kernels are declared ``extern "C" __global__``. Everything runs in the context that PyTorch uses, so that launches can
be captured into CUDA graphs; load modules before a capture starts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vivace.kernels.cuda_compile import KernelUnavailableError, compiled
from vivace.kernels.cuda_driver import (
    architecture,
    call,
    current_context,
    launch_config,
    packed,
    parameter_bytes,
)
from vivace.kernels.cuda_planned import PlannedModule
from vivace.kernels.gpu import planned_gpu

if TYPE_CHECKING:
    from vivace.kernels.cuda_driver import Argument

__all__ = ["CudaFunction", "CudaModule", "KernelUnavailableError", "open_module"]

_LOCAL_BYTES, _REGISTERS, _MOST_DYNAMIC_SHARED_BYTES = 3, 4, 8  # CUfunction_attribute


class CudaModule:
    """A source file, compiled for and loaded on one device.

    Args:
        source: CUDA C++.
        options: of the compiler, such as ``-DROWS=4`` or ``--use_fast_math``.
        name: of the file that keeps the code on disk, and of the source in the compiler's log.
        device: index; None takes PyTorch's current device.

    Raises:
        KernelUnavailableError: no NVIDIA GPU, driver or compiler; or the source does not compile, with the log.
    """

    def __init__(
        self, source: str, *, options: Sequence[str] = (), name: str, device: int | None = None
    ) -> None:
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise KernelUnavailableError(f"{name}: PyTorch finds no NVIDIA GPU")
        self.device = torch.cuda.current_device() if device is None else device
        self.architecture = architecture(torch.cuda.get_device_capability(self.device))
        code = compiled(source, name=name, options=options, architecture=self.architecture)
        self._handle = ctypes.c_void_p()
        with current_context(self.device):
            call("cuModuleLoadData", ctypes.byref(self._handle), code)

    def function(self, name: str) -> CudaFunction:
        """The kernel of that name.

        Raises:
            KernelUnavailableError: the source has none.
        """
        handle = ctypes.c_void_p()
        with current_context(self.device):
            call("cuModuleGetFunction", ctypes.byref(handle), self._handle, name.encode())
            return CudaFunction(name, handle, self.device, parameter_bytes(handle))


def open_module(
    source: str, *, options: Sequence[str] = (), name: str, device: int | None = None
) -> CudaModule | PlannedModule:
    """A module, where launches are planned only its stand-in; arguments and errors as ``CudaModule``."""
    gpu = planned_gpu()
    if gpu is None:
        return CudaModule(source, options=options, name=name, device=device)
    return PlannedModule(gpu, source, name, options, architecture(gpu.capability))


class CudaFunction:
    """One kernel of a module. Every method raises ``KernelUnavailableError`` if the driver refuses.

    Loaded code stays for as long as the process lives: a captured graph may still need it.
    """

    def __init__(
        self, name: str, handle: ctypes.c_void_p, device: int, sizes: tuple[int, ...] | None
    ) -> None:
        self.name = name
        self.device = device
        self._handle = handle
        self._sizes = sizes

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self._attribute(_REGISTERS)

    @property
    def local_bytes(self) -> int:
        """Bytes per thread that live in memory instead: spilled registers, arrays with a computed index."""
        return self._attribute(_LOCAL_BYTES)

    def set_shared_bytes(self, count: int) -> None:
        """Allows so much dynamic shared memory per block; needed above 48 KB."""
        with current_context(self.device):
            call("cuFuncSetAttribute", self._handle, _MOST_DYNAMIC_SHARED_BYTES, count)

    def max_blocks_per_multiprocessor(self, threads: int, shared_bytes: int = 0) -> int:
        """Blocks of so many threads and bytes of dynamic shared memory that fit on a multiprocessor at once."""
        count, size = ctypes.c_int(), ctypes.c_size_t(shared_bytes)
        with current_context(self.device):
            call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                ctypes.byref(count),
                self._handle,
                threads,
                size,
            )
        return count.value

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Argument],
        shared_bytes: int = 0,
        stream: torch.cuda.Stream | None = None,
        *,
        cluster: Sequence[int] | None = None,
        cooperative: bool = False,
        overlap: bool = False,
    ) -> None:
        """Starts the kernel and does not wait for it.

        Args:
            grid, block: one to three numbers of blocks, and of threads of a block.
            args: tensors (the kernel gets their address; on its device or pinned) and ctypes values.
            shared_bytes: dynamic shared memory of a block.
            stream: None takes PyTorch's current one.
            cluster: one to three numbers of blocks of a cluster.
            cooperative: all blocks run at once, so that they may wait for each other.
            overlap: may start before the kernel ahead of it ends, and waits for it itself (``griddepcontrol.wait``).

        Raises:
            TypeError: the kernel takes other arguments.
        """
        values = packed(args, self.device, self._sizes)
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = stream or torch.cuda.current_stream(self.device)
        config = launch_config(
            grid,
            block,
            shared_bytes,
            stream.cuda_stream,
            cluster=cluster,
            cooperative=cooperative,
            overlap=overlap,
        )
        with current_context(self.device):
            call("cuLaunchKernelEx", ctypes.byref(config), self._handle, pointers, None)

    def _attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        with current_context(self.device):
            call("cuFuncGetAttribute", ctypes.byref(value), attribute, self._handle)
        return value.value
