"""Official weight names to ours and back.

Ours drop what the official ones carry for no use: the text model's unused head, rotary frequencies (the
module computes them), and weight norm, which is folded into plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vivace.checkpoint.shapes import Stage

OFFICIAL_FILES: dict[Stage, str] = {"lm": "llm.pt", "flow": "flow.pt", "vocoder": "hift.pt"}

_Prefixes = tuple[tuple[str, str], ...]

# Ours to official; the first prefix that fits is replaced, so each table reads the same in both directions.
_QWEN: _Prefixes = (
    ("embed_tokens.", "llm.model.model.embed_tokens."),
    ("layers.", "llm.model.model.layers."),
    ("norm.", "llm.model.model.norm."),
    ("llm_decoder.", "llm_decoder."),
    ("speech_embedding.", "speech_embedding."),
)
_UNET_FLOW: _Prefixes = (
    ("input_embedding.", "input_embedding."),
    ("speaker_projection.", "spk_embed_affine_layer."),
    ("encoder.", "encoder."),
    ("encoder_proj.", "encoder_proj."),
    ("length_regulator.", "length_regulator."),
    ("unet.", "decoder.estimator."),
)
_LM: dict[int, _Prefixes] = {
    3: _QWEN,
    2: _QWEN,
    1: (
        ("text_embedding.", "text_embedding."),
        ("text_encoder.", "text_encoder."),
        ("text_projection.", "text_encoder_affine_layer."),
        ("speaker_projection.", "spk_embed_affine_layer."),
        ("speech_embedding.", "speech_embedding."),
        ("decoder.", "llm."),
        ("llm_decoder.", "llm_decoder."),
    ),
}
_FLOW: dict[int, _Prefixes] = {
    3: (
        ("input_embedding.", "input_embedding."),
        ("speaker_projection.", "spk_embed_affine_layer."),
        ("lookahead.", "pre_lookahead_layer."),
        ("dit.", "decoder.estimator."),
    ),
    2: _UNET_FLOW,
    1: _UNET_FLOW,
}
_DECODER_NORMS = ((".norm_mha.", ".norm1."), (".norm_ff.", ".norm2."))
"""Ours and official, in CosyVoice-300M's decoder, whose layers are otherwise those of its encoders."""

SPEECH_ROWS, START_ROWS = "speech_embedding.weight", "llm_embedding.weight"
NUM_START_ROWS = 2
"""CosyVoice 2 and 300M store the rows of start and task apart; ours follow the speech rows in one table."""

TEXT_HEAD = "llm.model.lm_head.weight"
ROTARY = "decoder.estimator.rotary_embed.inv_freq"
IGNORED = frozenset({TEXT_HEAD, ROTARY, "epoch", "step"})
"""Entries of official files that are not weights of ours."""

_GAIN, _DIRECTION = "parametrizations.weight.original0", "parametrizations.weight.original1"
_OLD_GAIN, _OLD_DIRECTION = "weight_g", "weight_v"


def _prefixes(stage: Stage, generation: int) -> _Prefixes:
    if stage == "lm":
        return _LM[generation]
    return _FLOW[generation] if stage == "flow" else (("", ""),)


def _has_own_norms(stage: Stage, ours: str, generation: int) -> bool:
    return stage == "lm" and generation == 1 and ours.startswith("decoder.")


def to_our_name(stage: Stage, official: str, generation: int = 3) -> str | None:
    """Our name of an official weight (weight norm already folded), or None if there is none."""
    for ours, theirs in _prefixes(stage, generation):
        if official.startswith(theirs):
            name = ours + official[len(theirs) :]
            if _has_own_norms(stage, name, generation):
                for own, norm in _DECODER_NORMS:
                    name = name.replace(norm, own)
            return name
    return None


