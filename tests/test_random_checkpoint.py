"""Random checkpoints: complete, finite, reproducible, and of the real sizes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from vivace.checkpoint import STAGES, num_parameters, open_model, read_official_voices, weight_shapes
from vivace.errors import ModelFolderError
from vivace.random_checkpoint import (
    _weight,
    full_config,
    random_weights,
    speaker_encoder,
    speech_tokenizer,
    tiny_config,
    write_random_checkpoint,
)
from vivace.text.tokenizer import TextTokenizer


def test_full_size_is_that_of_the_real_model() -> None:
    config = full_config()
    # Qwen2-0.5B has 494.0 M weights with its text embedding; speech embedding and head are 2 x 6761 x 896 more.
    assert num_parameters(config, "lm") == 494_032_768 + 2 * 6761 * 896
    shapes = weight_shapes(config, "flow")
    assert shapes["dit.transformer_blocks.21.attn_norm.linear.weight"] == (6144, 1024)
    assert "dit.transformer_blocks.22.attn_norm.linear.weight" not in shapes
    assert config.samples_per_token * config.token_rate_hz == 24_000


def test_folder_is_complete(random_model_folder: Path) -> None:
    model = open_model(random_model_folder)
    assert model.missing == {}
    assert all(getattr(model.paths, name) is not None for name in ("tokenizer", "speaker_encoder", "voices"))
    assert model.paths.tokenizer is not None
    tokenizer = TextTokenizer.from_folder(model.paths.tokenizer)
    text = "The cat sings in the rain, ça va? 你好"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the")) == 1  # a merge of two merges
    assert tokenizer.vocab_size <= model.config.lm.text_vocab_size
    voice = read_official_voices(random_model_folder / "spk2info.pt", 192, 80)["noise"]
    assert voice["flow_prompt_speech_token"].max() < model.config.flow.vocab_size
    assert len(voice["prompt_speech_feat"]) == 2 * len(voice["flow_prompt_speech_token"])


def test_weights_are_a_function_of_seed_and_name() -> None:
    config = tiny_config()
    first, again, other = (random_weights(config, seed, torch.float32) for seed in (1, 1, 2))
    rounded = random_weights(config, 1, torch.bfloat16)
    for stage in STAGES:
        assert {name: tuple(t.shape) for name, t in first[stage].items()} == weight_shapes(config, stage)
        for name, tensor in first[stage].items():
            assert torch.equal(tensor, again[stage][name])
            assert torch.equal(tensor.to(torch.bfloat16), rounded[stage][name])
    assert not torch.equal(first["lm"]["llm_decoder.weight"], other["lm"]["llm_decoder.weight"])
    assert not torch.equal(first["lm"]["llm_decoder.weight"], first["lm"]["speech_embedding.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_finite_and_of_a_sensible_size(random_model_folder: Path, dtype: torch.dtype) -> None:
    model = open_model(random_model_folder, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        ids = torch.randint(0, 256, (1, 24), generator=generator)
        logits = model.lm.logits(model.lm(model.lm.embed_text(ids))).float()
        tokens = torch.randint(0, 729, (30,), generator=generator)
        prompt = torch.randn(20, 80, generator=generator).to(dtype)
        embedding = torch.randn(192, generator=generator).to(dtype)
        mel = model.flow.generate(tokens, prompt, embedding, streaming=True).float()
        samples = model.vocoder(mel[None])
    for tensor in (logits, mel, samples):
        assert bool(torch.isfinite(tensor).all())
    assert 0.3 < float(logits.std()) < 3
    assert 0.3 < float(mel.std()) < 5
    assert 1e-3 < float(samples.std()) < 0.5
    assert float(samples.abs().max()) < model.config.vocoder.audio_limit


def test_deep_models_do_not_grow() -> None:
    # What one layer adds to the running sum is small at full size too: 24 layers of two additions each.
    shapes = weight_shapes(full_config(), "lm")
    name = "layers.23.mlp.down_proj.weight"
    weight = _weight("k", name, shapes[name])
    added = weight @ torch.randn(shapes[name][1], generator=torch.Generator().manual_seed(1))
    assert 0.1 < float(added.std()) < 0.4
    assert float(added.std()) * math.sqrt(48) < 2


def test_onnx_files_are_valid_and_have_the_official_inputs() -> None:
    config = tiny_config()
    for content in (speaker_encoder(config, 0), speech_tokenizer(config, 0)):
        onnx.checker.check_model(onnx.load_from_string(content), full_check=True)
    speaker = onnxruntime.InferenceSession(speaker_encoder(config, 0))
    rng = np.random.default_rng(0)
    embedding = speaker.run(None, {"input": rng.standard_normal((1, 103, 80)).astype(np.float32)})[0]
    assert embedding.shape == (1, 192)
    assert np.isfinite(embedding).all()
    tokenizer = onnxruntime.InferenceSession(speech_tokenizer(config, 0))
    for frames in (1, 4, 403):
        feats = rng.standard_normal((1, 128, frames)).astype(np.float32)
        indices = tokenizer.run(None, {"feats": feats, "feats_length": np.array([frames], np.int32)})[0]
        assert indices.shape == (1, math.ceil(frames / 4))
        assert indices.dtype == np.int32
        assert indices.min() >= 0
        assert indices.max() < config.flow.vocab_size
    assert len(set(indices[0])) > 10


def test_wrong_requests_are_refused_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelFolderError, match="--size must be one of full, tiny"):
        write_random_checkpoint(tmp_path / "out", size="huge")
    with pytest.raises(ModelFolderError, match="--dtype must be one of"):
        write_random_checkpoint(tmp_path / "out", dtype="int8")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ModelFolderError, match="exists already"):
        write_random_checkpoint(tmp_path / "used")

    def full_disk(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(ModelFolderError, match="free some space"):
        write_random_checkpoint(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
