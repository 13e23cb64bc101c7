"""The doctor tells what is there and what is wrong, and never raises on a broken folder."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vivace.checkpoint import convert_folder
from vivace.doctor import examine, examine_folder, examine_machine
from vivace.engine.loading import model_folder


@pytest.fixture
def folder(random_model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_model_folder, tmp_path / "model"))


def statuses(folder: Path) -> dict[str, str]:
    return {file.name: file.status for file in examine_folder(folder).files}


def test_machine_report() -> None:
    report = examine_machine()
    assert report.cores >= 1
    assert report.packages["torch"] == torch.__version__ or report.packages["torch"] in torch.__version__
    assert "CPUExecutionProvider" in report.onnx_providers
    assert "WAV" in report.audio_formats
    assert report.problems == []
    assert bool(report.gpus) == torch.cuda.is_available()


def test_broken_packages_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def broken(name: str, *arguments: object) -> object:
        if name == "soundfile":
            raise OSError("libsndfile.so: cannot open shared object file")
        return real_import(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", broken)
    report = examine()
    assert report.machine.problems == ["soundfile does not work (OSError): install it again"]
    assert not report.usable
    assert "PROBLEM   soundfile does not work (OSError): install it again" in report.lines()


def test_complete_folders_can_do_everything(folder: Path, tmp_path: Path) -> None:
    convert_folder(folder, tmp_path / "converted", dtype="bfloat16")
    for place, kind in ((folder, "official"), (tmp_path / "converted", "vivace")):
        report = examine(place)
        assert report.usable
        assert report.folder is not None
        assert report.folder.format == kind
        assert report.folder.problems == []
        assert report.folder.features == dict.fromkeys(("speak", "instruct", "clone", "convert_voice"), True)
        assert {file.status for file in report.folder.files} == {"ok"}
        document = json.loads(json.dumps(report.to_dict()))
        assert document["usable"] is True
        assert document["folder"]["parameters"].keys() == {"lm", "flow", "vocoder"}
        assert any(
            line.startswith("can       speak, instruct, clone, convert voice") for line in report.lines()
        )


def test_the_embedded_model_takes_no_instructions() -> None:
    report = examine(model_folder("mini"))
    assert report.usable
    assert report.folder is not None
    assert report.folder.features == {"speak": True, "instruct": False, "clone": True, "convert_voice": True}


@pytest.mark.parametrize(
    ("file", "lost"),
    [
        ("campplus.onnx", {"clone", "convert_voice"}),
        ("speech_tokenizer_v3.onnx", {"clone", "convert_voice"}),
        ("spk2info.pt", set()),
        ("CosyVoice-BlankEN/vocab.json", {"speak", "instruct", "clone"}),
        ("llm.pt", {"speak", "instruct", "clone", "convert_voice"}),
        ("hift.pt", {"speak", "instruct", "clone", "convert_voice"}),
    ],
)
def test_each_missing_file_costs_its_features(folder: Path, file: str, lost: set[str]) -> None:
    (folder / file).unlink()
    report = examine_folder(folder)
    assert {name for name, there in report.features.items() if not there} == lost
    assert report.usable == ("speak" not in lost)
    assert bool(report.problems) == (not report.usable)
    if file.endswith(("onnx", "pt")):
        assert statuses(folder)[file] == "missing"


def test_a_folder_without_any_voice_is_unusable(folder: Path) -> None:
    (folder / "spk2info.pt").unlink()
    (folder / "campplus.onnx").unlink()
    report = examine_folder(folder)
    assert not report.usable
    assert any("no voice to speak with" in problem for problem in report.problems)


def test_damage_is_told_apart_from_absence(folder: Path) -> None:
    (folder / "flow.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (folder / "campplus.onnx").write_bytes(b"")
    state = torch.load(folder / "hift.pt")
    state["conv_post.bias"][0] = float("nan")
    torch.save(state, folder / "hift.pt")
    report = examine_folder(folder)
    found = {file.name: (file.status, file.detail) for file in report.files}
    assert found["llm.pt"][0] == "ok"
    assert found["flow.pt"][0] == found["hift.pt"][0] == found["campplus.onnx"][0] == "problem"
    assert "git-LFS pointer" in found["flow.pt"][1]
    assert "'conv_post.bias' holds values that are not finite" in found["hift.pt"][1]
    assert len(report.problems) == 2  # the encoder is no reason not to speak
    assert not report.usable


@pytest.mark.parametrize(
    ("file", "lost"),
    [
        ("campplus.onnx", {"clone", "convert_voice"}),
        ("speech_tokenizer_v3.onnx", {"clone", "convert_voice"}),
        ("spk2info.pt", {"speak", "instruct", "clone", "convert_voice"}),
        ("voices/a.safetensors", {"speak", "instruct", "clone", "convert_voice"}),
        ("CosyVoice-BlankEN/vocab.json", {"speak", "instruct", "clone"}),
    ],
)
def test_files_beside_the_weights_are_opened(folder: Path, file: str, lost: set[str]) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(b"junk" * 100)
    report = examine_folder(folder)
    assert {feature for feature, there in report.features.items() if not there} == lost
    assert report.usable is ("speak" not in lost)
    assert bool(report.problems) is not report.usable
    assert sum(entry.status == "problem" for entry in report.files) == 1


def test_reinforced_language_model_is_optional(folder: Path) -> None:
    (folder / "llm.rl.pt").write_bytes(b"x" * 100)
    report = examine_folder(folder)
    assert statuses(folder)["llm.rl.pt"] == "problem"
    assert report.usable
    shutil.copyfile(folder / "llm.pt", folder / "llm.rl.pt")
    assert statuses(folder)["llm.rl.pt"] == "ok"


@pytest.mark.parametrize("content", ["", "x: !apply:os.system ['true']", "llm: 1", "\0"])
def test_broken_configurations_are_listed(folder: Path, content: str) -> None:
    (folder / "cosyvoice3.yaml").write_text(content)
    report = examine(folder)
    assert not report.usable
    assert report.folder is not None
    assert [problem.startswith("cosyvoice3.yaml: ") for problem in report.folder.problems] == [True]
    json.dumps(report.to_dict())
    assert report.lines()


def test_no_folder_and_other_folders(tmp_path: Path) -> None:
    assert examine().folder is None
    for place in (tmp_path, tmp_path / "nowhere", Path("/dev/null"), Path("a\nb")):
        report = examine_folder(place)
        assert not report.usable
        assert len(report.problems) == 1
        assert "\n" not in report.problems[0]


def test_values_of_converted_weights_are_looked_at(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "native"
    convert_folder(folder, out)
    path = out / "model.safetensors"
    weights = load_file(path)
    name = next(iter(weights))
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, path)
    report = examine_folder(out)
    assert not report.usable
    assert any(name in problem and "not finite" in problem for problem in report.problems)
