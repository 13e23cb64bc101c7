"""Every class and key that a CosyVoice 3 configuration file may name.

Most are for training and never looked at; they are listed so that a misspelt or foreign key is an error.
"""

from __future__ import annotations

LM = "cosyvoice.llm.llm.CosyVoice3LM"
QWEN = "cosyvoice.llm.llm.Qwen2Encoder"
SAMPLING = "cosyvoice.utils.common.ras_sampling"
FLOW = "cosyvoice.flow.flow.CausalMaskedDiffWithDiT"
LOOKAHEAD = "cosyvoice.transformer.upsample_encoder.PreLookaheadLayer"
SOLVER = "cosyvoice.flow.flow_matching.CausalConditionalCFM"
SOLVER_PARAMS = "omegaconf.DictConfig"
DIT = "cosyvoice.flow.DiT.dit.DiT"
HIFT = "cosyvoice.hifigan.generator.CausalHiFTGenerator"
F0 = "cosyvoice.hifigan.f0_predictor.CausalConvRNNF0Predictor"
TOKENIZER = "cosyvoice.tokenizer.tokenizer.get_qwen_tokenizer"


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


TOP_KEYS = _keys(
    # read by us
    "sample_rate llm_input_size llm_output_size spk_embed_dim token_frame_rate token_mel_ratio chunk_size "
    "llm flow hift "
    # of Vivace's own models only
    "pronunciation token_text_ratio default_voice segment_text_tokens "
    # for the reference implementation and its training
    "__set_seed1 __set_seed2 __set_seed3 __set_seed4 qwen_pretrain_path num_decoding_left_chunks "
    "mel_spec_transform1 hifigan parquet_opener get_tokenizer allowed_special tokenize filter resample "
    "truncate "
    "feat_extractor compute_fbank compute_whisper_fbank compute_f0 parse_embedding shuffle sort batch "
    "padding "
    "data_pipeline data_pipeline_gan train_conf train_conf_gan"
)

CLASS_KEYS: dict[str, frozenset[str]] = {
    LM: _keys(
        "llm_input_size llm_output_size speech_token_size length_normalized_loss lsm_weight mix_ratio llm "
        "sampling"
    ),
    QWEN: _keys("pretrain_path"),
    SAMPLING: _keys("top_p top_k win_size tau_r"),
    FLOW: _keys(
        "input_size output_size spk_embed_dim output_type vocab_size input_frame_rate only_mask_loss "
        "token_mel_ratio "
        "pre_lookahead_len pre_lookahead_layer decoder"
    ),
    LOOKAHEAD: _keys("in_channels channels pre_lookahead_len"),
    SOLVER: _keys("in_channels n_spks spk_emb_dim cfm_params estimator"),
    SOLVER_PARAMS: _keys("content"),
    DIT: _keys(
        "dim depth heads dim_head dropout ff_mult mel_dim mu_dim long_skip_connection spk_dim out_channels "
        "static_chunk_size num_decoding_left_chunks"
    ),
    HIFT: _keys(
        "in_channels base_channels nb_harmonics sampling_rate nsf_alpha nsf_sigma nsf_voiced_threshold "
        "upsample_rates "
        "upsample_kernel_sizes istft_params resblock_kernel_sizes resblock_dilation_sizes "
        "source_resblock_kernel_sizes source_resblock_dilation_sizes lrelu_slope audio_limit "
        "conv_pre_look_right "
        "source_phase "  # Vivace only
        "f0_predictor"
    ),
    F0: _keys("num_class in_channels cond_channels"),
    TOKENIZER: _keys("token_path skip_special_tokens version"),
    # training only
    "matcha.utils.audio.mel_spectrogram": _keys(
        "n_fft num_mels sampling_rate hop_size win_size fmin fmax center"
    ),
    "matcha.hifigan.models.MultiPeriodDiscriminator": _keys(""),
    "cosyvoice.hifigan.hifigan.HiFiGan": _keys("generator discriminator mel_spec_transform"),
    "cosyvoice.hifigan.discriminator.MultipleDiscriminator": _keys("mpd mrd"),
    "cosyvoice.hifigan.discriminator.MultiResSpecDiscriminator": _keys(""),
    "cosyvoice.dataset.processor.parquet_opener": _keys(""),
    "cosyvoice.dataset.processor.tokenize": _keys("get_tokenizer allowed_special"),
    "cosyvoice.dataset.processor.filter": _keys("max_length min_length token_max_length token_min_length"),
    "cosyvoice.dataset.processor.resample": _keys("resample_rate"),
    "cosyvoice.dataset.processor.truncate": _keys("truncate_length"),
    "cosyvoice.dataset.processor.compute_fbank": _keys("feat_extractor num_frames token_mel_ratio"),
    "cosyvoice.dataset.processor.compute_whisper_fbank": _keys("num_frames"),
    "cosyvoice.dataset.processor.compute_f0": _keys("sample_rate hop_size"),
    "cosyvoice.dataset.processor.parse_embedding": _keys("normalize"),
    "cosyvoice.dataset.processor.shuffle": _keys("shuffle_size"),
    "cosyvoice.dataset.processor.sort": _keys("sort_size"),
    "cosyvoice.dataset.processor.batch": _keys("batch_type max_frames_in_batch"),
    "cosyvoice.dataset.processor.padding": _keys("use_spk_embedding"),
}

OTHER_GENERATIONS = {
    "cosyvoice.llm.llm.TransformerLM": "CosyVoice 300M",
    "cosyvoice.llm.llm.Qwen2LM": "CosyVoice 2",
    "cosyvoice.flow.flow.MaskedDiffWithXvec": "CosyVoice 300M",
    "cosyvoice.flow.flow.CausalMaskedDiffWithXvec": "CosyVoice 2",
    "cosyvoice.hifigan.generator.HiFTGenerator": "CosyVoice 300M or 2",
}

SOLVER_KEYS = _keys("sigma_min solver t_scheduler training_cfg_rate inference_cfg_rate reg_loss_type")

# CosyVoice-BlankEN/config.json: sizes, settings with one supported value, and what says nothing to us.
QWEN_SIZES = _keys(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "vocab_size "
    "rms_norm_eps rope_theta rope_parameters layer_types"
)
QWEN_FIXED: dict[str, object] = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rope_scaling": None,
    "use_sliding_window": False,
}
QWEN_IGNORED = _keys(
    "architectures attention_dropout initializer_range max_position_embeddings max_window_layers "
    "sliding_window "
    "tie_word_embeddings torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id "
    "pad_token_id "
    "_name_or_path _attn_implementation_autoset use_mrope attention_bias mlp_bias"
)
