"""Where Triton keeps compiled kernels: a folder that can be written."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from pathlib import Path

from triton import knobs
from triton.runtime.cache import get_cache_manager

from vivace.environment import triton_folder

_log = logging.getLogger(__name__)


def use_cache_folder() -> Path:
    """Makes Triton keep what it compiles in a folder that can be written; warns where that ends with the process.

    ``$TRITON_CACHE_DIR``, else ``$VIVACE_CACHE/triton``, else Triton's own. Triton fails where it cannot write.
    """
    folder = triton_folder() or Path(knobs.cache.dir)
    if not _is_writable(folder):
        own = Path(tempfile.mkdtemp(prefix="vivace-kernels-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        _log.warning("%s cannot be written: kernels are compiled anew at every start", folder)
        folder = own
    knobs.cache.dir = str(folder)
    return folder


def kept_in(key: str, name: str) -> str | None:
    """Where Triton keeps a file; None where it keeps things elsewhere than in folders."""
    folder = getattr(get_cache_manager(key), "cache_dir", None)
    return None if folder is None else str(Path(folder) / name)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
