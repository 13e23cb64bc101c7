"""The stages' sections of a configuration file, one function a class of the reference."""

from __future__ import annotations

import math

from vivace.checkpoint import yaml_classes as known
from vivace.checkpoint.files import OFFICIAL_YAMLS, TOKENIZER_FOLDER
from vivace.checkpoint.yaml_section import Section
from vivace.config import (
    AnyFlowConfig,
    ConformerLMConfig,
    DiTConfig,
    EncoderConfig,
    FlowConfig,
    RegulatedFlowConfig,
    SamplingConfig,
    SpeechLMConfig,
    UNetConfig,
    UNetFlowConfig,
    VocoderConfig,
)
from vivace.errors import ModelFolderError

QWEN_FILE = f"{TOKENIZER_FOLDER}/config.json"


def _sampling(llm: Section) -> SamplingConfig:
    sampling = llm.call("sampling", known.SAMPLING)
    return SamplingConfig(
        top_p=sampling.number("top_p"),
        top_k=sampling.integer("top_k"),
        win_size=sampling.integer("win_size"),
        tau_r=sampling.number("tau_r"),
    )


def speech_lm(llm: Section, qwen: dict[str, object], generation: int) -> SpeechLMConfig:
    """CosyVoice 2 and 3; they differ in their special rows."""

    def size(key: str, default: int | None = None) -> int:
        value = qwen.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelFolderError(f"{QWEN_FILE}: {key} must be a whole number")
        return value

    def number(source: dict[str, object], key: str) -> float:
        value = source.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelFolderError(f"{QWEN_FILE}: {key} must be a number")
        return float(value)

    file = OFFICIAL_YAMLS[generation]
    llm.call("llm", known.QWEN)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    if llm.integer("llm_input_size") != hidden or llm.integer("llm_output_size") != hidden:
        raise ModelFolderError(f"{QWEN_FILE}: hidden_size differs from llm_input_size in {file}")
    if heads < 1 or ("head_dim" not in qwen and hidden % heads):
        raise ModelFolderError(f"{QWEN_FILE}: num_attention_heads must divide hidden_size")
    rope = qwen.get("rope_parameters")  # where newer files keep rope_theta
    if rope is not None and not (isinstance(rope, dict) and rope.get("rope_type", "default") == "default"):
        raise ModelFolderError(f"{QWEN_FILE}: rope_parameters must be of the default type")
    mix_ratio = llm.integers("mix_ratio")
    if len(mix_ratio) != 2:
        raise ModelFolderError(f"{file}: llm.mix_ratio must be two whole numbers")
    is_older = generation == 2
    return SpeechLMConfig(
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads"),
        head_dim=size("head_dim", hidden // heads),
        text_vocab_size=size("vocab_size"),
        speech_token_size=llm.integer("speech_token_size"),
        num_special_rows=3 if is_older else 200,
        rms_norm_eps=number(qwen, "rms_norm_eps"),
        rope_theta=number(rope if isinstance(rope, dict) and "rope_theta" in rope else qwen, "rope_theta"),
        mix_ratio=(mix_ratio[0], mix_ratio[1]),
        sampling=_sampling(llm),
        start_rows_apart=is_older,
        head_bias=is_older,
    )


def _encoder(encoder: Section, embedding: str) -> EncoderConfig:
    """A conformer or transformer encoder; only the settings of the official models are implemented."""
    encoder.must_be("input_layer", embedding)
    encoder.must_be("pos_enc_layer_type", "rel_pos_espnet")
    encoder.must_be("selfattention_layer_type", "rel_selfattn")
    encoder.must_be("normalize_before", True)
    for key in ("use_cnn_module", "macaron_style", "use_dynamic_chunk", "use_dynamic_left_chunk"):
        encoder.must_be(key, False)
    return EncoderConfig(
        input_size=encoder.integer("input_size"),
        output_size=encoder.integer("output_size"),
        heads=encoder.integer("attention_heads"),
        ff_size=encoder.integer("linear_units"),
        num_blocks=encoder.integer("num_blocks"),
    )


def conformer_lm(llm: Section) -> ConformerLMConfig:
    """CosyVoice-300M."""
    text = llm.call("text_encoder", known.CONFORMER)
    decoder = llm.call("llm", known.TRANSFORMER)
    for section in (text, decoder):
        section.must_be("static_chunk_size", 1)
    text.must_be("input_size", llm.integer("text_encoder_input_size"))
    decoder.must_be("input_size", llm.integer("llm_input_size"))
    decoder.must_be("output_size", llm.integer("llm_output_size"))
    return ConformerLMConfig(
        text_vocab_size=llm.integer("text_token_size"),
        speech_token_size=llm.integer("speech_token_size"),
        text_encoder=_encoder(text, "linear"),
        decoder=_encoder(decoder, "linear_legacy"),
        spk_embed_dim=llm.integer("spk_embed_dim"),
        sampling=_sampling(llm),
    )


def _solver(decoder: Section) -> Section:
    solver = decoder.call("cfm_params", known.SOLVER_PARAMS).mapping("content")
    solver.only(known.SOLVER_KEYS)
    solver.must_be("solver", "euler")
    solver.must_be("t_scheduler", "cosine")
    return solver


def _dit_flow(flow: Section) -> FlowConfig:
    lookahead = flow.call("pre_lookahead_layer", known.LOOKAHEAD)
    lookahead.must_be("in_channels", flow.integer("input_size"))
    lookahead.must_be("pre_lookahead_len", flow.integer("pre_lookahead_len"))
    decoder = flow.call("decoder", known.CAUSAL_SOLVER)
    solver = _solver(decoder)
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


def _unet(estimator: Section, static_chunk_frames: int | None) -> UNetConfig:
    mel_dim = estimator.integer("out_channels")
    estimator.must_be("act_fn", "gelu")
    if estimator.integer("in_channels") != 4 * mel_dim:
        raise ModelFolderError(f"{estimator.file}: {estimator.name}.in_channels must be 4 times out_channels")
    return UNetConfig(
        channels=estimator.integers("channels"),
        dim_head=estimator.integer("attention_head_dim"),
        heads=estimator.integer("num_heads"),
        num_blocks=estimator.integer("n_blocks"),
        num_mid_blocks=estimator.integer("num_mid_blocks"),
        mel_dim=mel_dim,
        static_chunk_frames=static_chunk_frames,
    )


def _unet_flow(flow: Section) -> UNetFlowConfig:
    encoder = flow.call("encoder", known.UPSAMPLE_CONFORMER)
    decoder = flow.call("decoder", known.CAUSAL_SOLVER)
    solver = _solver(decoder)
    estimator = decoder.call("estimator", known.CAUSAL_UNET)
    estimator.must_be("num_decoding_left_chunks", -1)
    frames, ratio = estimator.integer("static_chunk_size"), flow.integer("token_mel_ratio")
    encoder.must_be("static_chunk_size", frames // max(1, ratio))
    flow.must_be("token_mel_ratio", 2)
    return UNetFlowConfig(
        encoder=_encoder(encoder, "linear"),
        unet=_unet(estimator, frames),
        vocab_size=flow.integer("vocab_size"),
        input_size=flow.integer("input_size"),
        output_size=flow.integer("output_size"),
        spk_embed_dim=flow.integer("spk_embed_dim"),
        token_mel_ratio=ratio,
        lookahead_tokens=flow.integer("pre_lookahead_len"),
        guidance_scale=solver.number("inference_cfg_rate"),
        training_guidance_drop=solver.number("training_cfg_rate"),
        sigma_min=solver.number("sigma_min"),
    )


def _regulated_flow(flow: Section) -> RegulatedFlowConfig:
    encoder = flow.call("encoder", known.CONFORMER)
    encoder.must_be("static_chunk_size", 0)
    regulator = flow.call("length_regulator", known.REGULATOR)
    regulator.must_be("channels", flow.integer("output_size"))
    decoder = flow.call("decoder", known.SOLVER)
    solver = _solver(decoder)
    return RegulatedFlowConfig(
        encoder=_encoder(encoder, "linear"),
        unet=_unet(decoder.call("estimator", known.UNET), None),
        vocab_size=flow.integer("vocab_size"),
        token_rate_hz=flow.integer("input_frame_rate"),
        input_size=flow.integer("input_size"),
        output_size=flow.integer("output_size"),
        spk_embed_dim=flow.integer("spk_embed_dim"),
        num_regulator_layers=len(regulator.integers("sampling_ratios")),
        guidance_scale=solver.number("inference_cfg_rate"),
        training_guidance_drop=solver.number("training_cfg_rate"),
        sigma_min=solver.number("sigma_min"),
        seams=flow.optional_text("seams") or "context",
    )


def flow_config(root: Section, generation: int) -> AnyFlowConfig:
    """The flow's section of any generation."""
    section = root.call("flow", known.FLOWS[generation])
    section.must_be("output_type", "mel")
    if generation == 3:
        return _dit_flow(section)
    return _unet_flow(section) if generation == 2 else _regulated_flow(section)


def vocoder(root: Section, generation: int) -> VocoderConfig:
    """The vocoder's section; ``source_phase`` and ``seams`` are keys of Vivace's own models."""
    causal = generation == 3
    hift = root.call("hift", known.HIFT if causal else known.CENTRED_HIFT)
    istft = hift.mapping("istft_params")
    istft.only(frozenset({"n_fft", "hop_len"}))
    f0 = hift.call("f0_predictor", known.F0 if causal else known.CENTRED_F0)
    f0.must_be("num_class", 1)
    f0.must_be("in_channels", hift.integer("in_channels"))
    # The reference tells its two sources apart by the rate.
    phase = "frame" if causal else "sample" if hift.integer("sampling_rate") == 22_050 else "linear"
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
        conv_pre_lookahead_frames=hift.integer("conv_pre_look_right") if causal else 4,
        f0_cond_channels=f0.integer("cond_channels"),
        source_phase=hift.optional_text("source_phase") or phase,
        causal=causal,
        seams=hift.optional_text("seams") or "context",
        fade_frames=20 if generation == 1 else 8,
    )
