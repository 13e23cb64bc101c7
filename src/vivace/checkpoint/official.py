"""Weights of official folders: read into our names, written from ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from vivace.checkpoint import names
from vivace.checkpoint.files import GENERATIONS, OFFICIAL_YAMLS, TOKENIZER_FOLDER, LMVariant
from vivace.checkpoint.shapes import STAGES, Stage, weight_shapes
from vivace.checkpoint.torch_file import FLOAT_DTYPES, check_finite, check_tensor, read_torch_file
from vivace.checkpoint.yaml_writer import write_qwen_config, write_yaml
from vivace.config import FlowConfig, ModelConfig, SpeechLMConfig
from vivace.errors import ModelFolderError

_PARTS = ("gain", "direction")


def stage_file(folder: Path, stage: Stage, lm_variant: LMVariant = "base") -> Path:
    """The weights file of one stage; ``rl`` takes the language model trained by reinforcement learning."""
    if stage == "lm" and lm_variant == "rl":
        return folder / "llm.rl.pt"
    return folder / names.OFFICIAL_FILES[stage]


def read_official_stage(path: Path, stage: Stage, config: ModelConfig) -> dict[str, Tensor]:
    """One stage's weights in our names, weight norm folded, in the file's own dtypes.

    Raises:
        ModelFolderError: the file is damaged or unsafe, names or shapes differ from what ``config`` asks
        for, or
            a weight has a dtype that no weight has or values that are not finite.
    """
    content = read_torch_file(path)
    tensors = _by_official_name(content, stage, path.name)
    expected = _expected_official(stage, config, tensors)
    _check_names(expected, tensors, path.name, config.generation)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise ModelFolderError(
                f"{path.name}: tensor '{name}' has shape {list(tensor.shape)}, "
                f"{OFFICIAL_YAMLS[config.generation]} asks for "
                f"{list(expected[name])}; the files belong to different models"
            )
    for name, tensor in tensors.items():
        check_finite(tensor, name, path.name, torch.float64)
    return _in_our_names(stage, tensors, path.name, config.generation)


def _by_official_name(content: dict[str, object], stage: Stage, file: str) -> dict[str, Tensor]:
    """The file's weights without what is not one of ours; dense and of a float dtype."""
    tensors: dict[str, Tensor] = {}
    for key, value in content.items():
        name = names.strip_generator(key) if stage == "vocoder" else key
        if name in names.IGNORED:
            continue
        if name in tensors:
            raise ModelFolderError(f"{file}: '{key}' stands twice; download it again")
        tensor = check_tensor(value, key, file)
        if tensor.dtype not in FLOAT_DTYPES:
            raise ModelFolderError(
                f"{file}: tensor '{key}' has dtype {str(tensor.dtype).removeprefix('torch.')}; "
                "only float16, bfloat16, float32 and float64 weights are accepted"
            )
        tensors[name] = tensor
    return tensors


def _expected_official(
    stage: Stage, config: ModelConfig, found: Mapping[str, Tensor]
) -> dict[str, tuple[int, ...]]:
    """Official names and shapes; for each weight-norm pair in the spelling that ``found`` uses, or folded."""
    expected: dict[str, tuple[int, ...]] = {}
    for ours, shape in weight_shapes(config, stage).items():
        official = names.to_official_name(stage, ours, config.generation)
        if stage == "lm" and config.generation < 3 and ours == names.SPEECH_ROWS:
            expected[official] = (shape[0] - names.NUM_START_ROWS, *shape[1:])
            expected[names.START_ROWS] = (names.NUM_START_ROWS, *shape[1:])
        elif stage == "vocoder" and names.has_weight_norm(ours) and official not in found:
            old = official.removesuffix("weight") + "weight_v" in found
            gain, direction = names.weight_norm_names(official, old_style=old)
            expected[gain], expected[direction] = names.gain_shape(shape), shape
        else:
            expected[official] = shape
    return expected


_FOREIGN = {
    3: ("encoder.", "llm.encoders", "text_encoder."),
    2: ("pre_lookahead_layer.", "llm.encoders", "text_encoder.", "length_regulator."),
    1: ("pre_lookahead_layer.", "llm.model.", "encoder.up_layer"),
}
"""Weights that tell another generation's file."""


