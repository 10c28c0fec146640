"""Which of our devices is meant by an id in the kubelet's lists. Pure.

A resource's ids are its plugin's to choose: the device's own, the device's own with a replica's number behind it, or names
of the plugin's own making, which only whoever knows that plugin can tell. A DRA driver names its devices as it likes, and
its CDI names often carry the claim in front.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from scrubber.domain.resource_mapping import MappedDevice, parse_own_id

__all__ = ["AliasResolver", "DeviceIdResolver"]

AliasResolver = Callable[[str, str], MappedDevice | None]
"""What a resource's, or a DRA driver's, own id of a device means: (resource, id) → device and share, or None."""


class DeviceIdResolver:
    """Args:
    own_devices: our devices' ids.
    resolve_alias: asked for ids that are not.
    """

    def __init__(self, own_devices: Collection[str], resolve_alias: AliasResolver | None = None) -> None:
        self._own_devices = frozenset(own_devices)
        self._lowered = {each.lower(): each for each in self._own_devices}
        self._resolve_alias = resolve_alias

    def resolve(self, resource: str, kubelet_id: str) -> MappedDevice | None:
        """What ``resource`` lists as ``kubelet_id``; None when it is not ours."""
        own = parse_own_id(kubelet_id, self._own_devices)
        if own is not None or self._resolve_alias is None:
            return own
        meant = self._resolve_alias(resource, kubelet_id)
        return meant if meant is not None and meant.device in self._own_devices else None

    def device(self, resource: str, kubelet_id: str) -> str | None:
        """Our device that ``resource`` lists as ``kubelet_id``; None when it is not ours."""
        meant = self.resolve(resource, kubelet_id)
        return None if meant is None else meant.device

    def devices(self, resource: str, kubelet_ids: Iterable[str]) -> frozenset[str]:
        """Our devices among those that ``resource`` lists."""
        return frozenset(meant for each in kubelet_ids if (meant := self.device(resource, each)) is not None)

    def shares(self, resource: str, kubelet_ids: Iterable[str]) -> Mapping[str, frozenset[str]]:
        """Our devices of which ``kubelet_ids`` are shares and nothing else, and the ids of these."""
        ids: dict[str, set[str]] = {}
        whole: set[str] = set()
        for each in kubelet_ids:
            meant = self.resolve(resource, each)
            if meant is not None:
                ids.setdefault(meant.device, set()).add(each)
                whole |= set() if meant.is_share else {meant.device}
        return {device: frozenset(found) for device, found in ids.items() if device not in whole}

    def claimed_devices(self, driver: str, name: str, cdi_names: Iterable[str]) -> frozenset[str]:
        """Our devices that a DRA driver's device is: by its name, or by the names under which containers are given it.

        Names of devices are DNS labels there, so ids are compared in lower case.
        """
        labels = [name, *(each.rpartition("=")[2] for each in cdi_names)]
        lowered = [each.lower() for each in labels]
        found = {
            ours for low, ours in self._lowered.items() for each in lowered if each == low or each.endswith(f"-{low}")
        }
        return frozenset(found) | self.devices(driver, labels)
