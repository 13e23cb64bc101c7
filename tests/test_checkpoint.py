"""Weights: read exactly, converted without loss, and refused with one line whenever anything is off."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vivace.checkpoint import (
    STAGES,
    Model,
    Stage,
    convert_folder,
    load_config,
    num_parameters,
    open_model,
    read_official_voices,
    read_weights,
    save_official,
    to_official_state,
    weight_shapes,
)
from vivace.checkpoint import names as official_names
from vivace.checkpoint.loading import resolve_device
from vivace.checkpoint.official import read_official_stage
from vivace.checkpoint.torch_file import read_torch_file
from vivace.errors import ModelFolderError
from vivace.models.flow import FlowModel
from vivace.models.hift import CausalHiFT
from vivace.models.speech_lm import SpeechLM

FILES: dict[Stage, str] = {"lm": "llm.pt", "flow": "flow.pt", "vocoder": "hift.pt"}


def modules(model: Model) -> dict[Stage, nn.Module]:
    return {"lm": model.lm, "flow": model.flow, "vocoder": model.vocoder}


def assert_same_weights(first: Model, second: Model) -> None:
    for stage in STAGES:
        expected = dict(modules(first)[stage].named_parameters())
        found = dict(modules(second)[stage].named_parameters())
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.fixture
def folder(random_model_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(random_model_folder, tmp_path / "model"))


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def refuse(folder: Path, reason: str, file: str | None = None) -> None:
    with pytest.raises(ModelFolderError, match=reason) as caught:
        open_model(folder)
    assert "\n" not in caught.value.message
    if file is not None:
        assert caught.value.message.startswith(f"{file}: ")


# --- what is there is read exactly


def test_golden_weights_arrive_unchanged(golden_folder: Path, tiny_model_folder: Path) -> None:
    model = open_model(tiny_model_folder)
    with np.load(golden_folder / "weights.npz") as packed:
        for stage, prefix in (("lm", "llm"), ("flow", "flow"), ("vocoder", "hift")):
            for name, parameter in modules(model)[stage].named_parameters():
                official = f"{prefix}/{official_names.to_official_name(stage, name)}"
                if official in packed.files:
                    expected = packed[official]
                else:
                    gain = packed[official.removesuffix("weight") + "parametrizations.weight.original0"]
                    v = packed[official.removesuffix("weight") + "parametrizations.weight.original1"]
                    norm = np.sqrt((v.astype(np.float64) ** 2).sum((1, 2), keepdims=True))
                    expected = v * gain / norm
                    # Folded in float32: a product and a norm of up to 400 terms, each rounded once.
                    np.testing.assert_allclose(parameter.numpy(), expected, rtol=1e-6, atol=1e-9)
                    continue
                np.testing.assert_array_equal(parameter.numpy(), expected)
    assert not any(module.training for module in modules(model).values())
    assert not any(p.requires_grad for module in modules(model).values() for p in module.parameters())
    assert set(model.missing) == {"tokenizer", "speaker_encoder", "speech_tokenizer", "voices"}
    assert model.missing["speaker_encoder"].startswith("campplus.onnx: is missing")


def test_buffers_keep_what_the_module_computed(random_model_folder: Path) -> None:
    model = open_model(random_model_folder, dtype=torch.bfloat16)
    fresh = FlowModel(model.config.flow)
    for name, buffer in fresh.named_buffers():
        assert torch.equal(dict(model.flow.named_buffers())[name], buffer)
    assert torch.equal(model.flow.noise, fresh.noise)


def test_shape_table_agrees_with_the_modules(random_model_folder: Path) -> None:
    config = load_config(random_model_folder)
    uneven = dataclasses.replace(
        config,
        lm=dataclasses.replace(config.lm, hidden_size=48, head_dim=16, num_heads=4, num_kv_heads=2),
        flow=dataclasses.replace(
            config.flow,
            lookahead_tokens=2,
            lookahead_channels=24,
            dit=dataclasses.replace(config.flow.dit, dim=64, depth=3, heads=3, dim_head=16, ff_mult=3),
        ),
        vocoder=dataclasses.replace(
            config.vocoder,
            base_channels=48,
            upsample_rates=(6, 4),
            upsample_kernel_sizes=(12, 8),
            istft_n_fft=40,
            istft_hop=20,
            resblock_kernel_sizes=(3, 5),
            resblock_dilation_sizes=((1, 2), (1, 3, 5)),
            source_resblock_kernel_sizes=(3, 5),
            source_resblock_dilation_sizes=((1, 3), (1,)),
            nb_harmonics=5,
            conv_pre_lookahead_frames=5,
        ),
    )
    for sizes in (config, uneven):
        built: dict[Stage, nn.Module] = {
            "lm": SpeechLM(sizes.lm),
            "flow": FlowModel(sizes.flow),
            "vocoder": CausalHiFT(sizes.vocoder),
        }
        for stage in STAGES:
            parameters = {name: tuple(p.shape) for name, p in built[stage].named_parameters()}
            assert parameters == weight_shapes(sizes, stage)
            assert num_parameters(sizes, stage) == sum(p.numel() for p in built[stage].parameters())


def test_names_are_bijective(random_model_folder: Path) -> None:
    config = load_config(random_model_folder)
    for stage in STAGES:
        ours = list(weight_shapes(config, stage))
        official = [official_names.to_official_name(stage, name) for name in ours]
        assert len(set(official)) == len(ours)
        assert [official_names.to_our_name(stage, name) for name in official] == ours
    assert official_names.to_our_name("lm", "llm.model.lm_head.weight") is None
    with pytest.raises(KeyError):
        official_names.to_official_name("flow", "lm.norm.weight")


def test_official_state_has_the_reference_keys(golden_folder: Path, tiny_model_folder: Path) -> None:
    model = open_model(tiny_model_folder)
    with np.load(golden_folder / "weights.npz") as packed:
        for stage, prefix in (("lm", "llm"), ("flow", "flow"), ("vocoder", "hift")):
            state = to_official_state(stage, modules(model)[stage], model.config)
            expected = {
                name.removeprefix(f"{prefix}/") for name in packed.files if name.startswith(f"{prefix}/")
            }
            assert state.keys() == expected
            shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
            assert shapes == {name: packed[f"{prefix}/{name}"].shape for name in expected}
        inv_freq = to_official_state("flow", model.flow, model.config)[official_names.ROTARY]
        golden = packed[f"flow/{official_names.ROTARY}"]
        np.testing.assert_allclose(inv_freq.numpy(), golden, rtol=1e-6)  # float32 powers, one rounding apart


def test_saved_official_folder_reads_back(tiny_model_folder: Path, tmp_path: Path) -> None:
    model = open_model(tiny_model_folder)
    save_official(tmp_path / "copy", model.config, model.lm, model.flow, model.vocoder)
    again = open_model(tmp_path / "copy")
    assert_same_weights(model, again)
    assert dataclasses.replace(again.config, name=model.config.name) == model.config
    # The tied text head is stored once, as in official files.
    assert (tmp_path / "copy" / "llm.pt").stat().st_size < 1.01 * (
        tiny_model_folder / "llm.pt"
    ).stat().st_size


def test_weights_that_overflow_are_not_saved(random_model_folder: Path, tmp_path: Path) -> None:
    model = open_model(random_model_folder)
    model.flow.input_embedding.weight[3, 4] = 70_000.0
    with pytest.raises(
        ModelFolderError, match=r"^flow\.pt: tensor 'input_embedding\.weight' does not fit float16"
    ):
        save_official(tmp_path, model.config, model.lm, model.flow, model.vocoder, torch.float16)
    assert not (tmp_path / "flow.pt").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_extra_entries_of_official_files_are_tolerated(folder: Path, stage: Stage) -> None:
    expected = open_model(folder)
    state = load(folder / FILES[stage])
    torch.save(OrderedDict(state) | {"epoch": 3, "step": 12_000}, folder / FILES[stage])
    assert_same_weights(expected, open_model(folder))


def test_weights_without_text_head_and_rotary_frequencies_are_read(folder: Path) -> None:
    expected = open_model(folder)
    for file, extra in (("llm.pt", official_names.TEXT_HEAD), ("flow.pt", official_names.ROTARY)):
        state = load(folder / file)
        del state[extra]
        torch.save(state, folder / file)
    assert_same_weights(expected, open_model(folder))


@pytest.mark.parametrize("style", ["old weight norm", "folded", "generator prefix", "parameters", "half"])
def test_spellings_of_the_vocoder_file(folder: Path, style: str) -> None:
    expected = open_model(folder)
    state = load(folder / "hift.pt")
    new, old = (
        ("parametrizations.weight.original0", "parametrizations.weight.original1"),
        ("weight_g", "weight_v"),
    )
    match style:
        case "old weight norm":
            state = {n.replace(new[0], old[0]).replace(new[1], old[1]): t for n, t in state.items()}
        case "folded":
            state = {name: p.detach() for name, p in expected.vocoder.named_parameters()}
        case "generator prefix":
            state = {f"generator.{name}": tensor for name, tensor in state.items()}
        case "parameters":
            state = {name: nn.Parameter(tensor) for name, tensor in state.items()}
        case "half":
            state = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    torch.save(state, folder / "hift.pt")
    found = open_model(folder)
    if style != "half":
        assert_same_weights(expected, found)
        return
    for name, parameter in found.vocoder.named_parameters():
        assert parameter.dtype is torch.float32
        # Gain and direction each rounded to 8 bits.
        torch.testing.assert_close(parameter, expected.vocoder.get_parameter(name), rtol=2e-2, atol=1e-3)


def test_reinforced_language_model_is_an_option(folder: Path) -> None:
    state = load(folder / "llm.pt")
    state["llm.model.model.norm.weight"] = state["llm.model.model.norm.weight"] * 2
    torch.save(state, folder / "llm.rl.pt")
    base, tuned = open_model(folder), open_model(folder, lm_variant="rl")
    assert torch.equal(base.lm.norm.weight * 2, tuned.lm.norm.weight)
    (folder / "llm.rl.pt").unlink()
    with pytest.raises(ModelFolderError, match=r"^llm\.rl\.pt: is missing"):
        open_model(folder, lm_variant="rl")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_that_of_language_model_and_flow(random_model_folder: Path, dtype: torch.dtype) -> None:
    exact, model = open_model(random_model_folder), open_model(random_model_folder, dtype=dtype)
    for stage in ("lm", "flow"):
        for name, parameter in modules(model)[stage].named_parameters():
            assert parameter.dtype is dtype
            assert torch.equal(parameter, modules(exact)[stage].get_parameter(name).to(dtype))
    assert {p.dtype for p in model.vocoder.parameters()} == {torch.float32}


def test_loading_draws_no_random_numbers(random_model_folder: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    open_model(random_model_folder)
    assert torch.equal(torch.rand(4), expected)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    for device in ("cuda:99", "tpu", "mps", "-x", ""):
        with pytest.raises(ModelFolderError, match="--device"):
            resolve_device(device)


# --- our own format


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_converted_folder_equals_the_original(random_model_folder: Path, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "deep" / "converted"
    summary = convert_folder(random_model_folder, out, dtype=dtype)
    json.dumps(summary)
    expected, found = open_model(random_model_folder), open_model(out)
    for stage in STAGES:
        rounded = torch.float32 if stage == "vocoder" else getattr(torch, dtype)
        for name, parameter in modules(found)[stage].named_parameters():
            assert torch.equal(parameter, modules(expected)[stage].get_parameter(name).to(rounded).float())
    assert found.config == expected.config
    assert found.missing == {}
    for path in (
        "spk2info.pt",
        "campplus.onnx",
        "speech_tokenizer_v3.onnx",
        "CosyVoice-BlankEN/vocab.json",
        "CosyVoice-BlankEN/merges.txt",
    ):
        assert (out / path).read_bytes() == (random_model_folder / path).read_bytes()
    document = json.loads((out / "vivace.json").read_text())
    assert document["sources"].keys() == {"cosyvoice3.yaml", "llm.pt", "flow.pt", "hift.pt"}
    assert "CosyVoice-BlankEN/vocab.json" in document["files"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["converted"]


def test_converting_twice_changes_nothing(random_model_folder: Path, tmp_path: Path) -> None:
    convert_folder(random_model_folder, tmp_path / "one")
    convert_folder(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


def test_stored_voices_are_copied_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    (folder / "voices").mkdir()
    (folder / "voices" / "a.safetensors").write_bytes(b"voice")
    (folder / "voices" / "run.py").write_text("raise SystemExit")
    (folder / "CosyVoice-BlankEN" / "modeling.py").write_text("raise SystemExit")
    (folder / "other.bin").write_bytes(b"x")
    (folder / "lexicon.xz").write_bytes(b"x")
    convert_folder(folder, tmp_path / "out")
    copied = {
        str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert {"voices/a.safetensors", "lexicon.xz"} <= copied
    assert not {path for path in copied if path.endswith(".py") or path == "other.bin"}


def test_native_weights_are_mapped_not_copied(random_model_folder: Path, tmp_path: Path) -> None:
    convert_folder(random_model_folder, tmp_path / "out")
    model = open_model(tmp_path / "out")
    addresses = [p.data_ptr() for p in model.lm.parameters()]
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if "model.safetensors" in line and str(tmp_path) in line]
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]
    assert all(any(low <= address < high for low, high in ranges) for address in addresses)


def test_official_weights_are_copied_so_that_the_folder_may_be_written(folder: Path) -> None:
    model = open_model(folder)
    expected = {name: p.clone() for name, p in model.vocoder.named_parameters()}
    (folder / "hift.pt").write_bytes(b"")  # ends the process if a parameter is still mapped
    assert all(torch.equal(p, expected[name]) for name, p in model.vocoder.named_parameters())
    save_official(folder, model.config, model.lm, model.flow, model.vocoder)
    assert_same_weights(model, open_model(folder))


def test_a_new_folder_gets_nothing_from_outside_the_old_one(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"a": 0}')
    vocabulary = folder / "CosyVoice-BlankEN" / "vocab.json"
    aside = folder / "vocab.json"
    vocabulary.rename(aside)
    vocabulary.symlink_to("../vocab.json")
    convert_folder(folder, tmp_path / "linked within")
    copied = tmp_path / "linked within" / "CosyVoice-BlankEN" / "vocab.json"
    assert not copied.is_symlink()
    assert copied.read_bytes() == aside.read_bytes()

    vocabulary.unlink()
    vocabulary.symlink_to(secret)
    with pytest.raises(ModelFolderError, match=r"CosyVoice-BlankEN/vocab\.json: is a link that leads out"):
        convert_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_links_of_a_download_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    folder.rename(snapshot)
    for number, path in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    convert_folder(snapshot, tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_symlink()
    assert (tmp_path / "out" / "campplus.onnx").read_bytes() == (snapshot / "campplus.onnx").read_bytes()


def test_weights_that_overflow_are_not_converted(folder: Path, tmp_path: Path) -> None:
    state = load(folder / "flow.pt")
    state["input_embedding.weight"][3, 4] = 70_000.0
    torch.save(state, folder / "flow.pt")
    with pytest.raises(ModelFolderError, match=r"'flow\.input_embedding\.weight' does not fit float16"):
        convert_folder(folder, tmp_path / "out", dtype="float16")
    with pytest.raises(
        ModelFolderError, match=r"^flow\.pt: tensor 'input_embedding\.weight' does not fit float16"
    ):
        open_model(folder, dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    convert_folder(folder, tmp_path / "out", dtype="bfloat16")


def calls_without_failure(folder: Path, out: Path) -> bool:
    try:
        convert_folder(folder, out)
    except ModelFolderError as error:
        return "No space left" not in error.message
    return True


def test_conversion_never_leaves_half_a_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "place" / "out"
    calls = 0

    def failing(nth: int) -> Callable[[int], None]:
        def fsync(_descriptor: int) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise OSError(28, "No space left on device")

        return fsync

    nth = 0
    while True:  # fail at every flush in turn, until none is left to fail
        nth, calls = nth + 1, 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing(nth))
            if calls_without_failure(folder, out):
                break
        left = list(out.parent.iterdir())
        assert left in ([], [out])  # the last flush comes after the rename
        if left:
            open_model(out)
            shutil.rmtree(out)
    assert nth > 3
    open_model(out)


def test_output_must_be_new(random_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    convert_folder(random_model_folder, tmp_path / "empty")
    for out in (tmp_path / "empty", tmp_path / "empty" / "vivace.json"):
        with pytest.raises(ModelFolderError, match="exists already"):
            convert_folder(random_model_folder, out)
    with pytest.raises(ModelFolderError, match="--dtype must be one of"):
        convert_folder(random_model_folder, tmp_path / "x", dtype="int8")


def _edit_json(path: Path, **changes: object) -> None:
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))


def _drop_tensor(path: Path) -> None:
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name != "lm.norm.weight"}, path)


def _reshape_tensor(path: Path) -> None:
    save_file(load_file(path) | {"lm.norm.weight": torch.ones(3)}, path)


def _integer_tensor(path: Path) -> None:
    tensors = load_file(path)
    save_file(tensors | {"lm.norm.weight": tensors["lm.norm.weight"].to(torch.int32)}, path)


def _poison_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors["lm.norm.weight"][3] = float("nan")
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("vivace.json", lambda p: _edit_json(p, surprise=1), "unknown key 'surprise'"),
        ("vivace.json", lambda p: _edit_json(p, format_version=2), "another format version"),
        ("vivace.json", lambda p: _edit_json(p, format="x"), "not a Vivace model"),
        ("vivace.json", lambda p: _edit_json(p, weights="../../x"), "weights must be"),
        ("vivace.json", lambda p: _edit_json(p, config=...), "config must be an object"),
        ("vivace.json", lambda p: p.write_text("{"), "not valid JSON"),
        ("vivace.json", lambda p: p.write_text("[" * 100_000), "not valid JSON"),
        ("vivace.json", lambda p: p.write_bytes(b""), "is empty"),
        ("model.safetensors", lambda p: p.unlink(), "is missing"),
        ("model.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-10]), "cut off"),
        ("model.safetensors", lambda p: p.write_bytes(p.read_bytes() + b"x" * 10), "cut off or damaged"),
        (
            "model.safetensors",
            lambda p: p.write_bytes(b"\xff" * 8 + p.read_bytes()[8:]),
            "cut off or damaged",
        ),
        (
            "model.safetensors",
            lambda p: p.write_bytes(p.read_bytes()[:8] + b"{" * 4000),
            "cut off or damaged",
        ),
        ("model.safetensors", _drop_tensor, r"1 weights missing or unexpected \(lm\.norm\.weight\)"),
        ("model.safetensors", _reshape_tensor, r"'lm\.norm\.weight' has shape \[3\]"),
        ("model.safetensors", _integer_tensor, "not of a float dtype"),
        ("model.safetensors", _poison_tensor, r"tensor 'norm\.weight' holds values that are not finite"),
    ],
)
def test_damaged_native_folders_are_refused(
    random_model_folder: Path, tmp_path: Path, file: str, damage: Callable[[Path], object], reason: str
) -> None:
    out = tmp_path / "out"
    convert_folder(random_model_folder, out)
    damage(out / file)
    refuse(out, reason, file)


# --- what is off is refused


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 2023316821\n"
HTML = b"\n<!DOCTYPE html><html><head><title>404</title></head></html>" + b" " * 500

DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: p.unlink(), "is missing"),
    (lambda p: p.write_bytes(b""), "is empty"),
    (_replace_by_folder, "is a folder"),
    (_replace_by_fifo, "not a regular file"),
    (_replace_by_loop, "is missing"),
    (lambda p: p.write_bytes(LFS), "git-LFS pointer"),
    (lambda p: p.write_bytes(HTML), "HTML page"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
@pytest.mark.parametrize("file", ["llm.pt", "flow.pt", "hift.pt", "CosyVoice-BlankEN/config.json"])
def test_damaged_files_are_named(
    folder: Path, file: str, damage: Callable[[Path], object], reason: str
) -> None:
    damage(folder / file)
    refuse(folder, reason, Path(file).name)


@pytest.mark.parametrize("stage", STAGES)
def test_truncated_weights_are_refused(folder: Path, stage: Stage) -> None:
    _truncate(folder / FILES[stage])
    refuse(folder, "cut off or damaged; download it again", FILES[stage])


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
@pytest.mark.parametrize(
    ("file", "feature"),
    [
        ("campplus.onnx", "speaker_encoder"),
        ("speech_tokenizer_v3.onnx", "speech_tokenizer"),
        ("spk2info.pt", "voices"),
    ],
)
def test_files_beside_the_weights_only_matter_for_their_feature(
    folder: Path, file: str, feature: str, damage: Callable[[Path], object], reason: str
) -> None:
    damage(folder / file)
    model = open_model(folder)
    assert set(model.missing) == {feature}
    assert model.missing[feature].startswith(f"{file}: ")
    assert reason in model.missing[feature]


def test_batch_speech_tokenizer_is_found(folder: Path) -> None:
    (folder / "speech_tokenizer_v3.onnx").rename(folder / "speech_tokenizer_v3.batch.onnx")
    model = open_model(folder)
    assert model.missing == {}
    assert model.paths.speech_tokenizer == folder / "speech_tokenizer_v3.batch.onnx"


def test_wrong_places_are_refused(folder: Path, tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "no such model folder")
    refuse(folder / "llm.pt", "is a file; give the model folder")
    (tmp_path / "void").mkdir()
    refuse(tmp_path / "void", "is missing from", "cosyvoice3.yaml")


@pytest.mark.parametrize("file", ["cosyvoice2.yaml", "cosyvoice.yaml"])
def test_a_file_of_another_generation_is_named(folder: Path, file: str) -> None:
    (folder / "cosyvoice3.yaml").rename(folder / file)
    refuse(folder, "describes a CosyVoice 3 model; its file is called cosyvoice3.yaml", file)


def test_weights_of_another_generation_are_named(folder: Path) -> None:
    state = load(folder / "flow.pt")
    state["encoder.embed.out.0.weight"] = torch.ones(2)
    torch.save(state, folder / "flow.pt")
    refuse(folder, "belongs to another generation", "flow.pt")


def test_missing_and_unexpected_weights_are_named(folder: Path) -> None:
    state = load(folder / "flow.pt")
    for index in range(5):
        state[f"surprise.{index}"] = torch.ones(1)
    del state["spk_embed_affine_layer.bias"]
    torch.save(state, folder / "flow.pt")
    reason = (
        r"1 weights missing \(spk_embed_affine_layer\.bias\) and 5 weights unexpected \(surprise\.0, .*, …\)"
    )
    refuse(folder, reason, "flow.pt")


def test_wrong_shapes_are_refused_before_a_module_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vivace.models.kinds.SpeechLM", None)
    state = load(folder / "llm.pt")
    state["llm_decoder.weight"] = torch.ones(3, 128)
    torch.save(state, folder / "llm.pt")
    refuse(
        folder,
        r"'llm_decoder\.weight' has shape \[3, 128\], cosyvoice3\.yaml asks for \[929, 128\]",
        "llm.pt",
    )


def test_a_large_configuration_with_small_weights_allocates_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in ("SpeechLM", "FlowModel", "CausalHiFT"):
        monkeypatch.setattr(f"vivace.models.kinds.{stage}", None)
    yaml = (folder / "cosyvoice3.yaml").read_text()
    assert "            dim: 128" in yaml
    (folder / "cosyvoice3.yaml").write_text(yaml.replace("            dim: 128", "            dim: 16384"))
    refuse(folder, r"asks for \[16384, 256\]; the files belong to different models", "flow.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("lm", "llm.model.model.layers.1.mlp.up_proj.weight"),
        ("flow", "decoder.estimator.proj_out.bias"),
        ("vocoder", "conv_pre.parametrizations.weight.original0"),
    ],
)
def test_non_finite_weights_are_refused_by_name(folder: Path, stage: Stage, name: str, value: float) -> None:
    state = load(folder / FILES[stage])
    state[name].view(-1)[-1] = value
    torch.save(state, folder / FILES[stage])
    refuse(folder, f"tensor '{name}' holds values that are not finite", FILES[stage])


def test_all_zero_direction_is_refused(folder: Path) -> None:
    state = load(folder / "hift.pt")
    state["conv_pre.parametrizations.weight.original1"][2] = 0
    torch.save(state, folder / "hift.pt")
    refuse(folder, "'conv_pre.weight' has an all-zero direction", "hift.pt")


def _sparse(shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([[0]]), torch.ones(1, *shape[1:]), shape, check_invariants=True
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_sparse, "asks for 'torch._utils._rebuild_sparse_tensor'"),
        (
            lambda shape: torch.empty(shape, device="meta"),
            "asks for 'torch._utils._rebuild_meta_tensor_no_storage'",
        ),
        (lambda shape: torch.ones(1).expand(shape), "is not dense"),
        (lambda shape: torch.ones(shape[1], shape[0]).t(), "is not dense"),
        (lambda shape: torch.ones(shape, dtype=torch.complex64), "asks for 'torch.ComplexFloatStorage'"),
        (lambda shape: torch.ones(shape, dtype=torch.bool), "asks for 'torch.BoolStorage'"),
        (lambda shape: torch.ones(shape, dtype=torch.int8), "asks for 'torch.CharStorage'"),
        (lambda shape: torch.ones(shape, dtype=torch.int64), "has dtype int64"),
        (lambda shape: torch.ones(shape).to(torch.float8_e5m2), "asks for 'torch.float8_e5m2'"),
        (lambda _: torch.ones(1).expand(10**6, 10**6), "is not dense"),
        (lambda _: "text", "is not a tensor"),
        (lambda _: [1.0], "is not a tensor"),
        (lambda _: {"a": torch.ones(1)}, "is not a tensor"),
    ],
)
def test_only_dense_float_tensors_are_accepted(
    folder: Path, make: Callable[[torch.Size], object], reason: str
) -> None:
    state = load(folder / "flow.pt")
    name = "spk_embed_affine_layer.weight"
    state[name] = make(state[name].shape)
    torch.save(state, folder / "flow.pt")
    refuse(folder, reason, "flow.pt")


def test_float8_weights_are_read_and_checked(folder: Path) -> None:
    state, name = load(folder / "flow.pt"), "spk_embed_affine_layer.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    torch.save(state, folder / "flow.pt")
    assert torch.equal(open_model(folder).flow.speaker_projection.weight, state[name].float())
    state[name].view(torch.uint8)[0, 0] = 0x7F  # the dtype's one NaN
    torch.save(state, folder / "flow.pt")
    refuse(folder, "not finite", "flow.pt")


def test_quantised_tensors_are_refused(folder: Path) -> None:
    class Quantised:  # torch deprecates making one; its pickle is all that counts
        def __reduce__(self) -> tuple[Any, ...]:
            return torch._utils._rebuild_qtensor, ()

    torch.save(load(folder / "flow.pt") | {"q": Quantised()}, folder / "flow.pt")
    refuse(folder, "asks for 'torch._utils._rebuild_qtensor'", "flow.pt")


class _Runs:
    """Runs ``call`` when unpickled without care."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.reduced = (call, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.reduced


