"""Every setting as a frozen dataclass.

A model's sizes come from its own configuration file (see ``checkpoint``); nothing else in the package
knows a size. Units are in the names.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Nucleus sampling with repetition-aware resampling, the model's own rule (VALL-E 2's RAS)."""

    top_p: float = 0.8
    top_k: int = 25
    win_size: int = 10
    tau_r: float = 0.1


@dataclass(frozen=True, slots=True)
class SpeechLMConfig:
    """Qwen2 decoder that reads text tokens and writes speech tokens."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    text_vocab_size: int
    speech_token_size: int
    num_special_rows: int = 200
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    mix_ratio: tuple[int, int] = (5, 15)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    start_rows_apart: bool = False
    """Start and task have rows of their own behind all rows of the head (CosyVoice 2), or lie among them (3)."""
    head_bias: bool = False

    @property
    def num_speech_rows(self) -> int:
        """Rows of the head: speech tokens, then the special ones."""
        return self.speech_token_size + self.num_special_rows

    @property
    def num_embedding_rows(self) -> int:
        """Rows of the speech embedding: those of the head, then start and task where they stand apart."""
        return self.num_speech_rows + (2 if self.start_rows_apart else 0)

    @property
    def sos_id(self) -> int:
        return self.num_speech_rows if self.start_rows_apart else self.speech_token_size

    @property
    def eos_id(self) -> int:
        return self.speech_token_size + (0 if self.start_rows_apart else 1)

    @property
    def task_id(self) -> int:
        return self.num_speech_rows + 1 if self.start_rows_apart else self.speech_token_size + 2

    @property
    def fill_id(self) -> int:
        return self.speech_token_size + (2 if self.start_rows_apart else 3)

    @property
    def interleaving(self) -> SpeechLMConfig:
        """What streamed text is read by in turn with speaking."""
        return self


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Stack of attention layers with relative positions."""

    input_size: int
    output_size: int
    heads: int
    ff_size: int
    num_blocks: int

    @property
    def head_dim(self) -> int:
        return self.output_size // self.heads


@dataclass(frozen=True, slots=True)
class ConformerLMConfig:
    """CosyVoice-300M: a causal text encoder, then a decoder with relative positions that writes speech tokens.

    Rows of the speech embedding (speech tokens, start, task) and of the head (speech tokens, end) are numbered apart.
    """

    text_vocab_size: int
    speech_token_size: int
    text_encoder: EncoderConfig
    decoder: EncoderConfig
    spk_embed_dim: int = 192
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @property
    def hidden_size(self) -> int:
        return self.decoder.output_size

    @property
    def num_layers(self) -> int:
        return self.decoder.num_blocks

    @property
    def num_heads(self) -> int:
        return self.decoder.heads

    @property
    def num_kv_heads(self) -> int:
        return self.decoder.heads

    @property
    def head_dim(self) -> int:
        return self.decoder.head_dim

    @property
    def num_speech_rows(self) -> int:
        """Rows of the head: speech tokens and the end of sequence."""
        return self.speech_token_size + 1

    @property
    def num_embedding_rows(self) -> int:
        """Rows of the speech embedding: speech tokens, start, task."""
        return self.speech_token_size + 2

    @property
    def sos_id(self) -> int:
        return self.speech_token_size

    @property
    def task_id(self) -> int:
        return self.speech_token_size + 1

    @property
    def eos_id(self) -> int:
        return self.speech_token_size

    @property
    def fill_id(self) -> None:
        """Nothing asks for more text."""

    @property
    def mix_ratio(self) -> None:
        """Text is not interleaved with speech: a segment's text must be known before it is spoken."""

    @property
    def interleaving(self) -> None:
        """See ``mix_ratio``."""


LMConfig = SpeechLMConfig | ConformerLMConfig


@dataclass(frozen=True, slots=True)
class DiTConfig:
    """Diffusion transformer that estimates the flow's velocity."""

    dim: int
    depth: int
    heads: int
    dim_head: int
    ff_mult: int
    mel_dim: int = 80
    mu_dim: int = 80
    spk_dim: int = 80
    out_channels: int = 80
    static_chunk_frames: int = 50


@dataclass(frozen=True, slots=True)
class FlowConfig:
    """Speech tokens to mel: token embedding, look-ahead convolution, DiT, Euler solver with guidance."""

    dit: DiTConfig
    vocab_size: int
    input_size: int = 80
    output_size: int = 80
    spk_embed_dim: int = 192
    token_mel_ratio: int = 2
    lookahead_tokens: int = 3
    lookahead_channels: int = 1024
    guidance_scale: float = 0.7
    training_guidance_drop: float = 0.2
    num_steps: int = 10
    sigma_min: float = 1e-6
    noise_frames: int = 15_000
    noise_seed: int = 0

    @property
    def depth(self) -> int:
        """Attention layers of the velocity estimator."""
        return self.dit.depth

    @property
    def kept_values(self) -> int:
        """Keys and values that a stream keeps of a frame: both guidance branches, per layer and Euler step."""
        return 4 * self.num_steps * self.dit.depth * self.dit.heads * self.dit.dim_head

    def num_frames(self, num_tokens: int) -> int:
        """Mel frames of so many tokens."""
        return num_tokens * self.token_mel_ratio

    def num_tokens(self, num_frames: int) -> int:
        """Tokens that fit into so many mel frames."""
        return num_frames // self.token_mel_ratio


