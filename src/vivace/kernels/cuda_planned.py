"""Stand-ins for CUDA modules where launches are only planned: sources are reported, nothing is compiled or run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from vivace.kernels.cuda_compile import KernelUnavailableError
from vivace.kernels.gpu import Gpu


class CudaSource(NamedTuple):
    """What a CUDA C++ file is compiled with; see ``cuda_compile.compiled``."""

    text: str
    name: str
    options: tuple[str, ...]
    architecture: str


_report: ContextVar[Callable[[CudaSource], None] | None] = ContextVar("report of sources", default=None)


@contextmanager
def reports_sources(report: Callable[[CudaSource], None]) -> Iterator[None]:
    """Inside, ``report`` hears of every source that a planned module is made of."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


class PlannedModule:
    """Looks like ``CudaModule``."""

    def __init__(self, gpu: Gpu, text: str, name: str, options: Sequence[str], architecture: str) -> None:
        self._gpu = gpu
        report = _report.get()
        if report is not None:
            report(CudaSource(text, name, tuple(options), architecture))

    def function(self, name: str) -> PlannedFunction:
        """The kernel of that name."""
        return PlannedFunction(self._gpu, name)


class PlannedFunction:
    """Looks like ``CudaFunction`` as far as kernels are chosen by it."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu, self.name = gpu, name

    def set_shared_bytes(self, count: int) -> None:
        """Raises KernelUnavailableError where a block cannot have so much."""
        if count > self._gpu.block_bytes:
            raise KernelUnavailableError(f"{self.name}: {count} bytes of shared memory are too many")

    def max_blocks_per_multiprocessor(self, threads: int, shared_bytes: int = 0) -> int:
        """Whether a block fits."""
        del threads
        return int(shared_bytes <= self._gpu.block_bytes)

    def launch(self, *arguments: object, **options: object) -> None:
        """Nothing."""