@pytest.mark.parametrize(
    "call",
    [
        lambda marker: _Runs(os.system, f"touch {marker}"),
        lambda marker: _Runs(eval, f"open({str(marker)!r}, 'w')"),
        lambda _: _Runs(bytearray, 10**13),
    ],
)
@pytest.mark.parametrize("file", ["llm.pt", "spk2info.pt"])
def test_no_code_of_a_file_is_run(
    folder: Path, tmp_path: Path, file: str, call: Callable[[Path], object]
) -> None:
    marker = tmp_path / "marker"
    torch.save({"x": call(marker)}, folder / file)
    read = (
        partial(open_model, folder)
        if file == "llm.pt"
        else partial(read_official_voices, folder / file, 192, 80)
    )
    with pytest.raises(ModelFolderError, match="which weights do not need; not loaded"):
        read()
    assert not marker.exists()


def test_unknown_opcodes_are_refused(folder: Path) -> None:
    torch.save({"x": torch.ones(2)}, folder / "llm.pt", pickle_protocol=4)
    refuse(folder, "not a plain dictionary of tensors", "llm.pt")


def _rewrite(
    path: Path, change: Callable[[str, bytes], tuple[str, bytes]], compression: int = zipfile.ZIP_STORED
) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(*change(name, content))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda p: torch.save(load(p), p, _use_new_zipfile_serialization=False),
            "not a PyTorch weights file",
        ),
        (lambda p: p.write_bytes(pickle.dumps({"a": 1}) + b"x" * 100), "not a PyTorch weights file"),
        (lambda p: p.write_bytes(b"PK\x03\x04" + b"\0" * 100), "cut off or damaged"),
        (lambda p: _rewrite(p, lambda n, c: (n, c), zipfile.ZIP_DEFLATED), "compressed archive"),
        (lambda p: _rewrite(p, lambda n, c: (n.replace("data.pkl", "constants.pkl"), c)), "exported program"),
        (lambda p: _rewrite(p, lambda n, c: (n, c[:-5] if n.endswith("data.pkl") else c)), "is damaged"),
        (
            lambda p: _rewrite(p, lambda n, c: (n, c[:-4] if n.endswith("data/0") else c)),
            "not those that it stores",
        ),
        (lambda p: torch.save([torch.ones(1)] * 99, p), "must hold a dictionary"),
        (lambda p: torch.save({1: torch.ones(99)}, p), "whose name is not a short text"),
        (lambda p: torch.save({"x" * 10_000: torch.ones(9)}, p), "name is too long"),
    ],
)
def test_other_archives_are_refused(folder: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(folder / "flow.pt")
    refuse(folder, reason, "flow.pt")


def refusal(path: Path) -> str | None:
    try:
        read_torch_file(path)
    except ModelFolderError as error:
        return error.message
    return None


def test_any_flipped_byte_of_the_directory_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(3), "b": torch.ones(2, 2)}, path)
    content = path.read_bytes()
    start = content.rindex(b"PK\x01\x02")  # last entry of the directory, and what follows
    refused = 0
    for position in range(start, len(content)):
        changed = bytearray(content)
        changed[position] ^= 0xFF
        path.unlink()
        path.write_bytes(changed)
        message = refusal(path)
        assert message is None or message.startswith("x.pt: ")
        refused += message is not None
    assert refused > 20