def to_official_name(stage: Stage, ours: str, generation: int = 3) -> str:
    """Inverse of :func:`to_our_name`. Raises KeyError for a name that is no weight of the stage."""
    for prefix, theirs in _prefixes(stage, generation):
        if ours.startswith(prefix):
            name = theirs + ours[len(prefix) :]
            if _has_own_norms(stage, ours, generation):
                for own, norm in _DECODER_NORMS:
                    name = name.replace(own, norm)
            return name
    raise KeyError(ours)


def has_weight_norm(name: str) -> bool:
    """True for the vocoder's weights (our names) that official files store as gain and direction."""
    if not name.endswith(".weight"):
        return False
    first = name.split(".", 1)[0]
    return first in {"conv_pre", "conv_post", "ups", "resblocks", "source_resblocks"} or name.startswith(
        "f0_predictor.condnet."
    )


def strip_generator(name: str) -> str:
    """``hift.pt`` of a GAN training has its keys below ``generator.``."""
    return name.replace("generator.", "")


def split_weight_norm(name: str) -> tuple[str, str] | None:
    """``(weight name, "gain" or "direction")`` of a weight-norm entry, old style or new; else None."""
    for suffix, part in (
        (_GAIN, "gain"),
        (_DIRECTION, "direction"),
        (_OLD_GAIN, "gain"),
        (_OLD_DIRECTION, "direction"),
    ):
        if name.endswith("." + suffix):
            return name[: -len(suffix)] + "weight", part
    return None


def weight_norm_names(weight: str, *, old_style: bool) -> tuple[str, str]:
    """Names of the gain and the direction of an official ``….weight``."""
    module = weight.removesuffix("weight")
    return (
        (module + _OLD_GAIN, module + _OLD_DIRECTION) if old_style else (module + _GAIN, module + _DIRECTION)
    )


def gain_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the gain that belongs to a direction of ``shape``: one value per output channel."""
    return (shape[0], *(1 for _ in shape[1:]))


def fold_weight_norm(gain: Tensor, direction: Tensor) -> Tensor:
    """``direction * gain / |direction|`` with the norm over all but the first axis, in float32 or better.

    Raises:
        ZeroDivisionError: a direction is all zero, so the weight is undefined.
    """
    wide = torch.float64 if direction.dtype is torch.float64 else torch.float32
    gain, direction = gain.to(wide), direction.to(wide)
    norm = torch.linalg.vector_norm(direction, dim=tuple(range(1, direction.ndim)), keepdim=True)
    if bool((norm == 0).any()):
        raise ZeroDivisionError
    folded: Tensor = direction * (gain / norm)
    return folded


def to_official(
    stage: Stage, weights: Mapping[str, Tensor], rotary_channels: int = 0, generation: int = 3
) -> dict[str, Tensor]:
    """The official state dictionary of one stage from weights in our names.

    Args:
        stage: which file it is for.
        weights: every weight of the stage, our names.
        rotary_channels: for the flow of CosyVoice 3, channels per head of its rotary embedding, whose frequencies
            official files carry.
    """
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        tensor = value.detach()
        official = to_official_name(stage, name, generation)
        if stage == "vocoder" and has_weight_norm(name):
            gain, direction = weight_norm_names(official, old_style=False)
            norm = torch.linalg.vector_norm(tensor.float(), dim=tuple(range(1, tensor.ndim)), keepdim=True)
            state[gain] = norm  # float32 whatever the dtype, so that folding gives the weight back
            state[direction] = tensor
        elif stage == "lm" and generation < 3 and name == SPEECH_ROWS:
            state[official], state[START_ROWS] = tensor[:-NUM_START_ROWS], tensor[-NUM_START_ROWS:]
        else:
            state[official] = tensor
    if stage == "lm" and generation > 1:
        state[TEXT_HEAD] = state["llm.model.model.embed_tokens.weight"]  # tied: stored once
    if stage == "flow" and generation == 3:
        exponents = torch.arange(0, rotary_channels, 2, dtype=torch.float32) / rotary_channels
        state[ROTARY] = 1.0 / 10_000**exponents
    return state
