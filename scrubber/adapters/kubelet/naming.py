"""Which of our devices is meant by an id in the kubelet's lists. Pure.

A resource's ids are its plugin's to choose: the device's own, the device's own with a replica's number behind it, or names
of the plugin's own making, which only whoever knows that plugin can tell. A DRA driver names its devices as it likes, and
its CDI names often carry the claim in front.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

__all__ = ["Alias", "Naming"]

Alias = Callable[[str, str], str | None]
"""What a resource's, or a DRA driver's, own id of a device means: (resource, id) → our id, or None."""


class Naming:
    """Args:
    ours: our devices' ids.
    alias: asked for ids that are not.
    """

    def __init__(self, ours: Collection[str], alias: Alias | None = None) -> None:
        self._ours = frozenset(ours)
        self._lowered = {each.lower(): each for each in self._ours}
        self._alias = alias

    def device(self, resource: str, listed: str) -> str | None:
        """Our device that ``resource`` lists as ``listed``; None when it is not ours."""
        if listed in self._ours:
            return listed
        whole, separator, replica = listed.rpartition("::")
        if separator and replica.isdecimal() and whole in self._ours:
            return whole
        meant = self._alias(resource, listed) if self._alias is not None else None
        return meant if meant in self._ours else None

    def devices(self, resource: str, listed: Iterable[str]) -> frozenset[str]:
        """Our devices among those that ``resource`` lists."""
        return frozenset(meant for each in listed if (meant := self.device(resource, each)) is not None)

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