@dataclass(frozen=True, slots=True)
class UNetConfig:
    """One-dimensional U-Net that estimates the flow's velocity.

    ``channels`` has one entry per level; all levels but the last halve the frame rate. ``static_chunk_frames`` is the
    chunk of the causal estimator; None: convolutions and attention look both ways.
    """

    channels: tuple[int, ...]
    dim_head: int
    heads: int
    num_blocks: int
    num_mid_blocks: int
    mel_dim: int = 80
    static_chunk_frames: int | None = None

    @property
    def num_levels(self) -> int:
        """Levels of residual and attention blocks: down, middle, up."""
        return 2 * len(self.channels) + self.num_mid_blocks


@dataclass(frozen=True, slots=True)
class UNetFlowConfig:
    """CosyVoice 2: look-ahead, conformer that doubles the rate, causal U-Net, Euler solver with guidance."""

    encoder: EncoderConfig
    unet: UNetConfig
    vocab_size: int
    input_size: int = 512
    output_size: int = 80
    spk_embed_dim: int = 192
    token_mel_ratio: int = 2
    num_up_blocks: int = 4
    lookahead_tokens: int = 3
    guidance_scale: float = 0.7
    training_guidance_drop: float = 0.2
    num_steps: int = 10
    sigma_min: float = 1e-6
    noise_frames: int = 15_000
    noise_seed: int = 0

    @property
    def depth(self) -> int:
        """Attention layers of the velocity estimator."""
        return self.unet.num_levels * self.unet.num_blocks

    @property
    def kept_values(self) -> int:
        """Keys and values that a stream keeps of a frame: both guidance branches, per layer and Euler step."""
        return 4 * self.num_steps * self.depth * self.unet.heads * self.unet.dim_head

    @property
    def lookahead_channels(self) -> int:
        return self.encoder.output_size

    def num_frames(self, num_tokens: int) -> int:
        """Mel frames of so many tokens."""
        return num_tokens * self.token_mel_ratio

    def num_tokens(self, num_frames: int) -> int:
        """Tokens that fit into so many mel frames."""
        return num_frames // self.token_mel_ratio


@dataclass(frozen=True, slots=True)
class RegulatedFlowConfig:
    """CosyVoice-300M: conformer, length regulator, U-Net that looks both ways.

    The rates of tokens and frames have no whole ratio. ``seams`` says how a stream joins its pieces: "context" (each
    piece is computed with what lies before and behind it) or "fade" (the reference's overlap and cross-fade).
    """

    encoder: EncoderConfig
    unet: UNetConfig
    vocab_size: int
    token_rate_hz: int
    input_size: int = 512
    output_size: int = 80
    spk_embed_dim: int = 192
    num_regulator_layers: int = 4
    lookahead_tokens: int = 20
    guidance_scale: float = 0.7
    training_guidance_drop: float = 0.2
    num_steps: int = 10
    sigma_min: float = 1e-6
    noise_frames: int = 15_000
    noise_seed: int = 0
    seams: str = "context"

    @property
    def depth(self) -> int:
        """Attention layers of the velocity estimator."""
        return self.unet.num_levels * self.unet.num_blocks

    @property
    def kept_values(self) -> int:
        """A stream keeps no keys and values."""
        return 0

    def num_frames(self, num_tokens: int) -> int:
        """Mel frames of so many tokens, rounded down as in the reference (22,050 Hz, 256 samples a frame)."""
        return int(num_tokens / self.token_rate_hz * 22_050 / 256)

    def num_tokens(self, num_frames: int) -> int:
        """Tokens that fit into so many mel frames."""
        return num_frames * 256 * self.token_rate_hz // 22_050


AnyFlowConfig = FlowConfig | UNetFlowConfig | RegulatedFlowConfig


