"""Maps the kubelet's device IDs to devices: a whole device or a share. Pure.

The plugin of a resource chooses its IDs. The managed devices' own IDs, and those with a share number appended, have a
fixed meaning; the meaning of any other ID comes only from the plugin, which can never change the meaning of ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from scrubber.domain.errors import InvalidRequest

__all__ = [
    "MAX_MAPPED_IDS",
    "MAX_NAME_LENGTH",
    "MAX_RESOURCES",
    "REPLICA_SEPARATOR",
    "MappedDevice",
    "ResourceMappings",
    "parse_own_id",
]

REPLICA_SEPARATOR = "::"
"""Separates a device's ID from the number of one of its shares."""
MAX_RESOURCES = 64
MAX_MAPPED_IDS = 16_384
"""Maximum for all resources together."""
MAX_NAME_LENGTH = 512
"""Maximum length in characters of a resource's name and of an ID; the kubelet's limit for the former is 317."""


@dataclass(frozen=True, slots=True)
class MappedDevice:
    """The managed device ``device``; ``is_share``: one share of a device that several containers may have."""

    device: str
    is_share: bool = False


def parse_own_id(kubelet_id: str, own_devices: Collection[str]) -> MappedDevice | None:
    """Return the fixed meaning of ``kubelet_id`` under any resource; None when it is not based on ``own_devices``."""
    if kubelet_id in own_devices:
        return MappedDevice(kubelet_id)
    device, mark, number = kubelet_id.rpartition(REPLICA_SEPARATOR)
    if mark and number.isdecimal() and number.isascii() and device in own_devices:
        return MappedDevice(device, is_share=True)
    return None


# See docs/decisions/0012-resource-ids.md.
@dataclass(frozen=True, slots=True)
class ResourceMappings:
    """The mappings that plugins announced: by resource, ID → meaning.

    In memory only; plugins announce them again to each new service.
    """

    resources: Mapping[str, Mapping[str, MappedDevice]] = field(default_factory=dict)

    def resolve(self, resource: str, kubelet_id: str, own_devices: Collection[str]) -> MappedDevice | None:
        """Return the device of ``own_devices`` behind ``kubelet_id`` of ``resource``; None when there is none."""
        own = parse_own_id(kubelet_id, own_devices)
        if own is not None:
            return own
        meant = self.resources.get(resource, {}).get(kubelet_id)
        return meant if meant is not None and meant.device in own_devices else None

    def with_mapping(self, resource: str, mapping: Mapping[str, str], own_devices: Collection[str]) -> ResourceMappings:
        """Return the mappings with ``mapping`` (ID → device) replacing everything that ``resource`` announced before.

        Several IDs with the same device are its shares. A device that is not in ``own_devices`` is accepted: it may
        appear later.

        Raises:
            InvalidRequest: an invalid name or ID, an ID of ``own_devices`` with another meaning, or more than are
                stored.
        """
        for what in (resource, *mapping, *mapping.values()):
            if not what.strip() or len(what) > MAX_NAME_LENGTH or not what.isprintable():
                raise InvalidRequest(f"{what[:80]!r} is not a valid resource name or device id.")
        for listed, device in mapping.items():
            own = parse_own_id(listed, own_devices)
            if own is not None and own.device != device:
                raise InvalidRequest(f"{resource} cannot map the id {listed} to {device}: it is an id of {own.device}.")
        counts = Counter(mapping.values())
        meanings = {listed: MappedDevice(device, is_share=counts[device] > 1) for listed, device in mapping.items()}
        resources = {**self.resources, resource: meanings}
        if len(resources) > MAX_RESOURCES:
            raise InvalidRequest(f"{resource} would exceed the limit of {MAX_RESOURCES} announced resources.")
        if sum(len(each) for each in resources.values()) > MAX_MAPPED_IDS:
            raise InvalidRequest(f"The ids of {resource} would exceed the limit of {MAX_MAPPED_IDS} announced ids.")
        return ResourceMappings(resources)
