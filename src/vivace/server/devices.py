"""On which devices the engines of a server run: ``--device``, ``--devices``, ``--gpus``."""

from __future__ import annotations

from collections.abc import Callable

from vivace.errors import ServeError

ALL = "all"
_CUDA = "cuda"


def engine_devices(
    device: str, devices: str | None, gpus: str | None, count_gpus: Callable[[], int]
) -> tuple[str, ...]:
    """A device for each engine.

    Args:
        device: of the only engine, or ``cuda`` with ``gpus``.
        devices: several, separated by commas; a CPU may be named more than once.
        gpus: how many, from the first on, or ``all``.
        count_gpus: tells how many this machine has; asked only where it matters.

    Raises:
        ServeError: the options contradict each other, or there are not so many GPUs.
    """
    if devices is not None and gpus is not None:
        raise ServeError("give --devices or --gpus, not both")
    if gpus is not None:
        return _first_gpus(device, gpus, count_gpus)
    if devices is None:
        return (device,)
    if device != "cpu":
        raise ServeError("give --device or --devices, not both")
    return _named(devices)


def _first_gpus(device: str, gpus: str, count_gpus: Callable[[], int]) -> tuple[str, ...]:
    if device not in ("cpu", _CUDA):
        raise ServeError("--gpus takes GPUs from the first on; name others with --devices")
    there = count_gpus()
    if gpus != ALL and not gpus.isdecimal():
        raise ServeError("--gpus is a number or 'all'")
    count = there if gpus == ALL else int(gpus)
    if not 1 <= count <= there:
        raise ServeError(f"this machine has {there} GPUs that PyTorch can use, not {count or 'one'}")
    return tuple(f"{_CUDA}:{index}" for index in range(count))


def _named(devices: str) -> tuple[str, ...]:
    names = [f"{_CUDA}:0" if (name := part.strip()) == _CUDA else name for part in devices.split(",")]
    if not all(names):
        raise ServeError("--devices names devices, separated by commas: cuda:0,cuda:1")
    for name in names:
        if name != "cpu" and names.count(name) > 1:
            raise ServeError(f"{name} is named twice: one engine takes most of a GPU's memory")
    return tuple(names)
