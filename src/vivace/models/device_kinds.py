"""Which flows run on pages of a device, beside ``kinds``: this imports their kernels."""

from __future__ import annotations

from typing import TypeAlias

from vivace.models.flow import FlowModel
from vivace.models.flow_device import DeviceFlow
from vivace.models.flow_unet import UNetFlow
from vivace.models.kinds import AnyFlow
from vivace.models.unet_device import DeviceUNetFlow

AnyDeviceFlow: TypeAlias = DeviceFlow | DeviceUNetFlow
"""They have one interface."""


def make_device_flow(
    flow: AnyFlow, max_bytes: int | None = None, max_streams: int = 1
) -> AnyDeviceFlow | None:
    """The flow on pages of its own device; None where its kind has the plain way only.

    Args:
        max_bytes: memory for pages; None: as its kind chooses.
        max_streams: streams of one launch.
    """
    if isinstance(flow, FlowModel):
        return DeviceFlow(flow, max_bytes=max_bytes, max_streams=max_streams)
    if isinstance(flow, UNetFlow):
        return DeviceUNetFlow(flow, max_bytes=max_bytes, max_streams=max_streams)
    return None