def test_archives_of_very_many_entries_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.checkpoint.torch_file.MAX_ENTRIES", 20)
    refuse(folder, "has more than 20 entries", "llm.pt")


def test_names_with_paths_are_only_names(folder: Path) -> None:
    torch.save(load(folder / "flow.pt") | {"../../x": torch.ones(2)}, folder / "flow.pt")
    refuse(folder, r"unexpected \(\.\./\.\./x\)", "flow.pt")


def test_unreadable_stage_leaves_the_others_readable(folder: Path) -> None:
    (folder / "llm.pt").unlink()
    config = load_config(folder)
    assert (
        read_official_stage(folder / "flow.pt", "flow", config).keys() == weight_shapes(config, "flow").keys()
    )
    with pytest.raises(ModelFolderError, match=r"^llm\.pt"):
        read_weights(folder, config)


# --- stored voices


def test_voices_are_read_as_the_reference_stores_them(folder: Path) -> None:
    stored = load(folder / "spk2info.pt")["noise"]
    voice = read_official_voices(folder / "spk2info.pt", 192, 80)["noise"]
    assert voice["prompt_speech_feat"].shape == (150, 80)
    assert voice["flow_embedding"].shape == (192,)
    assert voice["llm_prompt_speech_token"].dtype == np.int32
    assert voice["prompt_speech_feat"].dtype == np.float32
    for key in voice:
        np.testing.assert_array_equal(voice[key], stored[key][0].numpy())


