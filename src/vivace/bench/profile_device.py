"""How busy a GPU is, through NVIDIA's management library: its Python binding, or the driver's own file."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Any

import torch

from vivace.bench.nvml import Nvml

INTERVAL_S = 0.05
IDLE_PERCENT, FULL_PERCENT = 60.0, 90.0
GROWTH = 1.5
"""Latency under load over that of a lone request, above which it counts as grown."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What was sampled."""

    samples: int
    busy_percent_mean: float
    busy_percent_max: float
    memory_bytes_max: int
    power_watts_mean: float | None


def advice(busy_percent: float, latency_growth: float) -> str:
    """What to do about the batch size."""
    if busy_percent < IDLE_PERCENT:
        return f"the device is busy for less than {IDLE_PERCENT:.0f} %: allow a larger batch"
    if busy_percent > FULL_PERCENT and latency_growth > GROWTH:
        return f"the device is busy for more than {FULL_PERCENT:.0f} % and latency has grown: take a smaller batch"
    return "the batch suits the device"


def _installed() -> Any:
    """The binding, or the library itself. Raises OSError where there is neither."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return Nvml()


class DeviceSampler:
    """Looks at the device twenty times a second inside its ``with`` block.

    Attributes:
        reason: why nothing can be sampled here, or None.
    """

    def __init__(self, device: torch.device, library: Any = None) -> None:
        self.reason: str | None = None
        self._seen: list[tuple[float, int, float | None]] = []
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._handle: Any = None
        self._library = library
        if library is None and device.type != "cuda":
            self.reason = "utilisation is sampled on NVIDIA GPUs only"
        else:
            self._open(device)

    def _open(self, device: torch.device) -> None:
        try:
            if self._library is None:
                self._library = _installed()
            self._library.nvmlInit()
            self._handle = self._find(device)
        except OSError:
            self.reason = "NVML is not installed (it comes with the driver; pip install nvidia-ml-py)"
        except Exception as error:  # a driver's own kinds of error
            self.reason = f"NVML does not answer: {error}"

    def _find(self, device: torch.device) -> Any:
        """By its identity: the library counts all devices, PyTorch the visible ones."""
        index = device.index or 0
        if torch.cuda.is_available():
            uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
            if uuid is not None:
                with suppress(Exception):
                    return self._library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return self._library.nvmlDeviceGetHandleByIndex(index)

    def __enter__(self) -> DeviceSampler:
        if self._handle is not None:
            self._thread = threading.Thread(target=self._watch, name="nvml", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while True:
            try:
                self._seen.append(self._look())
            except Exception as error:
                self.reason = f"NVML does not answer: {error}"
                return
            if self._end.wait(INTERVAL_S):
                return

    def _look(self) -> tuple[float, int, float | None]:
        library, handle = self._library, self._handle
        watts = None
        with suppress(Exception):  # not every device tells
            watts = library.nvmlDeviceGetPowerUsage(handle) / 1e3
        memory = int(library.nvmlDeviceGetMemoryInfo(handle).used)
        return float(library.nvmlDeviceGetUtilizationRates(handle).gpu), memory, watts

    def summary(self) -> DeviceUse | None:
        """What was seen; None where nothing could be."""
        if not self._seen:
            return None
        busy = [percent for percent, _, _ in self._seen]
        watts = [power for _, _, power in self._seen if power is not None]
        return DeviceUse(
            samples=len(busy),
            busy_percent_mean=round(fmean(busy), 1),
            busy_percent_max=max(busy),
            memory_bytes_max=max(memory for _, memory, _ in self._seen),
            power_watts_mean=round(fmean(watts), 1) if watts else None,
        )
