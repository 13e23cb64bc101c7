"""Fixtures that several test files share."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"

# Tests are small: more threads cost time, and they disturb each other where several test processes run at once.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes that the tests start

# Kernels are interpreted where there is no GPU (``tests/interpreter``), if Triton hears of it before it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """The recorded vectors and weights of the tiny CosyVoice 3 model."""
    return GOLDEN / "cosyvoice3-tiny"


def unpack_golden(golden_folder: Path, folder: Path) -> Path:
    """The golden weights of one generation in an official-layout folder.

    Like the official files, ``llm.pt`` stores the tied text head once and shares its storage. No tokenizer
    files, no ONNX files.
    """
    for yaml in golden_folder.glob("*.yaml"):
        shutil.copyfile(yaml, folder / yaml.name)
    if (golden_folder / "CosyVoice-BlankEN").exists():
        shutil.copytree(golden_folder / "CosyVoice-BlankEN", folder / "CosyVoice-BlankEN")
    with np.load(golden_folder / "weights.npz") as packed:
        for stage in ("llm", "flow", "hift"):
            names = [name for name in packed.files if name.startswith(f"{stage}/")]
            state = {
                name.removeprefix(f"{stage}/"): torch.from_numpy(packed[name])
                for name in names
                if name != "llm/llm.model.lm_head.weight"
            }
            if "llm.model.model.embed_tokens.weight" in state:
                state["llm.model.lm_head.weight"] = state["llm.model.model.embed_tokens.weight"]
            torch.save(state, folder / f"{stage}.pt")
    return folder


@pytest.fixture(scope="session")
def tiny_model_folder(golden_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden CosyVoice 3 as an official-layout folder; read-only by agreement."""
    return unpack_golden(golden_folder, tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def random_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete tiny official-layout folder: random float32 weights, tokenizer files, ONNX files, one voice."""
    from vivace.random_checkpoint import write_random_checkpoint

    folder = tmp_path_factory.mktemp("random") / "model"
    write_random_checkpoint(folder, size="tiny", seed=0, dtype="float32")
    return folder


@pytest.fixture
def vivace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, list[str], list[str]]]:
    """Runs the command in this process: (exit code, lines of standard output, of standard error)."""
    monkeypatch.setenv("VIVACE_VOICES", str(tmp_path / "voices"))
    monkeypatch.chdir(tmp_path)

    from vivace import cli

    def run(*arguments: object, stdin: str | io.TextIOBase = "") -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, "argv", ["vivace", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", stdin if isinstance(stdin, io.TextIOBase) else io.StringIO(stdin))
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err.strip().splitlines()

    return run


@pytest.fixture
def sequences(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], list[int]]]:
    """What the speech LM of any engine is given, one entry a segment: (prefix, text, prompt speech)."""
    from vivace.engine import stages

    seen = []

    class Recorded(stages.PlainSequence):
        def __init__(self, lm, prefix, text, prompt_speech):
            super().__init__(lm, prefix, text, prompt_speech)
            seen.append((list(prefix), list(text), list(prompt_speech)))

    monkeypatch.setattr(stages, "PlainSequence", Recorded)
    return seen
