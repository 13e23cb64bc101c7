"""Checks a whole model configuration before anything of that size is allocated."""

from __future__ import annotations

from collections.abc import Callable

from vivace.config import (
    AnyFlowConfig,
    ConformerLMConfig,
    DiTConfig,
    EncoderConfig,
    FlowConfig,
    ModelConfig,
    RegulatedFlowConfig,
    SamplingConfig,
    SpeechLMConfig,
    UNetConfig,
    UNetFlowConfig,
    VocoderConfig,
)
from vivace.errors import ModelFolderError

_Require = Callable[[bool, str], None]

_KINDS = {
    3: (SpeechLMConfig, FlowConfig, True),
    2: (SpeechLMConfig, UNetFlowConfig, False),
    1: (ConformerLMConfig, RegulatedFlowConfig, False),
}


def check_config(config: ModelConfig, file: str) -> None:
    """Raises ModelFolderError, naming ``file`` and the setting, if the sizes cannot be those of a model.

    Upper bounds are far above every real model; they keep a hostile file from asking for absurd allocations.
    The exact sizes are then compared with the weights.
    """

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise ModelFolderError(f"{file}: {what}; the file is damaged or for another model")

    require(config.generation in (1, 2, 3), "generation must be 1, 2 or 3")
    kinds = type(config.lm), type(config.flow), config.vocoder.causal
    require(kinds == _KINDS[config.generation], "generation does not fit the stages' configurations")
    if isinstance(config.lm, SpeechLMConfig):
        _check_lm(config.lm, require)
    else:
        _check_conformer_lm(config.lm, require)
    _check_vocoder(config.vocoder, require)
    _check_any_flow(config, require)
    flow, vocoder = config.flow, config.vocoder
    require(
        config.lm.speech_token_size == flow.vocab_size, "speech_token_size and the flow's vocab_size differ"
    )
    require(
        flow.output_size == vocoder.in_channels, "the flow's output_size and the vocoder's in_channels differ"
    )
    require(
        config.sample_rate_hz == vocoder.sampling_rate, "sample_rate and the vocoder's sampling_rate differ"
    )
    require(1 <= config.segment_text_tokens <= 10_000, "segment_text_tokens must be a number from 1 to 10000")
    low, high = config.token_text_ratio
    require(0 <= low < high <= 1_000, "token_text_ratio must be two numbers, the smaller first")
    require(1 <= config.chunk_tokens <= 1_000, "chunk_size must be 1 to 1000")
    require(
        config.mel_fmax_hz is None or 1_000 <= config.mel_fmax_hz <= config.sample_rate_hz / 2,
        "fmax must be 1000 to half the sample rate",
    )


def _check_any_flow(config: ModelConfig, require: _Require) -> None:
    """The flow, and the rates that join it to the vocoder."""
    flow = config.flow
    if isinstance(flow, RegulatedFlowConfig):
        _check_encoder(flow.encoder, "the flow's encoder", require)
        _check_unet(flow.unet, require)
        _check_regulated(flow, config, require)
        return
    if isinstance(flow, FlowConfig):
        _check_dit(flow.dit, require)
        _check_dit_flow(flow, require)
        chunk_frames: int | None = flow.dit.static_chunk_frames
    else:
        _check_encoder(flow.encoder, "the flow's encoder", require)
        _check_unet(flow.unet, require)
        _check_unet_flow(flow, require)
        chunk_frames = flow.unet.static_chunk_frames
    _check_flow(flow, require)
    require(1 <= flow.token_mel_ratio <= 16, "token_mel_ratio must be 1 to 16")
    require(
        config.token_rate_hz * flow.token_mel_ratio * config.vocoder.hop_samples == config.sample_rate_hz,
        "token_frame_rate, token_mel_ratio and the vocoder's hop do not multiply to sample_rate",
    )
    require(
        chunk_frames == config.chunk_tokens * flow.token_mel_ratio,
        "static_chunk_size is not chunk_size * token_mel_ratio",
    )


