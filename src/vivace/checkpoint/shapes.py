"""Names and shapes of every weight, by configuration.

The one place that knows what a checkpoint of given sizes holds, in our names, without building a module:
used to check files before anything is allocated, to count memory, and to make random checkpoints. A test
proves that it agrees with the modules.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from vivace.config import FlowConfig, ModelConfig, SpeechLMConfig, VocoderConfig

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
        return lm_shapes(config.lm)
    if stage == "flow":
        return flow_shapes(config.flow)
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
    shapes["speech_embedding.weight"] = (lm.num_speech_rows, hidden)
    return shapes


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
    shapes |= _conv("conv_pre", channels[0], vocoder.in_channels, vocoder.conv_pre_lookahead_frames + 1)
    for stage, kernel in enumerate(vocoder.upsample_kernel_sizes):
        out = channels[stage + 1]
        shapes |= _conv(f"ups.{stage}", out, channels[stage], kernel)
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
    for index, kernel in enumerate(F0_KERNELS):
        inputs = vocoder.in_channels if index == 0 else vocoder.f0_cond_channels
        shapes |= _conv(f"f0_predictor.condnet.{2 * index}", vocoder.f0_cond_channels, inputs, kernel)
    shapes |= _linear("f0_predictor.classifier", 1, vocoder.f0_cond_channels)
    return shapes
