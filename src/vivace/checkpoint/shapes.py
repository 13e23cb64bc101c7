"""Names and shapes of every weight, by configuration.

The one place that knows what a checkpoint of given sizes holds, in our names, without building a module:
used to check files before anything is allocated, to count memory, and to make random checkpoints. A test
proves that it agrees with the modules.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from vivace.config import (
    ConformerLMConfig,
    EncoderConfig,
    FlowConfig,
    ModelConfig,
    RegulatedFlowConfig,
    SpeechLMConfig,
    UNetConfig,
    UNetFlowConfig,
    VocoderConfig,
)

Stage: TypeAlias = Literal["lm", "flow", "vocoder"]
Shapes: TypeAlias = dict[str, tuple[int, ...]]

STAGES: tuple[Stage, ...] = ("lm", "flow", "vocoder")

TIME_CHANNELS = 256  # sinusoids of the flow's time
POSITION_KERNEL = 31  # convolutional position embedding of the DiT …
POSITION_GROUPS = 16  # … and its groups
F0_KERNELS = (4, 3, 3, 3, 3)  # the F0 predictor's convolutions; an activation stands between each two
POST_KERNEL = 7


def weight_shapes(config: ModelConfig, stage: Stage) -> Shapes:
    """Every parameter of one stage."""
    if stage == "lm":
        lm = config.lm
        return lm_shapes(lm) if isinstance(lm, SpeechLMConfig) else conformer_lm_shapes(lm)
    if stage == "flow":
        flow = config.flow
        return flow_shapes(flow) if isinstance(flow, FlowConfig) else unet_flow_shapes(flow)
    return vocoder_shapes(config.vocoder)


def num_parameters(config: ModelConfig, stage: Stage) -> int:
    """How many numbers one stage's weights are."""
    return sum(math.prod(shape) for shape in weight_shapes(config, stage).values())


def _linear(name: str, out_size: int, in_size: int) -> Shapes:
    return {f"{name}.weight": (out_size, in_size), f"{name}.bias": (out_size,)}


def _conv(name: str, out_channels: int, in_channels: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (out_channels, in_channels, kernel), f"{name}.bias": (out_channels,)}


def lm_shapes(lm: SpeechLMConfig) -> Shapes:
    """The speech LM: Qwen2's own names below the decoder, without its text head."""
    hidden, queries, keys = lm.hidden_size, lm.num_heads * lm.head_dim, lm.num_kv_heads * lm.head_dim
    shapes: Shapes = {"embed_tokens.weight": (lm.text_vocab_size, hidden)}
    for index in range(lm.num_layers):
        layer = f"layers.{index}"
        shapes |= _linear(f"{layer}.self_attn.q_proj", queries, hidden)
        shapes |= _linear(f"{layer}.self_attn.k_proj", keys, hidden)
        shapes |= _linear(f"{layer}.self_attn.v_proj", keys, hidden)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, queries)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (lm.intermediate_size, hidden)
        shapes[f"{layer}.mlp.up_proj.weight"] = (lm.intermediate_size, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, lm.intermediate_size)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["norm.weight"] = (hidden,)
    shapes["llm_decoder.weight"] = (lm.num_speech_rows, hidden)
    if lm.head_bias:
        shapes["llm_decoder.bias"] = (lm.num_speech_rows,)
    shapes["speech_embedding.weight"] = (lm.num_embedding_rows, hidden)
    return shapes


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _input_embedding(name: str, input_size: int, size: int) -> Shapes:
    return _linear(f"{name}.out.0", size, input_size) | _norm(f"{name}.out.1", size)


def _relative_layers(name: str, encoder: EncoderConfig, count: int) -> Shapes:
    size = encoder.output_size
    shapes: Shapes = {}
    for index in range(count):
        layer = f"{name}.{index}"
        for projection in ("linear_q", "linear_k", "linear_v", "linear_out"):
            shapes |= _linear(f"{layer}.self_attn.{projection}", size, size)
        shapes[f"{layer}.self_attn.linear_pos.weight"] = (size, size)
        for bias in ("pos_bias_u", "pos_bias_v"):
            shapes[f"{layer}.self_attn.{bias}"] = (encoder.heads, encoder.head_dim)
        shapes |= _linear(f"{layer}.feed_forward.w_1", encoder.ff_size, size)
        shapes |= _linear(f"{layer}.feed_forward.w_2", size, encoder.ff_size)
        shapes |= _norm(f"{layer}.norm_mha", size) | _norm(f"{layer}.norm_ff", size)
    return shapes


def _relative_encoder(name: str, encoder: EncoderConfig) -> Shapes:
    shapes = _input_embedding(f"{name}.embed", encoder.input_size, encoder.output_size)
    shapes |= _relative_layers(f"{name}.encoders", encoder, encoder.num_blocks)
    return shapes | _norm(f"{name}.after_norm", encoder.output_size)


