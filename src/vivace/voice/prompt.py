"""Prompt audio to ``Voice``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vivace.audio.decode import decode_audio
from vivace.audio.features import mel_spectrogram, resample
from vivace.errors import InvalidAudioError
from vivace.voice.value import MetaValue, Voice, check_prompt_text, check_voice_name, invalid_voice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from vivace.audio.decode import AudioSource
    from vivace.config import Limits, ModelConfig

ENCODER_RATE_HZ = 16_000


_OFFICIAL_NAMES = {
    "中文女": "chinese-female",
    "中文男": "chinese-male",
    "日语男": "japanese-male",
    "粤语女": "cantonese-female",
    "英文女": "english-female",
    "英文男": "english-male",
    "韩语女": "korean-female",
}


def official_name(name: str) -> str:
    """Our name of a speaker of CosyVoice-300M-SFT and -Instruct; any other name as it is.

    Voice names are file names and parts of addresses, so they keep to a small alphabet.
    """
    return _OFFICIAL_NAMES.get(name, name)


class SpeechEncoding(Protocol):
    """The speech tokenizer, as far as it matters here."""

    def encode(self, samples: NDArray[np.float32]) -> NDArray[np.int32]:
        """16 kHz samples ``[n]`` to speech tokens ``[tokens]``."""


class SpeakerEncoding(Protocol):
    """The speaker encoder, as far as it matters here."""

    def embed(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """16 kHz samples ``[n]`` to a speaker embedding ``[192]``."""


def make_voice(
    prompt_audio: AudioSource,
    prompt_text: str,
    *,
    name: str,
    config: ModelConfig,
    speech_tokenizer: SpeechEncoding,
    speaker_encoder: SpeakerEncoding,
    limits: Limits,
    consent: bool = False,
) -> Voice:
    """Decode, check, and encode a recording. Everything is checked before any model runs.

    Tokens and mel are cut to the same duration, as the reference's front end does for CosyVoice 2 and 3: the flow
    needs exactly as many frames as its tokens make. The mel is taken at the model's own rate (the reference takes
    CosyVoice-300M's from audio at 24 kHz as if it were at 22.05).

    Args:
        prompt_text: what the recording says, or "".
        consent: the speaker has agreed; recorded in the voice.

    Raises:
        InvalidAudioError, InvalidTextError, InvalidVoiceError: what is wrong with which input.
    """
    name, prompt_text = check_voice_name(name), check_prompt_text(prompt_text)
    samples, rate_hz = decode_audio(prompt_audio, limits)
    samples_16k = resample(samples, rate_hz, ENCODER_RATE_HZ)
    flow = config.flow
    mel = model_mel(resample(samples, rate_hz, config.sample_rate_hz), config)
    tokens = np.asarray(speech_tokenizer.encode(samples_16k), np.int32).reshape(-1)
    num_tokens = min(flow.num_tokens(len(mel)), len(tokens))
    if num_tokens == 0:
        raise InvalidAudioError("The audio holds no speech that could be encoded.", param="prompt_audio")
    embedding = np.asarray(speaker_encoder.embed(samples_16k), np.float32).reshape(-1)
    meta = _meta(config, num_tokens) | {"consent": consent}
    mel = mel[: flow.num_frames(num_tokens)]
    voice = Voice(name, prompt_text, tokens[:num_tokens], mel, embedding, meta)
    voice.check_fits(config)
    return voice


def model_mel(samples: NDArray[np.float32], config: ModelConfig) -> NDArray[np.float32]:
    """Samples ``[n]`` at the model's rate as the mel ``[frames, 80]`` that its flow makes.

    Args:
        samples: at least four frames of them.
    """
    hop = config.vocoder.hop_samples
    return mel_spectrogram(
        samples,
        rate_hz=config.sample_rate_hz,
        n_fft=4 * hop,
        hop=hop,
        num_mels=config.flow.output_size,
        fmax_hz=config.mel_fmax_hz,
    )


def from_spk2info(
    name: str,
    entry: Mapping[str, object],
    *,
    config: ModelConfig,
    decode_text: Callable[[Sequence[int]], str] | None = None,
) -> Voice:
    """A voice from one entry of an official ``spk2info.pt`` (tensors on the CPU, or arrays).

    Entries stored with ``add_zero_shot_spk`` hold prompt text as token ids, speech tokens, mel, embedding;
    those that came with a model may hold an embedding alone.

    Args:
        decode_text: text token ids to text; without it a prompt text stored as ids is left out.

    Raises:
        InvalidVoiceError: ``invalid_voice``: no embedding, or shapes that do not fit together or the model.
    """
    embedding = _first(entry, "flow_embedding", "llm_embedding", "embedding")
    if embedding is None:
        raise invalid_voice("its entry has no speaker embedding")
    tokens = _first(entry, "flow_prompt_speech_token", "llm_prompt_speech_token")
    mel = _first(entry, "prompt_speech_feat")
    try:
        tokens = (
            np.zeros(0, np.int32) if tokens is None or mel is None else tokens.astype(np.int32).reshape(-1)
        )
        mel = np.zeros((0, config.flow.output_size), np.float32) if mel is None else mel
        mel = mel.astype(np.float32).reshape(-1, config.flow.output_size)
        embedding = embedding.astype(np.float32).reshape(-1)
    except (TypeError, ValueError) as error:
        raise invalid_voice("its entry has arrays of an unknown shape") from error
    num_tokens = min(config.flow.num_tokens(len(mel)), len(tokens))
    text = entry.get("prompt_text", "")
    if not isinstance(text, str):
        ids = [int(token) for token in np.asarray(text).reshape(-1)]
        text = decode_text(ids) if decode_text is not None and ids else ""
    meta = _meta(config, num_tokens) | {"source": "spk2info"}
    if official_name(name) != name:
        name, meta = official_name(name), meta | {"official_name": name}
    mel = mel[: config.flow.num_frames(num_tokens)]
    voice = Voice(name, text, tokens[:num_tokens], mel, embedding, meta)
    voice.check_fits(config)
    return voice


def _first(entry: Mapping[str, object], *keys: str) -> NDArray[np.generic] | None:
    """The first of ``keys`` that the entry has, as an array."""
    for key in keys:
        if entry.get(key) is not None:
            return np.asarray(entry[key])
    return None


def _meta(config: ModelConfig, num_tokens: int) -> dict[str, MetaValue]:
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "generation": config.generation,
        "model": config.name,
        "speech_token_size": config.lm.speech_token_size,
        "seconds": num_tokens / config.token_rate_hz,
    }
