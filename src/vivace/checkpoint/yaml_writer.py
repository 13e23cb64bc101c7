"""Writes a configuration in the official shape, for random checkpoints and models trained here."""

from __future__ import annotations

import dataclasses
import json

from vivace.checkpoint import yaml_classes as known
from vivace.checkpoint.files import LARGEST_WHISPER
from vivace.config import (
    ConformerLMConfig,
    EncoderConfig,
    FlowConfig,
    ModelConfig,
    RegulatedFlowConfig,
    SpeechLMConfig,
    UNetConfig,
    UNetFlowConfig,
)


def _rows(rows: tuple[tuple[int, ...], ...]) -> str:
    return str([list(row) for row in rows])


def _number(value: float) -> str:
    """A float that YAML readers of both versions take for one (``1e-06`` is text to some)."""
    text = repr(float(value))
    mantissa, exponent, power = text.partition("e")
    return text if not exponent or "." in mantissa else f"{mantissa}.0e{power}"


def _own_keys(config: ModelConfig) -> str:
    """Keys that official models do not have, where they say something."""
    lines = ""
    if config.pronunciation is not None:
        lines += f"pronunciation: {json.dumps(config.pronunciation)}\n"
    defaults = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    if config.segment_text_tokens != defaults["segment_text_tokens"]:
        lines += f"segment_text_tokens: {config.segment_text_tokens}\n"
    if config.token_text_ratio != defaults["token_text_ratio"]:
        lines += f"token_text_ratio: [{', '.join(map(_number, config.token_text_ratio))}]\n"
    if config.default_voice is not None:
        lines += f"default_voice: {json.dumps(config.default_voice)}\n"
    return lines


def write_yaml(config: ModelConfig) -> str:
    """The text of the generation's configuration file; the reference implementation reads it too."""
    return "\n".join(
        (_head(config), _lm_yaml(config.lm), _flow_yaml(config), _vocoder_yaml(config), _tail(config))
    )


def _head(config: ModelConfig) -> str:
    lm, flow = config.lm, config.flow
    lines = f"""__set_seed1: !apply:random.seed [1986]
__set_seed2: !apply:numpy.random.seed [1986]
__set_seed3: !apply:torch.manual_seed [1986]
__set_seed4: !apply:torch.cuda.manual_seed_all [1986]

sample_rate: {config.sample_rate_hz}
llm_input_size: {lm.hidden_size}
llm_output_size: {lm.hidden_size}
spk_embed_dim: {flow.spk_embed_dim}
"""
    if isinstance(lm, ConformerLMConfig):
        lines += f"text_encoder_input_size: {lm.text_encoder.input_size}\n"
    if not isinstance(flow, RegulatedFlowConfig):
        lines += f"""qwen_pretrain_path: ''
token_frame_rate: {config.token_rate_hz}
token_mel_ratio: {flow.token_mel_ratio}
chunk_size: {config.chunk_tokens}
num_decoding_left_chunks: -1
"""
    return lines + _own_keys(config)


def _lm_yaml(lm: SpeechLMConfig | ConformerLMConfig) -> str:
    if isinstance(lm, ConformerLMConfig):
        text = f"""llm: !new:{known.LMS[1]}
    text_encoder_input_size: !ref <text_encoder_input_size>
    llm_input_size: !ref <llm_input_size>
    llm_output_size: !ref <llm_output_size>
    text_token_size: {lm.text_vocab_size}
    speech_token_size: {lm.speech_token_size}
    length_normalized_loss: True
    lsm_weight: 0
    spk_embed_dim: !ref <spk_embed_dim>
    text_encoder: !new:{known.CONFORMER}
{_encoder_yaml(lm.text_encoder, "linear", 8, conformer=True, chunk="1")}
    llm: !new:{known.TRANSFORMER}
{_encoder_yaml(lm.decoder, "linear_legacy", 8, conformer=False, chunk="1")}
"""
    else:
        text = f"""llm: !new:{known.LMS[2 if lm.start_rows_apart else 3]}
    llm_input_size: !ref <llm_input_size>
    llm_output_size: !ref <llm_output_size>
    speech_token_size: {lm.speech_token_size}
    length_normalized_loss: True
    lsm_weight: 0
    mix_ratio: {list(lm.mix_ratio)}
    llm: !new:{known.QWEN}
        pretrain_path: !ref <qwen_pretrain_path>
"""
    return f"""{text}    sampling: !name:{known.SAMPLING}
        top_p: {_number(lm.sampling.top_p)}
        top_k: {lm.sampling.top_k}
        win_size: {lm.sampling.win_size}
        tau_r: {_number(lm.sampling.tau_r)}
"""


