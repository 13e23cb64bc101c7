"""The part of the CUDA driver's interface that loading and launching kernels takes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vivace.kernels.cuda_compile import KernelUnavailableError, load_library

if TYPE_CHECKING:
    Value = ctypes._SimpleCData[Any] | ctypes.Structure
    Argument = Tensor | Value

_COOPERATIVE, _CLUSTER, _OVERLAP = 2, 4, 6  # CUlaunchAttributeID
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``: its id and a union of 64 bytes, of which ours use the first three numbers."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


def launch_config(
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    stream: int,
    *,
    cluster: Sequence[int] | None = None,
    cooperative: bool = False,
    overlap: bool = False,
) -> LaunchConfig:
    """How a kernel is launched; see ``CudaFunction.launch``."""
    chosen: list[tuple[int, Sequence[int]]] = []
    if cooperative:
        chosen.append((_COOPERATIVE, (1,)))
    if cluster is not None:
        chosen.append((_CLUSTER, _three(cluster)))
    if overlap:
        chosen.append((_OVERLAP, (1,)))
    attributes = (LaunchAttribute * len(chosen))()
    for attribute, (name, values) in zip(attributes, chosen, strict=True):
        attribute.id = name
        attribute.value[: len(values)] = values
    sizes = (ctypes.c_uint * 3)(*_three(grid)), (ctypes.c_uint * 3)(*_three(block))
    return LaunchConfig(*sizes, shared_bytes, stream, attributes, len(chosen))


def _three(sizes: Sequence[int]) -> tuple[int, ...]:
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"{tuple(sizes)}: one to three sizes of at least 1")
    return (*sizes, *(1,) * (3 - len(sizes)))


def packed(args: Sequence[Argument], device: int, sizes: tuple[int, ...] | None) -> list[Value]:
    """Arguments as values in memory; ``sizes`` in bytes are those that the kernel takes, if known.

    Raises:
        TypeError: the kernel takes others, a tensor lies on another device, or a number has no C type.
    """
    values = [_value(argument, device) for argument in args]
    given = tuple(ctypes.sizeof(value) for value in values)
    if sizes is not None and given != sizes:
        raise TypeError(f"arguments of {given} bytes for a kernel that takes {sizes}")
    return values


def _value(argument: Argument, device: int) -> Value:
    if isinstance(argument, Tensor):
        if argument.device != torch.device("cuda", device) and not argument.is_pinned():
            raise TypeError(f"a tensor on {argument.device} for a kernel on cuda:{device}")
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int | float):
        raise TypeError("a plain number has no size; give a ctypes value, such as ctypes.c_int(1)")
    return argument


def architecture(capability: tuple[int, int]) -> str:
    """What the compiler calls a device; with the features of its own that Hopper has."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


@cache
def _driver() -> ctypes.CDLL:
    driver = load_library(["libcuda.so.1", "libcuda.so", "nvcuda.dll"])
    _check(driver, "cuInit", driver.cuInit(0))
    return driver


def call(function: str, *arguments: object) -> None:
    """One call of the driver.

    Raises:
        KernelUnavailableError: with the driver's word for what is wrong.
    """
    driver = _driver()
    if not hasattr(driver, function):
        raise KernelUnavailableError(f"{function}: the driver is too old")
    _check(driver, function, getattr(driver, function)(*arguments))


def _check(driver: ctypes.CDLL, function: str, status: int) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(text))
        raise KernelUnavailableError(f"{function}: {(text.value or str(status).encode()).decode()}")


@cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """The context of PyTorch; held for as long as the process lives."""
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def current_context(device: int) -> Iterator[None]:
    """Calls of the driver inside are about this device, whatever the thread."""
    call("cuCtxPushCurrent_v2", _primary_context(device))
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def parameter_bytes(function: ctypes.c_void_p) -> tuple[int, ...] | None:
    """Sizes of a kernel's parameters; None with a driver too old to tell."""
    driver = _driver()
    if not hasattr(driver, "cuFuncGetParamInfo"):
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while True:
        index = ctypes.c_size_t(len(sizes))
        status = driver.cuFuncGetParamInfo(function, index, ctypes.byref(offset), ctypes.byref(size))
        if status == _INVALID_VALUE:
            return tuple(sizes)
        _check(driver, "cuFuncGetParamInfo", status)
        sizes.append(size.value)
