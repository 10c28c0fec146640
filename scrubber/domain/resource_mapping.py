"""What the kubelet's ids mean: which device, the whole of it or a share, and which resources are our plugin's own. Pure.

A resource's ids are its plugin's to choose. Our devices' own ids, and those with a number behind them, speak for
themselves; what another id means only the plugin can say, and it can never give one of ours another meaning.
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
"""Between a device's id and the number of one of its shares."""
MAX_RESOURCES = 64
MAX_MAPPED_IDS = 16_384
"""Of all resources together."""
MAX_NAME_LENGTH = 512
"""Characters of a resource's name, and of an id; the kubelet's limit for the former is 317."""


@dataclass(frozen=True, slots=True)
class MappedDevice:
    """``device`` is our id; ``is_share``: of a device that several containers may have, not the whole of it."""

    device: str
    is_share: bool = False


def parse_own_id(kubelet_id: str, own_devices: Collection[str]) -> MappedDevice | None:
    """What ``kubelet_id`` means by itself, whichever resource has it; None when it is no id made of one of ``own_devices``."""
    if kubelet_id in own_devices:
        return MappedDevice(kubelet_id)
    device, mark, number = kubelet_id.rpartition(REPLICA_SEPARATOR)
    if mark and number.isdecimal() and number.isascii() and device in own_devices:
        return MappedDevice(device, is_share=True)
    return None


@dataclass(frozen=True, slots=True)
class ResourceMappings:
    """What plugins said of their ids: by resource, id → meaning. Kept in memory; a plugin says it to each service anew."""

    resources: Mapping[str, Mapping[str, MappedDevice]] = field(default_factory=dict)

    def resolve(self, resource: str, kubelet_id: str, own_devices: Collection[str]) -> MappedDevice | None:
        """The device of ``own_devices`` that ``resource`` calls ``kubelet_id``; None when there is none."""
        own = parse_own_id(kubelet_id, own_devices)
        if own is not None:
            return own
        meant = self.resources.get(resource, {}).get(kubelet_id)
        return meant if meant is not None and meant.device in own_devices else None

    def with_mapping(self, resource: str, mapping: Mapping[str, str], own_devices: Collection[str]) -> ResourceMappings:
        """``mapping`` (id → device) in the place of all that ``resource`` announced before.

        Ids that mean one device together are its shares. A device that is not of ``own_devices`` yet may be one day.

        Raises:
            InvalidRequest: an impossible name or id, one of ``own_devices`` with another meaning, or more than is kept.
        """
        for what in (resource, *mapping, *mapping.values()):
            if not what.strip() or len(what) > MAX_NAME_LENGTH or not what.isprintable():
                raise InvalidRequest(f"{what[:80]!r} is no name of a resource and no id of a device.")
        for listed, device in mapping.items():
            own = parse_own_id(listed, own_devices)
            if own is not None and own.device != device:
                raise InvalidRequest(f"{resource} cannot call {device} by the id {listed}, which is {own.device}.")
        counts = Counter(mapping.values())
        meanings = {listed: MappedDevice(device, is_share=counts[device] > 1) for listed, device in mapping.items()}
        resources = {**self.resources, resource: meanings}
        if len(resources) > MAX_RESOURCES:
            raise InvalidRequest(f"Over {MAX_RESOURCES} resources were announced; {resource} is one too many.")
        if sum(len(each) for each in resources.values()) > MAX_MAPPED_IDS:
            raise InvalidRequest(f"Over {MAX_MAPPED_IDS} ids were announced in all; those of {resource} are too many.")
        return ResourceMappings(resources)
