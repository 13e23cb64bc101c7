"""``spk2info.pt``: the voices that an official folder stores."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vivace.checkpoint.torch_file import FLOAT_DTYPES, check_tensor, read_torch_file
from vivace.errors import ModelFolderError

OfficialVoice: TypeAlias = dict[str, NDArray[np.float32] | NDArray[np.int32]]
"""One stored voice; the keys are the reference's own.

- ``embedding`` float32 ``[192]``: a voice of fine-tuning, nothing else with it; or
- ``prompt_text`` int32 ``[n]`` (text token ids), ``llm_prompt_speech_token`` and
``flow_prompt_speech_token`` int32
  ``[tokens]``, ``prompt_speech_feat`` float32 ``[frames, 80]``, ``llm_embedding`` and ``flow_embedding``
  float32 ``[192]``: a voice stored with its prompt.
"""

MAX_VOICES = 100_000
_FLOATS = frozenset({"embedding", "llm_embedding", "flow_embedding", "prompt_speech_feat"})
_INTEGERS = frozenset({"prompt_text", "llm_prompt_speech_token", "flow_prompt_speech_token"})
# Lengths of the tensors above (their shapes say it), the text and the speech that the reference stores by
# mistake.
_IGNORED = frozenset(
    {
        "prompt_text_len",
        "llm_prompt_speech_token_len",
        "flow_prompt_speech_token_len",
        "prompt_speech_feat_len",
        "text",
        "text_len",
        "speech_feat",
        "speech_token",
    }
)


def read_official_voices(path: Path, spk_embed_dim: int, mel_channels: int) -> dict[str, OfficialVoice]:
    """Name → voice, of every voice in an official ``spk2info.pt``; nothing of the file is run.

    Args:
        path: the file.
        spk_embed_dim: length of a speaker embedding.
        mel_channels: channels of a mel frame.

    Raises:
        ModelFolderError: the file is damaged or holds something that is no voice.
    """
    content = read_torch_file(path)
    if len(content) > MAX_VOICES:
        raise ModelFolderError(f"{path.name}: has more than {MAX_VOICES} voices")
    voices: dict[str, OfficialVoice] = {}
    for name, entry in content.items():
        if not isinstance(entry, dict):
            raise ModelFolderError(f"{path.name}: voice '{name[:60]}' is not a dictionary; store it anew")
        voices[name] = _voice(entry, f"{name[:60]}", path.name, spk_embed_dim, mel_channels)
    return voices


def _voice(
    entry: dict[object, object], name: str, file: str, spk_embed_dim: int, mel_channels: int
) -> OfficialVoice:
    voice: OfficialVoice = {}
    for key, value in entry.items():
        where = f"{name}.{str(key)[:60]}"
        if key in _IGNORED:
            continue
        if not isinstance(key, str) or key not in _FLOATS | _INTEGERS:
            raise ModelFolderError(f"{file}: '{where}' is an unknown entry; store the voice anew")
        tensor = check_tensor(_as_tensor(value), where, file)
        if key in _INTEGERS:
            if tensor.dtype not in (torch.int32, torch.int64) or (
                tensor.numel() and (int(tensor.min()) < 0 or int(tensor.max()) >= 2**31)
            ):
                raise ModelFolderError(f"{file}: '{where}' must hold token ids; store the voice anew")
            voice[key] = tensor.flatten().to(torch.int32).numpy()
            continue
        if tensor.dtype not in FLOAT_DTYPES or not bool(torch.isfinite(tensor).all()):
            raise ModelFolderError(f"{file}: '{where}' must hold finite numbers; store the voice anew")
        width = mel_channels if key == "prompt_speech_feat" else spk_embed_dim
        if tensor.numel() == 0 or tensor.shape[-1] != width:
            raise ModelFolderError(f"{file}: '{where}' must have {width} channels; it is of another model")
        rows = tensor.to(torch.float32).reshape(-1, width)
        if key != "prompt_speech_feat" and rows.shape[0] != 1:
            raise ModelFolderError(f"{file}: '{where}' must be one embedding; store the voice anew")
        voice[key] = (rows if key == "prompt_speech_feat" else rows[0]).numpy()
    if not ({"embedding", "flow_embedding"} & voice.keys()):
        raise ModelFolderError(f"{file}: voice '{name}' has no embedding; store it anew")
    return voice


def _as_tensor(value: object) -> object:
    """Fine-tuning recipes store the embedding as a plain list of numbers."""
    if isinstance(value, list) and value and all(type(item) in (int, float) for item in value):
        return torch.tensor(value, dtype=torch.float32)
    return value
