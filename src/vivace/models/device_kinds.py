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


def make_device_flow(flow: AnyFlow) -> AnyDeviceFlow | None:
    """The flow on pages of its own device; None where its kind has the plain way only."""
    if isinstance(flow, FlowModel):
        return DeviceFlow(flow)
    return DeviceUNetFlow(flow) if isinstance(flow, UNetFlow) else None
