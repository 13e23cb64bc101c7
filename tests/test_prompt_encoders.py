"""Prompt encoders: small ONNX graphs with known answers, wrong files, wrong audio."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from vivace.audio.features import fbank80, log_mel128
from vivace.errors import InvalidAudioError, ModelFolderError, SynthesisError
from vivace.models.prompt_encoders import SpeakerEncoder, SpeechTokenizer


def model_bytes(nodes, inputs, outputs, constants=()):
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs],
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    return model.SerializeToString()


def tokenizer_bytes(kind=TensorProto.FLOAT, bins=128, offset=100, length_kind=TensorProto.INT32):
    """Tokens: 10 · bin 3 of every fourth frame, rounded down, + ``offset``; checks feats_length, too."""
    nodes = [
        helper.make_node("Cast", ["feats_length"], ["stop"], to=TensorProto.INT64),
        helper.make_node("Slice", ["feats", "start", "stop", "time", "step"], ["every4"]),
        helper.make_node("Gather", ["every4", "bin"], ["row"], axis=1),
        helper.make_node("Mul", ["row", "ten"], ["scaled"]),
        helper.make_node("Floor", ["scaled"], ["whole"]),
        helper.make_node("Add", ["whole", "offset"], ["moved"]),
        helper.make_node("Cast", ["moved"], ["indices"], to=TensorProto.INT32),
    ]
    constants = [
        ("start", np.array([0])),
        ("time", np.array([2])),
        ("step", np.array([4])),
        ("bin", np.array(3)),
        ("ten", np.float32(10)),
        ("offset", np.float32(offset)),
    ]
    inputs = [("feats", kind, [1, bins, "T"]), ("feats_length", length_kind, [1])]
    return model_bytes(nodes, inputs, [("indices", TensorProto.INT32, [1, "N"])], constants)


def speaker_bytes(size=192, factor=1.0, banks=80):
    """Embedding: the largest value of the filter bank over time, bank by bank, padded with ones."""
    nodes = [
        helper.make_node("ReduceMax", ["input"], ["top"], axes=[1], keepdims=0),
        helper.make_node("Mul", ["top", "factor"], ["scaled"]),
        helper.make_node("Concat", ["scaled", "rest"], ["output"], axis=1),
    ]
    constants = [
        ("factor", np.float32(factor)),
        ("rest", np.full((1, size - banks), factor, np.float32)),
    ]
    inputs = [("input", TensorProto.FLOAT, ["B", "T", banks])]
    return model_bytes(nodes, inputs, [("output", TensorProto.FLOAT, ["B", size])], constants)


@pytest.fixture
def samples():
    generator = np.random.default_rng(5)
    return (0.1 * generator.standard_normal(16_000 * 2 + 77)).astype(np.float32)


def test_tokens_are_those_of_the_graph(samples, tmp_path):
    path = tmp_path / "speech_tokenizer_v3.onnx"
    path.write_bytes(tokenizer_bytes())
    tokens = SpeechTokenizer(path, 243).encode(samples)
    expected = np.floor(log_mel128(samples)[3, ::4] * np.float32(10)).astype(np.int32) + 100
    assert tokens.dtype == np.int32
    assert len(tokens) == 50
    np.testing.assert_array_equal(tokens, expected)


def test_embedding_is_that_of_the_graph(samples):
    embedding = SpeakerEncoder(speaker_bytes()).embed(samples)
    assert embedding.dtype == np.float32
    np.testing.assert_array_equal(embedding[:80], fbank80(samples).max(axis=0))
    np.testing.assert_array_equal(embedding[80:], 1.0)


@pytest.mark.parametrize(
    "data",
    [
        b"not an ONNX file at all",
        tokenizer_bytes(bins=80),
        tokenizer_bytes(kind=TensorProto.DOUBLE),
        tokenizer_bytes(length_kind=TensorProto.INT64),
        speaker_bytes(),
    ],
)
def test_a_wrong_tokenizer_file_is_named(data, tmp_path):
    path = tmp_path / "speech_tokenizer_v3.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelFolderError, match=r"^speech_tokenizer_v3\.onnx: ") as caught:
        SpeechTokenizer(path, 243)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("data", [b"", tokenizer_bytes(), speaker_bytes(banks=40), speaker_bytes(size=256)])
def test_a_wrong_speaker_file_is_named(data):
    with pytest.raises(ModelFolderError, match=r"^campplus\.onnx: "):
        SpeakerEncoder(data)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelFolderError, match=r"^campplus\.onnx: is missing"):
        SpeakerEncoder(tmp_path / "campplus.onnx")


@pytest.mark.parametrize("offset", [-100, 500])
def test_tokens_of_another_codebook_are_refused(samples, offset):
    tokenizer = SpeechTokenizer(tokenizer_bytes(offset=offset), 243)
    with pytest.raises(ModelFolderError, match="came with this model"):
        tokenizer.encode(samples)


@pytest.mark.parametrize("factor", [np.nan, np.inf, 0.0])
def test_an_unusable_embedding_is_refused(samples, factor):
    with pytest.raises(SynthesisError):
        SpeakerEncoder(speaker_bytes(factor=factor)).embed(samples)


def test_audio_is_checked_before_the_network(samples):
    tokenizer, encoder = SpeechTokenizer(tokenizer_bytes(), 243), SpeakerEncoder(speaker_bytes())
    broken = samples.copy()
    broken[1000] = np.nan
    for audio, code in [
        (samples[:1599], "audio_too_short"),
        (np.zeros(0, np.float32), "audio_too_short"),
        (np.zeros(30 * 16_000 + 1, np.float32), "audio_too_long"),
        (broken, "non_finite_samples"),
    ]:
        for call in (tokenizer.encode, encoder.embed):
            with pytest.raises(InvalidAudioError) as caught:
                call(audio)
            assert caught.value.code == code


def test_thirty_seconds_pass():
    audio = np.tile(np.sin(np.arange(16_000) * 0.05).astype(np.float32) * 0.3, 30)
    assert len(SpeechTokenizer(tokenizer_bytes(), 243).encode(audio)) == 750
    assert SpeakerEncoder(speaker_bytes()).embed(audio).shape == (192,)


def test_an_unknown_provider_falls_back_to_the_cpu(samples):
    encoder = SpeakerEncoder(speaker_bytes(), providers=("NoSuchExecutionProvider", "CPUExecutionProvider"))
    assert encoder.embed(samples).shape == (192,)
