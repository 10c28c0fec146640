"""Mapping of IDs in the kubelet's lists to this node's devices. Pure.

A device plugin chooses the IDs of its resource: the device's own ID, that ID with a replica number appended, or names
that only code with knowledge of that plugin can resolve. A DRA driver chooses the names of its devices, and its CDI
names often have the claim as a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from scrubber.domain.resource_mapping import MappedDevice, parse_own_id

__all__ = ["AliasResolver", "DeviceIdResolver"]

AliasResolver = Callable[[str, str], MappedDevice | None]
"""Resolves a plugin's or DRA driver's own ID of a device: (resource, ID) → device and share, or None."""


class DeviceIdResolver:
    """Maps IDs in the kubelet's lists to our devices.

    Args:
        own_devices: IDs of our devices.
        resolve_alias: called for IDs that are not derived from one of those.
    """

    def __init__(self, own_devices: Collection[str], resolve_alias: AliasResolver | None = None) -> None:
        self._own_devices = frozenset(own_devices)
        self._lowered = {each.lower(): each for each in self._own_devices}
        self._resolve_alias = resolve_alias

    def resolve(self, resource: str, kubelet_id: str) -> MappedDevice | None:
        """Return the device that ``resource`` lists as ``kubelet_id``; None when it is not one of ours."""
        own = parse_own_id(kubelet_id, self._own_devices)
        if own is not None or self._resolve_alias is None:
            return own
        meant = self._resolve_alias(resource, kubelet_id)
        return meant if meant is not None and meant.device in self._own_devices else None

    def device(self, resource: str, kubelet_id: str) -> str | None:
        """Return the ID of our device that ``resource`` lists as ``kubelet_id``; None when it is not one of ours."""
        meant = self.resolve(resource, kubelet_id)
        return None if meant is None else meant.device

    def devices(self, resource: str, kubelet_ids: Iterable[str]) -> frozenset[str]:
        """Return our devices among those that ``resource`` lists."""
        return frozenset(meant for each in kubelet_ids if (meant := self.device(resource, each)) is not None)

    def shares(self, resource: str, kubelet_ids: Iterable[str]) -> Mapping[str, frozenset[str]]:
        """Return our devices of which ``kubelet_ids`` are only shares, and the IDs of these shares."""
        ids: dict[str, set[str]] = {}
        whole: set[str] = set()
        for each in kubelet_ids:
            meant = self.resolve(resource, each)
            if meant is not None:
                ids.setdefault(meant.device, set()).add(each)
                whole |= set() if meant.is_share else {meant.device}
        return {device: frozenset(found) for device, found in ids.items() if device not in whole}

    def claimed_devices(self, driver: str, name: str, cdi_names: Iterable[str]) -> frozenset[str]:
        """Return our devices that match a DRA driver's device, by its name or by its CDI names.

        DRA device names are DNS labels, so IDs are compared in lower case.
        """
        labels = [name, *(each.rpartition("=")[2] for each in cdi_names)]
        lowered = [each.lower() for each in labels]
        found = {
            ours for low, ours in self._lowered.items() for each in lowered if each == low or each.endswith(f"-{low}")
        }
        return frozenset(found) | self.devices(driver, labels)
