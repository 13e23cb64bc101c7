"""Makes a folder from the file, on the machine without network, by the standard library alone.

``site`` holds what the project needs, ``reference`` the checkouts and the packages of the reference implementation.
``reference-python`` runs with those packages and with the machine's own torch, but with nothing else of the machine:
its ``transformers``, for one, would be another version. ``publish`` runs ``benchmarks.publish`` with all of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKED = frozenset(
    {
        *(
            "torch",
            "torchgen",
            "functorch",
            "triton",
            "numpy",
            "numpy.libs",
            "scipy",
            "scipy.libs",
            "safetensors",
        ),
        *(
            "nvidia",
            "cuda",
            "cuda_bindings",
            "cuda_pathfinder",
            "cuda_toolkit",
            "mpmath",
            "sympy",
            "networkx",
        ),
        *(
            "jinja2",
            "markupsafe",
            "filelock",
            "fsspec",
            "typing_extensions",
            "packaging",
            "requests",
            "urllib3",
        ),
        *("idna", "certifi", "charset_normalizer", "tqdm", "regex", "rich", "pygments", "markdown_it"),
        *("markdown_it_py", "mdurl", "yaml", "_yaml", "pyyaml", "pil", "pillow", "pillow.libs", "zipp"),
        *("setuptools", "pkg_resources", "_distutils_hack"),
    }
)
"""Modules and metadata that the reference takes from the machine: torch and what it needs, and plain tools."""
FOUND_BY = ("torch", "numpy", "scipy", "yaml", "regex", "requests", "tqdm", "safetensors", "rich")
"""Modules whose folders are looked through."""
NEEDED = (
    *(
        "torch",
        "numpy",
        "safetensors",
        "tokenizers",
        "yaml",
        "soundfile",
        "soxr",
        "onnxruntime",
        "wetext",
        "typer",
    ),
    *("rich", "vivace.cli", "vivace.server.run"),
)
"""What the figures need, imported once to see whether it is there."""
OURS = f"""
import importlib, sys
faults = []
for name in {NEEDED!r}:
    try:
        importlib.import_module(name)
    except Exception as error:
        faults.append(f"{{name}}: {{error}}")
