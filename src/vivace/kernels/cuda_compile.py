"""CUDA C++ → cubin at run time, with the NVRTC library that comes with PyTorch; compiled code is kept on disk.

Users need no compiler. A kept file is its SHA-256 followed by the code, so that a damaged one is noticed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch

from vivace.environment import cache_folder

_DIGEST_BYTES = 32


class KernelUnavailableError(RuntimeError):
    """A CUDA kernel cannot be compiled, loaded or launched here; the text says why. Callers take a plain path."""


class Compiler:
    """NVRTC.

    Raises:
        KernelUnavailableError: no library of the given names can be loaded.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._library = load_library(names)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: str, *, name: str, options: Sequence[str]) -> bytes:
        """Code for the architecture that the options name.

        Raises:
            KernelUnavailableError: with the compiler's log.
        """
        program = ctypes.c_void_p()
        file_name = f"{name}.cu".encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), file_name, 0, None, None)
        try:
            texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), texts)
            if status != 0:
                log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise KernelUnavailableError(f"{name}: {self._message(status)}\n{log}")
            return self._read(program, "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise KernelUnavailableError(f"{function}: {self._message(status)}")

    def _message(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())


@cache
def compiler() -> Compiler:
    """The NVRTC of this installation."""
    bundled = bundled_compilers(_packages(), torch.version.cuda or "")
    return Compiler([*bundled, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"])


def compiled(source: str, *, name: str, options: Sequence[str], architecture: str) -> bytes:
    """Code of ``source`` for ``architecture`` (such as "sm_90a"), from disk if it was compiled before.

    Raises:
        KernelUnavailableError: it does not compile, with the log, or there is no compiler.
    """
    nvrtc = compiler()
    kept = kept_file(source, name=name, options=options, architecture=architecture)
    code = read_kept(kept)
    if code is None:
        headers = [f"--include-path={folder}" for folder in bundled_headers(_packages())]
        code = nvrtc.compile(
            source, name=name, options=[f"--gpu-architecture={architecture}", *headers, *options]
        )
        keep(kept, code)
    return code


def kept_file(source: str, *, name: str, options: Sequence[str], architecture: str) -> Path:
    """Where ``compiled`` keeps the code. Raises as it does."""
    return cache_folder() / f"{name}-{cache_key(source, options, architecture, compiler().version)}.cubin"


def cache_key(source: str, options: Sequence[str], architecture: str, version: str) -> str:
    """Hexadecimal name of what these inputs compile to."""
    parts = (source, architecture, version, *options)
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def read_kept(file: Path) -> bytes | None:
    """Code in a kept file; None if it is missing, cannot be read or is damaged."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def keep(file: Path, code: bytes) -> None:
    """Writes a kept file in one step. A folder that cannot be written only means that nothing is kept."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=file.parent, prefix=".compiling-")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(hashlib.sha256(code).digest() + code)
            Path(written).replace(file)
        except OSError:
            Path(written).unlink(missing_ok=True)


def load_library(names: Sequence[str]) -> ctypes.CDLL:
    """The first of the shared libraries that loads.

    Raises:
        KernelUnavailableError: none does; with what was tried.
    """
    for name in names:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise KernelUnavailableError(f"cannot load a shared library; tried {', '.join(names)}")


def bundled_compilers(packages: Path, toolkit: str) -> list[str]:
    """NVRTC libraries in packages that PyTorch depends on; the one of its own toolkit (such as "13.0") first: a
    newer one may write code that the driver does not know."""
    own = f".so.{toolkit.partition('.')[0]}"
    found = sorted(_in_toolkit(packages, "lib", "libnvrtc.so.*"), reverse=True)
    return [str(path) for path in sorted(found, key=lambda path: not path.name.endswith(own))]


def bundled_headers(packages: Path) -> list[Path]:
    """Folders with the toolkit's header files (such as ``cuda_bf16.h``); empty where they are not installed."""
    return sorted(path.parent for path in _in_toolkit(packages, "include", "cuda_bf16.h"))


def _in_toolkit(packages: Path, folder: str, pattern: str) -> Iterator[Path]:
    return packages.glob(f"nvidia/*/{folder}/{pattern}")


def _packages() -> Path:
    """Where PyTorch and its companions are installed."""
    return Path(torch.__file__).parent.parent
