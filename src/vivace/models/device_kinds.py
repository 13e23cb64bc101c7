"""Which flows and vocoders have a device's own way, beside ``kinds``: this imports their kernels."""

from __future__ import annotations

from typing import Any, TypeAlias

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

AnyDeviceFlow: TypeAlias = DeviceFlow | DeviceUNetFlow
"""They have one interface."""

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
        waves = () if alone else None
        return DeviceFlow(flow, max_bytes=max_bytes, max_streams=max_streams, waves=waves)
    if isinstance(flow, UNetFlow):
        most = min(max_streams, MOST_UNET_STREAMS)
        return DeviceUNetFlow(flow, max_bytes=max_bytes, max_streams=most, alone=alone)
    return None


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
