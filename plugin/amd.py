"""The resources of AMD GPUs, named as AMD's own device plugin names them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from scrubber.domain.device import Access, AccessKind

__all__ = ["AMD_RESOURCE", "AmdNaming", "amd_resource", "has_amd_node", "unequal_partitions_error"]

AMD_RESOURCE = "amd.com/gpu"
_NODE = "/dev/kfd"


class AmdNaming(StrEnum):
    """How partitions of AMD GPUs are advertised; as the resource naming strategy of AMD's plugin."""

    SINGLE = "single"
    """One resource, if all GPUs of the node are partitioned alike."""
    MIXED = "mixed"
    """One resource for each kind of partition; a whole GPU that could be partitioned is one too (``spx_nps1``)."""


def has_amd_node(access: Iterable[Access]) -> bool:
    """Return whether the node of AMD's compute driver is among ``access``."""
    return any(each.kind is AccessKind.DEVICE_NODE and each.container_path == _NODE for each in access)


def amd_resource(whole: str, profile: str, naming: AmdNaming) -> str:
    """Return the resource of a device.

    Args:
        whole: the name for whole GPUs.
        profile: the modes of the device's GPU, such as ``cpx_nps1``; empty for a GPU that cannot be partitioned.
    """
    if not profile or naming is AmdNaming.SINGLE:
        return whole
    return f"{whole.partition('/')[0]}/{profile}"


def unequal_partitions_error(profiles: Iterable[str]) -> str:
    """Return why devices with ``profiles`` (empty: no partition modes) cannot be one resource; empty when they can."""
    kinds = sorted(set(profiles))
    if len(kinds) < 2:
        return ""
    named = ", ".join(kind or "without partition modes" for kind in kinds)
    return (
        f"With --amd-resource-naming single, no AMD GPU can be advertised: the GPUs of this node differ ({named}). Use "
        "mixed, or partition all GPUs alike."
    )