def _check_lm(lm: SpeechLMConfig, require: _Require) -> None:
    require(1 <= lm.num_layers <= 256, "num_hidden_layers must be 1 to 256")
    require(1 <= lm.hidden_size <= 16_384, "hidden_size must be 1 to 16384")
    require(1 <= lm.intermediate_size <= 131_072, "intermediate_size must be 1 to 131072")
    require(1 <= lm.num_heads <= 256, "num_attention_heads must be 1 to 256")
    require(
        1 <= lm.num_kv_heads <= lm.num_heads and lm.num_heads % lm.num_kv_heads == 0,
        "num_key_value_heads must divide num_attention_heads",
    )
    require(2 <= lm.head_dim <= 1_024 and lm.head_dim % 2 == 0, "the head size must be even, 2 to 1024")
    require(1 <= lm.text_vocab_size <= 1_000_000, "vocab_size must be 1 to 1000000")
    require(1 <= lm.speech_token_size <= 1_000_000, "speech_token_size must be 1 to 1000000")
    least = 3 if lm.start_rows_apart else 4
    require(least <= lm.num_special_rows <= 1_000, f"there must be {least} to 1000 special rows")
    require(0 < lm.rms_norm_eps < 0.1, "rms_norm_eps must be small and positive")
    require(1 < lm.rope_theta <= 1e12, "rope_theta must be above 1")
    require(min(lm.mix_ratio) >= 1 and max(lm.mix_ratio) <= 1_000, "mix_ratio must be two numbers, 1 to 1000")
    _check_sampling(lm.sampling, require)


def _check_sampling(sampling: SamplingConfig, require: _Require) -> None:
    require(0 < sampling.top_p <= 1, "top_p must be above 0 and at most 1")
    require(1 <= sampling.top_k <= 1_000_000, "top_k must be at least 1")
    require(0 <= sampling.win_size <= 10_000, "win_size must be 0 to 10000")
    require(0 <= sampling.tau_r <= 10, "tau_r must be 0 to 10")


def _check_encoder(encoder: EncoderConfig, name: str, require: _Require) -> None:
    require(1 <= encoder.num_blocks <= 256, f"num_blocks of {name} must be 1 to 256")
    require(1 <= encoder.input_size <= 16_384, f"input_size of {name} must be 1 to 16384")
    require(
        2 <= encoder.output_size <= 16_384 and encoder.output_size % 2 == 0,
        f"output_size of {name} must be even, 2 to 16384",
    )
    require(
        1 <= encoder.heads <= 256 and encoder.output_size % encoder.heads == 0,
        f"attention_heads of {name} must divide its output_size",
    )
    require(1 <= encoder.ff_size <= 131_072, f"linear_units of {name} must be 1 to 131072")


def _check_conformer_lm(lm: ConformerLMConfig, require: _Require) -> None:
    _check_encoder(lm.text_encoder, "the text encoder", require)
    _check_encoder(lm.decoder, "the language model", require)
    require(lm.decoder.input_size == lm.decoder.output_size, "llm_input_size and llm_output_size differ")
    require(1 <= lm.text_vocab_size <= 1_000_000, "text_token_size must be 1 to 1000000")
    require(1 <= lm.speech_token_size <= 1_000_000, "speech_token_size must be 1 to 1000000")
    require(1 <= lm.spk_embed_dim <= 4_096, "spk_embed_dim must be 1 to 4096")
    _check_sampling(lm.sampling, require)


def _check_unet(unet: UNetConfig, require: _Require) -> None:
    causal = unet.static_chunk_frames is not None
    require(1 <= len(unet.channels) <= (1 if causal else 8), "channels must be one number, or a short list")
    require(
        all(8 <= width <= 16_384 and width % 8 == 0 for width in unet.channels),
        "channels must be multiples of 8, at most 16384",
    )
    require(1 <= unet.heads <= 256, "num_heads must be 1 to 256")
    require(1 <= unet.dim_head <= 1_024, "attention_head_dim must be 1 to 1024")
    require(1 <= unet.num_blocks <= 64, "n_blocks must be 1 to 64")
    require(0 <= unet.num_mid_blocks <= 256, "num_mid_blocks must be 0 to 256")
    require(
        unet.static_chunk_frames is None or 1 <= unet.static_chunk_frames <= 10_000,
        "static_chunk_size is wrong",
    )


