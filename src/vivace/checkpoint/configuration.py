"""The configuration of a model folder of either format, read without any weights, or what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vivace.checkpoint.config_check import check_config
from vivace.checkpoint.config_json import from_json
from vivace.checkpoint.files import NATIVE_JSON, NATIVE_WEIGHTS, check_file, check_generation, is_native
from vivace.checkpoint.yaml_config import read_official_config
from vivace.config import ModelConfig
from vivace.errors import ModelFolderError

FORMAT_VERSION = 1
_KEYS = frozenset({"format", "format_version", "weights", "dtype", "config", "sources", "files"})
_MAX_JSON_BYTES = 1024 * 1024


def read_native_json(folder: Path) -> dict[str, Any]:
    """``vivace.json`` with its keys checked. Raises ModelFolderError."""
    path = folder / NATIVE_JSON
    check_file(path)
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ModelFolderError(f"{NATIVE_JSON}: is too large; convert the model again")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{NATIVE_JSON}: is not valid JSON; convert the model again") from error
    if not isinstance(values, dict) or values.get("format") != "vivace":
        raise ModelFolderError(f"{NATIVE_JSON}: is not a Vivace model; convert the model again")
    for key in values:
        if key not in _KEYS:
            raise ModelFolderError(
                f"{NATIVE_JSON}: unknown key '{key[:60]}'; this Vivace is older than the file"
            )
    if values.get("format_version") != FORMAT_VERSION:
        raise ModelFolderError(
            f"{NATIVE_JSON}: has another format version than {FORMAT_VERSION}; convert the model again with "
            f"this Vivace"
        )
    if values.get("weights") != NATIVE_WEIGHTS:
        raise ModelFolderError(f"{NATIVE_JSON}: weights must be {NATIVE_WEIGHTS}; convert the model again")
    return values


def read_native_config(folder: Path) -> ModelConfig:
    """Raises ModelFolderError: see :func:`read_native_json`; also for impossible sizes."""
    config = from_json(ModelConfig, read_native_json(folder).get("config"), NATIVE_JSON)
    check_config(config, NATIVE_JSON)
    return config


def load_config(folder: str | Path) -> ModelConfig:
    """The configuration of a model folder of either format. Raises ModelFolderError."""
    folder = Path(folder)
    check_generation(folder)
    return read_native_config(folder) if is_native(folder) else read_official_config(folder)
