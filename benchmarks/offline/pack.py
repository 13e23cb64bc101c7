"""Writes the file: wheels that the machine lacks, unpacked, and the reference implementation with its own packages.

Of the reference's packages, which are pure Python, only the sources are taken, and of ``transformers`` only the models
that something needs: some 2 MB in the end.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.offline.machine import Machine, normalised

ROOT = Path(__file__).resolve().parents[2]
LACKING = (
    *("soundfile", "cffi", "pycparser"),
    *("soxr", "wetext", "kaldifst", "contractions", "textsearch", "anyascii", "pyahocorasick"),
    *("typer", "shellingham", "click"),
    *("pydantic", "pydantic-core", "annotated-types", "annotated-doc", "typing-inspection"),
    *("fastapi", "starlette", "uvicorn", "httptools", "websockets", "python-multipart", "opentelemetry-api"),
)
"""What images for machine learning often lack, for when nothing can be asked."""
HAS = frozenset({"torch"})
"""Never packed."""
TESTS = ("pytest", "pytest-xdist", "hypothesis")
"""For the tests among the figures."""
REFERENCE = (
    "transformers==4.51.3",
    "x-transformers==2.11.24",
    "diffusers==0.29.0",
    "conformer==0.3.2",
    "omegaconf==2.3.0",
    "HyperPyYAML==1.2.3",
    "antlr4-python3-runtime==4.9.3",
    "ruamel.yaml==0.18.17",
    "einops==0.8.2",
    "einx==0.4.3",
    "frozendict==2.5.1",
    "loguru==0.7.3",
    "huggingface-hub==0.30.2",
)
"""Versions with which the reference was seen to run."""
KEPT_MODELS = frozenset({"auto", "clip", "encoder_decoder", "qwen2"})
"""Folders of ``transformers/models`` that are taken as a whole; of the others ``__init__.py``."""
CHECKOUTS = {"CosyVoice": "cosyvoice", "Matcha-TTS": "matcha"}
"""Folder in the file, and the package in the checkout that it holds."""

Pip = Callable[[Sequence[str]], str]


class PackError(Exception):
    """Something that cannot be packed; the text says what to do."""


def pack(
    machine: Machine,
    out: Path,
    *,
    repo: Path | None = None,
    matcha: Path | None = None,
    commit: str | None = None,
    lacking: Sequence[str] = (),
    pip: Pip | None = None,
    project: Path = ROOT / "pyproject.toml",
) -> None:
    """Writes ``out`` and prints what is in it.

    Args:
        repo, matcha: checkouts of the reference implementation and of Matcha-TTS; no repo: neither is packed.
        commit: of the repo; None: what git says.
        lacking: packages that the machine lacks; empty: what the project needs and ``machine.installed`` has not.
        pip: runs pip with these arguments and returns what it printed.
        project: whose dependencies are needed.

    Raises:
        PackError: a checkout is none, pip failed, or a package of the reference is not pure Python.
    """
    pip = pip or run_pip
    with tempfile.TemporaryDirectory(prefix="offline-") as name:
        tree = Path(name) / "tree"
        tree.mkdir()
        print("asks pip what is needed ...", flush=True)
        wheels = own_wheels(machine, Path(name) / "own", lacking, pip, project)
        contents = {"python": machine.python, "packages": sorted(wheel.name for wheel in wheels)}
        for wheel in wheels:
            unzip(wheel, tree / "site", is_kept=lambda path: True)
        if repo is not None:
            matcha = matcha or repo / "third_party" / "Matcha-TTS"
            for folder, checkout in zip(CHECKOUTS, (repo, matcha), strict=True):
                copy_sources(checkout, CHECKOUTS[folder], tree / "reference" / folder)
            print("packages of the reference ...", flush=True)
            add_reference(Path(name) / "reference", tree / "reference" / "site", pip)
            contents["reference_commit"] = commit or commit_of(repo)
        (tree / "offline.json").write_text(json.dumps(contents, indent=1), encoding="utf-8")
        write_archive(tree, out)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB for Python {machine.python}")
    print(f"packages that the machine lacks: {' '.join(contents['packages']) or 'none'}")
    said = contents.get("reference_commit")
    print(f"reference implementation: {'not packed (--repo)' if said is None else f'commit {said}'}")


def own_wheels(machine: Machine, folder: Path, lacking: Sequence[str], pip: Pip, project: Path) -> list[Path]:
    """Wheels of what the project needs and the machine lacks, in versions that go together.

    Raises:
        PackError: pip found no such versions, or no wheel.
    """
    needed = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    needed = [line for line in needed if normalised(name_of(line)) not in HAS]
    needed += TESTS
    known = [*lacking] or ([*LACKING] if machine.installed is None else [])
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={machine.python}"]
    target += [f"--platform={tag}" for tag in machine.platforms]
    ask = [
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        f"--target={folder}",
        "--report=-",
        *target,
    ]
    report = json.loads(pip([*ask, *needed, *known]))
    found = {
        normalised(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in report["install"]
    }
    names = set(found) - HAS - set(machine.installed or ())
    if known:
        names &= {normalised(name_of(line)) for line in known}
    folder.mkdir(parents=True)
    if names:
        exact = [f"{name}=={found[name]}" for name in sorted(names)]
        pip(["download", "--quiet", "--no-deps", f"--dest={folder}", *target, *exact])
    return sorted(folder.glob("*.whl"))


def add_reference(wheels: Path, site: Path, pip: Pip) -> None:
    """The sources of the reference's packages.

    Raises:
        PackError: pip failed, or one of them is compiled.
    """
    pip(["wheel", "--quiet", "--no-deps", f"--wheel-dir={wheels}", *REFERENCE])
    for wheel in sorted(wheels.glob("*.whl")):
        if not wheel.stem.endswith("-none-any"):
            raise PackError(f"{wheel.name} is compiled: it would run on this machine alone")
        unzip(wheel, site, is_kept=is_source)


def is_source(path: str) -> bool:
    """Whether a file of the reference's packages is taken."""
    parts = Path(path).parts
    if parts[:2] == ("transformers", "models") and len(parts) > 3 and parts[2] not in KEPT_MODELS:
        return parts[-1] == "__init__.py"
    in_metadata = parts[0].endswith(".dist-info")
    return path.endswith(".py") or (in_metadata and (parts[-1] == "METADATA" or "LICEN" in path.upper()))


