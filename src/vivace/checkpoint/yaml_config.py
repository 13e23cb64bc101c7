"""``cosyvoice3.yaml`` and ``CosyVoice-BlankEN/config.json`` to :class:`~vivace.config.ModelConfig`."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from vivace.checkpoint import yaml_classes as known
from vivace.checkpoint.config_check import check_config
from vivace.checkpoint.files import OFFICIAL_YAML, TOKENIZER_FOLDER, check_file
from vivace.checkpoint.yaml_reader import Call, References, Value, parse_hyper_yaml, read_hyper_yaml
from vivace.checkpoint.yaml_section import Section
from vivace.config import DiTConfig, FlowConfig, ModelConfig, SamplingConfig, SpeechLMConfig, VocoderConfig
from vivace.errors import ModelFolderError

_QWEN_FILE = f"{TOKENIZER_FOLDER}/config.json"


def _check_names(top: dict[str, Value], file: str) -> None:
    """Every key and class name in the tree is a known one."""
    for key in top:
        if key not in known.TOP_KEYS:
            raise ModelFolderError(f"{file}: unknown key '{key}'; this is no CosyVoice 3 configuration")
    pending: list[Value] = list(top.values())
    while pending:
        match pending.pop():
            case Call(target=target, arguments=arguments, line=line):
                if target in known.OTHER_GENERATIONS:
                    raise ModelFolderError(
                        f"{file}: line {line}: describes a {known.OTHER_GENERATIONS[target]} model, which "
                        f"is not "
                        "supported yet; use a CosyVoice 3 model (Fun-CosyVoice3-0.5B)"
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


def _speech_lm(llm: Section, qwen: dict[str, object]) -> SpeechLMConfig:
    def size(key: str, default: int | None = None) -> int:
        value = qwen.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelFolderError(f"{_QWEN_FILE}: {key} must be a whole number")
        return value

    def number(source: dict[str, object], key: str) -> float:
        value = source.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelFolderError(f"{_QWEN_FILE}: {key} must be a number")
        return float(value)

    llm.call("llm", known.QWEN)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    if llm.integer("llm_input_size") != hidden or llm.integer("llm_output_size") != hidden:
        raise ModelFolderError(f"{_QWEN_FILE}: hidden_size differs from llm_input_size in {OFFICIAL_YAML}")
    if heads < 1 or ("head_dim" not in qwen and hidden % heads):
        raise ModelFolderError(f"{_QWEN_FILE}: num_attention_heads must divide hidden_size")
    rope = qwen.get("rope_parameters")  # where newer files keep rope_theta
    if rope is not None and not (isinstance(rope, dict) and rope.get("rope_type", "default") == "default"):
        raise ModelFolderError(f"{_QWEN_FILE}: rope_parameters must be of the default type")
    mix_ratio = llm.integers("mix_ratio")
    if len(mix_ratio) != 2:
        raise ModelFolderError(f"{OFFICIAL_YAML}: llm.mix_ratio must be two whole numbers")
    sampling = llm.call("sampling", known.SAMPLING)
    return SpeechLMConfig(
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads"),
        head_dim=size("head_dim", hidden // heads),
        text_vocab_size=size("vocab_size"),
        speech_token_size=llm.integer("speech_token_size"),
        rms_norm_eps=number(qwen, "rms_norm_eps"),
        rope_theta=number(rope if isinstance(rope, dict) and "rope_theta" in rope else qwen, "rope_theta"),
        mix_ratio=(mix_ratio[0], mix_ratio[1]),
        sampling=SamplingConfig(
            top_p=sampling.number("top_p"),
            top_k=sampling.integer("top_k"),
            win_size=sampling.integer("win_size"),
            tau_r=sampling.number("tau_r"),
        ),
    )


def _flow(flow: Section) -> FlowConfig:
    flow.must_be("output_type", "mel")
    lookahead = flow.call("pre_lookahead_layer", known.LOOKAHEAD)
    lookahead.must_be("in_channels", flow.integer("input_size"))
    lookahead.must_be("pre_lookahead_len", flow.integer("pre_lookahead_len"))
    decoder = flow.call("decoder", known.SOLVER)
    solver = decoder.call("cfm_params", known.SOLVER_PARAMS).mapping("content")
    solver.only(known.SOLVER_KEYS)
    solver.must_be("solver", "euler")
    solver.must_be("t_scheduler", "cosine")
    dit = decoder.call("estimator", known.DIT)
    dit.must_be("long_skip_connection", False)
    return FlowConfig(
        dit=DiTConfig(
            dim=dit.integer("dim"),
            depth=dit.integer("depth"),
            heads=dit.integer("heads"),
            dim_head=dit.integer("dim_head"),
            ff_mult=dit.integer("ff_mult"),
            mel_dim=dit.integer("mel_dim"),
            mu_dim=dit.integer("mu_dim"),
            spk_dim=dit.integer("spk_dim"),
            out_channels=dit.integer("out_channels"),
            static_chunk_frames=dit.integer("static_chunk_size"),
        ),
        vocab_size=flow.integer("vocab_size"),
        input_size=flow.integer("input_size"),
        output_size=flow.integer("output_size"),
        spk_embed_dim=flow.integer("spk_embed_dim"),
        token_mel_ratio=flow.integer("token_mel_ratio"),
        lookahead_tokens=flow.integer("pre_lookahead_len"),
        lookahead_channels=lookahead.integer("channels"),
        guidance_scale=solver.number("inference_cfg_rate"),
        training_guidance_drop=solver.number("training_cfg_rate"),
        sigma_min=solver.number("sigma_min"),
    )


def _source_phase(hift: Section) -> str:
    """A key of Vivace's own models; official files do not have it."""
    return hift.optional_text("source_phase") or "frame"


