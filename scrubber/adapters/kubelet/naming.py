"""Which of our devices is meant by an id in the kubelet's lists. Pure.

A resource's ids are its plugin's to choose: the device's own, the device's own with a replica's number behind it, or names
of the plugin's own making, which only whoever knows that plugin can tell. A DRA driver names its devices as it likes, and
its CDI names often carry the claim in front.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from scrubber.domain.resources import Meaning, own_meaning

__all__ = ["Alias", "Naming"]

Alias = Callable[[str, str], Meaning | None]
"""What a resource's, or a DRA driver's, own id of a device means: (resource, id) → device and share, or None."""


class Naming:
    """Args:
    ours: our devices' ids.
    alias: asked for ids that are not.
    """

    def __init__(self, ours: Collection[str], alias: Alias | None = None) -> None:
        self._ours = frozenset(ours)
        self._lowered = {each.lower(): each for each in self._ours}
        self._alias = alias

    def meaning(self, resource: str, listed: str) -> Meaning | None:
        """What ``resource`` lists as ``listed``; None when it is not ours."""
        own = own_meaning(listed, self._ours)
        if own is not None or self._alias is None:
            return own
        meant = self._alias(resource, listed)
        return meant if meant is not None and meant.device in self._ours else None

    def device(self, resource: str, listed: str) -> str | None:
        """Our device that ``resource`` lists as ``listed``; None when it is not ours."""
        meant = self.meaning(resource, listed)
        return None if meant is None else meant.device

    def devices(self, resource: str, listed: Iterable[str]) -> frozenset[str]:
        """Our devices among those that ``resource`` lists."""
        return frozenset(meant for each in listed if (meant := self.device(resource, each)) is not None)

    def shares(self, resource: str, listed: Iterable[str]) -> Mapping[str, frozenset[str]]:
        """Our devices of which ``listed`` are shares and nothing else, and the ids of these."""
        ids: dict[str, set[str]] = {}
        whole: set[str] = set()
        for each in listed:
            meant = self.meaning(resource, each)
            if meant is not None:
                ids.setdefault(meant.device, set()).add(each)
                whole |= set() if meant.share else {meant.device}
        return {device: frozenset(found) for device, found in ids.items() if device not in whole}

    def claimed(self, driver: str, name: str, cdi_names: Iterable[str]) -> frozenset[str]:
        """Our devices that a DRA driver's device is: by its name, or by the names under which containers are given it.

        Names of devices are DNS labels there, so ids are compared in lower case.
        """
        labels = [name, *(each.rpartition("=")[2] for each in cdi_names)]
        lowered = [each.lower() for each in labels]
        found = {
            ours for low, ours in self._lowered.items() for each in lowered if each == low or each.endswith(f"-{low}")
        }
        return frozenset(found) | self.devices(driver, labels)
