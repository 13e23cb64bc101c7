"""Finds the kernels that launches need, and compiles them, without a GPU.

    with recorded(Gpu((9, 0), 132), found.append):
        stages.rehearse()                   # of tensors on the device ``meta``
    for kernel in found:
        kernel.compile()                    # into the cache that a launch on such a GPU looks into

Triton itself says what a launch needs (types, divisibility, constants, options), so that the keys in its cache are
those of a real launch, as long as sizes and places of tensors are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from vivace.kernels import triton_launcher
from vivace.kernels.cuda_compile import compiled, kept_file
from vivace.kernels.cuda_planned import CudaSource, reports_sources
from vivace.kernels.gpu import Gpu, stands_for
from vivace.kernels.triton_cache import kept_in

_WARP = 32


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """A Triton kernel for arguments of some types and some constants.

    Attributes:
        target: Triton's name of the GPU. The others are what Triton's compiler takes.
    """

    kernel: Any
    target: GPUTarget
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the function."""
        return str(self.kernel.__name__)

    def compile(self) -> Any:
        """Compiles it into Triton's cache, or finds it there; Triton's ``CompiledKernel``, not loaded.

        With it comes the module in C that launches it, where there is a driver to link.
        """
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        compiled = triton.compile(source, target=self.target, options=self.options)
        if triton_launcher.has_driver():
            triton_launcher.build(compiled)
        return compiled

    def kept(self, compiled: Any) -> list[str]:
        """The files that a launch needs; the one that launches may be missing. None where they are not in folders."""
        group = kept_in(compiled.hash, f"__grp__{compiled.src.name[:150]}.json")
        return [] if group is None else [group, *triton_launcher.kept(compiled)]


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A CUDA C++ source."""

    source: CudaSource

    @property
    def name(self) -> str:
        """Of the file that keeps the code."""
        return self.source.name

    def compile(self) -> bytes:
        """Compiles it into our own cache, or finds it there. Raises ``KernelUnavailableError``."""
        source = self.source
        return compiled(
            source.text, name=source.name, options=source.options, architecture=source.architecture
        )

    def kept(self, code: bytes) -> list[str]:
        """The file that keeps the code."""
        del code
        text, name, options, architecture = self.source
        return [str(kept_file(text, name=name, options=options, architecture=architecture))]


AnyKernel: TypeAlias = TritonKernel | CudaKernel


class _PlannedDriver:
    """What a launch asks Triton's driver before it compiles."""

    def __init__(self, gpu: Gpu) -> None:
        major, minor = gpu.capability
        self._target = GPUTarget("cuda", 10 * major + minor, _WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        """Triton keeps what it knows of launches by device: not that of a real one."""
        return f"planned {self._target.arch}"

    def get_current_stream(self, device: str) -> int:
        del device
        return 0


@contextmanager
def recorded(gpu: Gpu, found: Callable[[AnyKernel], None]) -> Iterator[None]:
    """Inside, launches on the device ``meta`` run nothing; ``found`` hears of every kernel that they need, once.

    Concerns all threads: no other may launch Triton kernels meanwhile.
    """
    planned, seen = _PlannedDriver(gpu), set[tuple[Any, str]]()
    before, compile_before = driver._active, JITFunction._do_compile

    def record(
        kernel: Any, key: str, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, warmup: bool
    ) -> None:  # fmt: skip
        del device, warmup
        if (kernel, key) not in seen:
            seen.add((kernel, key))
            assert kernel.cache_key  # made of its source here, not again in every process that compiles
            found(
                TritonKernel(
                    kernel,
                    planned.get_current_target(),
                    signature,
                    constants,
                    attributes,
                    dict(options.__dict__),
                )
            )

    # Digests of the whole compiler, a fifth of a second: likewise.
    triton_key()
    make_backend(planned.get_current_target()).hash()
    driver.set_active(planned)
    JITFunction._do_compile = record
    try:
        with stands_for(gpu), reports_sources(lambda source: found(CudaKernel(source))):
            yield
    finally:
        JITFunction._do_compile = compile_before
        driver._active = before
