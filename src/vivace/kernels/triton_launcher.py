"""The modules in C through which Triton launches kernels: one for each list of argument types.

How Triton makes them is its own affair and may change: only compiling ahead depends on it, which can be done without.
"""

from __future__ import annotations

import hashlib
import sysconfig
from functools import cache
from typing import Any

import triton

from vivace.kernels.triton_cache import kept_in


@cache
def has_driver() -> bool:
    """Whether there is a CUDA driver, which the modules are linked with."""
    try:
        from triton.backends.nvidia.driver import library_dirs

        return bool(library_dirs())
    except Exception:  # Triton asserts, or a tool of the system is missing
        return False


def why_no_launches() -> str | None:
    """Why Triton cannot launch anything on this machine; None where it can."""
    try:
        assert triton.runtime.driver.active.utils is not None
    except Exception as error:  # no C compiler, no Python headers, no driver: of many kinds
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None


def build(compiled: Any) -> None:
    """Builds the module of a compiled kernel into Triton's cache, or finds it there."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)


def kept(compiled: Any) -> list[str]:
    """The file that ``build`` leaves."""
    from triton.backends.nvidia.driver import make_launcher
    from triton.runtime.build import platform_key

    source = make_launcher(
        dict(compiled.src.constants),
        dict(compiled.src.signature),
        getattr(compiled.metadata, "tensordesc_meta", None),
    )
    key = hashlib.sha256((source + platform_key()).encode()).hexdigest()
    file = kept_in(key, f"__triton_launcher{sysconfig.get_config_var('EXT_SUFFIX')}")
    return [] if file is None else [file]
