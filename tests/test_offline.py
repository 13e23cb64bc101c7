"""Packing for a machine without network, and unpacking there: tiny packages in place of the real ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.offline import pack as packing
from benchmarks.offline import unpack as unpacking
from benchmarks.offline.__main__ import main
from benchmarks.offline.machine import Machine, survey
from benchmarks.offline.pack import PackError, is_source, name_of, pack
from benchmarks.offline.unpack import UnpackError, judge, link, unpack

HERE = "{}.{}".format(*sys.version_info)
PROJECT = '[project]\ndependencies = ["torch>=2", "Toy_Tones[all]>=1; python_version>\'3\'", "base"]\n'
RESOLVED = {"toy-tones": "1.5", "base": "2.0", "helper": "3.0", "torch": "9"}


def write_wheel(folder, name, version, files, tag="py3-none-any"):
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
        for place, text in files.items():
            archive.writestr(place, text)


class FakePip:
    """Resolves and serves tiny wheels; keeps what it was asked."""

    def __init__(self, reference_tag="py3-none-any"):
        self.asked, self.tag = [], reference_tag

    def __call__(self, arguments):
        self.asked.append(list(arguments))
        folder = next((a.split("=", 1)[1] for a in arguments if re.match("--(dest|wheel-dir)=", a)), None)
        names = [argument for argument in arguments[1:] if not argument.startswith("-")]
        if arguments[0] == "install":
            found = [{"metadata": {"name": name, "version": it}} for name, it in RESOLVED.items()]
            return json.dumps({"install": found})
        os.makedirs(folder, exist_ok=True)
        for line in names:
            name, version = line.split("==")
            module = name.lower().replace("-", "_").replace(".", "_")
            files = {
                f"{module}/__init__.py": f"VERSION = {version!r}\n",
                f"{module}/data.bin": "data",
                f"{module}-{version}.data/purelib/{module}_more.py": "",
                f"{module}-{version}.data/scripts/tool": "#!python",
            }
            write_wheel(
                Path(folder), module, version, files, self.tag if arguments[0] == "wheel" else "py3-none-any"
            )
        return ""


@pytest.fixture
def project(tmp_path):
    path = tmp_path / "pyproject.toml"
    path.write_text(PROJECT)
    return path


@pytest.fixture
def checkouts(tmp_path):
    repo, matcha = tmp_path / "repo", tmp_path / "matcha-repo"
    for checkout, package in ((repo, "cosyvoice"), (matcha, "matcha")):
        (checkout / package / "inner").mkdir(parents=True)
        (checkout / package / "inner" / "code.py").write_text("")
        (checkout / package / "weights.pt").write_text("large")
        (checkout / "asset.py").write_text("")
    (repo / "LICENSE").write_text("licence")
    return {"repo": repo, "matcha": matcha}


def names_in(bundle):
    with tarfile.open(bundle) as archive:
        return set(archive.getnames())


def test_only_what_the_machine_lacks_is_packed(tmp_path, project, capsys):
    pip, out = FakePip(), tmp_path / "bundle.tar.xz"
    machine = Machine("3.12", "x86_64", "2.28", installed=("torch", "base"))
    pack(machine, out, pip=pip, project=project)
    resolve, download = pip.asked
    assert resolve[-5:-3] == ["Toy_Tones[all]>=1; python_version>'3'", "base"]  # never torch, which is large
    assert resolve[-3:] == list(packing.TESTS)
    assert {
        "--python-version=3.12",
        "--platform=manylinux_2_28_x86_64",
        "--platform=manylinux2014_x86_64",
    } <= set(download)
    assert download[-2:] == ["helper==3.0", "toy-tones==1.5"]
    assert names_in(out) == {
        "offline.json",
        *(f"site/{name}/{file}" for name in ("helper", "toy_tones") for file in ("__init__.py", "data.bin")),
        "site/helper_more.py",
        "site/toy_tones_more.py",
        "site/helper-3.0.dist-info/METADATA",
        "site/toy_tones-1.5.dist-info/METADATA",
    }
    assert "not packed (--repo)" in capsys.readouterr().out


def test_names_that_are_given_are_packed_and_no_others(tmp_path, project):
    pip = FakePip()
    pack(Machine("3.12", "x86_64", "2.28"), tmp_path / "b.tar.xz", lacking=["Base"], pip=pip, project=project)
    assert pip.asked[0][-1] == "Base"
    assert pip.asked[1][-1] == "base==2.0"
    assert not any("helper" in name for name in names_in(tmp_path / "b.tar.xz"))
    pack(
        Machine("3.12", "x86_64", "2.28", installed=tuple(RESOLVED)),
        tmp_path / "b",
        pip=FakePip(),
        project=project,
    )
    assert names_in(tmp_path / "b") == {"offline.json"}


def test_the_reference_is_packed_as_sources(tmp_path, project, checkouts):
    out = tmp_path / "bundle.tar.xz"
    pack(
        Machine(HERE, "x86_64", "2.28", ()),
        out,
        commit="1234567",
        pip=FakePip(),
        project=project,
        **checkouts,
    )
    found = names_in(out)
    assert {
        "reference/CosyVoice/cosyvoice/inner/code.py",
        "reference/CosyVoice/LICENSE",
        "reference/Matcha-TTS/matcha/inner/code.py",
        "reference/site/transformers/__init__.py",
        "reference/site/transformers-4.51.3.dist-info/METADATA",
    } <= found
    assert not any(
        name.startswith("reference") and re.search("weights|asset|data.bin|tool", name) for name in found
    )
    first = out.read_bytes()
    pack(
        Machine(HERE, "x86_64", "2.28", ()),
        out,
        commit="1234567",
        pip=FakePip(),
        project=project,
        **checkouts,
    )
    assert out.read_bytes() == first


def test_what_cannot_be_packed_is_said(tmp_path, project, checkouts):
    machine, out = Machine(HERE, "x86_64", "2.28", ()), tmp_path / "bundle.tar.xz"
    with pytest.raises(PackError, match="is compiled"):
        pack(machine, out, pip=FakePip("cp312-cp312-linux_x86_64"), project=project, **checkouts)
    with pytest.raises(PackError, match="has no folder matcha"):
        pack(machine, out, repo=checkouts["repo"], matcha=tmp_path, pip=FakePip(), project=project)
    with pytest.raises(PackError, match="pip download failed: "):
        packing.run_pip(["download", "--no-index", "--no-deps", "--quiet", "a-package-that-nobody-has"])


def test_models_that_nothing_needs_are_left_out():
    kept = (
        "transformers/models/__init__.py",
        "transformers/models/bert/__init__.py",
        "transformers/modeling_utils.py",
    )
    kept += ("transformers/models/qwen2/modeling_qwen2.py", "x-1.dist-info/licenses/LICENSE.txt")
    assert all(map(is_source, kept))
    left = ("transformers/models/bert/modeling_bert.py", "einops/data.json", "x-1.dist-info/RECORD")
    assert not any(map(is_source, left))
    names = map(name_of, ("uvicorn[standard]>=0.35", "torch", "a_b ; x", "c~=1"))
    assert list(names) == ["uvicorn", "torch", "a_b", "c"]


def test_tags_of_wheels_by_the_age_of_the_system():
    tags = Machine("3.12", "aarch64", "2.18").platforms
    assert tags[:3] == ["manylinux_2_18_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"]
    assert tags[-2:] == ["manylinux_2_5_aarch64", "manylinux1_aarch64"]


def test_a_survey_is_what_packing_takes(tmp_path, capsys):
    assert main(["survey"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == survey()
    machine = Machine(**found)
    assert machine.python == HERE
    assert {"torch", "typing-extensions"} <= set(machine.installed)


@pytest.fixture
def bundle(tmp_path, project, checkouts):
    path = tmp_path / "bundle.tar.xz"
    pack(
        Machine(HERE, "x86_64", "2.28", ()),
        path,
        commit="1234567",
        pip=FakePip(),
        project=project,
        **checkouts,
    )
    return path


@pytest.fixture
def tried(monkeypatch):
    """The trials import these and nothing large."""
    monkeypatch.setattr(unpacking, "OURS", "import toy_tones; assert toy_tones.VERSION == '1.5'")
    shown = "import sys, json, transformers, toy; print(transformers.VERSION, toy.__file__, 'pytest' in sys.modules)"
    monkeypatch.setattr(unpacking, "THEIRS", shown)
    monkeypatch.setattr(unpacking, "FOUND_BY", ("toy",))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Packages of the machine, of which the reference may see one."""
    site = tmp_path / "installed"
    for name in ("toy", "transformers", "secret", "nvidia"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("VERSION = 'of the machine'")
    (site / "toy-1.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(site))
    return site


def test_unpacking_makes_two_programs_that_work(tmp_path, bundle, tried, installed, capsys, monkeypatch):
    root = tmp_path / "a checkout"
    (root / "benchmarks").mkdir(parents=True)
    (root / "benchmarks" / "publish.py").write_text(
        "import sys, toy_tones; print(toy_tones.VERSION, *sys.argv[1:])"
    )
    folder = tmp_path / "a folder"
    unpack(bundle, folder, links=["toy"], root=root)
    printed = capsys.readouterr().out
    place = folder / "reference" / "site" / "toy" / "__init__.py"
    assert f"the reference implementation runs: 4.51.3 {place} False" in printed
    assert f"ready: '{folder / 'publish'}' --device cuda" in printed
    assert "2 packages" not in printed
    monkeypatch.delenv("PYTHONPATH", raising=False)
    run = subprocess.run(
        [folder / "publish", "--out", "x y"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    reference = folder / "reference"
    assert run.stdout.strip() == (
        f"1.5 --repo {reference}/CosyVoice --matcha {reference}/Matcha-TTS"
        f" --reference-python {folder}/reference-python --reference-commit 1234567 --out x y"
    )
    lost = "import importlib.util as u; print([n for n in ('toy', 'secret', 'pytest') if u.find_spec(n)])"
    run = subprocess.run(
        [folder / "reference-python", "-c", lost], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "['toy']"


def test_unpacking_again_replaces_what_was_there(tmp_path, bundle, tried, installed):
    folder = tmp_path / "folder"
    unpack(bundle, folder, links=["toy"])
    (folder / "site" / "old.py").write_text("")
    (folder / "mine").write_text("kept")
    unpack(bundle, folder, links=["toy"])
    assert not (folder / "site" / "old.py").exists()
    assert (folder / "mine").read_text() == "kept"
    assert (installed / "toy" / "__init__.py").exists()  # links are removed, not what they lead to


def test_what_came_in_the_file_is_not_hidden_by_the_machine(tmp_path, bundle, installed, monkeypatch):
    monkeypatch.setattr(unpacking, "FOUND_BY", ("toy",))
    unpacking.extract(bundle, tmp_path / "f")
    assert link(tmp_path / "f", ["Toy", "transformers"]) == ["nvidia", "toy"]
    text = (tmp_path / "f" / "reference" / "site" / "transformers" / "__init__.py").read_text()
    assert "4.51.3" in text


def test_a_file_for_another_python_or_none_at_all_is_refused(tmp_path, project, capsys):
    other = tmp_path / "other.tar.xz"
    pack(Machine("3.9", "x86_64", "2.28", ()), other, pip=FakePip(), project=project)
    assert main(["unpack", str(other), str(tmp_path / "f")]) == 1
    assert f"is for Python 3.9, this is {HERE}: pack --python {HERE}" in capsys.readouterr().err
    project.write_text("no archive")
    with pytest.raises(UnpackError, match="is no file that pack has written"):
        unpack(project, tmp_path / "f")


def test_missing_packages_are_named_with_what_to_do(tmp_path, bundle, tried, monkeypatch, capsys):
    monkeypatch.setattr(unpacking, "OURS", "import sys; print(\"soxr: No module named 'soxr'\\nx: broken\")")
    with pytest.raises(UnpackError, match="pack with --lacking soxr and those before"):
        unpack(bundle, tmp_path / "folder")
    printed = capsys.readouterr().out
    assert "THE REFERENCE IMPLEMENTATION DOES NOT RUN: ModuleNotFoundError: No module named 'toy'" in printed
    assert "unpack --link toy" in printed
    with pytest.raises(UnpackError, match="the Python that has it"):
        judge({"ours": (0, "torch: No module named 'torch'")}, {"packages": []})
    with pytest.raises(UnpackError, match="Killed"):
        judge({"ours": (-9, "Killed")}, {"packages": []})
