"""Which devices the kubelet is told are healthy, also while the scrub service is away.

Promises: a restart of the service changes nobody's health for a grace period; after it no device is healthy until a
service that has looked at every device says so. A device that the service never spoke for is never healthy. A device
once listed stays listed: the kubelet shows an omitted device as healthy, so what vanishes is listed as unhealthy.

Everything here is pure. Times are seconds on one monotonic clock that the caller reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from plugin.devices import AdvertisedDevice, ServiceVerdict, by_index

__all__ = ["Availability"]


@dataclass(frozen=True, slots=True)
class Availability:
    """What is known of the devices, and since when nobody has watched them.

    Attributes:
        grace: seconds that the last verdict outlives the service.
        known: every device that was ever seen, in the order of its index; their health is of :meth:`devices`.
        epoch: of the last snapshot; empty while the service is away.
        unwatched_since: when the service was lost or stopped being ready; None while a ready service watches.
    """

    grace: float
    known: tuple[AdvertisedDevice, ...] = ()
    epoch: str = ""
    version: int = 0
    unwatched_since: float | None = -math.inf

    def on_snapshot(
        self, devices: Iterable[AdvertisedDevice], *, epoch: str, version: int, ready: bool, now: float
    ) -> Availability:
        """A snapshot has come. One that is older than what is known already changes nothing.

        Args:
            devices: with the verdict of this snapshot, which counts only if its service is ``ready``.
            epoch, version: versions grow within one epoch; an epoch is one run of the service.
        """
        if epoch == self.epoch and version < self.version:
            return self
        seen = {device.id: device for device in devices}
        before = {device.id: device for device in self.known}
        if ready:
            missing = {id_: _gone(device) for id_, device in before.items() if id_ not in seen}
        else:
            seen = {id_: _judged_as(device, before.get(id_)) for id_, device in seen.items()}
            # A service that is not ready may not have read its inventory to the end: missing is not vanished.
            missing = {id_: _unproved(device) for id_, device in before.items() if id_ not in seen}
        known = tuple(sorted((seen | missing).values(), key=by_index))
        since = None if ready else self._since(now)
        return replace(self, known=known, epoch=epoch, version=version, unwatched_since=since)

    def on_disconnect(self, now: float) -> Availability:
        """The service does not answer. Its certificates went with it: cleanness does not outlive who watched."""
        known = tuple(_unproved(device) for device in self.known)
        return replace(self, known=known, epoch="", version=0, unwatched_since=self._since(now))

    def devices(self, now: float) -> tuple[AdvertisedDevice, ...]:
        """Every device, in the order of its index, with its health at ``now``."""
        trusted = not self.is_over(now)
        return tuple(
            replace(device, healthy=trusted and device.verdict is ServiceVerdict.OFFERED) for device in self.known
        )

    def falls_in(self, now: float) -> float | None:
        """Seconds until the grace period is over; None when a service watches, or when it is over already."""
        if self.unwatched_since is None or self.is_over(now):
            return None
        return self.unwatched_since + self.grace - now

    def is_over(self, now: float) -> bool:
        """Whether the grace period is over; so it is before anybody has watched."""
        return self.unwatched_since is not None and now >= self.unwatched_since + self.grace

    def _since(self, now: float) -> float:
        return now if self.unwatched_since is None else self.unwatched_since


def _judged_as(device: AdvertisedDevice, before: AdvertisedDevice | None) -> AdvertisedDevice:
    """``device`` as it is described now, with the verdict that it had ``before``."""
    if before is None:
        return replace(device, verdict=ServiceVerdict.NONE, refusal="")
    return replace(device, verdict=before.verdict, refusal=before.refusal)


def _unproved(device: AdvertisedDevice) -> AdvertisedDevice:
    return replace(device, certified=False, scrubbing=False)


def _gone(device: AdvertisedDevice) -> AdvertisedDevice:
    sentence = f"Device {device.id} is no longer on this node."
    return replace(_unproved(device), verdict=ServiceVerdict.WITHHELD, refusal=sentence, gone=True)
