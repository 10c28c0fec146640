"""Who has a device, and who had it: what the service's messages say of it, for every answer of the command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["current_tenancies", "is_in_use", "previous_tenancies", "tenant_name"]


def is_in_use(device: pb.Device) -> bool:
    """Whether anybody has it. The grants of one that was given back stay open until a scrub has shown their pods over."""
    return device.hygiene == "in-use"


def current_tenancies(device: pb.Device) -> Sequence[pb.Tenancy]:
    """The grants by which somebody has the device now, oldest first."""
    return device.tenancies if is_in_use(device) else ()


def previous_tenancies(device: pb.Device) -> Sequence[pb.Tenancy]:
    """The grants by which somebody had it since it was last clean, oldest first; none while somebody has it."""
    return () if is_in_use(device) else device.tenancies


def tenant_name(device: pb.Device) -> str:
    """Namespace, pod and container that have the device; empty if nobody has."""
    if not is_in_use(device):
        return ""
    return "/".join(part for part in (device.tenant_namespace, device.pod, device.container) if part)
