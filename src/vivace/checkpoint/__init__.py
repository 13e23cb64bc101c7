"""The only reader of weights: official folders of all generations and our own format.

A model folder is data. Nothing of it is run, every name must be a known one, shapes are compared with the
configuration before anything of that size is allocated, and every value must be finite. Whatever is wrong is
one :class:`~vivace.errors.ModelFolderError` whose single line names the file and says what to do.

What reads or writes weights is loaded at first use: to look at a folder takes no tensor library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vivace.checkpoint.configuration import load_config
from vivace.checkpoint.files import LMVariant, ModelPaths, find_paths, model_folder
from vivace.checkpoint.shapes import STAGES, Stage, num_parameters, weight_shapes

if TYPE_CHECKING:
    from vivace.checkpoint.model import Model, convert_folder, open_model, read_weights
    from vivace.checkpoint.official import save_official, to_official_state, write_official
    from vivace.checkpoint.voices import OfficialVoice, read_official_voices

__all__ = [
    "STAGES",
    "LMVariant",
    "Model",
    "ModelPaths",
    "OfficialVoice",
    "Stage",
    "convert_folder",
    "find_paths",
    "load_config",
    "model_folder",
    "num_parameters",
    "open_model",
    "read_official_voices",
    "read_weights",
    "save_official",
    "to_official_state",
    "weight_shapes",
    "write_official",
]

_LAZY = {
    **dict.fromkeys(("Model", "convert_folder", "open_model", "read_weights"), "vivace.checkpoint.model"),
    **dict.fromkeys(("save_official", "to_official_state", "write_official"), "vivace.checkpoint.official"),
    **dict.fromkeys(("OfficialVoice", "read_official_voices"), "vivace.checkpoint.voices"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
