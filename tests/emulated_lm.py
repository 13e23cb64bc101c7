"""The resident kernel of the speech LM on an emulated GPU (``tests/emulator``)."""

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

import torch

from vivace.engine.sampler import OneRow
from vivace.kernels.lm_persistent import PersistentKernel, Shape, Tuning, compile_options

_SOURCES = Path(__file__).parent / "emulator"
_MOST_PASSES = 200_000
"""Over all blocks; a step of a tiny model takes some hundreds."""


def missing() -> str | None:
    """What it lacks on this machine; None where it runs."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return "fibers are written for Linux on x86-64"
    return None if shutil.which("c++") else "needs a C++ compiler"


@functools.cache
def _library(source: str, options: tuple[str, ...]) -> ctypes.CDLL:
    folder = tempfile.mkdtemp(prefix="vivace-emulator-")
    target = Path(folder) / "kernel.so"
    include = f"-I{files('vivace.kernels')}"
    flags = ["-O2", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w", include]
    try:
        subprocess.run(["c++", *flags, *options, str(_SOURCES / source), "-o", str(target)], check=True)
        library = ctypes.CDLL(str(target))
    finally:
        shutil.rmtree(folder)
    return library


class EmulatedKernel(PersistentKernel):
    """As ``PersistentKernel``, on CPU tensors. Every launch has another order of blocks."""

    def _load(self, options):
        self._emulated, self._seed = _library("lm_persistent.cc", tuple(options)), 0
        self._emulated.run.restype = ctypes.c_longlong
        assert self._emulated.shared_bytes() <= self._shared

    def _start(self, values):
        self._seed += 1
        passes = self._emulated.run(ctypes.byref(values), self._seed, ctypes.c_longlong(_MOST_PASSES))
        assert passes > 0, "the blocks wait for each other for ever"


class _Row(ctypes.Structure):
    """``Row`` of the library: a ``Rule``, and the last decoded tokens as a ring."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("min_place", "seed", "place")),
        ("tau_r", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("top_p", "temperature")),
        *((name, ctypes.c_int) for name in ("kind", "top_k", "win_size", "decoded", "slot", "gap")),
        ("recent", ctypes.c_int * 64),
    )


def draw_rows(shape: Shape, grid: int, logits: torch.Tensor, rows: list[tuple[OneRow, int, int, list[int]]]):
    """What the kernel's sampling rule draws for every row; -1 where scores are not finite.

    Args:
        logits: float32 ``[rows, vocab]``.
        rows: settings, kind, place, and what was decoded, newest last.
    """
    library = _library("lm_sampling.cc", tuple(compile_options(shape, Tuning(5, 2048), grid)))
    library.draw_rows.restype = ctypes.c_longlong
    table = (_Row * len(rows))()
    for entry, (row, kind, place, history) in zip(table, rows, strict=True):
        for name in ("seed", "tau_r", "top_p", "temperature", "top_k", "win_size"):
            setattr(entry, name, getattr(row, name))
        entry.kind, entry.place, entry.decoded = kind, place, len(history)
        for at in range(max(0, len(history) - 64), len(history)):
            entry.recent[at % 64] = history[at]
    words = torch.stack(
        (logits.contiguous().view(torch.int32), torch.ones_like(logits, dtype=torch.int32)), -1
    )
    drawn = torch.full((len(rows),), -2, dtype=torch.int32)
    pointers = (ctypes.byref(table), ctypes.c_void_p(words.data_ptr()), ctypes.c_void_p(drawn.data_ptr()))
    passes = library.draw_rows(*pointers, len(rows), len(rows), ctypes.c_longlong(_MOST_PASSES))
    assert passes > 0, "threads wait for each other for ever"
    return drawn.tolist()