@dataclass(frozen=True, slots=True)
class VocoderConfig:
    """HiFT: F0 predictor, harmonic source, upsampling generator, inverse STFT."""

    in_channels: int = 80
    base_channels: int = 512
    nb_harmonics: int = 8
    sampling_rate: int = 24_000
    nsf_alpha: float = 0.1
    nsf_sigma: float = 0.003
    nsf_voiced_threshold: float = 10.0
    upsample_rates: tuple[int, ...] = (8, 5, 3)
    upsample_kernel_sizes: tuple[int, ...] = (16, 11, 7)
    istft_n_fft: int = 16
    istft_hop: int = 4
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    source_resblock_kernel_sizes: tuple[int, ...] = (7, 7, 11)
    source_resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    lrelu_slope: float = 0.1
    audio_limit: float = 0.99
    conv_pre_lookahead_frames: int = 4
    f0_cond_channels: int = 512
    source_phase: str = "frame"
    """How the harmonic source's phase moves: "frame" = one value per frame (the official CosyVoice 3),
    "sample" = it runs on at every sample (the embedded model, CosyVoice-300M), "linear" = in a straight line from the
    middle of one frame to that of the next (CosyVoice 2)."""
    causal: bool = True
    """Convolutions look back only but for a fixed look-ahead (CosyVoice 3), or to both sides (CosyVoice 2 and 300M)."""
    seams: str = "context"
    """How a stream of a vocoder that is not causal joins its pieces: "context" (every layer waits for what it looks
    ahead on; equals the whole) or "fade" (the reference's overlap and cross-fade)."""
    fade_frames: int = 8
    """Overlap of the cross-fade in mel frames: 8 in CosyVoice 2, 20 in CosyVoice-300M."""

    @property
    def hop_samples(self) -> int:
        """Samples of audio per mel frame."""
        hop = self.istft_hop
        for rate in self.upsample_rates:
            hop *= rate
        return hop


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model folder: the three stages and the rates that join them."""

    generation: int
    name: str
    lm: LMConfig
    flow: AnyFlowConfig
    vocoder: VocoderConfig
    sample_rate_hz: int = 24_000
    token_rate_hz: int = 25
    chunk_tokens: int = 25
    pronunciation: str | None = None
    """Name of a pronouncing front end that turns words into phoneme tags, or None (the official models)."""
    token_text_ratio: tuple[float, float] = (2.0, 20.0)
    """Fewest and most speech tokens per text token of a segment; the reference's bounds."""
    default_voice: str | None = None
    segment_text_tokens: int = 80
    """Most text tokens of one segment: what the model was trained to speak in one go (the reference's bound)."""
    mel_fmax_hz: float | None = None
    """Upper edge of the mel bands of a voice's prompt; None is half the sample rate."""

    @property
    def samples_per_token(self) -> int:
        return self.sample_rate_hz // self.token_rate_hz

    @property
    def max_tokens(self) -> int:
        """Most speech tokens of one utterance with its prompt: the model's fixed noise ends there."""
        return self.flow.num_tokens(self.flow.noise_frames)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a request may ask for. All can be changed by whoever builds the engine."""

    text_characters: int = 100_000
    segment_text_tokens: int | None = None
    """Most text tokens of one segment; None takes the model's own bound."""
    instruction_characters: int = 1_000
    speed_min: float = 0.25
    speed_max: float = 4.0
    prompt_seconds_min: float = 1.0
    prompt_seconds_max: float = 30.0
    prompt_file_bytes: int = 10 * 1024 * 1024
    prompt_rate_hz_min: int = 8_000
    prompt_rate_hz_max: int = 192_000
    decode_seconds: float = 2.0
    normalize_seconds: float = 1.0
    stream_frames: int = 15_000
    """Longest utterance of one segment with its prompt, in mel frames: the model's fixed noise ends there."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of ``vivace serve``.

    Attributes:
        api_keys: any one of them opens the server; needed unless it listens on this machine only.
        allowed_hosts: values of ``Host`` to answer to, without port; empty: names of this machine when
            listening on it only, any other name otherwise (keys are needed then).
        allowed_origins: web pages of other origins that may call, such as ``https://example.org``.
        text_characters: longest ``input``; OpenAI's bound.
        request_seconds: most time that a request may wait for the engine, in all. Time that its reader takes
            does not count.
        write_stall_seconds: how long a reader may take nothing before its request ends.
        voice_aliases: names that clients know, and what they mean here; unknown ones fall to the built-in voices.
        model_aliases: names of models that mean the one that is loaded.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    body_bytes: int = 1024 * 1024
    upload_bytes: int = 10 * 1024 * 1024
    header_bytes: int = 32 * 1024
    header_count: int = 100
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    keep_alive_seconds: float = 60.0
    write_stall_seconds: float = 15.0
    request_seconds: float = 120.0
    drain_seconds: float = 30.0
    text_characters: int = 4096
    instruction_characters: int = 1_000
    max_connections: int = 4096
    max_uploads: int = 4
    websocket_frame_bytes: int = 64 * 1024
    websocket_pending_text_bytes: int = 32 * 1024
    websocket_idle_seconds: float = 60.0
    heartbeat_seconds: float = 5.0
    voice_aliases: Mapping[str, str] = field(default_factory=dict)
    model_aliases: tuple[str, ...] = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")

    @property
    def is_local(self) -> bool:
        """Only programs on this machine can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False
