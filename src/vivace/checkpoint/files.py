"""What lies in a model folder, and whether each file is what its name says."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from vivace.errors import ModelFolderError

OFFICIAL_YAML = "cosyvoice3.yaml"
NATIVE_JSON = "vivace.json"
NATIVE_WEIGHTS = "model.safetensors"
TOKENIZER_FOLDER = "CosyVoice-BlankEN"
SPEAKER_ENCODER = "campplus.onnx"
SPEECH_TOKENIZERS = ("speech_tokenizer_v3.onnx", "speech_tokenizer_v3.batch.onnx")
VOICES = "spk2info.pt"
OTHER_GENERATIONS = {"cosyvoice2.yaml": "CosyVoice 2", "cosyvoice.yaml": "CosyVoice 300M"}

_LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """Files beside the weights. None where the folder has no such file.

    Attributes:
        tokenizer: folder with the text tokenizer's files.
        speaker_encoder: ``campplus.onnx``; speaker embedding of a prompt.
        speech_tokenizer: ``speech_tokenizer_v3.onnx``; speech tokens of a prompt.
        voices: ``spk2info.pt``; stored voices.
    """

    tokenizer: Path | None
    speaker_encoder: Path | None
    speech_tokenizer: Path | None
    voices: Path | None


def _shown(folder: Path) -> str:
    """A path within a message of one line."""
    return str(folder) if str(folder).isprintable() else repr(str(folder))


def check_folder(folder: Path) -> None:
    """Raises ModelFolderError unless ``folder`` is a folder that can be read."""
    if not folder.exists():
        raise ModelFolderError(f"{_shown(folder)}: no such model folder; give the path of a downloaded model")
    if not folder.is_dir():
        raise ModelFolderError(
            f"{_shown(folder)}: is a file; give the model folder that holds {OFFICIAL_YAML}"
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ModelFolderError(f"{_shown(folder)}: may not be read; check its permissions")


def check_file(path: Path, *, min_bytes: int = 1) -> None:
    """Raises ModelFolderError, one line that says what to do, unless ``path`` can be what its name says.

    Catches what goes wrong in downloads: missing, a folder or a device, unreadable, empty, a git-LFS
    pointer, an HTML page saved in the file's place, fewer than ``min_bytes``.
    """
    name = path.name
    try:
        status = path.stat()
    except OSError as error:
        raise ModelFolderError(
            f"{name}: is missing from {_shown(path.parent)}; download it from the model's page"
        ) from error
    if stat.S_ISDIR(status.st_mode):
        raise ModelFolderError(f"{name}: is a folder, a file is needed; download it again")
    if not stat.S_ISREG(status.st_mode):
        raise ModelFolderError(f"{name}: is not a regular file; put a copy of the real file in its place")
    if status.st_size == 0:
        raise ModelFolderError(f"{name}: is empty; download it again")
    try:
        with path.open("rb") as stream:
            head = stream.read(512)
    except OSError as error:
        raise ModelFolderError(f"{name}: may not be read; check its permissions") from error
    if head.startswith(_LFS):
        raise ModelFolderError(
            f"{name}: is a git-LFS pointer, not the file; run 'git lfs pull' in the folder"
        )
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        raise ModelFolderError(
            f"{name}: is an HTML page, not the file (a failed download); download it again"
        )
    if status.st_size < min_bytes:
        raise ModelFolderError(
            f"{name}: has only {status.st_size} bytes, so it is cut off; download it again"
        )


def is_native(folder: Path) -> bool:
    """True for a folder written by ``vivace convert``."""
    return (folder / NATIVE_JSON).exists()


def check_generation(folder: Path) -> None:
    """Raises ModelFolderError unless the folder holds a CosyVoice 3 model or our own format."""
    check_folder(folder)
    if is_native(folder) or (folder / OFFICIAL_YAML).exists():
        return
    for name, generation in OTHER_GENERATIONS.items():
        if (folder / name).exists():
            raise ModelFolderError(
                f"{name}: {_shown(folder)} is a {generation} model, which is not supported yet; "
                "use a CosyVoice 3 model (Fun-CosyVoice3-0.5B)"
            )
    raise ModelFolderError(
        f"{OFFICIAL_YAML}: is missing from {_shown(folder)}; give the folder of a CosyVoice 3 model "
        f"(Fun-CosyVoice3-0.5B)"
    )


def find_paths(folder: Path) -> tuple[ModelPaths, dict[str, str]]:
    """The files beside the weights, and for each that is missing or unusable one line saying what it is for.

    Never raises: a model speaks without its prompt encoders.
    """
    missing: dict[str, str] = {}

    def optional(key: str, purpose: str, *names: str) -> Path | None:
        found = next((folder / name for name in names if (folder / name).exists()), None)
        if found is None:
            missing[key] = f"{names[0]}: is missing; {purpose}"
            return None
        try:
            check_file(found)
        except ModelFolderError as error:
            missing[key] = f"{error.message}; {purpose}"
            return None
        return found

    tokenizer: Path | None = folder / TOKENIZER_FOLDER
    if not (_has(tokenizer, "vocab.json") and _has(tokenizer, "merges.txt")):
        tokenizer = None
        missing["tokenizer"] = f"{TOKENIZER_FOLDER}: has no vocab.json and merges.txt; text cannot be spoken"
    paths = ModelPaths(
        tokenizer=tokenizer,
        speaker_encoder=optional("speaker_encoder", "voices cannot be cloned from audio", SPEAKER_ENCODER),
        speech_tokenizer=optional(
            "speech_tokenizer", "voices cannot be cloned from audio", *SPEECH_TOKENIZERS
        ),
        voices=optional("voices", "there are no stored voices", VOICES),
    )
    return paths, missing


def _has(folder: Path | None, name: str) -> bool:
    if folder is None:
        return False
    try:
        check_file(folder / name)
    except ModelFolderError:
        return False
    return True