def _vocoder(hift: Section) -> VocoderConfig:
    istft = hift.mapping("istft_params")
    istft.only(frozenset({"n_fft", "hop_len"}))
    f0 = hift.call("f0_predictor", known.F0)
    f0.must_be("num_class", 1)
    f0.must_be("in_channels", hift.integer("in_channels"))
    return VocoderConfig(
        in_channels=hift.integer("in_channels"),
        base_channels=hift.integer("base_channels"),
        nb_harmonics=hift.integer("nb_harmonics"),
        sampling_rate=hift.integer("sampling_rate"),
        nsf_alpha=hift.number("nsf_alpha"),
        nsf_sigma=hift.number("nsf_sigma"),
        nsf_voiced_threshold=hift.number("nsf_voiced_threshold"),
        upsample_rates=hift.integers("upsample_rates"),
        upsample_kernel_sizes=hift.integers("upsample_kernel_sizes"),
        istft_n_fft=istft.integer("n_fft"),
        istft_hop=istft.integer("hop_len"),
        resblock_kernel_sizes=hift.integers("resblock_kernel_sizes"),
        resblock_dilation_sizes=hift.integer_rows("resblock_dilation_sizes"),
        source_resblock_kernel_sizes=hift.integers("source_resblock_kernel_sizes"),
        source_resblock_dilation_sizes=hift.integer_rows("source_resblock_dilation_sizes"),
        lrelu_slope=hift.number("lrelu_slope"),
        audio_limit=hift.number("audio_limit"),
        conv_pre_lookahead_frames=hift.integer("conv_pre_look_right"),
        f0_cond_channels=f0.integer("cond_channels"),
        source_phase=_source_phase(hift),
    )


def _read_qwen(path: Path) -> dict[str, object]:
    """The text model's ``config.json``: known keys only, and only settings that the code implements."""
    check_file(path)
    if path.stat().st_size > 64 * 1024:
        raise ModelFolderError(f"{_QWEN_FILE}: is too large for a configuration; download it again")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{_QWEN_FILE}: is not valid JSON; download it again") from error
    if not isinstance(values, dict):
        raise ModelFolderError(f"{_QWEN_FILE}: must be a JSON object; download it again")
    for key, value in values.items():
        if key in known.QWEN_FIXED:
            if value != known.QWEN_FIXED[key]:
                raise ModelFolderError(
                    f"{_QWEN_FILE}: {key} must be {json.dumps(known.QWEN_FIXED[key])}; others are not "
                    f"supported"
                )
        elif key == "layer_types":
            if not isinstance(value, list) or any(kind != "full_attention" for kind in value):
                raise ModelFolderError(
                    f"{_QWEN_FILE}: layer_types other than full_attention are not supported"
                )
        elif key not in known.QWEN_SIZES and key not in known.QWEN_IGNORED:
            raise ModelFolderError(f"{_QWEN_FILE}: unknown key '{key[:60]}'")
    return values


def config_from_values(top: dict[str, Value], qwen: dict[str, object], name: str) -> ModelConfig:
    """Builds the configuration from a parsed yaml and a checked ``config.json``. Raises ModelFolderError."""
    _check_names(top, OFFICIAL_YAML)
    root = Section("", top, References(top, OFFICIAL_YAML))
    flow_section = root.call("flow", known.FLOW)
    token_rate_hz = root.integer("token_frame_rate")
    flow_section.must_be("input_frame_rate", token_rate_hz)
    config = ModelConfig(
        generation=3,
        name=name,
        lm=_speech_lm(root.call("llm", known.LM), qwen),
        flow=_flow(flow_section),
        vocoder=_vocoder(root.call("hift", known.HIFT)),
        sample_rate_hz=root.integer("sample_rate"),
        token_rate_hz=token_rate_hz,
        chunk_tokens=root.integer("chunk_size"),
        pronunciation=root.optional_text("pronunciation"),
        default_voice=root.optional_text("default_voice"),
    )
    if "segment_text_tokens" in top:
        config = dataclasses.replace(config, segment_text_tokens=root.integer("segment_text_tokens"))
    if "token_text_ratio" in top:
        config = dataclasses.replace(config, token_text_ratio=root.number_pair("token_text_ratio"))
    check_config(config, OFFICIAL_YAML)
    return config


def parse_official_config(yaml_text: str, qwen: dict[str, object], name: str) -> ModelConfig:
    """As :func:`read_official_config`, from text already in memory."""
    return config_from_values(parse_hyper_yaml(yaml_text, OFFICIAL_YAML), qwen, name)


def read_official_config(folder: Path) -> ModelConfig:
    """Reads the configuration of an official CosyVoice 3 folder. No code of the folder is run.

    Raises:
        ModelFolderError: a file is missing or damaged, names something unknown, or describes another model.
    """
    check_file(folder / OFFICIAL_YAML)
    top = read_hyper_yaml(folder / OFFICIAL_YAML)
    _check_names(top, OFFICIAL_YAML)
    return config_from_values(
        top, _read_qwen(folder / TOKENIZER_FOLDER / "config.json"), folder.resolve().name
    )