def _encoder_yaml(
    encoder: EncoderConfig, embedding: str, indent: int, *, conformer: bool, chunk: str | None
) -> str:
    lines = [
        f"input_size: {encoder.input_size}",
        f"output_size: {encoder.output_size}",
        f"attention_heads: {encoder.heads}",
        f"linear_units: {encoder.ff_size}",
        f"num_blocks: {encoder.num_blocks}",
        "dropout_rate: 0.1",
        "positional_dropout_rate: 0.1",
        "attention_dropout_rate: 0.1",
        "normalize_before: True",
        f"input_layer: '{embedding}'",
        "pos_enc_layer_type: 'rel_pos_espnet'",
        "selfattention_layer_type: 'rel_selfattn'",
    ]
    lines += ["use_cnn_module: False", "macaron_style: False"] if conformer else []
    lines += [] if chunk is None else [f"static_chunk_size: {chunk}"]
    return "\n".join(" " * indent + line for line in lines)


def _unet_yaml(unet: UNetConfig) -> str:
    return f"""            in_channels: {4 * unet.mel_dim}
            out_channels: {unet.mel_dim}
            channels: {list(unet.channels)}
            dropout: 0.0
            attention_head_dim: {unet.dim_head}
            n_blocks: {unet.num_blocks}
            num_mid_blocks: {unet.num_mid_blocks}
            num_heads: {unet.heads}
            act_fn: 'gelu'
"""


_CHUNKS = """            static_chunk_size: !ref <chunk_size> * <token_mel_ratio>
            num_decoding_left_chunks: !ref <num_decoding_left_chunks>
"""


def _flow_yaml(config: ModelConfig) -> str:
    flow = config.flow
    rate = config.token_rate_hz if isinstance(flow, RegulatedFlowConfig) else "!ref <token_frame_rate>"
    text = f"""flow: !new:{known.FLOWS[config.generation]}
    input_size: {flow.input_size}
    output_size: {flow.output_size}
    spk_embed_dim: !ref <spk_embed_dim>
    output_type: 'mel'
    vocab_size: {flow.vocab_size}
    input_frame_rate: {rate}
    only_mask_loss: True
"""
    if isinstance(flow, RegulatedFlowConfig):
        own = "" if flow.seams == "context" else f"    seams: {flow.seams}\n"
        text += f"""{own}    encoder: !new:{known.CONFORMER}
{_encoder_yaml(flow.encoder, "linear", 8, conformer=True, chunk=None)}
    length_regulator: !new:{known.REGULATOR}
        channels: {flow.output_size}
        sampling_ratios: {[1] * flow.num_regulator_layers}
"""
        return text + _decoder_yaml(flow, flow.unet.mel_dim, known.SOLVER, known.UNET, _unet_yaml(flow.unet))
    text += f"""    token_mel_ratio: !ref <token_mel_ratio>
    pre_lookahead_len: {flow.lookahead_tokens}
"""
    if isinstance(flow, UNetFlowConfig):
        text += f"""    encoder: !new:{known.UPSAMPLE_CONFORMER}
{_encoder_yaml(flow.encoder, "linear", 8, conformer=True, chunk="!ref <chunk_size>")}
"""
        estimator = _unet_yaml(flow.unet) + _CHUNKS
        return text + _decoder_yaml(
            flow, flow.unet.mel_dim, known.CAUSAL_SOLVER, known.CAUSAL_UNET, estimator
        )
    dit = flow.dit
    text += f"""    pre_lookahead_layer: !new:{known.LOOKAHEAD}
        in_channels: {flow.input_size}
        channels: {flow.lookahead_channels}
        pre_lookahead_len: {flow.lookahead_tokens}
"""
    estimator = f"""            dim: {dit.dim}
            depth: {dit.depth}
            heads: {dit.heads}
            dim_head: {dit.dim_head}
            ff_mult: {dit.ff_mult}
            mel_dim: {dit.mel_dim}
            mu_dim: {dit.mu_dim}
            spk_dim: {dit.spk_dim}
            out_channels: {dit.out_channels}
{_CHUNKS}"""
    return text + _decoder_yaml(flow, dit.spk_dim, known.CAUSAL_SOLVER, known.DIT, estimator)