def _check_dit(dit: DiTConfig, require: _Require) -> None:
    require(1 <= dit.depth <= 256, "depth must be 1 to 256")
    require(16 <= dit.dim <= 16_384 and dit.dim % 16 == 0, "dim must be a multiple of 16, at most 16384")
    require(1 <= dit.heads <= 256, "heads must be 1 to 256")
    require(2 <= dit.dim_head <= 1_024 and dit.dim_head % 2 == 0, "dim_head must be even, 2 to 1024")
    require(1 <= dit.ff_mult <= 16, "ff_mult must be 1 to 16")
    require(dit.mel_dim == dit.mu_dim == dit.out_channels, "mel_dim, mu_dim and out_channels differ")
    require(1 <= dit.static_chunk_frames <= 10_000, "static_chunk_size must be 1 to 10000")


def _check_dit_flow(flow: FlowConfig, require: _Require) -> None:
    require(flow.input_size == flow.output_size, "input_size and output_size differ")
    require(
        flow.dit.mel_dim == flow.output_size and flow.dit.spk_dim == flow.output_size,
        "the DiT's channels and output_size differ",
    )
    require(1 <= flow.lookahead_channels <= 16_384, "the look-ahead channels must be 1 to 16384")


def _check_unet_flow(flow: UNetFlowConfig, require: _Require) -> None:
    require(
        flow.input_size == flow.encoder.input_size == flow.encoder.output_size,
        "input_size and the encoder's sizes differ",
    )
    require(1 <= flow.num_up_blocks <= 64, "the encoder's upper blocks must be 1 to 64")
    require(flow.unet.mel_dim == flow.output_size, "out_channels and output_size differ")
    require(flow.unet.static_chunk_frames is not None, "static_chunk_size is missing")


def _check_regulated(flow: RegulatedFlowConfig, config: ModelConfig, require: _Require) -> None:
    require(flow.input_size == flow.encoder.input_size, "input_size and the encoder's input_size differ")
    require(flow.unet.mel_dim == flow.output_size, "out_channels and output_size differ")
    require(flow.unet.static_chunk_frames is None, "this flow has no chunks")
    require(1 <= flow.num_regulator_layers <= 16, "sampling_ratios must be 1 to 16 numbers")
    require(flow.token_rate_hz in (25, 50), "input_frame_rate must be 25 or 50")
    require(flow.seams in ("context", "fade"), "seams must be context or fade")
    _check_flow(flow, require)
    # The reference has these two as constants.
    require(config.sample_rate_hz == 22_050, "sample_rate must be 22050")
    require(config.vocoder.hop_samples == 256, "the vocoder's hop must be 256")
    require(config.token_rate_hz == flow.token_rate_hz, "the token rates differ")


def _check_flow(flow: AnyFlowConfig, require: _Require) -> None:
    require(1 <= flow.output_size <= 1_024, "output_size must be 1 to 1024")
    require(1 <= flow.input_size <= 16_384, "input_size must be 1 to 16384")
    require(1 <= flow.spk_embed_dim <= 4_096, "spk_embed_dim must be 1 to 4096")
    require(1 <= flow.lookahead_tokens <= 64, "pre_lookahead_len must be 1 to 64")
    require(0 <= flow.guidance_scale <= 100, "inference_cfg_rate must be 0 to 100")
    require(0 <= flow.training_guidance_drop <= 1, "training_cfg_rate must be 0 to 1")
    require(0 <= flow.sigma_min < 1, "sigma_min must be 0 to 1")
    # No weight bounds these two: they multiply what a stream keeps, and the noise that the model draws.
    require(1 <= flow.num_steps <= 100, "num_steps must be 1 to 100")
    require(1 <= flow.noise_frames <= 100_000, "noise_frames must be 1 to 100000")


