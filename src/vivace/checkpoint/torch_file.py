"""Reads ``.pt`` files as what they should be: dictionaries of dense tensors.

Two fences, because each has had holes. The pickle inside the file is first scanned without running it: only
the few opcodes and the few names that a saved dictionary of tensors needs are let through. Then
``torch.load(weights_only=True)`` reads it, and every tensor is checked against its storage before its values
are touched. The archive itself must be stored uncompressed, so nothing can unpack to more than the file's
size.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, cast

import torch

from vivace.checkpoint.files import check_file
from vivace.errors import ModelFolderError

MAX_ENTRIES = 20_000
MAX_PICKLE_BYTES = 8 * 1024 * 1024
MAX_NAME = 300

FLOAT_DTYPES = frozenset({torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""What weights may be stored in; they are computed with in the dtype that the caller asks for."""

_OPCODE_NAMES = (
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE "
    "BINSTRING SHORT_BINSTRING EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS "
    "SETITEM SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET BINPERSID GLOBAL REDUCE BUILD"
)
_OPCODES = frozenset(_OPCODE_NAMES.split())
_NAMES = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_tensor_v3",
        "torch.storage UntypedStorage",
        "torch float8_e4m3fn",
        "torch._utils _rebuild_parameter",
        "torch FloatStorage",
        "torch HalfStorage",
        "torch BFloat16Storage",
        "torch DoubleStorage",
        "torch LongStorage",
        "torch IntStorage",
    }
)


def read_torch_file(path: Path) -> dict[str, Any]:
    """The dictionary in ``path``, its tensors mapped from the file where possible.

    Raises:
        ModelFolderError: the file is missing, damaged, no weights file, or holds anything but dense tensors,
            numbers and text.
    """
    check_file(path, min_bytes=64)
    entry_sizes = _check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds; each means that the file cannot be used
        raise ModelFolderError(f"{path.name}: cannot be read as weights; download it again") from error
    if not isinstance(content, dict):
        raise ModelFolderError(
            f"{path.name}: must hold a dictionary of tensors; this is another kind of file"
        )
    for key in content:
        if not isinstance(key, str) or len(key) > MAX_NAME:
            raise ModelFolderError(f"{path.name}: has an entry whose name is not a short text")
    # A mapped storage takes its length from the pickle; it must be that of its entry in the archive.
    if sorted(_storage_sizes(content)) != sorted(entry_sizes):
        raise ModelFolderError(f"{path.name}: its tensors are not those that it stores; download it again")
    return cast("dict[str, Any]", content)


def _storage_sizes(content: dict[Any, Any]) -> list[int]:
    """Bytes of each distinct storage, of a dictionary of tensors or of dictionaries of tensors."""
    sizes: dict[int, int] = {}
    for entry in content.values():
        for value in entry.values() if isinstance(entry, dict) else (entry,):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return [size for size in sizes.values() if size]


def check_tensor(value: object, key: str, file: str) -> torch.Tensor:
    """``value`` as a plain tensor, if it is dense and lies within its storage. Raises ModelFolderError."""
    if not isinstance(value, torch.Tensor):
        raise ModelFolderError(f"{file}: '{key}' is not a tensor; this is another kind of file")
    tensor = value.detach()
    if (
        tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_quantized
        or not tensor.is_contiguous()
    ):
        raise ModelFolderError(f"{file}: tensor '{key}' is not dense; only plain dense weights are accepted")
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.numel() and end > tensor.untyped_storage().nbytes():
        raise ModelFolderError(
            f"{file}: tensor '{key}' is larger than what the file holds; download it again"
        )
    return tensor


def check_finite(tensor: torch.Tensor, key: str, file: str, dtype: torch.dtype) -> None:
    """Raises ModelFolderError unless every value is a number that ``dtype`` can hold. One pass, no copy."""
    if tensor.numel() == 0:
        return
    if tensor.element_size() == 1:
        tensor = tensor.float()  # float8 has no arithmetic of its own
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    if not (float("-inf") < low and high < float("inf")):
        raise ModelFolderError(
            f"{file}: tensor '{key}' holds values that are not finite; download the file again"
        )
    if max(-low, high) > torch.finfo(dtype).max:
        raise ModelFolderError(
            f"{file}: tensor '{key}' does not fit {str(dtype).removeprefix('torch.')}; use bfloat16 or "
            f"float32"
        )


def _check_archive(path: Path) -> list[int]:
    """The zip archive holds one pickle and raw storages, uncompressed, and the pickle is harmless.

    Returns the bytes of each storage that is not empty.
    """
    with path.open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            raise ModelFolderError(
                f"{path.name}: is not a PyTorch weights file; download it again (files from before PyTorch "
                f"1.6 "
                "must be saved anew with torch.save)"
            )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_ENTRIES:
                raise ModelFolderError(
                    f"{path.name}: has more than {MAX_ENTRIES} entries; this is another kind of file"
                )
            pickles = [entry for entry in entries if entry.filename.endswith(".pkl")]
            if len(pickles) != 1 or not pickles[0].filename.endswith("/data.pkl"):
                raise ModelFolderError(
                    f"{path.name}: is an exported program, not a weights file; use the original .pt"
                )
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ModelFolderError(
                    f"{path.name}: is a compressed archive, not a weights file; use the original .pt"
                )
        # Two readers may find different entries in one archive (names that differ in case, a second directory), so
        # the pickle that is scanned is the one that torch's own reader will load.
        reader = torch._C.PyTorchFileReader(str(path))
        # Entries are stored as they are: no record is longer than the file says, or than the file.
        program = b"" if pickles[0].file_size > MAX_PICKLE_BYTES else reader.get_record("data.pkl")
        if not 0 < len(program) <= MAX_PICKLE_BYTES:
            raise ModelFolderError(f"{path.name}: describes too many objects; this is another kind of file")
    except (zipfile.BadZipFile, struct.error, ValueError, EOFError, OSError, RuntimeError) as error:
        raise ModelFolderError(f"{path.name}: is cut off or damaged; download it again") from error
    _scan_pickle(program, path.name)
    folder = pickles[0].filename.removesuffix("data.pkl") + "data/"
    return [entry.file_size for entry in entries if entry.filename.startswith(folder) and entry.file_size]


def _scan_pickle(program: bytes, file: str) -> None:
    """Looks at every opcode of a pickle without running it."""
    try:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name not in _OPCODES:
                raise ModelFolderError(
                    f"{file}: is not a plain dictionary of tensors ({opcode.name}); not loaded"
                )
            if opcode.name == "GLOBAL" and argument not in _NAMES:
                raise ModelFolderError(
                    f"{file}: asks for '{str(argument).replace(' ', '.')[:80]}', which weights do not need; "
                    f"not loaded"
                )
            if opcode.name in ("BINUNICODE", "LONG1") and len(str(argument)) > 4096:
                raise ModelFolderError(f"{file}: has an entry whose name is too long; not loaded")
    except ModelFolderError:
        raise
    except Exception as error:  # genops raises ValueError and others on damaged pickles
        raise ModelFolderError(f"{file}: is damaged; download it again") from error
