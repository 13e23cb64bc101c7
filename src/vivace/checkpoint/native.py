"""Our own folder format: ``model.safetensors`` and ``vivace.json``.

One weights file with keys ``lm.*``, ``flow.*`` and ``vocoder.*`` in our names, weight norm folded, loaded by
memory map; one JSON with the whole configuration and where the weights came from. Files beside the weights
keep their official names.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vivace.checkpoint.config_json import to_json
from vivace.checkpoint.configuration import FORMAT_VERSION
from vivace.checkpoint.files import NATIVE_JSON, NATIVE_WEIGHTS, check_file
from vivace.checkpoint.shapes import STAGES, Stage, weight_shapes
from vivace.checkpoint.torch_file import FLOAT_DTYPES, check_finite
from vivace.config import ModelConfig
from vivace.errors import ModelFolderError


def read_native_weights(folder: Path, config: ModelConfig) -> dict[Stage, dict[str, Tensor]]:
    """Every stage's weights, mapped from the file. Names, shapes and dtypes are checked; values are not read.

    Raises:
        ModelFolderError: the file is damaged or does not fit ``config``.
    """
    path = folder / NATIVE_WEIGHTS
    check_file(path, min_bytes=16)
    expected = {
        f"{stage}.{name}": shape for stage in STAGES for name, shape in weight_shapes(config, stage).items()
    }
    weights: dict[Stage, dict[str, Tensor]] = {stage: {} for stage in STAGES}
    try:
        with safe_open(path, framework="pt", device="cpu") as stored:
            found = set(stored.keys())
            if found != set(expected):
                odd = sorted(found ^ set(expected))
                raise ModelFolderError(
                    f"{path.name}: does not fit {NATIVE_JSON}: {len(odd)} weights missing or unexpected "
                    f"({', '.join(name[:80] for name in odd[:3])}); convert the model again"
                )
            for key, shape in expected.items():
                actual = tuple(stored.get_slice(key).get_shape())
                if actual != shape:
                    raise ModelFolderError(
                        f"{path.name}: tensor '{key}' has shape {list(actual)}, {NATIVE_JSON} asks for "
                        f"{list(shape)}"
                    )
                tensor = stored.get_tensor(key)
                if tensor.dtype not in FLOAT_DTYPES:
                    raise ModelFolderError(
                        f"{path.name}: tensor '{key}' is not of a float dtype; convert again"
                    )
                stage, _, name = key.partition(".")
                weights[_stage(stage)][name] = tensor
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(f"{path.name}: is cut off or damaged; convert the model again") from error
    return weights


def read_finite_weights(folder: Path, config: ModelConfig) -> dict[Stage, dict[str, Tensor]]:
    """As :func:`read_native_weights`, with every value looked at. Raises ModelFolderError."""
    weights = read_native_weights(folder, config)
    for stage, tensors in weights.items():
        for name, tensor in tensors.items():
            check_finite(tensor, f"{stage}.{name}", NATIVE_WEIGHTS, torch.float64)
    return weights


def _stage(name: str) -> Stage:
    return next(stage for stage in STAGES if stage == name)


def write_native(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[Stage, Mapping[str, Tensor]],
    dtype: torch.dtype,
    sources: Mapping[str, str],
) -> None:
    """Writes both files into ``folder``, which exists; flushed to the disk.

    Args:
        folder: where to; every other file of the model should already lie there, the JSON lists them.
        config: sizes of the model.
        weights: every weight, our names; finite in ``dtype``.
        dtype: of the stored weights; the vocoder, which always runs in float32, keeps its own.
        sources: SHA-256 of the files that the weights came from, by name.
    """
    tensors = {
        f"{stage}.{name}": tensor.to("cpu", tensor.dtype if stage == "vocoder" else dtype).contiguous()
        for stage in STAGES
        for name, tensor in weights[stage].items()
    }
    save_file(tensors, folder / NATIVE_WEIGHTS, metadata={"format": "pt"})
    os.chmod(folder / NATIVE_WEIGHTS, 0o644)  # the library makes it 0600
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    document = {
        "format": "vivace",
        "format_version": FORMAT_VERSION,
        "weights": NATIVE_WEIGHTS,
        "dtype": str(dtype).removeprefix("torch."),
        "config": to_json(config),
        "sources": dict(sources),
        "files": files,
    }
    (folder / NATIVE_JSON).write_text(
        json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` that becomes ``out`` when the block ends well, and vanishes
    otherwise.

    Raises:
        ModelFolderError: ``out`` exists and is not an empty folder, or cannot be made.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ModelFolderError(f"{out}: exists already; name a new folder")
    temporary = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ModelFolderError(f"{out}: cannot be made ({error.strerror}); choose another place") from error
    try:
        yield temporary
        os.rename(temporary, out)
        _flush(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