def conformer_lm_shapes(lm: ConformerLMConfig) -> Shapes:
    """The speech LM of CosyVoice-300M."""
    text, decoder = lm.text_encoder, lm.decoder
    shapes: Shapes = {"text_embedding.weight": (lm.text_vocab_size, text.input_size)}
    shapes |= _relative_encoder("text_encoder", text)
    shapes |= _linear("text_projection", decoder.input_size, text.output_size)
    shapes |= _linear("speaker_projection", decoder.input_size, lm.spk_embed_dim)
    shapes["speech_embedding.weight"] = (lm.num_embedding_rows, decoder.input_size)
    shapes |= _relative_encoder("decoder", decoder)
    return shapes | _linear("llm_decoder", lm.num_speech_rows, decoder.output_size)


def _unet_level(name: str, unet: UNetConfig, before: int, width: int) -> Shapes:
    """A residual block and its attention blocks."""
    inner, time = unet.heads * unet.dim_head, 4 * unet.channels[0]
    norm = 1 if unet.static_chunk_frames is None else 2
    shapes = _linear(f"{name}.0.mlp.1", width, time)
    for block, inputs in (("block1", before), ("block2", width)):
        shapes |= _conv(f"{name}.0.{block}.block.0", width, inputs, 3)
        shapes |= _norm(f"{name}.0.{block}.block.{norm}", width)
    shapes |= _conv(f"{name}.0.res_conv", width, before, 1)
    for index in range(unet.num_blocks):
        block = f"{name}.1.{index}"
        shapes |= _norm(f"{block}.norm1", width) | _norm(f"{block}.norm3", width)
        for projection in ("to_q", "to_k", "to_v"):
            shapes[f"{block}.attn1.{projection}.weight"] = (inner, width)
        shapes |= _linear(f"{block}.attn1.to_out.0", width, inner)
        shapes |= _linear(f"{block}.ff.net.0.proj", 4 * width, width)
        shapes |= _linear(f"{block}.ff.net.2", width, 4 * width)
    return shapes


def unet_shapes(unet: UNetConfig) -> Shapes:
    """The U-Net that estimates the velocity."""
    channels, inputs, last = unet.channels, 4 * unet.mel_dim, len(unet.channels) - 1
    time, causal = 4 * channels[0], unet.static_chunk_frames is not None
    shapes = _linear("unet.time_mlp.linear_1", time, inputs) | _linear("unet.time_mlp.linear_2", time, time)
    for index, width in enumerate(channels):
        name = f"unet.down_blocks.{index}"
        shapes |= _unet_level(name, unet, inputs if index == 0 else channels[index - 1], width)
        shapes |= _conv(f"{name}.2" if index == last else f"{name}.2.conv", width, width, 3)
    for index in range(unet.num_mid_blocks):
        shapes |= _unet_level(f"unet.mid_blocks.{index}", unet, channels[-1], channels[-1])
    outputs = (*channels[::-1], channels[0])
    for index, width in enumerate(outputs[:-1]):
        name, after = f"unet.up_blocks.{index}", outputs[index + 1]
        shapes |= _unet_level(name, unet, 2 * width, after)
        is_last = index == last
        shapes |= _conv(f"{name}.2" if is_last else f"{name}.2.conv", after, after, 3 if is_last else 4)
    shapes |= _conv("unet.final_block.block.0", channels[0], channels[0], 3)
    shapes |= _norm(f"unet.final_block.block.{2 if causal else 1}", channels[0])
    return shapes | _conv("unet.final_proj", unet.mel_dim, channels[0], 1)


def unet_flow_shapes(flow: UNetFlowConfig | RegulatedFlowConfig) -> Shapes:
    """The flows of CosyVoice 2 and CosyVoice-300M."""
    encoder, size = flow.encoder, flow.encoder.output_size
    shapes: Shapes = {"input_embedding.weight": (flow.vocab_size, flow.input_size)}
    shapes |= _linear("speaker_projection", flow.output_size, flow.spk_embed_dim)
    shapes |= _linear("encoder_proj", flow.output_size, size)
    shapes |= _relative_encoder("encoder", encoder)
    if isinstance(flow, UNetFlowConfig):
        lookahead = "encoder.pre_lookahead_layer"
        shapes |= _conv(f"{lookahead}.conv1", flow.lookahead_channels, size, flow.lookahead_tokens + 1)
        shapes |= _conv(f"{lookahead}.conv2", size, flow.lookahead_channels, 3)
        shapes |= _conv("encoder.up_layer.conv", size, size, 2 * flow.token_mel_ratio + 1)
        shapes |= _input_embedding("encoder.up_embed", size, size)
        shapes |= _relative_layers("encoder.up_encoders", encoder, flow.num_up_blocks)
    else:
        mel = flow.output_size
        for index in range(flow.num_regulator_layers):
            shapes |= _conv(f"length_regulator.model.{3 * index}", mel, mel, 3)
            shapes |= _norm(f"length_regulator.model.{3 * index + 1}", mel)
        shapes |= _conv(f"length_regulator.model.{3 * flow.num_regulator_layers}", mel, mel, 1)
    return shapes | unet_shapes(flow.unet)


