"""``cosyvoice3.yaml`` (``2``, none) and ``CosyVoice-BlankEN/config.json`` to :class:`~vivace.config.ModelConfig`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from vivace.checkpoint import yaml_classes as known
from vivace.checkpoint.config_check import check_config
from vivace.checkpoint.files import (
    GENERATIONS,
    OFFICIAL_YAMLS,
    TOKENIZER_FOLDER,
    check_file,
    official_generation,
)
from vivace.checkpoint.yaml_reader import Call, References, Value, parse_hyper_yaml, read_hyper_yaml
from vivace.checkpoint.yaml_section import Section
from vivace.checkpoint.yaml_stages import QWEN_FILE, conformer_lm, flow_config, speech_lm, vocoder
from vivace.config import ModelConfig, RegulatedFlowConfig
from vivace.errors import ModelFolderError


def _check_names(top: dict[str, Value], generation: int) -> None:
    """Every key and class name in the tree is a known one, and none is another generation's."""
    file = OFFICIAL_YAMLS[generation]
    for key in top:
        if key not in known.TOP_KEYS:
            raise ModelFolderError(
                f"{file}: unknown key '{key}'; this is no {GENERATIONS[generation]} configuration"
            )
    pending: list[Value] = list(top.values())
    while pending:
        match pending.pop():
            case Call(target=target, arguments=arguments, line=line):
                owner = known.OWNERS.get(target, generation)
                if owner != generation:
                    raise ModelFolderError(
                        f"{file}: line {line}: describes a {GENERATIONS[owner]} model; its file is called "
                        f"{OFFICIAL_YAMLS[owner]}"
                    )
                if target not in known.CLASS_KEYS:
                    raise ModelFolderError(f"{file}: line {line}: unknown class '{target[:120]}'")
                for key in arguments:
                    if key not in known.CLASS_KEYS[target]:
                        raise ModelFolderError(f"{file}: line {line}: unknown key '{key}' of {target}")
                pending.extend(arguments.values())
            case list(items):
                pending.extend(items)
            case dict(values):
                pending.extend(values.values())


def _read_qwen(path: Path) -> dict[str, object]:
    """The text model's ``config.json``: known keys only, and only settings that the code implements."""
    check_file(path)
    if path.stat().st_size > 64 * 1024:
        raise ModelFolderError(f"{QWEN_FILE}: is too large for a configuration; download it again")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{QWEN_FILE}: is not valid JSON; download it again") from error
    if not isinstance(values, dict):
        raise ModelFolderError(f"{QWEN_FILE}: must be a JSON object; download it again")
    for key, value in values.items():
        if key in known.QWEN_FIXED:
            if value != known.QWEN_FIXED[key]:
                raise ModelFolderError(
                    f"{QWEN_FILE}: {key} must be {json.dumps(known.QWEN_FIXED[key])}; others are not "
                    f"supported"
                )
        elif key == "layer_types":
            if not isinstance(value, list) or any(kind != "full_attention" for kind in value):
                raise ModelFolderError(
                    f"{QWEN_FILE}: layer_types other than full_attention are not supported"
                )
        elif key not in known.QWEN_SIZES and key not in known.QWEN_IGNORED:
            raise ModelFolderError(f"{QWEN_FILE}: unknown key '{key[:60]}'")
    return values


def config_from_values(
    top: dict[str, Value], qwen: dict[str, object], name: str, generation: int = 3
) -> ModelConfig:
    """Builds the configuration from a parsed yaml and a checked ``config.json``. Raises ModelFolderError."""
    _check_names(top, generation)
    file = OFFICIAL_YAMLS[generation]
    root = Section("", top, References(top, file))
    flow = flow_config(root, generation)
    if isinstance(flow, RegulatedFlowConfig):
        token_rate_hz, chunk_tokens = flow.token_rate_hz, flow.token_rate_hz
    else:
        token_rate_hz, chunk_tokens = root.integer("token_frame_rate"), root.integer("chunk_size")
        root.call("flow", known.FLOWS[generation]).must_be("input_frame_rate", token_rate_hz)
    llm = root.call("llm", known.LMS[generation])
    config = ModelConfig(
        generation=generation,
        name=name,
        lm=conformer_lm(llm) if generation == 1 else speech_lm(llm, qwen, generation),
        flow=flow,
        vocoder=vocoder(root, generation),
        sample_rate_hz=root.integer("sample_rate"),
        token_rate_hz=token_rate_hz,
        chunk_tokens=chunk_tokens,
        pronunciation=root.optional_text("pronunciation"),
        default_voice=root.optional_text("default_voice"),
        mel_fmax_hz=_mel_fmax(root, top, generation),
    )
    if "segment_text_tokens" in top:
        config = dataclasses.replace(config, segment_text_tokens=root.integer("segment_text_tokens"))
    if "token_text_ratio" in top:
        config = dataclasses.replace(config, token_text_ratio=root.number_pair("token_text_ratio"))
    check_config(config, file)
    return config


def _mel_fmax(root: Section, top: dict[str, Value], generation: int) -> float | None:
    """Upper edge of the prompt's mel; a file without the section gets what the official ones say."""
    if "feat_extractor" not in top:
        return 8000.0 if generation == 1 else None
    return root.call("feat_extractor", known.MEL).optional_number("fmax")


def parse_official_config(
    yaml_text: str, qwen: dict[str, object], name: str, generation: int = 3
) -> ModelConfig:
    """As :func:`read_official_config`, from text already in memory."""
    top = parse_hyper_yaml(yaml_text, OFFICIAL_YAMLS[generation])
    return config_from_values(top, qwen, name, generation)


def read_official_config(folder: Path) -> ModelConfig:
    """Reads the configuration of an official folder of any generation. No code of the folder is run.

    Raises:
        ModelFolderError: a file is missing or damaged, names something unknown, or describes another model.
    """
    generation = official_generation(folder)
    path = folder / OFFICIAL_YAMLS[generation]
    check_file(path)
    top = read_hyper_yaml(path)
    _check_names(top, generation)
    qwen = {} if generation == 1 else _read_qwen(folder / TOKENIZER_FOLDER / "config.json")
    return config_from_values(top, qwen, folder.resolve().name, generation)