def _check_names(
    expected: Mapping[str, object], found: Mapping[str, object], file: str, generation: int
) -> None:
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if not missing and not extra:
        return
    if any(name.startswith(_FOREIGN[generation]) for name in extra):
        raise ModelFolderError(
            f"{file}: belongs to another generation of CosyVoice; use the files of one {GENERATIONS[generation]} "
            "model together"
        )
    parts = [
        f"{len(group)} weights {kind} "
        f"({', '.join(name[:80] for name in group[:3])}{', …' if len(group) > 3 else ''})"
        for kind, group in (("missing", missing), ("unexpected", extra))
        if group
    ]
    raise ModelFolderError(
        f"{file}: does not fit {OFFICIAL_YAMLS[generation]}: {' and '.join(parts)}; download it again"
    )


def _in_our_names(stage: Stage, tensors: dict[str, Tensor], file: str, generation: int) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    pairs: dict[str, dict[str, Tensor]] = {}
    if names.START_ROWS in tensors:
        rows = [tensors.pop(names.SPEECH_ROWS), tensors.pop(names.START_ROWS)]
        tensors[names.SPEECH_ROWS] = torch.cat(rows)
    for official, tensor in tensors.items():
        split = names.split_weight_norm(official) if stage == "vocoder" else None
        if split is None:
            ours = names.to_our_name(stage, official, generation)
            assert ours is not None  # its name was expected
            weights[ours] = tensor
        else:
            pairs.setdefault(split[0], {})[split[1]] = tensor
    for official, pair in pairs.items():
        try:
            weights[official] = names.fold_weight_norm(*(pair[part] for part in _PARTS))
        except ZeroDivisionError as error:
            raise ModelFolderError(
                f"{file}: tensor '{official}' has an all-zero direction; download it again"
            ) from error
    return weights


def module_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a stage's module under our names, detached."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def to_official_state(stage: Stage, module: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """What the stage's official file holds, for ``torch.save``; weight norm is split again.

    Folding the result gives the module's weights back exactly; gain and direction themselves may differ from
    those a file was read from, with the same product.
    """
    return names.to_official(stage, module_weights(module), _rotary(config), config.generation)


def _rotary(config: ModelConfig) -> int:
    return config.flow.dit.dim_head if isinstance(config.flow, FlowConfig) else 0


def write_official(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[Stage, Mapping[str, Tensor]],
    dtype: torch.dtype | None = None,
) -> None:
    """Writes yaml, ``config.json``, ``llm.pt``, ``flow.pt`` and ``hift.pt`` into ``folder``.

    Args:
        folder: made if need be; files of these names are replaced.
        config: sizes of the model.
        weights: every weight of every stage, our names.
        dtype: of the stored weights; None keeps theirs.

    Raises:
        ModelFolderError: a weight is not finite or does not fit ``dtype``; its file is not replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / OFFICIAL_YAMLS[config.generation]).write_text(write_yaml(config), encoding="utf-8")
    if isinstance(config.lm, SpeechLMConfig):
        (folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
        (folder / TOKENIZER_FOLDER / "config.json").write_text(write_qwen_config(config), encoding="utf-8")
    for stage in STAGES:
        target = stage_file(folder, stage)
        stored: dict[str, Tensor] = {}
        for name, tensor in weights[stage].items():
            check_finite(tensor, name, target.name, dtype or tensor.dtype)
            stored[name] = tensor.to("cpu", dtype or tensor.dtype).contiguous()
        state = names.to_official(stage, stored, _rotary(config), config.generation)
        temporary = target.with_name(f".{target.name}.tmp")
        torch.save(state, temporary)
        os.replace(temporary, target)  # never cut short a file that someone has open


def save_official(
    folder: Path,
    config: ModelConfig,
    lm: nn.Module,
    flow: nn.Module,
    vocoder: nn.Module,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes three modules as an official-layout folder; see :func:`write_official`.

    Tokenizer files, ONNX files and voices are the caller's to add.
    """
    modules: dict[Stage, nn.Module] = {"lm": lm, "flow": flow, "vocoder": vocoder}
    write_official(
        folder, config, {stage: module_weights(module) for stage, module in modules.items()}, dtype
    )
