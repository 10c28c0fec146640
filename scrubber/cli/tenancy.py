"""The current and previous holders of a device according to the service, for all output of the command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["current_tenancies", "is_in_use", "previous_tenancies", "tenant_name"]


def is_in_use(device: pb.Device) -> bool:
    """Return whether the device is in use.

    Grants of a returned device stay open until a scrub has shown that their pods ended.
    """
    return device.hygiene == "in-use"


def current_tenancies(device: pb.Device) -> Sequence[pb.OpenGrant]:
    """Return the grants of the current holders, oldest first."""
    return device.open_grants if is_in_use(device) else ()


def previous_tenancies(device: pb.Device) -> Sequence[pb.OpenGrant]:
    """Return the grants since the device was last clean, oldest first; none while it is in use."""
    return () if is_in_use(device) else device.open_grants


def tenant_name(device: pb.Device) -> str:
    """Return namespace, pod and container that the device is assigned to; empty if none."""
    if not is_in_use(device):
        return ""
    return "/".join(part for part in (device.tenant, device.pod, device.container) if part)