print("\\n".join(faults))
"""
THEIRS = """
import sys
from pathlib import Path
from benchmarks import reference_side as side
reference = Path(sys.argv[1])
sys.path[:0] = [str(reference / "CosyVoice"), str(reference / "Matcha-TTS")]
sys.meta_path.insert(0, side.StandIns(side.NEVER_NEEDED))
sys.meta_path.append(side.StandIns(side.OFTEN_MISSING))
import torch, transformers, diffusers, x_transformers
from hyperpyyaml import load_hyperpyyaml
from transformers import AutoConfig, Qwen2ForCausalLM
import cosyvoice.cli.model, cosyvoice.llm.llm, cosyvoice.flow.flow_matching, cosyvoice.flow.DiT.dit
import cosyvoice.hifigan.generator, cosyvoice.flow.decoder, cosyvoice.flow.length_regulator
import cosyvoice.transformer.upsample_encoder, cosyvoice.transformer.encoder
print(f"transformers {transformers.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}")
"""
SMOKE_S = 180


class UnpackError(Exception):
    """Why the figures cannot be measured; the text says what to do."""


def unpack(bundle: Path, folder: Path, *, links: Sequence[str] = (), root: Path = ROOT) -> None:
    """Makes the folder, or makes it anew, tries what is in it, and prints the command that measures.

    Args:
        links: more modules of the machine that the reference may see.
        root: the checkout whose code is measured.

    Raises:
        UnpackError: the file was packed for another Python, or something that the project needs is not there.
    """
    folder = folder.resolve()
    contents = extract(bundle, folder)
    (folder / "site").mkdir(exist_ok=True)
    has_reference = (folder / "reference").is_dir()
    publish = [f"PYTHONPATH={path_of(root / 'src', root, folder / 'site')}"]
    command = [sys.executable, "-m", "benchmarks.publish", *reference_options(folder, contents)]
    write_script(folder / "publish", publish, command)
    trials = {"ours": trial([sys.executable, "-c", OURS], path_of(root / "src", root, folder / "site"))}
    if has_reference:
        found = link(folder, links)
        print(f"the reference sees of this machine: {' '.join(found)}")
        settings = ["HF_HUB_OFFLINE=1", "USE_TF=0", "USE_FLAX=0"]
        sees = f"PYTHONPATH={path_of(folder / 'reference' / 'site')}"
        write_script(folder / "reference-python", [*settings, sees], [sys.executable, "-S"])
        reference = str(folder / "reference")
        theirs = [str(folder / "reference-python"), "-c", THEIRS, reference]
        trials["theirs"] = trial(theirs, None, root)
    judge({name: outcome(process) for name, process in trials.items()}, contents)
    print(f"ready: {shlex.quote(str(folder / 'publish'))} --device cuda --out published --limit-seconds 540")


def extract(bundle: Path, folder: Path) -> dict[str, object]:
    """The file's contents on disk, in place of those of an earlier one; what it says of itself.

    Raises:
        UnpackError: it is no such file, or for another Python.
    """
    for name in ("site", "reference"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(bundle) as archive:
            archive.extractall(folder, filter="data")
        contents: dict[str, object] = json.loads((folder / "offline.json").read_text(encoding="utf-8"))
    except (OSError, tarfile.TarError, ValueError) as error:
        raise UnpackError(f"{bundle} is no file that pack has written: {error}") from None
    here = "{}.{}".format(*sys.version_info)
    if contents["python"] != here:
        raise UnpackError(
            f"{bundle} is for Python {contents['python']}, this is {here}: pack --python {here}"
        )
    return contents


def link(folder: Path, links: Sequence[str]) -> list[str]:
    """Links the machine's modules into the reference's packages; those that came in the file stay.

    Returns:
        The modules' names, without metadata.
    """
    site, wanted = folder / "reference" / "site", LINKED | {name.lower() for name in links}
    found = []
    for entry in (entry for base in machine_folders(folder) for entry in sorted(base.iterdir())):
        name = entry.name.split("-")[0].removesuffix(".py").split(".cpython")[0]
        is_wanted = name.lower() in wanted or name.startswith("nvidia_")
        if is_wanted and not os.path.lexists(site / entry.name):
            (site / entry.name).symlink_to(entry)
            found += [] if entry.name.endswith("-info") else [name]
    return found


def machine_folders(folder: Path) -> list[Path]:
    """Folders of installed packages, and of those that came for the project."""
    found = [folder / "site"]
    for name in FOUND_BY:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found.append(Path(spec.origin).resolve().parent.parent)
    return list(dict.fromkeys(found))


def reference_options(folder: Path, contents: dict[str, object]) -> list[str]:
    """Options of ``benchmarks.publish``."""
    if "reference_commit" not in contents:
        return []
    reference = folder / "reference"
    options = ["--repo", str(reference / "CosyVoice"), "--matcha", str(reference / "Matcha-TTS")]
    options += ["--reference-python", str(folder / "reference-python")]
    return [*options, "--reference-commit", str(contents["reference_commit"])]


def write_script(path: Path, settings: Sequence[str], command: Sequence[str]) -> None:
    """A program that runs a command with settings of the environment, and passes its arguments on."""
    words = shlex.join([*settings, *command])
    path.write_text(f'#!/bin/sh\nexec env {words} "$@"\n', encoding="utf-8")
    path.chmod(0o755)


def path_of(*folders: Path) -> str:
    """A value for ``PYTHONPATH``."""
    return ":".join(map(str, folders))


def trial(command: Sequence[str], pythonpath: str | None, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Starts a program of its own that imports everything."""
    environment = {**os.environ, "COLUMNS": "150"}
    environment.pop("PYTHONPATH", None)
    if pythonpath is not None:
        environment["PYTHONPATH"] = pythonpath
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd
    )


def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and what was printed, or the last line of the failure."""
    try:
        printed, failure = process.communicate(timeout=SMOKE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 1, f"took longer than {SMOKE_S} s"
    lines = failure.strip().splitlines() or ["ended without a word"]
    return process.returncode, printed.strip() if process.returncode == 0 else lines[-1]


def judge(outcomes: dict[str, tuple[int, str]], contents: dict[str, object]) -> None:
    """Prints what runs.

    Raises:
        UnpackError: the project itself does not.
    """
    if "theirs" in outcomes:
        status, said = outcomes["theirs"]
        if status == 0:
            print(f"the reference implementation runs: {said}")
        else:
            print(
                f"THE REFERENCE IMPLEMENTATION DOES NOT RUN: {said}\nall but the comparison can be measured;"
            )
            print(
                f"where the machine has a module that is missing: unpack --link {next(missing(said), 'NAME')}"
            )
    status, said = outcomes["ours"]
    if status or said:
        names = dict.fromkeys(missing(said))
        if "torch" in names:
            raise UnpackError("PyTorch is not here: run this with the Python that has it")
        wanted = " ".join(names) or "NAME"
        raise UnpackError(f"not everything is here:\n{said}\npack with --lacking {wanted} and those before")
    print(f"the project runs with {len(contents['packages'])} packages of the file")  # type: ignore[arg-type]


def missing(said: str) -> Iterator[str]:
    """Modules that a failure names."""
    return (name.partition(".")[0] for name in re.findall(r"No module named '([\w.]+)'", said))
