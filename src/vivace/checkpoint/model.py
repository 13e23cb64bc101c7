"""Opens a model folder of either format, and converts one to the other."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vivace.checkpoint.configuration import load_config
from vivace.checkpoint.files import (
    NATIVE_WEIGHTS,
    OFFICIAL_YAMLS,
    RANK_FILES,
    SPEAKER_ENCODER,
    SPEECH_TOKENIZERS,
    TOKENIZER_FOLDER,
    VOICES,
    LMVariant,
    ModelPaths,
    check_file,
    find_paths,
    is_native,
    rank_file_name,
)
from vivace.checkpoint.loading import build_stage, check_memory, resolve_device, stage_dtype
from vivace.checkpoint.native import new_folder, read_native_weights, write_native
from vivace.checkpoint.official import read_official_stage, stage_file
from vivace.checkpoint.shapes import STAGES, Stage, num_parameters
from vivace.checkpoint.torch_file import check_finite
from vivace.config import ModelConfig
from vivace.errors import ModelFolderError
from vivace.models.int8_stages import check_int8, quantize
from vivace.models.kinds import AnyFlow, AnyLM, AnyVocoder, make_flow, make_lm, make_vocoder

M = TypeVar("M", bound=nn.Module)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What files may hold."""

PRECISIONS: dict[str, torch.dtype | None] = {"auto": None, **DTYPES, "int8": torch.int8}
"""What an engine may run in; None is what suits the device (``loading.default_dtype``)."""

# Copied beside converted weights, by name: whatever else lies in a folder stays there.
_TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
)
_OTHER_FILES = (
    SPEAKER_ENCODER,
    *(name for names in SPEECH_TOKENIZERS.values() for name in names),
    *RANK_FILES,
    VOICES,
    "lexicon.xz",
    "LICENSE",
    "LICENSES.md",
)
_VOICE_FILES = (".safetensors", ".json")


@dataclass(slots=True)
class Model:
    """A model folder, loaded.

    Attributes:
        config: sizes and rates.
        lm, flow, vocoder: the stages, in eval mode, without gradients.
        folder: where it was read from.
        paths: files beside the weights.
        missing: what the folder lacks, by feature (``tokenizer``, ``speaker_encoder``, ``speech_tokenizer``,
            ``voices``): one line each that names the file and what is not possible without it.
        device: of the weights.
        dtype: of the weights; the vocoder's are always float32. int8: of the large linear layers' weights, the
            others are float32.
    """

    config: ModelConfig
    lm: AnyLM
    flow: AnyFlow
    vocoder: AnyVocoder
    folder: Path
    paths: ModelPaths
    missing: dict[str, str]
    device: torch.device
    dtype: torch.dtype


def read_weights(
    folder: Path, config: ModelConfig, lm_variant: LMVariant = "base"
) -> dict[Stage, dict[str, Tensor]]:
    """Every weight in our names, in the files' dtypes. Raises ModelFolderError."""
    if is_native(folder):
        if lm_variant != "base":
            raise ModelFolderError(
                "llm.rl.pt: only official folders hold it; convert that language model instead"
            )
        return read_native_weights(folder, config)
    paths = {stage: stage_file(folder, stage, lm_variant) for stage in STAGES}
    for path in paths.values():  # all of them before reading gigabytes of the first
        check_file(path, min_bytes=64)
    return {stage: read_official_stage(path, stage, config) for stage, path in paths.items()}


def open_model(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    lm_variant: LMVariant = "base",
    tokenizer: Path | None = None,
) -> Model:
    """Loads a model folder: an official folder of any generation, or one written by :func:`convert_folder`.

    Args:
        folder: the folder.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: of the speech LM's and the flow's weights; the vocoder always runs in float32. int8 (CosyVoice 3 on
            a CPU) rounds the weights of float, or half, files to 8 bits while they are read.
        lm_variant: ``rl`` reads ``llm.rl.pt`` in place of ``llm.pt``.
        tokenizer: where to take the text tokenizer from instead of the folder; see :func:`find_paths`.

    Raises:
        ModelFolderError: one line that names the file and says what to do. No code of the folder is run and
        nothing
            of a size that the files do not have is allocated. A ``tokenizer`` that is not there is an error, a folder
            without one is not.
    """
    folder = Path(folder)
    resolved = resolve_device(device)
    is_int8 = dtype == torch.int8
    if is_int8:
        check_int8(resolved)
    config = load_config(folder)
    paths, missing = find_paths(folder, config, tokenizer)
    if tokenizer is not None and paths.tokenizer is None:
        raise ModelFolderError(missing["tokenizer"])
    weights = read_weights(folder, config, lm_variant)
    check_memory(config, resolved, dtype)

    mapped = is_native(folder)

    def build(stage: Stage, make: Callable[[], M]) -> M:
        file = NATIVE_WEIGHTS if mapped else stage_file(folder, stage, lm_variant).name
        own_dtype = torch.float32 if is_int8 else stage_dtype(stage, dtype)
        module = build_stage(make, weights.pop(stage), file, resolved, own_dtype, keep_mapped=mapped)
        if is_int8 and stage != "vocoder":
            quantize(module)
        return module

    return Model(
        config=config,
        lm=build("lm", lambda: make_lm(config.lm)),
        flow=build("flow", lambda: make_flow(config.flow)),
        vocoder=build("vocoder", lambda: make_vocoder(config.vocoder)),
        folder=folder,
        paths=paths,
        missing=missing,
        device=resolved,
        dtype=dtype,
    )


