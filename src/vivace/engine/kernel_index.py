"""Which files hold the kernels of an engine: written when all of them are compiled, looked at before the next start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from vivace.engine.kernel_plan import EngineKind
from vivace.environment import cache_folder, compiler_settings

END = {"ended": True}
"""Last line of the process that compiles. Whoever waits for its end waits for what its libraries have started, too."""

_PACKAGES = ("triton", "torch", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


def index_file(kind: EngineKind, folder: Path) -> Path:
    """The index of an engine's kernels, some of which Triton keeps in ``folder``.

    Another version of Vivace or of a compiler, and other settings of it, have another one.
    """
    parts = (
        repr(kind),
        str(folder),
        _sources(),
        str(torch.version.cuda),
        repr(sorted(compiler_settings().items())),
    )
    digest = hashlib.sha256("\0".join((*parts, *map(_version, _PACKAGES))).encode())
    return cache_folder() / f"kernels-{digest.hexdigest()[:32]}.json"


def is_complete(index: Path) -> bool:
    """Whether all kernels of an index are there."""
    try:
        files = json.loads(index.read_text())
        return isinstance(files, list) and all(Path(file).exists() for file in files)
    except (OSError, ValueError, TypeError):
        return False


def write_index(index: Path, files: Sequence[str]) -> None:
    """In one step. A folder that cannot be written only means that the next start looks for kernels again."""
    with contextlib.suppress(OSError):
        index.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=index.parent, prefix=".index-")
        try:
            with os.fdopen(handle, "w") as stream:
                json.dump(sorted(set(files)), stream)
            Path(written).replace(index)
        except OSError:
            Path(written).unlink(missing_ok=True)


@cache
def _sources() -> str:
    """Digest of all code that kernels, and the choice of them, are made of."""
    package, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".cu") and path.parent.name in ("kernels", "models", "layers", "engine"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
