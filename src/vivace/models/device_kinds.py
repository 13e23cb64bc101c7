"""Which flows and vocoders have a device's own way, beside ``kinds``: this imports their kernels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from vivace.kernels.reference import DrawRows
from vivace.models.conformer_lm import ConformerLM
from vivace.models.conformer_paged import PagedConformer
from vivace.models.flow import FlowModel
from vivace.models.flow_device import DeviceFlow
from vivace.models.flow_pieces import FadingFlow, PieceFlow
from vivace.models.flow_unet import UNetFlow
from vivace.models.hift import CausalHiFT
from vivace.models.hift_centred import CentredHiFT
from vivace.models.hift_centred_device import MOST_ROWS, CentredDeviceVocoder
from vivace.models.hift_device import DeviceVocoder
from vivace.models.hift_fade import FadingHiFT
from vivace.models.kinds import AnyFlow, AnyLM, AnyVocoder
from vivace.models.lm_paged import PagedLM
from vivace.models.piece_device import WAVE, DevicePieceFlow
from vivace.models.unet_device import DeviceUNetFlow
from vivace.models.unet_pages import UNetPages

if TYPE_CHECKING:
    from vivace.config import ModelConfig

AnyDeviceFlow: TypeAlias = DeviceFlow | DeviceUNetFlow
"""They have one interface."""

MOST_KEPT_BYTES = 8 * 1024**3
"""Of voices' prompts that stay on a device: at most an eighth of the memory for pages, and so much."""

_TYPICAL_SECONDS = 60  # of a stream, for pages that are taken at once

MOST_UNET_STREAMS = 16
"""Streams of one launch of the older generations' flows."""

AnyDeviceVocoder: TypeAlias = DeviceVocoder | CentredDeviceVocoder
"""So have they."""


def make_paged_lm(lm: AnyLM, draw: DrawRows, **options: Any) -> PagedLM:
    """The speech LM for many rows; arguments as ``PagedLM``."""
    kind = PagedConformer if isinstance(lm, ConformerLM) else PagedLM
    return kind(lm, draw, **options)


def make_device_flow(
    flow: AnyFlow, max_bytes: int | None = None, max_streams: int = 1, *, alone: bool = False
) -> AnyDeviceFlow | None:
    """The flow on pages of its own device; None where its kind has the plain way only.

    Args:
        max_bytes: memory for pages; None: as its kind chooses.
        max_streams: streams of one launch; fewer where its kind has room for fewer.
        alone: every chunk has a launch of its own.
    """
    if isinstance(flow, FlowModel):
        most = 1 if alone else None
        return DeviceFlow(flow, max_bytes=max_bytes, max_streams=max_streams, most_in_wave=most)
    if isinstance(flow, UNetFlow):
        most = min(max_streams, MOST_UNET_STREAMS)
        return DeviceUNetFlow(flow, max_bytes=max_bytes, max_streams=most, alone=alone)
    return None


def page_bytes_used(flow: AnyFlow, config: ModelConfig, max_streams: int, longest_tokens: int) -> int:
    """Memory for pages of the flow beyond which more are of no use; of a flow that takes pages when it needs them, all.

    Args:
        longest_tokens: of the longest stream, which fits when it is alone.
    """
    if not isinstance(flow, UNetFlow):
        return sys.maxsize
    usual = max_streams * _TYPICAL_SECONDS * config.token_rate_hz
    pages = -(-max(longest_tokens, usual) // config.chunk_tokens)
    used = pages * UNetPages.bytes_of(flow.config, flow.speaker_projection.weight.dtype)
    return used + min(MOST_KEPT_BYTES, used // 7)


def make_piece_flow(flow: AnyFlow, max_streams: int, *, alone: bool = False) -> DevicePieceFlow | None:
    """The flow in pieces on its own device; None for other kinds, and for the reference's way of joining pieces.

    Args:
        max_streams, alone: as ``make_device_flow``.
    """
    if isinstance(flow, PieceFlow) and not isinstance(flow, FadingFlow):
        return DevicePieceFlow(flow, max_rows=1 if alone else max(WAVE, min(max_streams, MOST_UNET_STREAMS)))
    return None


def make_device_vocoder(
    vocoder: AnyVocoder, slots: int, max_rows: int, max_bytes: int | None = None
) -> AnyDeviceVocoder | None:
    """The vocoder on its own device; None where its kind has the plain way only.

    Args:
        slots: streams that may be open at once.
        max_rows: streams of one launch; fewer where its kind has room for fewer.
        max_bytes: memory for what they work on; None: as its kind chooses.
    """
    if isinstance(vocoder, CausalHiFT):
        return DeviceVocoder(vocoder, slots=slots, max_rows=max_rows, max_bytes=max_bytes)
    if isinstance(vocoder, CentredHiFT) and not isinstance(vocoder, FadingHiFT):
        return CentredDeviceVocoder(vocoder, slots=slots, max_rows=min(max_rows, MOST_ROWS))
    return None