def flow_shapes(flow: FlowConfig) -> Shapes:
    """The flow: token embedding, speaker projection, look-ahead layer and DiT."""
    dit, dim = flow.dit, flow.dit.dim
    inner, wide = dit.heads * dit.dim_head, dim * dit.ff_mult
    shapes: Shapes = {"input_embedding.weight": (flow.vocab_size, flow.input_size)}
    shapes |= _linear("speaker_projection", flow.output_size, flow.spk_embed_dim)
    shapes |= _conv("lookahead.conv1", flow.lookahead_channels, flow.input_size, flow.lookahead_tokens + 1)
    shapes |= _conv("lookahead.conv2", flow.input_size, flow.lookahead_channels, 3)
    shapes |= _linear("dit.time_embed.time_mlp.0", dim, TIME_CHANNELS)
    shapes |= _linear("dit.time_embed.time_mlp.2", dim, dim)
    shapes |= _linear("dit.input_embed.proj", dim, 2 * dit.mel_dim + dit.mu_dim + dit.spk_dim)
    for half in ("conv1.0", "conv2.0"):
        shapes |= _conv(
            f"dit.input_embed.conv_pos_embed.{half}", dim, dim // POSITION_GROUPS, POSITION_KERNEL
        )
    for index in range(dit.depth):
        block = f"dit.transformer_blocks.{index}"
        shapes |= _linear(f"{block}.attn_norm.linear", 6 * dim, dim)
        for name in ("to_q", "to_k", "to_v"):
            shapes |= _linear(f"{block}.attn.{name}", inner, dim)
        shapes |= _linear(f"{block}.attn.to_out.0", dim, inner)
        shapes |= _linear(f"{block}.ff.ff.0.0", wide, dim)
        shapes |= _linear(f"{block}.ff.ff.2", dim, wide)
    shapes |= _linear("dit.norm_out.linear", 2 * dim, dim)
    shapes |= _linear("dit.proj_out", dit.mel_dim, dim)
    return shapes


def _resblock(name: str, channels: int, kernel: int, dilations: tuple[int, ...]) -> Shapes:
    shapes: Shapes = {}
    for index in range(len(dilations)):
        for half in ("1", "2"):
            shapes |= _conv(f"{name}.convs{half}.{index}", channels, channels, kernel)
            shapes[f"{name}.activations{half}.{index}.alpha"] = (channels,)
    return shapes


def vocoder_shapes(vocoder: VocoderConfig) -> Shapes:
    """The vocoder with weight norm folded."""
    spectrum = vocoder.istft_n_fft + 2
    channels = [vocoder.base_channels // 2**level for level in range(len(vocoder.upsample_rates) + 1)]
    shapes: Shapes = _linear("m_source.l_linear", 1, vocoder.nb_harmonics + 1)
    first = vocoder.conv_pre_lookahead_frames + 1 if vocoder.causal else POST_KERNEL
    shapes |= _conv("conv_pre", channels[0], vocoder.in_channels, first)
    for stage, kernel in enumerate(vocoder.upsample_kernel_sizes):
        out = channels[stage + 1]
        shapes |= _conv(f"ups.{stage}", out, channels[stage], kernel)
        if not vocoder.causal:  # a transposed convolution has its inputs first
            shapes[f"ups.{stage}.weight"] = (channels[stage], out, kernel)
        # The source's spectrum is brought down to this stage's rate.
        rate = math.prod(vocoder.upsample_rates[stage + 1 :])
        shapes |= _conv(f"source_downs.{stage}", out, spectrum, 1 if rate == 1 else 2 * rate)
        shapes |= _resblock(
            f"source_resblocks.{stage}",
            out,
            vocoder.source_resblock_kernel_sizes[stage],
            vocoder.source_resblock_dilation_sizes[stage],
        )
        blocks = len(vocoder.resblock_kernel_sizes)
        for index, (size, dilations) in enumerate(
            zip(vocoder.resblock_kernel_sizes, vocoder.resblock_dilation_sizes, strict=True)
        ):
            shapes |= _resblock(f"resblocks.{stage * blocks + index}", out, size, dilations)
    shapes |= _conv("conv_post", spectrum, channels[-1], POST_KERNEL)
    for index, kernel in enumerate(F0_KERNELS if vocoder.causal else F0_KERNELS[1:] + F0_KERNELS[-1:]):
        inputs = vocoder.in_channels if index == 0 else vocoder.f0_cond_channels
        shapes |= _conv(f"f0_predictor.condnet.{2 * index}", vocoder.f0_cond_channels, inputs, kernel)
    shapes |= _linear("f0_predictor.classifier", 1, vocoder.f0_cond_channels)
    return shapes