@pytest.mark.parametrize(
    "embedding", [torch.ones(1, 192), torch.ones(192), [1.0] * 192, torch.ones(192).double()]
)
def test_voices_of_fine_tuning_hold_an_embedding_only(tmp_path: Path, embedding: object) -> None:
    torch.save({"中文女": {"embedding": embedding}}, tmp_path / "spk2info.pt")
    voices = read_official_voices(tmp_path / "spk2info.pt", 192, 80)
    assert voices.keys() == {"中文女"}
    np.testing.assert_array_equal(voices["中文女"]["embedding"], np.ones(192, np.float32))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ([1.0], "is not a dictionary"),
        ({}, "has no embedding"),
        ({"embedding": torch.ones(100)}, "must have 192 channels"),
        ({"embedding": torch.ones(2, 192)}, "must be one embedding"),
        ({"embedding": torch.full((192,), float("nan"))}, "must hold finite numbers"),
        ({"embedding": torch.ones(192), "surprise": 1}, "is an unknown entry"),
        ({"embedding": torch.ones(192), "prompt_text": torch.tensor([-1])}, "must hold token ids"),
        ({"embedding": torch.ones(192), "prompt_text": torch.ones(2)}, "must hold token ids"),
        ({"embedding": torch.ones(192), "prompt_speech_feat": torch.ones(1, 4, 81)}, "must have 80 channels"),
        ({"embedding": torch.ones(1).expand(192)}, "is not dense"),
    ],
)
def test_damaged_voices_are_refused_by_name(tmp_path: Path, entry: object, reason: str) -> None:
    torch.save({"eve": entry, "_": {"embedding": torch.ones(192)}}, tmp_path / "spk2info.pt")
    with pytest.raises(ModelFolderError, match=reason) as caught:
        read_official_voices(tmp_path / "spk2info.pt", 192, 80)
    assert "eve" in caught.value.message


def test_the_pickle_that_is_loaded_is_the_one_that_is_scanned(tmp_path):
    """Torch takes ``DATA.PKL`` for ``data.pkl``; Python's reader of archives does not."""
    harmless = io.BytesIO()
    torch.save({"w": torch.zeros(4)}, harmless)
    path = tmp_path / "two.pt"
    with zipfile.ZipFile(harmless) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
        hostile = pickle.dumps(os.system, protocol=2)
        target.writestr(f"{source.namelist()[0].split('/')[0]}/DATA.PKL", hostile)
    with pytest.raises(ModelFolderError, match=r"asks for '.*system'"):
        read_torch_file(path)


@pytest.mark.parametrize("change", [{"num_steps": 1000}, {"noise_frames": 1_000_000}])
def test_sizes_that_no_weight_bounds_have_bounds_of_their_own(random_model_folder, tmp_path, change):
    out = tmp_path / "native"
    convert_folder(random_model_folder, out)
    document = json.loads((out / "vivace.json").read_text())
    document["config"]["flow"] |= change
    (out / "vivace.json").write_text(json.dumps(document))
    with pytest.raises(ModelFolderError, match=next(iter(change))):
        load_config(out)
