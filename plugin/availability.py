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
from enum import StrEnum

from plugin.injection import has_nvidia_node
from scrubber.domain.device import Access

__all__ = ["Availability", "Offer", "SeenDevice", "Sighting", "Word", "by_index"]


class Word(StrEnum):
    """The last thing that a service which was ready said about a device."""

    OFFERED = "offered"
    WITHHELD = "withheld"
    """Quarantined, or gone from the node: the offer's ``refusal`` says which."""
    NONE = "none"
    """No service was ready since this plugin saw the device first."""


@dataclass(frozen=True, slots=True)
class SeenDevice:
    """One device in one snapshot of the service.

    Attributes:
        advertised: the service would hand it over, now or after a scrub.
        certified: clean, with a certificate that is not used up.
        parent: id of the GPU that an instance is cut from; empty for a whole GPU.
        profile: what kind of instance it is, in the driver's words; empty for a whole GPU.
        pci_address: of its GPU for an instance; empty where there is none.
        refusal: a sentence for a pod's status; empty while the device is advertised.
    """

    id: str
    index: str
    advertised: bool
    certified: bool = False
    scrubbing: bool = False
    numa_node: int | None = None
    peers: frozenset[str] = frozenset()
    parent: str = ""
    profile: str = ""
    pci_address: str = ""
    access: tuple[Access, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A snapshot of the service. Versions grow within one epoch; an epoch is one run of the service."""

    epoch: str
    version: int
    ready: bool
    devices: tuple[SeenDevice, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """A device as the kubelet is to see it. ``certified`` and ``scrubbing`` are hints for the order of preference.

    Attributes:
        gone: it is no longer on this node, and is listed only because it once was.
        share_of: of one of several shares of a device, that device's id; empty for the device itself.
    """

    id: str
    index: str
    word: Word
    healthy: bool = False
    certified: bool = False
    scrubbing: bool = False
    numa_node: int | None = None
    peers: frozenset[str] = frozenset()
    parent: str = ""
    profile: str = ""
    pci_address: str = ""
    access: tuple[Access, ...] = ()
    refusal: str = ""
    gone: bool = False
    share_of: str = ""

    @property
    def device(self) -> str:
        """The id of the device that this is, or is a share of."""
        return self.share_of or self.id

    @property
    def listed(self) -> tuple[str, bool, int | None]:
        """What of the offer is sent to the kubelet: id, health and NUMA node."""
        return (self.id, self.healthy, self.numa_node)

    @property
    def nvidia(self) -> bool:
        """Whether NVIDIA's flags say how containers are given it: it has a device node of NVIDIA's driver."""
        return has_nvidia_node(self.access)

    def withheld(self, refusal: str) -> Offer:
        """The same device, out of service for the reason in ``refusal``; one that is so already keeps its own."""
        if self.word is Word.WITHHELD:
            return self
        return replace(self, word=Word.WITHHELD, healthy=False, certified=False, scrubbing=False, refusal=refusal)


@dataclass(frozen=True, slots=True)
class Availability:
    """What is known of the devices, and since when nobody has watched them.

    Attributes:
        grace: seconds that the last word outlives the service.
        epoch: of the last snapshot; empty while the service is away.
        unwatched_since: when the service was lost or stopped being ready; None while a ready service watches.
    """

    grace: float
    known: tuple[Offer, ...] = ()
    epoch: str = ""
    version: int = 0
    unwatched_since: float | None = -math.inf

    def saw(self, sighting: Sighting, now: float) -> Availability:
        """A snapshot has come. One that is older than what is known already changes nothing."""
        if sighting.epoch == self.epoch and sighting.version < self.version:
            return self
        heard = replace(self, epoch=sighting.epoch, version=sighting.version)
        if sighting.ready:
            return replace(heard, known=self._as_said(sighting.devices), unwatched_since=None)
        return replace(heard, known=self._as_before(sighting.devices), unwatched_since=self._since(now))

    def lost(self, now: float) -> Availability:
        """The service does not answer. Its certificates went with it: cleanness does not outlive who watched."""
        known = tuple(replace(offer, certified=False, scrubbing=False) for offer in self.known)
        return replace(self, known=known, epoch="", version=0, unwatched_since=self._since(now))

    def offers(self, now: float) -> tuple[Offer, ...]:
        """Every device, in the order of its index, with its health at ``now``."""
        trusted = self._trusted(now)
        return tuple(replace(offer, healthy=trusted and offer.word is Word.OFFERED) for offer in self.known)

    def falls_in(self, now: float) -> float | None:
        """Seconds until the grace period is over; None when a service watches, or when it is over already."""
        if self.unwatched_since is None or not self._trusted(now):
            return None
        return self.unwatched_since + self.grace - now

    def is_over(self, now: float) -> bool:
        """Whether the grace period is over; so it is before anybody has watched."""
        return not self._trusted(now)

    def _trusted(self, now: float) -> bool:
        return self.unwatched_since is None or now < self.unwatched_since + self.grace

    def _since(self, now: float) -> float:
        return now if self.unwatched_since is None else self.unwatched_since

    def _as_said(self, devices: Iterable[SeenDevice]) -> tuple[Offer, ...]:
        present = {
            device.id: _offer(
                device,
                Word.OFFERED if device.advertised else Word.WITHHELD,
                "" if device.advertised else device.refusal or f"Device {device.id} is out of service.",
            )
            for device in devices
        }
        gone = {offer.id: _gone(offer) for offer in self.known if offer.id not in present}
        return _in_order(present | gone)

    def _as_before(self, devices: Iterable[SeenDevice]) -> tuple[Offer, ...]:
        before = {offer.id: offer for offer in self.known}
        seen = {
            device.id: _offer(device, before[device.id].word, before[device.id].refusal)
            if device.id in before
            else _offer(device, Word.NONE, "")
            for device in devices
        }
        # A service that is not ready may not have read its inventory to the end: missing is not vanished.
        missing = {
            id_: replace(offer, certified=False, scrubbing=False) for id_, offer in before.items() if id_ not in seen
        }
        return _in_order(seen | missing)


def _offer(device: SeenDevice, word: Word, refusal: str) -> Offer:
    return Offer(
        id=device.id,
        index=device.index,
        word=word,
        certified=device.certified,
        scrubbing=device.scrubbing,
        numa_node=device.numa_node,
        peers=device.peers,
        parent=device.parent,
        profile=device.profile,
        pci_address=device.pci_address,
        access=device.access,
        refusal=refusal,
    )


def _gone(offer: Offer) -> Offer:
    sentence = f"Device {offer.id} is no longer on this node."
    return replace(offer, word=Word.WITHHELD, certified=False, scrubbing=False, refusal=sentence, gone=True)


def _in_order(offers: dict[str, Offer]) -> tuple[Offer, ...]:
    return tuple(sorted(offers.values(), key=by_index))


def by_index(offer: Offer) -> tuple[list[tuple[int, str]], str]:
    """``"2"`` before ``"10"``, ``"0:1"`` after ``"0"``; the id settles what is left."""
    return [(int(part) if part.isdecimal() else -1, part) for part in offer.index.split(":")], offer.id
