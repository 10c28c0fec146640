"""The devices as the kubelet sees them: their health, and the one place from which every stream sends full lists.

Invariants: a restart of the service changes no device's health during a grace period. After it, no device is healthy
until a service that has checked every device reports so. A device that no ready service has reported is never healthy.
A device once listed stays listed: the kubelet shows an omitted device as healthy, so a device that disappears is listed
as unhealthy.

There is no queue that a slow reader could fill: a slow stream skips versions and always sends the newest, and the
version grows only when something that is sent has changed.

:class:`Availability` is pure: its times are seconds on one monotonic clock that the caller reads.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from plugin.amd import has_amd_node
from plugin.nvidia.injection import has_nvidia_node
from scrubber.domain.device import Access
from scrubber.domain.states import BindingState, TaintReason

__all__ = ["AdvertisedDevice", "AdvertisedDevices", "Availability", "ServiceVerdict", "index_sort_key"]


class ServiceVerdict(StrEnum):
    """The last verdict of a ready service on a device."""

    ADVERTISED = "advertised"
    WITHHELD = "withheld"
    """Quarantined, or gone from the node; the device's ``refusal`` explains it."""
    HELD = "held"
    """In service, but not to be handed over for now: a process without a grant holds it, its driver has just reported a
    fault, or the node is yielded. It is unhealthy, so that the kubelet assigns it to no further pod; an allocation that
    is already on its way is accepted, because a refusal would fail its pod for good."""
    UNKNOWN = "unknown"
    """No service was ready since this plugin saw the device first."""


@dataclass(frozen=True, slots=True)
class AdvertisedDevice:
    """A device as the kubelet should see it: the one shape between the service's snapshot and the kubelet's list.

    Attributes:
        certified, scrubbing: clean with an unused certificate; being scrubbed. Hints for the order of preference.
        parent: id of the GPU that a MIG instance belongs to; empty for a whole GPU.
        profile: profile of a MIG instance, as the driver names it; empty for a whole GPU.
        pci_address: PCI address, of the GPU for a MIG instance; empty where there is none.
        refusal: message for a pod's status; empty while the device is advertised.
        gone: it is no longer on this node, and is listed only because it once was.
        model, memory_bytes, driver_version: as the driver reports them.
        taints: why the scheduler should not choose it for a claim, as the service says.
        binding: whether a scheduler that waits for it may bind a pod to it now, as the service says; None: not known.
        share_of: id of the device that this is a share of; empty for the device itself.
    """

    id: str
    index: str
    verdict: ServiceVerdict
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
    model: str = ""
    memory_bytes: int = 0
    driver_version: str = ""
    taints: tuple[TaintReason, ...] = ()
    binding: BindingState | None = None
    share_of: str = ""

    @property
    def device_id(self) -> str:
        """The id of this device, or of the device that this is a share of."""
        return self.share_of or self.id

    @property
    def is_nvidia(self) -> bool:
        """Whether NVIDIA's flags control its injection into containers: it has a device node of NVIDIA's driver."""
        return has_nvidia_node(self.access)

    @property
    def is_amd(self) -> bool:
        """Whether it is named as a resource like AMD's devices: it has the node of AMD's compute driver."""
        return has_amd_node(self.access)

    def as_withheld(self, refusal: str) -> AdvertisedDevice:
        """Return the device, out of service for the reason in ``refusal``; an earlier reason is kept."""
        return self._out_of_service(ServiceVerdict.WITHHELD, refusal)

    def as_held(self, refusal: str) -> AdvertisedDevice:
        """Return the device, not to be handed over for now for the reason in ``refusal``; one out of service stays so."""
        return self._out_of_service(ServiceVerdict.HELD, refusal)

    def _out_of_service(self, verdict: ServiceVerdict, refusal: str) -> AdvertisedDevice:
        if self.verdict is ServiceVerdict.WITHHELD:
            return self
        return replace(self, verdict=verdict, healthy=False, certified=False, scrubbing=False, refusal=refusal)


YIELDED = "The node's GPU driver is being serviced, so no device is handed over until that has ended."