def convert_folder(
    folder: str | Path,
    out: str | Path,
    dtype: str = "float32",
    *,
    lm_variant: LMVariant = "base",
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Writes a model in our own format: ``model.safetensors``, ``vivace.json`` and the files beside the
    weights.

    ``out`` appears complete or not at all.

    Args:
        folder: model folder of either format.
        out: new folder.
        dtype: ``float32``, ``bfloat16`` or ``float16``, of the speech LM and the flow; a weight that would overflow
            is an error. The vocoder always runs in float32 and keeps its own.
        lm_variant: which language model of an official folder.
        tokenizer: goes into the new folder in place of the folder's own: a folder with Qwen2's files, or
            CosyVoice-300M's rank file. None: the folder's own, or the rank file of an installed package, so that the
            new folder speaks where that package is not installed.

    Returns:
        Plain values: ``out``, ``dtype``, ``bytes`` of the weights, ``parameters`` by stage, ``sources``,
        ``missing``.

    Raises:
        ModelFolderError: ``folder`` cannot be read, ``out`` exists, or the disk is full.
    """
    folder, out = Path(folder), Path(out)
    if dtype not in DTYPES:
        raise ModelFolderError(
            f"--dtype must be one of {', '.join(DTYPES)}", code="unsupported_value", param="dtype"
        )
    config = load_config(folder)
    paths, missing = find_paths(folder, config, tokenizer)
    if tokenizer is not None and paths.tokenizer is None:
        raise ModelFolderError(missing["tokenizer"])
    weights = read_weights(folder, config, lm_variant)
    for stage in STAGES:
        for name, tensor in weights[stage].items():
            stored = tensor.dtype if stage == "vocoder" else DTYPES[dtype]
            check_finite(tensor, f"{stage}.{name}", folder.name, stored)
    if is_native(folder):
        sources = [folder / NATIVE_WEIGHTS]
    else:
        sources = [
            folder / OFFICIAL_YAMLS[config.generation],
            *(stage_file(folder, stage, lm_variant) for stage in STAGES),
        ]
    digests = {path.name: _sha256(path) for path in sources}
    try:
        with new_folder(out) as temporary:
            _copy_others(folder, temporary)
            text = paths.tokenizer
            if text is not None and (tokenizer is not None or not text.is_relative_to(folder)):
                _copy_tokenizer(text, temporary, rank_file_name(config.lm.text_vocab_size))
            write_native(temporary, config, weights, DTYPES[dtype], digests)
            size = (temporary / NATIVE_WEIGHTS).stat().st_size
    except OSError as error:
        raise ModelFolderError(
            f"{out}: cannot be written ({error.strerror}); free some space or choose another place"
        ) from error
    return {
        "out": str(out),
        "dtype": dtype,
        "bytes": size,
        "parameters": {stage: num_parameters(config, stage) for stage in STAGES},
        "sources": digests,
        "missing": find_paths(out, config)[1],
    }


def _copy_others(folder: Path, out: Path) -> None:
    """Copies the known files beside the weights; each is checked first, so that no pointer is passed on."""
    wanted = [Path(TOKENIZER_FOLDER) / name for name in _TOKENIZER_FILES] + [
        Path(name) for name in _OTHER_FILES
    ]
    wanted += sorted(
        path.relative_to(folder) for path in (folder / "voices").rglob("*") if path.suffix in _VOICE_FILES
    )
    for relative in wanted:
        source = folder / relative
        if not source.exists():
            continue
        check_file(source)
        real = _within(folder, source)
        (out / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(real, out / relative, follow_symlinks=False)


def _copy_tokenizer(given: Path, out: Path, rank_name: str) -> None:
    """Puts a text tokenizer where a folder of the model has it; nothing of the folder's own is left."""
    if given.is_file():
        shutil.copyfile(given, out / rank_name)
        return
    inside = out / TOKENIZER_FOLDER
    inside.mkdir(exist_ok=True)
    for name in _TOKENIZER_FILES:
        (inside / name).unlink(missing_ok=True)
        if (given / name).exists():
            check_file(given / name)
            shutil.copyfile(given / name, inside / name)


def _within(folder: Path, path: Path) -> Path:
    """``path`` with its links resolved. A new folder is passed on, so it gets nothing from elsewhere on this machine.

    Links within the folder are followed, and those of a download cache, whose files lie in ``blobs`` beside
    ``snapshots``.

    Raises:
        ModelFolderError: it is, or lies behind, a link to another place.
    """
    root, real = folder.resolve(), path.resolve()
    blobs = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []
    if not any(real.is_relative_to(place) for place in (root, *blobs)):
        raise ModelFolderError(
            f"{path.relative_to(folder)}: is a link that leads out of the model folder; put the file itself there"
        )
    return real


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
