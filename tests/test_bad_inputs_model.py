"""Rows M15 and M20 of the bad inputs. The other rows M: ``test_checkpoint.py``, ``test_model_yaml.py``.

ONNX Runtime runs these files: one that computes without end is not stopped. Use those of a source you trust.
"""

import shutil

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from tests.helpers import speech_like_wav
from vivace import Engine, ModelFolderError
from vivace.checkpoint.loading import check_memory
from vivace.random_checkpoint import full_config

FILES = ("campplus.onnx", "speech_tokenizer_v3.onnx")


@pytest.fixture
def folder(random_model_folder, tmp_path):
    return shutil.copytree(random_model_folder, tmp_path / "model")


def _replaced(folder, file, change):
    """The same inputs and outputs, and something else in between."""
    model = onnx.load(folder / file)
    change(model)
    onnx.save(model, folder / file)


def _outside(model):
    """Values that lie in a file outside the folder."""
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "../secret"), ("offset", "0"), ("length", "4096")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def _unknown_operator(model):
    model.graph.node.insert(0, helper.make_node("Anything", [], ["nothing"], domain="evil.example"))
    model.opset_import.append(helper.make_opsetid("evil.example", 1))


def _huge(model):
    """An initial value that claims two gigabytes."""
    tensor = model.graph.initializer[0]
    tensor.dims[:] = [2**29]


def _other_names(model):
    model.graph.input[0].name = "surprise"


@pytest.mark.parametrize("change", [_outside, _unknown_operator, _huge, _other_names])
@pytest.mark.parametrize("file", FILES)
def test_M15_files_that_are_not_what_they_should_be(folder, file, change):
    """The file is named, and everything that does not need it works."""
    (folder.parent / "secret").write_bytes(bytes(1 << 16))
    _replaced(folder, file, change)
    with Engine.open(folder, warm_up=False) as engine:
        with pytest.raises(ModelFolderError) as caught:
            engine.make_voice(speech_like_wav())
        assert file in caught.value.message
        assert "\n" not in caught.value.message
        assert engine.voices.names()


def test_M20_a_model_larger_than_the_memory_of_the_gpu(monkeypatch):
    """Both sizes are named, before anything is put there."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (2**30, 2**34))
    with pytest.raises(ModelFolderError, match=r"needs \d+\.\d GiB .* has 1\.0 GiB"):
        check_memory(full_config(), torch.device("cuda"), torch.float32)