def index_sort_key(device: AdvertisedDevice) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts ``"2"`` before ``"10"`` and ``"0:1"`` after ``"0"``; ties are resolved by the id."""
    return [(int(part) if part.isdecimal() else -1, part) for part in device.index.split(":")], device.id


@dataclass(frozen=True, slots=True)
class Availability:
    """What is known of the devices, and since when no ready service has watched them.

    Attributes:
        grace: seconds for which the last verdict remains valid after the service is lost.
        all_devices: every device that was ever seen, in the order of its index; :meth:`devices` computes their health.
        epoch: epoch of the last snapshot; empty while the service is away.
        not_ready_since: when the service was lost or stopped being ready; None while a ready service watches.
    """

    grace: float
    all_devices: tuple[AdvertisedDevice, ...] = ()
    epoch: str = ""
    version: int = 0
    not_ready_since: float | None = -math.inf

    def on_snapshot(
        self,
        devices: Iterable[AdvertisedDevice],
        *,
        epoch: str,
        version: int,
        ready: bool,
        now: float,
        yielded: bool = False,
    ) -> Availability:
        """Return the state after a snapshot. A snapshot older than the known one changes nothing.

        Args:
            devices: with the verdict of this snapshot, which counts only if its service is ``ready``.
            epoch, version: versions grow within one epoch; an epoch is one run of the service.
            yielded: the node is yielded: the service does not look at devices, so that a missing one need not be gone.
        """
        if epoch == self.epoch and version < self.version:
            return self
        seen = {device.id: device for device in devices}
        before = {device.id: device for device in self.all_devices}
        if yielded:
            missing = {id_: device.as_held(YIELDED) for id_, device in before.items() if id_ not in seen}
        elif ready:
            missing = {id_: _as_missing(device) for id_, device in before.items() if id_ not in seen}
        else:
            seen = {id_: _with_verdict_of(device, before.get(id_)) for id_, device in seen.items()}
            # A service that is not ready may not have read its whole inventory: a missing device need not be gone.
            missing = {id_: _without_certificate(device) for id_, device in before.items() if id_ not in seen}
        known = tuple(sorted((seen | missing).values(), key=index_sort_key))
        since = None if ready else self._since(now)
        return replace(self, all_devices=known, epoch=epoch, version=version, not_ready_since=since)

    def on_disconnect(self, now: float) -> Availability:
        """Return the state without a service. It drops all certificates: an unwatched device cannot be certified."""
        known = tuple(_without_certificate(device) for device in self.all_devices)
        return replace(self, all_devices=known, epoch="", version=0, not_ready_since=self._since(now))

    def devices(self, now: float) -> tuple[AdvertisedDevice, ...]:
        """Return every device, in the order of its index, with its health at ``now``."""
        trusted = not self.is_expired(now)
        return tuple(
            replace(device, healthy=trusted and device.verdict is ServiceVerdict.ADVERTISED)
            for device in self.all_devices
        )

    def seconds_until_expiry(self, now: float) -> float | None:
        """Return the seconds until the grace period ends; None while a ready service watches, or when it has ended."""
        if self.not_ready_since is None or self.is_expired(now):
            return None
        return self.not_ready_since + self.grace - now

    def is_expired(self, now: float) -> bool:
        """Return whether the grace period has ended; also True before any ready service has watched."""
        return self.not_ready_since is not None and now >= self.not_ready_since + self.grace

    def _since(self, now: float) -> float:
        return now if self.not_ready_since is None else self.not_ready_since


def _with_verdict_of(device: AdvertisedDevice, before: AdvertisedDevice | None) -> AdvertisedDevice:
    """Return ``device`` as it is described now, with the verdict that it had ``before``."""
    if before is None:
        return replace(device, verdict=ServiceVerdict.UNKNOWN, refusal="")
    return replace(device, verdict=before.verdict, refusal=before.refusal)


def _without_certificate(device: AdvertisedDevice) -> AdvertisedDevice:
    binding = None if device.binding is BindingState.READY else device.binding
    return replace(device, certified=False, scrubbing=False, binding=binding)


def _as_missing(device: AdvertisedDevice) -> AdvertisedDevice:
    message = f"Device {device.id} is no longer on this node."
    return replace(_without_certificate(device), verdict=ServiceVerdict.WITHHELD, refusal=message, gone=True)


class AdvertisedDevices:
    """The devices, their version, and a notification at every change.

    Attributes:
        version: 0 until the first snapshot of the service has arrived.
        epoch: run of the service that is connected; empty while it is away.
    """

    def __init__(self) -> None:
        self.version = 0
        self.epoch = ""
        self._devices: dict[str, AdvertisedDevice] = {}
        self._changed = asyncio.Condition()

    @property
    def devices(self) -> tuple[AdvertisedDevice, ...]:
        return tuple(self._devices.values())

    @property
    def health(self) -> tuple[bool, ...]:
        """Whether each id of the list is healthy, as reported to the kubelet."""
        return tuple(device.healthy for device in self._devices.values())

    def find(self, id_: str) -> AdvertisedDevice | None:
        return self._devices.get(id_)

    async def update(self, devices: tuple[AdvertisedDevice, ...], epoch: str) -> None:
        """Replace all devices; the version grows when something in the kubelet's list is different."""
        before = (self.epoch, self._kubelet_fields())
        self._devices = {device.id: device for device in devices}
        self.epoch = epoch
        now = (epoch, self._kubelet_fields())
        if self.version == 0 or before[1] != now[1]:
            self.version += 1
        if before != now or self.version == 1:
            await self.notify()

    def _kubelet_fields(self) -> list[tuple[str, bool, int | None]]:
        """Return the fields that are sent to the kubelet: id, health and NUMA node."""
        return [(device.id, device.healthy, device.numa_node) for device in self._devices.values()]

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; it is evaluated again at every change and every :meth:`notify`."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def notify(self) -> None:
        """Make every waiter evaluate its condition again."""
        async with self._changed:
            self._changed.notify_all()
