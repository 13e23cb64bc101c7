"""Opens everything that an engine needs: model, text front end, voices, prompt encoders."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vivace.audio.decode import decode_audio
from vivace.audio.features import resample
from vivace.audio.pool import FeaturePool
from vivace.checkpoint import LMVariant, Model, model_folder, open_model
from vivace.config import Limits
from vivace.engine.frontend import Frontend
from vivace.engine.voices import open_voices
from vivace.environment import cpu_threads
from vivace.errors import (
    InvalidAudioError,
    InvalidRequestError,
    ModelFolderError,
    VoiceNotFoundError,
)
from vivace.models.prompt_encoders import SpeakerEncoder, SpeechTokenizer
from vivace.voice import Voice, VoiceRegistry, make_voice, official_name
from vivace.voice.prompt import ENCODER_RATE_HZ

if TYPE_CHECKING:
    from vivace.audio.decode import AudioSource


class Assets:
    """What one engine holds for its lifetime.

    Attributes:
        frontend: None where the folder has no tokenizer: then only voice conversion works.
    """

    def __init__(
        self, model: Model, frontend: Frontend | None, voices: VoiceRegistry, limits: Limits
    ) -> None:
        self.model = model
        self.frontend = frontend
        self.voices = voices
        self.limits = limits
        self._pool = FeaturePool()
        self._lock = threading.Lock()
        self._speech_tokenizer: SpeechTokenizer | None = None
        self._speaker_encoder: SpeakerEncoder | None = None

    @property
    def default_voice(self) -> Voice | None:
        """The model's own choice, or the first built-in voice."""
        name = self.voices.default_name
        return None if name is None else self.voices.get(name)

    def find_voice(self, voice: str | Voice | None) -> Voice:
        """The voice asked for, checked against the model. Never another one in its place."""
        if voice is None:
            found = self.default_voice
            if found is None:
                raise VoiceNotFoundError(
                    "this model has no built-in voice; give a voice made from a recording", param="voice"
                )
        elif isinstance(voice, Voice):
            found = voice
        elif isinstance(voice, str):
            found = self.voices.get(official_name(voice))
        else:
            raise InvalidRequestError("voice must be a name or a Voice", code="invalid_type", param="voice")
        found.check_fits(self.model.config)
        return found

    def make_voice(self, audio: AudioSource, text: str, *, name: str, consent: bool) -> Voice:
        """See ``Engine.make_voice``. Runs in the feature pool, so that it overlaps other work."""
        tokenizer, encoder = self._open_speech_tokenizer(), self._open_speaker_encoder()

        def make() -> Voice:
            return make_voice(
                audio,
                text,
                name=name,
                config=self.model.config,
                speech_tokenizer=tokenizer,
                speaker_encoder=encoder,
                limits=self.limits,
                consent=consent,
            )

        return self._pool.submit(make).result()

    def speech_tokens(self, audio: AudioSource) -> list[int]:
        """Speech tokens of a recording, for voice conversion. An ``InvalidAudioError`` names it ``source``."""
        tokenizer = self._open_speech_tokenizer()

        def encode() -> list[int]:
            samples, rate_hz = decode_audio(audio, self.limits)
            tokens: list[int] = tokenizer.encode(resample(samples, rate_hz, ENCODER_RATE_HZ)).tolist()
            if not tokens:
                raise InvalidAudioError("the audio holds no speech that could be encoded", param="source")
            return tokens

        try:
            return self._pool.submit(encode).result()
        except InvalidAudioError as error:
            raise InvalidAudioError(error.message, code=error.code, param="source") from None

    def missing_error(self, feature: str) -> ModelFolderError:
        """What the folder lacks for ``feature``."""
        return ModelFolderError(
            f"{self.model.folder}: {self.model.missing.get(feature, 'files are missing')}"
        )

    def close(self) -> None:
        self._pool.close()

    def _open_speech_tokenizer(self) -> SpeechTokenizer:
        """The speech tokenizer, read at first use."""
        path = self.model.paths.speech_tokenizer
        if path is None:
            raise self.missing_error("speech_tokenizer")
        with self._lock:
            if self._speech_tokenizer is None:
                self._speech_tokenizer = SpeechTokenizer(path, self.model.config.lm.speech_token_size)
            return self._speech_tokenizer

    def _open_speaker_encoder(self) -> SpeakerEncoder:
        """The speaker encoder, read at first use."""
        path = self.model.paths.speaker_encoder
        if path is None:
            raise self.missing_error("speaker_encoder")
        with self._lock:
            if self._speaker_encoder is None:
                self._speaker_encoder = SpeakerEncoder(path, self.model.config.flow.spk_embed_dim)
            return self._speaker_encoder


def load_assets(
    model: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    lm_variant: LMVariant = "base",
    voices_folder: Path | None = None,
    limits: Limits | None = None,
    tokenizer: Path | None = None,
) -> Assets:
    """Loads a model folder and its voices. Raises ModelFolderError.

    Args:
        tokenizer: where to take the text tokenizer from instead of the folder: a folder with Qwen2's files, or
            CosyVoice-300M's rank file.
    """
    threads = cpu_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    folder = model_folder(model)
    loaded = open_model(folder, device, dtype, lm_variant=lm_variant, tokenizer=tokenizer)
    if loaded.device.type == "cpu":
        loaded.flow.prepare()
    limits = limits or Limits()
    limits = replace(limits, stream_frames=min(limits.stream_frames, loaded.config.flow.noise_frames))
    frontend = None
    if loaded.paths.tokenizer is not None:
        frontend = Frontend(loaded.paths.tokenizer, folder, loaded.config, limits)
    voices = open_voices(folder, voices_folder, frontend=frontend, tokenizer=tokenizer)
    return Assets(loaded, frontend, voices, limits)
