"""The resident kernel of the speech LM on an emulated GPU (``tests/emulator``)."""

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

from vivace.kernels.lm_persistent import PersistentKernel

_SOURCE = Path(__file__).parent / "emulator" / "lm_persistent.cc"
_MOST_PASSES = 200_000
"""Over all blocks; a step of a tiny model takes some hundreds."""


def missing() -> str | None:
    """What it lacks on this machine; None where it runs."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return "fibers are written for Linux on x86-64"
    return None if shutil.which("c++") else "needs a C++ compiler"


@functools.cache
def _library(options: tuple[str, ...]) -> ctypes.CDLL:
    folder = tempfile.mkdtemp(prefix="vivace-emulator-")
    target = Path(folder) / "kernel.so"
    include = f"-I{files('vivace.kernels')}"
    flags = ["-O2", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w", include]
    try:
        subprocess.run(["c++", *flags, *options, str(_SOURCE), "-o", str(target)], check=True)
        library = ctypes.CDLL(str(target))
    finally:
        shutil.rmtree(folder)
    library.run.restype = ctypes.c_longlong
    return library


class EmulatedKernel(PersistentKernel):
    """As ``PersistentKernel``, on CPU tensors. Every launch has another order of blocks."""

    def _load(self, options):
        self._emulated, self._seed = _library(tuple(options)), 0
        assert self._emulated.shared_bytes() <= self._shared

    def _start(self, values):
        self._seed += 1
        passes = self._emulated.run(ctypes.byref(values), self._seed, ctypes.c_longlong(_MOST_PASSES))
        assert passes > 0, "the blocks wait for each other for ever"
