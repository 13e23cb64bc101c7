"""The voices of a model, opened without the model."""

from __future__ import annotations

import logging
from pathlib import Path

from vivace.checkpoint import ModelPaths, find_paths, load_config, model_folder
from vivace.config import Limits, ModelConfig
from vivace.engine.frontend import Frontend
from vivace.environment import voices_folder
from vivace.errors import InvalidVoiceError, ModelFolderError, VivaceError
from vivace.voice import Voice, VoiceRegistry, from_spk2info, load_voice

VOICES_SUBFOLDER = "voices"

_log = logging.getLogger(__name__)


def open_voices(
    model: str | Path,
    folder: Path | None = None,
    *,
    frontend: Frontend | None = None,
    tokenizer: Path | None = None,
) -> VoiceRegistry:
    """The voices of a model folder and the stored ones, without loading the model. Raises ModelFolderError.

    Args:
        frontend: the model's, which reads the prompt texts of official voices; made where needed when None.
        tokenizer: see ``load_assets``.
    """
    path = model_folder(model)
    config = load_config(path)
    paths, _ = find_paths(path, config, tokenizer)
    if frontend is None and paths.voices is not None and paths.tokenizer is not None:
        frontend = Frontend(paths.tokenizer, path, config, Limits())
    builtin = _builtin_voices(path, paths, config, frontend)
    return VoiceRegistry(
        folder or voices_folder(),
        builtin,
        default=config.default_voice,
        config=config,
        takes_recordings=paths.speech_tokenizer is not None,
    )


def _builtin_voices(
    folder: Path, paths: ModelPaths, config: ModelConfig, frontend: Frontend | None
) -> dict[str, Voice]:
    """Voices that come with the model: ``spk2info.pt`` and our own files in ``voices/``."""
    voices: dict[str, Voice] = {}
    if paths.voices is not None:
        decode = None if frontend is None else frontend.decode_prompt
        from vivace.checkpoint import read_official_voices  # loads the tensor library

        stored = read_official_voices(paths.voices, config.flow.spk_embed_dim, config.flow.output_size)
        for name, entry in stored.items():
            try:
                voice = from_spk2info(name, entry, config=config, decode_text=decode)
            except VivaceError as error:
                _log.warning("a voice of %s was left out: %s", paths.voices.name, error.message)
            else:
                voices[voice.name] = voice
    for path in sorted((folder / VOICES_SUBFOLDER).glob("*.safetensors")):
        try:
            voice = load_voice(path)
            voice.check_fits(config)
        except InvalidVoiceError as error:
            raise ModelFolderError(f"{path}: {error.message}") from error
        voices[voice.name] = voice
    return voices
