"""Sizes of the embedded model: the one place that every training script takes them from.

The mini is CosyVoice 3 in miniature: same stages, same layouts, small numbers. Only the codebook
(``speech_token_size``: 3 ** 5 = 243 or 3 ** 6 = 729 codes) is left open, because the tokenizer decides it.
"""

from __future__ import annotations

from vivace.config import DiTConfig, FlowConfig, ModelConfig, SamplingConfig, SpeechLMConfig, VocoderConfig

TEXT_VOCAB_SIZE = 544
"""256 bytes and 281 special tokens (see ``build_tokenizer``), rounded up to a multiple of 32."""

MIX_RATIO = (10, 12)
"""Text tokens and speech tokens of a group where text is streamed in.

The text has to lead: a group's speech must not need phonemes that only the next group brings. Measured on the
teacher's speech: 14.2 text tokens (phonemes, spaces, marks) a second against 25 speech tokens, so 1.76 speech tokens
for each text token; 1.37 for the fastest utterance. A group brings 1.2, so even there the text stays ahead.
"""


SAMPLING = SamplingConfig(top_p=0.4, top_k=10, win_size=10, tau_r=0.7)
"""The model's own sampling, milder than the official one.

With few codes at 25 a second a sound that lasts repeats its code: about a third of the tokens equal one of the
ten before. The official ``tau_r`` 0.1 would draw each of these again from all tokens, the end of sequence
included. ``train_lm check --sweep`` measures settings on held-out speech.
"""


def mini_lm_config(speech_token_size: int) -> SpeechLMConfig:
    """The speech LM: 4.3 million parameters with 243 codes, 4.5 million with 729."""
    return SpeechLMConfig(
        hidden_size=256,
        intermediate_size=384,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        text_vocab_size=TEXT_VOCAB_SIZE,
        speech_token_size=speech_token_size,
        mix_ratio=MIX_RATIO,
        sampling=SAMPLING,
    )


def mini_flow_config(speech_token_size: int) -> FlowConfig:
    """The flow: token embedding, look-ahead convolution and a five-block DiT, 5.3 million parameters."""
    dit = DiTConfig(dim=256, depth=5, heads=4, dim_head=64, ff_mult=2, static_chunk_frames=50)
    return FlowConfig(dit=dit, vocab_size=speech_token_size, lookahead_channels=128)


def mini_vocoder_config() -> VocoderConfig:
    """The vocoder: causal HiFT at three eighths of the official width, 1.95 million parameters.

    Kernels are shorter than the official ones, and the phase of the source runs on at every sample, so that the
    small network gets real harmonics to shape. Every stage's channels (96, 48, 24) are a multiple of eight, which
    the GPU's convolutions need to be fast.
    """
    return VocoderConfig(
        base_channels=192,
        resblock_kernel_sizes=(3, 5, 7),
        source_resblock_kernel_sizes=(3, 3, 3),
        f0_cond_channels=96,
        source_phase="sample",
    )


def mini_config(speech_token_size: int, *, name: str = "vivace-mini") -> ModelConfig:
    """The whole embedded model for a codebook of ``speech_token_size`` codes."""
    return ModelConfig(
        generation=3,
        name=name,
        lm=mini_lm_config(speech_token_size),
        flow=mini_flow_config(speech_token_size),
        vocoder=mini_vocoder_config(),
        pronunciation="en-arpabet",
        token_text_ratio=(1.2, 5.0),
        segment_text_tokens=90,
    )
