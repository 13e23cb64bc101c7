"""The only reader of weights: official folders of all generations and our own format.

A model folder is data. Nothing of it is run, every name must be a known one, shapes are compared with the
configuration before anything of that size is allocated, and every value must be finite. Whatever is wrong is
one :class:`~vivace.errors.ModelFolderError` whose single line names the file and says what to do.
"""

from vivace.checkpoint.files import ModelPaths, find_paths
from vivace.checkpoint.model import Model, convert_folder, load_config, open_model, read_weights
from vivace.checkpoint.official import LMVariant, save_official, to_official_state, write_official
from vivace.checkpoint.shapes import STAGES, Stage, num_parameters, weight_shapes
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
    "num_parameters",
    "open_model",
    "read_official_voices",
    "read_weights",
    "save_official",
    "to_official_state",
    "weight_shapes",
    "write_official",
]
