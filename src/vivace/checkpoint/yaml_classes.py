"""Every class and key that a configuration file may name.

Most are for training and never looked at; they are listed so that a misspelt or foreign key is an error.
"""

from __future__ import annotations

LMS = {
    3: "cosyvoice.llm.llm.CosyVoice3LM",
    2: "cosyvoice.llm.llm.Qwen2LM",
    1: "cosyvoice.llm.llm.TransformerLM",
}
QWEN = "cosyvoice.llm.llm.Qwen2Encoder"
SAMPLING = "cosyvoice.utils.common.ras_sampling"
CONFORMER = "cosyvoice.transformer.encoder.ConformerEncoder"
TRANSFORMER = "cosyvoice.transformer.encoder.TransformerEncoder"
UPSAMPLE_CONFORMER = "cosyvoice.transformer.upsample_encoder.UpsampleConformerEncoder"
FLOWS = {
    3: "cosyvoice.flow.flow.CausalMaskedDiffWithDiT",
    2: "cosyvoice.flow.flow.CausalMaskedDiffWithXvec",
    1: "cosyvoice.flow.flow.MaskedDiffWithXvec",
}
LOOKAHEAD = "cosyvoice.transformer.upsample_encoder.PreLookaheadLayer"
REGULATOR = "cosyvoice.flow.length_regulator.InterpolateRegulator"
SOLVER = "cosyvoice.flow.flow_matching.ConditionalCFM"
CAUSAL_SOLVER = "cosyvoice.flow.flow_matching.CausalConditionalCFM"
SOLVER_PARAMS = "omegaconf.DictConfig"
DIT = "cosyvoice.flow.DiT.dit.DiT"
UNET = "cosyvoice.flow.decoder.ConditionalDecoder"
CAUSAL_UNET = "cosyvoice.flow.decoder.CausalConditionalDecoder"
HIFT = "cosyvoice.hifigan.generator.CausalHiFTGenerator"
CENTRED_HIFT = "cosyvoice.hifigan.generator.HiFTGenerator"
F0 = "cosyvoice.hifigan.f0_predictor.CausalConvRNNF0Predictor"
CENTRED_F0 = "cosyvoice.hifigan.f0_predictor.ConvRNNF0Predictor"
TOKENIZER = "cosyvoice.tokenizer.tokenizer.get_qwen_tokenizer"
MEL = "matcha.utils.audio.mel_spectrogram"

OWNERS = {target: generation for table in (LMS, FLOWS) for generation, target in table.items()} | {
    HIFT: 3,
    DIT: 3,
    CAUSAL_UNET: 2,
    UNET: 1,
}
"""Classes that only one generation has."""


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


TOP_KEYS = _keys(
    # read by us
    "sample_rate llm_input_size llm_output_size spk_embed_dim token_frame_rate token_mel_ratio chunk_size "
    "llm flow hift "
    # of Vivace's own models only
    "pronunciation token_text_ratio default_voice segment_text_tokens "
    "text_encoder_input_size "  # CosyVoice-300M
    # for the reference implementation and its training
    "__set_seed1 __set_seed2 __set_seed3 __set_seed4 qwen_pretrain_path num_decoding_left_chunks "
    "mel_spec_transform1 hifigan parquet_opener get_tokenizer allowed_special tokenize filter resample "
    "truncate "
    "feat_extractor compute_fbank compute_whisper_fbank compute_f0 parse_embedding shuffle sort batch "
    "padding "
    "data_pipeline data_pipeline_gan train_conf train_conf_gan"
)

_QWEN_LM = _keys(
    "llm_input_size llm_output_size speech_token_size length_normalized_loss lsm_weight mix_ratio llm sampling"
)
_ENCODER = _keys(
    "input_size output_size attention_heads linear_units num_blocks dropout_rate positional_dropout_rate "
    "attention_dropout_rate input_layer pos_enc_layer_type normalize_before static_chunk_size use_dynamic_chunk "
    "use_dynamic_left_chunk selfattention_layer_type use_cnn_module macaron_style"
)
_FLOW = _keys(
    "input_size output_size spk_embed_dim output_type vocab_size input_frame_rate only_mask_loss decoder"
)
_SOLVER = _keys("in_channels n_spks spk_emb_dim cfm_params estimator")
_UNET = _keys(
    "in_channels out_channels channels dropout attention_head_dim n_blocks num_mid_blocks num_heads act_fn"
)
_HIFT = _keys(
    "in_channels base_channels nb_harmonics sampling_rate nsf_alpha nsf_sigma nsf_voiced_threshold upsample_rates "
    "upsample_kernel_sizes istft_params resblock_kernel_sizes resblock_dilation_sizes "
    "source_resblock_kernel_sizes source_resblock_dilation_sizes lrelu_slope audio_limit f0_predictor "
    "source_phase "  # Vivace only
)
_WHISPER = _keys("multilingual num_languages language task")

CLASS_KEYS: dict[str, frozenset[str]] = {
    LMS[3]: _QWEN_LM,
    LMS[2]: _QWEN_LM,
    LMS[1]: _keys(
        "text_encoder_input_size llm_input_size llm_output_size text_token_size speech_token_size "
        "length_normalized_loss lsm_weight spk_embed_dim text_encoder llm sampling"
    ),
    QWEN: _keys("pretrain_path"),
    SAMPLING: _keys("top_p top_k win_size tau_r"),
    CONFORMER: _ENCODER,
    TRANSFORMER: _ENCODER,
    UPSAMPLE_CONFORMER: _ENCODER,
    FLOWS[3]: _FLOW | _keys("token_mel_ratio pre_lookahead_len pre_lookahead_layer"),
    FLOWS[2]: _FLOW | _keys("token_mel_ratio pre_lookahead_len encoder"),
    FLOWS[1]: _FLOW | _keys("encoder length_regulator seams"),  # seams: Vivace only
    LOOKAHEAD: _keys("in_channels channels pre_lookahead_len"),
    REGULATOR: _keys("channels sampling_ratios"),
    SOLVER: _SOLVER,
    CAUSAL_SOLVER: _SOLVER,
    SOLVER_PARAMS: _keys("content"),
    DIT: _keys(
        "dim depth heads dim_head dropout ff_mult mel_dim mu_dim long_skip_connection spk_dim out_channels "
        "static_chunk_size num_decoding_left_chunks"
    ),
    UNET: _UNET,
    CAUSAL_UNET: _UNET | _keys("static_chunk_size num_decoding_left_chunks"),
    HIFT: _HIFT | _keys("conv_pre_look_right"),
    CENTRED_HIFT: _HIFT | _keys("seams"),  # Vivace only
    F0: _keys("num_class in_channels cond_channels"),
    CENTRED_F0: _keys("num_class in_channels cond_channels"),
    TOKENIZER: _keys("token_path skip_special_tokens version"),
    "whisper.tokenizer.get_tokenizer": _WHISPER,
    "cosyvoice.tokenizer.tokenizer.get_tokenizer": _WHISPER,
    MEL: _keys("n_fft num_mels sampling_rate hop_size win_size fmin fmax center"),
    # training only
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
