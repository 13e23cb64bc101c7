# ruff: noqa: N802  (names of the binding)
"""The few calls of NVIDIA's management library that ``DeviceSampler`` needs, without its Python binding.

The library comes with the driver. Function names are those of the binding (``nvidia-ml-py``), so either serves.
"""

from __future__ import annotations

import ctypes
from typing import Any

FILE = "libnvidia-ml.so.1"


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NVMLError(Exception):
    """A call returned an error code."""


class Nvml:
    """The driver's own library.

    Args:
        library: in place of the one that is installed.

    Raises:
        OSError: there is none.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL(FILE) if library is None else library

    def nvmlInit(self) -> None:
        self._call("nvmlInit_v2")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()), ctypes.byref(handle))
        return handle

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p) -> _Utilization:
        rates = _Utilization()
        self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
        return rates

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p) -> _Memory:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p) -> int:
        """Milliwatts."""
        power = ctypes.c_uint()
        self._call("nvmlDeviceGetPowerUsage", handle, ctypes.byref(power))
        return power.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise NVMLError(f"{name} returned {code}")
