"""What the environment says, and what other processes get of it. The only module that reads it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def api_keys() -> tuple[str, ...]:
    """Keys in ``$VIVACE_API_KEYS``, separated by commas or white space."""
    return tuple(os.environ.get("VIVACE_API_KEYS", "").replace(",", " ").split())


def voices_folder() -> Path:
    """Where stored voices live: ``$VIVACE_VOICES`` or ``~/.local/share/vivace/voices``."""
    given = os.environ.get("VIVACE_VOICES")
    return Path(given) if given else Path.home() / ".local" / "share" / "vivace" / "voices"


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$VIVACE_CACHE`` or ``~/.cache/vivace``."""
    given = os.environ.get("VIVACE_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "vivace"


def triton_folder() -> Path | None:
    """Where Triton is to keep compiled kernels: ``$TRITON_CACHE_DIR``, or beside ours if ``$VIVACE_CACHE`` is given;
    None: Triton's own choice."""
    given = os.environ.get("TRITON_CACHE_DIR")
    if given:
        return Path(given)
    return cache_folder() / "triton" if os.environ.get("VIVACE_CACHE") else None


def compiler_settings() -> dict[str, str]:
    """What the environment says to Triton, but for where it keeps things; other code may come of other values."""
    folders = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR")
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("TRITON_") and name not in folders
    }


def compiler_environment() -> dict[str, str]:
    """Environment of the process that compiles kernels: that of an engine's, without a GPU, with this one's modules."""
    modules = os.pathsep.join(path for path in sys.path if path)
    return engine_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": modules}


def cpu_threads() -> int | None:
    """Threads for tensor work on the CPU from ``$VIVACE_THREADS``; None leaves the library's choice."""
    given = os.environ.get("VIVACE_THREADS")
    return int(given) if given and given.isdecimal() and int(given) > 0 else None


def spin_briefly() -> None:
    """Lets OpenMP's threads sleep soon instead of spinning while they wait for each other.

    On a busy machine spinning threads hold the cores that the others need: the same command then took up to forty
    times as long. A short spin costs nothing that could be measured on a quiet one. Has an effect only before the
    tensor library is loaded; a value that the user has set stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def keep_to_ourselves() -> None:
    """Keeps ONNX Runtime from telling its maker's server of each use, with a mark of this machine in the user's folder.

    Has an effect only before it is imported; a value that the user has set stays.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def engine_environment() -> dict[str, str]:
    """Environment of the engine's own process: what libraries and drivers read, no keys and no other secrets."""
    names = ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "PYTHONHASHSEED")
    prefixes: tuple[str, ...] = ("LD_", "DYLD_", "LC_", "XDG_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "GOMP_")
    prefixes += ("MALLOC_", "CUDA_", "NVIDIA_", "TORCH", "PYTORCH_", "TRITON_", "NCCL_")
    ours = ("VIVACE_THREADS", "VIVACE_VOICES", "VIVACE_CACHE")
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name in ours or name.startswith(prefixes)
    }


def child_environment() -> dict[str, str]:
    """Environment of the process that decodes untrusted files: what finding shared libraries takes, no secrets,
    one thread."""
    names = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TEMP")
    passed_on = {name: os.environ[name] for name in names if name in os.environ}
    return passed_on | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