def _check_vocoder(vocoder: VocoderConfig, require: _Require) -> None:
    stages = len(vocoder.upsample_rates)
    require(1 <= stages <= 8, "upsample_rates must be 1 to 8 numbers")
    require(all(1 <= rate <= 64 for rate in vocoder.upsample_rates), "upsample_rates must be 1 to 64 each")
    require(
        len(vocoder.upsample_kernel_sizes) == stages,
        "upsample_kernel_sizes and upsample_rates differ in number",
    )
    for name, sizes, dilations in (
        ("resblock", vocoder.resblock_kernel_sizes, vocoder.resblock_dilation_sizes),
        ("source_resblock", vocoder.source_resblock_kernel_sizes, vocoder.source_resblock_dilation_sizes),
    ):
        require(1 <= len(sizes) <= 8, f"{name}_kernel_sizes must be 1 to 8 numbers")
        require(
            len(sizes) == len(dilations), f"{name}_kernel_sizes and {name}_dilation_sizes differ in number"
        )
        require(all(1 <= size <= 255 and size % 2 == 1 for size in sizes), f"{name}_kernel_sizes must be odd")
        require(
            all(1 <= len(row) <= 8 and all(1 <= d <= 255 for d in row) for row in dilations),
            f"{name}_dilation_sizes must be 1 to 255 each",
        )
    require(
        len(vocoder.source_resblock_kernel_sizes) == stages,
        "source_resblock_kernel_sizes and upsample_rates differ in number",
    )
    require(
        all(1 <= size <= 255 for size in vocoder.upsample_kernel_sizes),
        "upsample_kernel_sizes must be 1 to 255",
    )
    require(
        all(k >= rate for k, rate in zip(vocoder.upsample_kernel_sizes, vocoder.upsample_rates, strict=True)),
        "upsample_kernel_sizes must be at least the upsample_rates",
    )
    require(
        1 <= vocoder.base_channels <= 16_384 and vocoder.base_channels % 2**stages == 0,
        "base_channels must be divisible by 2 for each of the upsample_rates",
    )
    require(1 <= vocoder.in_channels <= 1_024, "in_channels must be 1 to 1024")
    require(0 <= vocoder.nb_harmonics <= 64, "nb_harmonics must be 0 to 64")
    require(8_000 <= vocoder.sampling_rate <= 192_000, "sampling_rate must be 8000 to 192000")
    require(
        2 <= vocoder.istft_n_fft <= 4_096 and vocoder.istft_n_fft % 2 == 0, "n_fft must be even, 2 to 4096"
    )
    require(1 <= vocoder.istft_hop <= vocoder.istft_n_fft, "hop_len must be 1 to n_fft")
    require(0 < vocoder.audio_limit <= 1, "audio_limit must be above 0 and at most 1")
    require(0 <= vocoder.lrelu_slope < 1, "lrelu_slope must be 0 to 1")
    require(
        0 <= vocoder.nsf_alpha <= 1 and 0 <= vocoder.nsf_sigma <= 1, "nsf_alpha and nsf_sigma must be 0 to 1"
    )
    require(0 <= vocoder.nsf_voiced_threshold <= 1_000, "nsf_voiced_threshold must be 0 to 1000")
    # The F0 predictor looks three frames ahead, and the spectrum of its source reaches into one more.
    require(4 <= vocoder.conv_pre_lookahead_frames <= 64, "conv_pre_look_right must be 4 to 64")
    require(1 <= vocoder.f0_cond_channels <= 16_384, "cond_channels must be 1 to 16384")
    phases = ("frame", "sample") if vocoder.causal else ("linear", "sample")
    require(vocoder.source_phase in phases, f"source_phase must be {phases[0]} or {phases[1]}")
    require(vocoder.seams in ("context", "fade"), "seams must be context or fade")
    require(1 <= vocoder.fade_frames <= 100, "fade_frames must be 1 to 100")
    if not vocoder.causal:
        rates = zip(vocoder.upsample_kernel_sizes, vocoder.upsample_rates, strict=True)
        require(
            all((kernel - rate) % 2 == 0 for kernel, rate in rates),
            "upsample_kernel_sizes and upsample_rates must differ by even numbers",
        )
