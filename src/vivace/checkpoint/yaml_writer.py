"""Writes a configuration in the official shape, for random checkpoints and models trained here."""

from __future__ import annotations

import dataclasses
import json

from vivace.config import ModelConfig, VocoderConfig


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
    """The text of ``cosyvoice3.yaml`` for ``config``; the reference implementation reads it too."""
    lm, flow, dit, vocoder = config.lm, config.flow, config.flow.dit, config.vocoder
    own = _own_keys(config)
    return f"""__set_seed1: !apply:random.seed [1986]
__set_seed2: !apply:numpy.random.seed [1986]
__set_seed3: !apply:torch.manual_seed [1986]
__set_seed4: !apply:torch.cuda.manual_seed_all [1986]

sample_rate: {config.sample_rate_hz}
llm_input_size: {lm.hidden_size}
llm_output_size: {lm.hidden_size}
spk_embed_dim: {flow.spk_embed_dim}
qwen_pretrain_path: ''
token_frame_rate: {config.token_rate_hz}
token_mel_ratio: {flow.token_mel_ratio}
chunk_size: {config.chunk_tokens}
num_decoding_left_chunks: -1
{own}
llm: !new:cosyvoice.llm.llm.CosyVoice3LM
    llm_input_size: !ref <llm_input_size>
    llm_output_size: !ref <llm_output_size>
    speech_token_size: {lm.speech_token_size}
    length_normalized_loss: True
    lsm_weight: 0
    mix_ratio: {list(lm.mix_ratio)}
    llm: !new:cosyvoice.llm.llm.Qwen2Encoder
        pretrain_path: !ref <qwen_pretrain_path>
    sampling: !name:cosyvoice.utils.common.ras_sampling
        top_p: {_number(lm.sampling.top_p)}
        top_k: {lm.sampling.top_k}
        win_size: {lm.sampling.win_size}
        tau_r: {_number(lm.sampling.tau_r)}

flow: !new:cosyvoice.flow.flow.CausalMaskedDiffWithDiT
    input_size: {flow.input_size}
    output_size: {flow.output_size}
    spk_embed_dim: !ref <spk_embed_dim>
    output_type: 'mel'
    vocab_size: {flow.vocab_size}
    input_frame_rate: !ref <token_frame_rate>
    only_mask_loss: True
    token_mel_ratio: !ref <token_mel_ratio>
    pre_lookahead_len: {flow.lookahead_tokens}
    pre_lookahead_layer: !new:cosyvoice.transformer.upsample_encoder.PreLookaheadLayer
        in_channels: {flow.input_size}
        channels: {flow.lookahead_channels}
        pre_lookahead_len: {flow.lookahead_tokens}
    decoder: !new:cosyvoice.flow.flow_matching.CausalConditionalCFM
        in_channels: {3 * flow.output_size}
        n_spks: 1
        spk_emb_dim: {dit.spk_dim}
        cfm_params: !new:omegaconf.DictConfig
            content:
                sigma_min: {_number(flow.sigma_min)}
                solver: 'euler'
                t_scheduler: 'cosine'
                training_cfg_rate: {_number(flow.training_guidance_drop)}
                inference_cfg_rate: {_number(flow.guidance_scale)}
                reg_loss_type: 'l1'
        estimator: !new:cosyvoice.flow.DiT.dit.DiT
            dim: {dit.dim}
            depth: {dit.depth}
            heads: {dit.heads}
            dim_head: {dit.dim_head}
            ff_mult: {dit.ff_mult}
            mel_dim: {dit.mel_dim}
            mu_dim: {dit.mu_dim}
            spk_dim: {dit.spk_dim}
            out_channels: {dit.out_channels}
            static_chunk_size: !ref <chunk_size> * <token_mel_ratio>
            num_decoding_left_chunks: !ref <num_decoding_left_chunks>

{_vocoder_yaml(vocoder)}
get_tokenizer: !name:cosyvoice.tokenizer.tokenizer.get_qwen_tokenizer
    token_path: !ref <qwen_pretrain_path>
    skip_special_tokens: True
    version: cosyvoice3
allowed_special: 'all'
feat_extractor: !name:matcha.utils.audio.mel_spectrogram
    n_fft: {4 * vocoder.hop_samples}
    num_mels: {vocoder.in_channels}
    sampling_rate: !ref <sample_rate>
    hop_size: {vocoder.hop_samples}
    win_size: {4 * vocoder.hop_samples}
    fmin: 0
    fmax: null
    center: False
"""


def _vocoder_yaml(vocoder: VocoderConfig) -> str:
    own = "" if vocoder.source_phase == "frame" else f"    source_phase: {vocoder.source_phase}\n"
    return f"""hift: !new:cosyvoice.hifigan.generator.CausalHiFTGenerator
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
    conv_pre_look_right: {vocoder.conv_pre_lookahead_frames}
{own}    f0_predictor: !new:cosyvoice.hifigan.f0_predictor.CausalConvRNNF0Predictor
        num_class: 1
        in_channels: {vocoder.in_channels}
        cond_channels: {vocoder.f0_cond_channels}
"""


def write_qwen_config(config: ModelConfig) -> str:
    """The text of ``CosyVoice-BlankEN/config.json`` for ``config``."""
    lm = config.lm
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
