"""What benchmarks share: the head of their documents, and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from vivace.doctor import examine_machine


def heading(bench: str, device: str, model: str, dtype: torch.dtype) -> dict[str, Any]:
    """The first members of a document.

    Args:
        bench: the command.
        model: name of the model, as its configuration has it.
        dtype: of speech LM and flow.
    """
    return {
        "bench": bench,
        "hardware": hardware(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": model,
        "precision": str(dtype).removeprefix("torch."),
    }


def hardware(device: str) -> str:
    """The machine as result rows name it, such as "2 cores AMD EPYC (AVX-512)"."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    machine = examine_machine()
    wide = " (AVX-512)" if "avx512f" in machine.cpu_flags else ""
    return f"{machine.cores} cores {machine.cpu}{wide}"


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds, when all work given to the device so far is done."""
    if device.type != "cuda":
        return time.perf_counter

    def after_work() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return after_work
