"""The stages of every generation, and the one place where a configuration becomes a module.

A generation is a configuration and the classes that it names here; nothing after loading asks which one it is.
"""

from __future__ import annotations

from typing import TypeAlias

from vivace.config import AnyFlowConfig, FlowConfig, LMConfig, SpeechLMConfig, UNetFlowConfig, VocoderConfig
from vivace.models.conformer_lm import ConformerLM, SpeakerView
from vivace.models.flow import FlowModel
from vivace.models.flow_pieces import FadingFlow, PieceFlow, PieceStream
from vivace.models.flow_stream import FlowStream
from vivace.models.flow_unet import UNetFlow, UNetFlowStream
from vivace.models.hift import CausalHiFT
from vivace.models.hift_centred import CentredHiFT
from vivace.models.hift_fade import FadingHiFT
from vivace.models.speech_lm import SpeechLM

AnyLM: TypeAlias = SpeechLM | ConformerLM
SpokenLM: TypeAlias = SpeechLM | ConformerLM | SpeakerView
"""What ``for_speaker`` gives."""

AnyFlow: TypeAlias = FlowModel | UNetFlow | PieceFlow
AnyFlowStream: TypeAlias = FlowStream | UNetFlowStream | PieceStream
AnyVocoder: TypeAlias = CausalHiFT | CentredHiFT


def make_lm(config: LMConfig) -> AnyLM:
    """The speech LM of a configuration, its weights not yet loaded."""
    return SpeechLM(config) if isinstance(config, SpeechLMConfig) else ConformerLM(config)


def make_flow(config: AnyFlowConfig) -> AnyFlow:
    """The flow of a configuration."""
    if isinstance(config, FlowConfig):
        return FlowModel(config)
    if isinstance(config, UNetFlowConfig):
        return UNetFlow(config)
    return FadingFlow(config) if config.seams == "fade" else PieceFlow(config)


def make_vocoder(config: VocoderConfig) -> AnyVocoder:
    """The vocoder of a configuration."""
    if config.causal:
        return CausalHiFT(config)
    return FadingHiFT(config) if config.seams == "fade" else CentredHiFT(config)