def unzip(wheel: Path, site: Path, is_kept: Callable[[str], bool]) -> None:
    """A wheel's modules as an installer lays them out, but no scripts."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            top, _, rest = name.partition("/")
            if top.endswith(".data"):
                kind, _, inner = rest.partition("/")
                place = inner if kind in ("purelib", "platlib") else ""
            else:
                place = name
            if not place or place.endswith("/") or not is_kept(place):
                continue
            path = site / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))


def copy_sources(checkout: Path, package: str, target: Path) -> None:
    """The Python files of one package of a checkout, and its licence.

    Raises:
        PackError: the checkout has no such package.
    """
    sources = [*(checkout / package).rglob("*.py"), *checkout.glob("LICENSE*")]
    if not (checkout / package).is_dir():
        raise PackError(f"{checkout} has no folder {package}: it is not the checkout that is needed")
    for source in sources:
        path = target / source.relative_to(checkout)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)


def write_archive(tree: Path, out: Path) -> None:
    """The folder as ``tar.xz``, without owners and times, so that the same content gives the same file."""
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for path in _files(tree):
            entry = archive.gettarinfo(path, str(path.relative_to(tree)))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o644
            with open(path, "rb") as file:
                archive.addfile(entry, file)


def _files(tree: Path) -> Iterator[Path]:
    # Sorted by kind, so that what is alike stands together.
    return iter(
        sorted((path for path in tree.rglob("*") if path.is_file()), key=lambda p: (p.suffix, str(p)))
    )


def name_of(requirement: str) -> str:
    """``uvicorn[standard]>=0.35`` is ``uvicorn``."""
    end = next((index for index, sign in enumerate(requirement) if sign in "[<>=!~; "), len(requirement))
    return requirement[:end]


def commit_of(repo: Path) -> str:
    """What git says of a checkout; "unknown" where it says nothing."""
    git = ["git", "-C", str(repo), "rev-parse", "--short=7", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run_pip(arguments: Sequence[str]) -> str:
    """What this interpreter's pip prints.

    Raises:
        PackError: it failed.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise PackError(f"pip {arguments[0]} failed: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout
