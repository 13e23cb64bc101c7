"""Runs the steps of the Dockerfile one by one in a plain folder, where there is no engine that could build it.

    debootstrap --variant=minbase bookworm ROOT
    python deploy/steps.py ROOT --work FOLDER --arg TORCH_INDEX=…

ROOT stands for the base image and is left as it is: each stage works in a copy of it (``FOLDER/<stage>``). ``RUN``
is carried out with chroot, ``COPY`` by copying what ``Dockerfile.dockerignore`` lets through, ``ARG`` and ``ENV`` as
environment. What an engine alone does (volumes, ports, the health check's timing) is not. Needs root.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONTEXT = HERE.parent
_NAME = r"[A-Z_][A-Z0-9_]*"


@dataclass
class Stage:
    """One ``FROM``: its steps as (instruction, text), and what the last lines of the file say of the image."""

    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def parse(text: str) -> tuple[dict[str, str], list[Stage]]:
    """The arguments before the first stage, and the stages."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in joined.splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            name = rest.partition(" AS ")[2] or f"stage{len(stages)}"
            stages.append(Stage(name))
        elif not stages:
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            stages[-1].steps.append((instruction, rest.strip()))
    return arguments, stages


def pairs(text: str) -> dict[str, str]:
    """``A=b C=d`` of an ``ENV``."""
    return {name: value.strip('"') for name, value in re.findall(rf'({_NAME})=("[^"]*"|\S*)', text)}


def copied(text: str) -> tuple[str | None, list[str], str]:
    """Stage to copy from, sources and target of a ``COPY``."""
    words = text.split()
    stage = words.pop(0).partition("=")[2] if words[0].startswith("--from=") else None
    return stage, words[:-1], words[-1]


def _copy(source: Path, target: Path, *, is_context: bool) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info") if is_context else None
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=ignored)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _run_stage(stage: Stage, root: Path, given: dict[str, str], work: Path) -> None:
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    folder = "/"
    for instruction, text in stage.steps:
        sys.stdout.write(f"[{stage.name}] {instruction} {text[:100]}\n")
        sys.stdout.flush()
        if instruction == "ARG":
            name, _, value = text.partition("=")
            environment[name] = given.get(name, value)
        elif instruction == "ENV":
            environment |= pairs(text)
        elif instruction == "WORKDIR":
            folder = text
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY":
            origin, sources, target = copied(text)
            for source in sources:
                place = (
                    root / folder.lstrip("/") / target if not target.startswith("/") else root / target[1:]
                )
                path = CONTEXT / source if origin is None else work / origin / source.lstrip("/")
                into = place / path.name if target.endswith("/") and path.is_file() else place
                _copy(path, into, is_context=origin is None)
        elif instruction == "RUN":
            command = ["chroot", str(root), "/bin/sh", "-c", f"cd {folder} && {text}"]
            subprocess.run(command, env=environment, check=True)


def main() -> None:
    """The command line."""
    reader = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    reader.add_argument("root", type=Path)
    reader.add_argument("--work", type=Path, required=True)
    reader.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    given = reader.parse_args()
    _, stages = parse((HERE / "Dockerfile").read_text(encoding="utf-8"))
    arguments = dict(pair.split("=", 1) for pair in given.arg)
    for stage in stages:
        root = given.work / stage.name
        subprocess.run(["cp", "-a", str(given.root), str(root)], check=True)
        _run_stage(stage, root, arguments, given.work)
    sys.stdout.write(f"done: {given.work / stages[-1].name}\n")


if __name__ == "__main__":
    sys.exit(main())