def _decoder_yaml(
    flow: FlowConfig | UNetFlowConfig | RegulatedFlowConfig,
    spk_dim: int,
    solver: str,
    estimator: str,
    sizes: str,
) -> str:
    return f"""    decoder: !new:{solver}
        in_channels: {3 * flow.output_size}
        n_spks: 1
        spk_emb_dim: {spk_dim}
        cfm_params: !new:{known.SOLVER_PARAMS}
            content:
                sigma_min: {_number(flow.sigma_min)}
                solver: 'euler'
                t_scheduler: 'cosine'
                training_cfg_rate: {_number(flow.training_guidance_drop)}
                inference_cfg_rate: {_number(flow.guidance_scale)}
                reg_loss_type: 'l1'
        estimator: !new:{estimator}
{sizes}"""


def _tail(config: ModelConfig) -> str:
    hop, generation = config.vocoder.hop_samples, config.generation
    fmax = "null" if config.mel_fmax_hz is None else _number(config.mel_fmax_hz)
    if generation == 1:
        kind = "whisper" if config.lm.text_vocab_size <= LARGEST_WHISPER else "cosyvoice.tokenizer"
        tokenizer = f"""get_tokenizer: !name:{kind}.tokenizer.get_tokenizer
    multilingual: True
    num_languages: {100 if kind == "whisper" else 105}
    language: 'en'
    task: 'transcribe'
"""
    else:
        version = "    version: cosyvoice3\n" if generation == 3 else ""
        tokenizer = f"""get_tokenizer: !name:{known.TOKENIZER}
    token_path: !ref <qwen_pretrain_path>
    skip_special_tokens: True
{version}"""
    return f"""{tokenizer}allowed_special: 'all'
feat_extractor: !name:{known.MEL}
    n_fft: {4 * hop}
    num_mels: {config.vocoder.in_channels}
    sampling_rate: !ref <sample_rate>
    hop_size: {hop}
    win_size: {4 * hop}
    fmin: 0
    fmax: {fmax}
    center: False
"""


def _vocoder_yaml(config: ModelConfig) -> str:
    vocoder = config.vocoder
    defaults = ("frame",) if vocoder.causal else ("linear", "sample")
    own = "" if vocoder.source_phase in defaults else f"    source_phase: {vocoder.source_phase}\n"
    own += "" if vocoder.seams == "context" else f"    seams: {vocoder.seams}\n"
    if vocoder.causal:
        own = f"    conv_pre_look_right: {vocoder.conv_pre_lookahead_frames}\n{own}"
    return f"""hift: !new:{known.HIFT if vocoder.causal else known.CENTRED_HIFT}
    in_channels: {vocoder.in_channels}
    base_channels: {vocoder.base_channels}
    nb_harmonics: {vocoder.nb_harmonics}
    sampling_rate: !ref <sample_rate>
    nsf_alpha: {_number(vocoder.nsf_alpha)}
    nsf_sigma: {_number(vocoder.nsf_sigma)}
    nsf_voiced_threshold: {_number(vocoder.nsf_voiced_threshold)}
    upsample_rates: {list(vocoder.upsample_rates)}
    upsample_kernel_sizes: {list(vocoder.upsample_kernel_sizes)}
    istft_params:
        n_fft: {vocoder.istft_n_fft}
        hop_len: {vocoder.istft_hop}
    resblock_kernel_sizes: {list(vocoder.resblock_kernel_sizes)}
    resblock_dilation_sizes: {_rows(vocoder.resblock_dilation_sizes)}
    source_resblock_kernel_sizes: {list(vocoder.source_resblock_kernel_sizes)}
    source_resblock_dilation_sizes: {_rows(vocoder.source_resblock_dilation_sizes)}
    lrelu_slope: {_number(vocoder.lrelu_slope)}
    audio_limit: {_number(vocoder.audio_limit)}
{own}    f0_predictor: !new:{known.F0 if vocoder.causal else known.CENTRED_F0}
        num_class: 1
        in_channels: {vocoder.in_channels}
        cond_channels: {vocoder.f0_cond_channels}
"""


def write_qwen_config(config: ModelConfig) -> str:
    """The text of ``CosyVoice-BlankEN/config.json`` for ``config``."""
    lm = config.lm
    assert isinstance(lm, SpeechLMConfig), "only Qwen2 has such a file"
    values: dict[str, object] = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": lm.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": lm.intermediate_size,
        "max_position_embeddings": 32768,
        "max_window_layers": lm.num_layers,
        "model_type": "qwen2",
        "num_attention_heads": lm.num_heads,
        "num_hidden_layers": lm.num_layers,
        "num_key_value_heads": lm.num_kv_heads,
        "rms_norm_eps": lm.rms_norm_eps,
        "rope_theta": lm.rope_theta,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": lm.text_vocab_size,
    }
    if lm.head_dim * lm.num_heads != lm.hidden_size:
        values["head_dim"] = lm.head_dim
    return json.dumps(values, indent=2) + "\n"
