"""What lies in a model folder, and whether each file is what its name says."""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from vivace.config import ModelConfig
from vivace.errors import ModelFolderError

GENERATIONS = {3: "CosyVoice 3", 2: "CosyVoice 2", 1: "CosyVoice 300M"}
OFFICIAL_YAMLS = {3: "cosyvoice3.yaml", 2: "cosyvoice2.yaml", 1: "cosyvoice.yaml"}
OFFICIAL_YAML = OFFICIAL_YAMLS[3]
NATIVE_JSON = "vivace.json"
NATIVE_WEIGHTS = "model.safetensors"
TOKENIZER_FOLDER = "CosyVoice-BlankEN"
SPEAKER_ENCODER = "campplus.onnx"
SPEECH_TOKENIZERS = {
    generation: (f"speech_tokenizer_v{generation}.onnx", f"speech_tokenizer_v{generation}.batch.onnx")
    for generation in GENERATIONS
}
VOICES = "spk2info.pt"
RANK_FILES = ("multilingual.tiktoken", "multilingual_zh_ja_yue_char_del.tiktoken")
"""Text vocabularies of CosyVoice-300M: of the 50 Hz models (51,866 tokens) and of the 25 Hz model (60,515). They come
with other packages, not with the model."""
LARGEST_WHISPER = 55_000
RANK_PACKAGES = (
    ("cosyvoice", "tokenizer/assets"),
    ("whisper", "assets"),
    ("funasr", "models/sense_voice/whisper_lib/assets"),
)
"""Installed packages that ship them, and where."""

LMVariant: TypeAlias = Literal["base", "rl"]
"""Language models of an official folder: ``llm.pt`` or ``llm.rl.pt``."""
EMBEDDED = "mini"

_LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """Files beside the weights. None where the folder has no such file.

    Attributes:
        tokenizer: folder with the text tokenizer's files, or the rank file of CosyVoice-300M.
        speaker_encoder: ``campplus.onnx``; speaker embedding of a prompt.
        speech_tokenizer: ``speech_tokenizer_v3.onnx`` (``v2``, ``v1``); speech tokens of a prompt.
        voices: ``spk2info.pt``; stored voices.
    """

    tokenizer: Path | None
    speaker_encoder: Path | None
    speech_tokenizer: Path | None
    voices: Path | None


def model_folder(model: str | Path) -> Path:
    """Where a model lies: "mini" is the embedded one, anything else a path."""
    if str(model) == EMBEDDED:
        return Path(str(importlib.resources.files("vivace"))) / "assets" / EMBEDDED
    return Path(model)


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


def official_generation(folder: Path) -> int:
    """3, 2 or 1 by the configuration file that the folder holds; 3 where it holds none."""
    return next((g for g, name in OFFICIAL_YAMLS.items() if (folder / name).exists()), 3)


def check_generation(folder: Path) -> None:
    """Raises ModelFolderError unless the folder holds a CosyVoice model or our own format."""
    check_folder(folder)
    if is_native(folder) or (folder / OFFICIAL_YAMLS[official_generation(folder)]).exists():
        return
    raise ModelFolderError(
        f"{OFFICIAL_YAML}: is missing from {_shown(folder)}; give the folder of a CosyVoice 3 model "
        f"(Fun-CosyVoice3-0.5B), or one with {OFFICIAL_YAMLS[2]} or {OFFICIAL_YAMLS[1]}"
    )


def find_paths(
    folder: Path, config: ModelConfig | None = None, tokenizer: Path | None = None
) -> tuple[ModelPaths, dict[str, str]]:
    """The files beside the weights, and for each that is missing or unusable one line saying what it is for.

    Never raises: a model speaks without its prompt encoders.

    Args:
        config: the model's; None: that of a CosyVoice 3.
        tokenizer: where else to take the text tokenizer from: a folder, or CosyVoice-300M's rank file. Its line
            names the path as it was given, all others name what lies in ``folder``.
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

    generation = 3 if config is None else config.generation
    if config is not None and generation == 1:
        text = _rank_file(folder, config.lm.text_vocab_size, tokenizer)
    else:
        text = _tokenizer_folder(folder, tokenizer)
    if isinstance(text, str):
        missing["tokenizer"] = text
    cloning = "voices cannot be cloned from audio"
    stored = optional("voices", "there are no stored voices", VOICES)
    if not (folder / VOICES).exists() and any((folder / "voices").glob("*.safetensors")):
        del missing["voices"]  # it has some of our own format
    paths = ModelPaths(
        tokenizer=None if isinstance(text, str) else text,
        speaker_encoder=optional("speaker_encoder", cloning, SPEAKER_ENCODER),
        speech_tokenizer=optional("speech_tokenizer", cloning, *SPEECH_TOKENIZERS[generation]),
        voices=stored,
    )
    return paths, missing


def _tokenizer_folder(folder: Path, given: Path | None) -> Path | str:
    """The folder with the tokenizer's files, or what is wrong."""
    path = folder / TOKENIZER_FOLDER if given is None else given
    if _has(path, "vocab.json") and _has(path, "merges.txt"):
        return path
    name = path.name if given is None else _shown(given)
    return f"{name}: has no vocab.json and merges.txt; text cannot be spoken"


def rank_file_name(vocab_size: int) -> str:
    """What CosyVoice-300M's text vocabulary of that size is called."""
    return RANK_FILES[vocab_size > LARGEST_WHISPER]


def _rank_file(folder: Path, vocab_size: int, given: Path | None) -> Path | str:
    """CosyVoice-300M's text vocabulary: the one given, in the folder, or in an installed package."""
    name = rank_file_name(vocab_size)
    if given is not None:
        shown = _shown(given)
        if given.exists():
            return _checked(given, shown)
        return f"{shown}: is missing; text cannot be spoken; give the path of the rank file ({name})"
    for place in (folder, *_package_folders()):
        if (place / name).exists():
            return _checked(place / name, name)
    source = (
        "install the package openai-whisper, which has it, or copy the file into the folder"
        if name == RANK_FILES[0]
        else "copy it from the CosyVoice repository (cosyvoice/tokenizer/assets) into the folder"
    )
    return (
        f"{name}: is missing, and is no part of the model; text cannot be spoken: {source}; commands that have the "
        "option --tokenizer also take it from elsewhere"
    )


def _checked(path: Path, shown: str) -> Path | str:
    """A rank file that can be one, or what is wrong with what is called ``shown``."""
    try:
        check_file(path)
    except ModelFolderError as error:
        detail = error.message.removeprefix(f"{path.name}: ")
        return f"{shown}: {detail}; text cannot be spoken"
    return path


def _package_folders() -> list[Path]:
    """Where installed packages keep rank files; nothing is imported."""
    folders = []
    for package, below in RANK_PACKAGES:
        spec = importlib.util.find_spec(package)
        places = (spec.submodule_search_locations or []) if spec is not None else []
        folders += [Path(place) / below for place in places]
    return folders


def _has(folder: Path, name: str) -> bool:
    try:
        check_file(folder / name)
    except ModelFolderError:
        return False
    return True
