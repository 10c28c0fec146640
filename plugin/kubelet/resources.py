"""Maps devices to resources, and holds the list of each resource.

Invariants: a device once listed stays in the same list, because the kubelet shows an omitted device as healthy. No
resource mixes kinds of instances behind one name: a node that cannot be advertised as configured is not advertised, and
a message gives the reason.

The decision is pure (:class:`ResourceLayout`); :class:`AdvertisedResources` applies it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from plugin.amd import AMD_RESOURCE, AmdNaming, amd_resource, unequal_partitions_error
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.kubelet.registration import resource_name_error
from plugin.kubelet.shares import TimeSlicing, id_mapping
from plugin.logs import Logger
from plugin.resource_mapping import PublishMapping, discard_mapping

__all__ = [
    "NVIDIA_RESOURCE",
    "SIMULATED_RESOURCE",
    "AdvertisedLists",
    "AdvertisedResources",
    "MigStrategy",
    "ResourceLayout",
]

SIMULATED_RESOURCE = "scrubber.dev/gpu"
NVIDIA_RESOURCE = "nvidia.com/gpu"
UNKNOWN_PROFILE = "unknown"
"""Profile of an instance that the driver does not describe: two such instances need not be alike."""


class MigStrategy(StrEnum):
    """How MIG instances are advertised; as in NVIDIA's plugin."""

    NONE = "none"
    """Whole GPUs only."""
    SINGLE = "single"
    """Either all GPUs of the node are partitioned into instances of one profile or none is: one resource."""
    MIXED = "mixed"
    """One resource for each profile, beside that of the whole GPUs."""


@dataclass(frozen=True, slots=True)
class AdvertisedLists:
    """The devices to advertise for each resource.

    Attributes:
        lists: resource → its full list, in the order of the devices.
        devices: all devices as they should be seen, advertised or not.
        error: why the node cannot be advertised as configured; empty when it can.
        warnings: what is left out, and what would change that.
    """

    lists: Mapping[str, tuple[AdvertisedDevice, ...]]
    devices: tuple[AdvertisedDevice, ...] = ()
    error: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResourceLayout:
    """The rule that maps devices to resources, and its decisions so far.

    Attributes:
        resource: the name for whole devices; empty: depends on the kind of device.
        sharing: which of them are advertised as shares.
        amd: how partitions of AMD GPUs are advertised.
        injection_error: why no container would get an NVIDIA GPU; empty when one would.
        listed_resources: id → resources under which the device was ever listed, by their unshared names. An instance
            may return under its old id with another profile.
    """

    mig: MigStrategy = MigStrategy.NONE
    resource: str = ""
    sharing: TimeSlicing = field(default_factory=TimeSlicing)
    injection_error: str = ""
    amd: AmdNaming = AmdNaming.SINGLE
    listed_resources: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def assign_resources(self, devices: Iterable[AdvertisedDevice]) -> tuple[ResourceLayout, AdvertisedLists]:
        """Map ``devices`` to lists; return them with a layout that remembers each device's resource."""
        devices = tuple(devices)
        error = self.injection_error if any(device.is_nvidia for device in devices) else ""
        if not error and self.mig is MigStrategy.SINGLE:
            error = self._single_strategy_error(devices)
        amd_error = self._amd_error(devices) if self.amd is AmdNaming.SINGLE else ""
        judged = tuple(_withheld(device, nvidia=error, amd=amd_error) for device in devices)
        listed = dict(self.listed_resources)
        lists: dict[str, list[AdvertisedDevice]] = {}
        notes: Counter[str] = Counter()
        for device in judged:
            home = self._resource_of(device)
            if not home and not device.gone:
                notes[self._unlisted_reason(device)] += 1
            # A device reported only by a service that is not ready may be just one of several kinds.
            waits = device.is_nvidia and (
                error or (self.mig is MigStrategy.SINGLE and device.verdict is ServiceVerdict.UNKNOWN)
            )
            waits = waits or (
                device.is_amd
                and self.amd is AmdNaming.SINGLE
                and bool(amd_error or device.verdict is ServiceVerdict.UNKNOWN)
            )
            if home and not waits:
                listed[device.id] = listed.get(device.id, frozenset()) | {home}
            for resource in sorted(listed.get(device.id, ())):
                name = self.sharing.advertised_name(resource)
                moved = f"Device {device.id} is no longer advertised as {name}."
                seen = device if resource == home else device.as_withheld(moved)
                lists.setdefault(name, []).extend(self.sharing.shares_of(resource, seen))
        unmet = self.sharing.shares.keys() - set().union(*listed.values()) if judged else set()
        arrangement = AdvertisedLists(
            {resource: tuple(part) for resource, part in sorted(lists.items())},
            judged,
            error or amd_error,
            (
                *(f"{note} (instances: {count})" for note, count in sorted(notes.items())),
                *(
                    f"The configuration file shares {resource}, but this node has no such resource"
                    for resource in sorted(unmet)
                ),
            ),
        )
        return replace(self, listed_resources=listed), arrangement

    @staticmethod
    def _amd_error(devices: Iterable[AdvertisedDevice]) -> str:
        """Return why the AMD GPUs of this node are not of one kind. Reports of a service that is not ready do not count."""
        return unequal_partitions_error(
            device.profile
            for device in devices
            if device.is_amd and not device.gone and device.verdict is not ServiceVerdict.UNKNOWN
        )

    def _single_strategy_error(self, devices: Iterable[AdvertisedDevice]) -> str:
        """Return why the GPUs of this node are not of one kind. Reports of a service that is not ready do not count."""
        gpus = [
            device
            for device in devices
            if device.is_nvidia and not device.gone and device.verdict is not ServiceVerdict.UNKNOWN
        ]
        instances = [device for device in gpus if device.parent]
        profiles = sorted({device.profile or UNKNOWN_PROFILE for device in instances})
        if UNKNOWN_PROFILE in profiles:
            why = "the driver does not report the profile of an instance"
        elif instances and len(instances) < len(gpus):
            why = "some GPUs of this node are partitioned into MIG instances and some are not"
        elif len(profiles) > 1:
            why = f"the MIG instances of this node have different profiles ({', '.join(profiles)})"
        else:
            return ""
        return f"With --mig-strategy single, no GPU can be advertised: {why}. Use mixed, or partition all GPUs alike."

    def _resource_of(self, device: AdvertisedDevice) -> str:
        """Return the resource of a device; empty for none."""
        if device.is_amd:
            name = amd_resource(self.resource or AMD_RESOURCE, device.profile, self.amd)
            return "" if resource_name_error(name) else name
        if not device.is_nvidia:
            return self.resource or SIMULATED_RESOURCE
        whole = self.resource or NVIDIA_RESOURCE
        if not device.parent or self.mig is MigStrategy.SINGLE:
            return whole
        if self.mig is MigStrategy.NONE:
            return ""
        name = _mig_resource(whole, device.profile)
        return "" if device.profile in ("", UNKNOWN_PROFILE) or resource_name_error(name) else name

    def _unlisted_reason(self, device: AdvertisedDevice) -> str:
        """Return why a device has no resource."""
        if device.is_amd:
            return f'A partition of the kind "{device.profile}" is not advertised: the kind cannot be part of a resource name'
        if self.mig is MigStrategy.NONE:
            return "MIG instances are not advertised: --mig-strategy is none; use single or mixed"
        return f'A MIG instance of profile "{device.profile}" is not advertised: the profile cannot be part of a resource name'


def _withheld(device: AdvertisedDevice, *, nvidia: str, amd: str) -> AdvertisedDevice:
    """Return the device, withheld for the error of its kind if there is one."""
    error = nvidia if device.is_nvidia else amd if device.is_amd else ""
    return device.as_withheld(error) if error else device


def _mig_resource(whole: str, profile: str) -> str:
    """Return ``nvidia.com/mig-1g.10gb.me`` for the profile ``1g.10gb+me``: plus signs are invalid in resource names."""
    domain = whole.partition("/")[0]
    return f"{domain}/mig-{profile.replace('+', '.')}"


PublishDevices = Callable[[Sequence[AdvertisedDevice], str], Mapping[str, str]]
"""Makes devices usable by containers before they are advertised; returns id → why that failed."""


def _nothing_to_publish(devices: Sequence[AdvertisedDevice], epoch: str) -> Mapping[str, str]:
    return {}


class AdvertisedResources(AdvertisedDevices):
    """The node's devices, with one list for each resource.

    Args:
        publish_mapping: called with every list before the list is visible.
        injection_unknown: why it is unknown whether a container gets an NVIDIA GPU; logged if there is one.

    Attributes:
        lists: resource → its list; a list is never removed.
        error: see :class:`AdvertisedLists`.
    """

    def __init__(
        self,
        layout: ResourceLayout,
        *,
        log: Logger,
        publish: PublishDevices = _nothing_to_publish,
        publish_mapping: PublishMapping = discard_mapping,
        injection_unknown: str = "",
    ) -> None:
        super().__init__()
        self.lists: dict[str, AdvertisedDevices] = {}
        self.error = ""
        self._layout = layout
        self._log = log
        self._publish = publish
        self._publish_mapping = publish_mapping
        self._injection_unknown = injection_unknown
        self._update_lock = asyncio.Lock()
        self._warnings: tuple[str, ...] = ()

    def error_for(self, devices: Iterable[AdvertisedDevice]) -> str:
        """Return why these devices could not be advertised as configured; empty when they could."""
        return self._layout.assign_resources(devices)[1].error

    async def update(self, devices: tuple[AdvertisedDevice, ...], epoch: str) -> None:
        async with self._update_lock:  # publishing takes a while, and updates must become visible in order
            await self._update(devices, epoch)

    async def _update(self, devices: tuple[AdvertisedDevice, ...], epoch: str) -> None:
        refusals = self._publish(devices, epoch)
        usable = [
            device.as_withheld(refusals[device.id])
            if device.id in refusals and device.verdict is ServiceVerdict.ADVERTISED
            else device
            for device in devices
        ]
        self._layout, arrangement = self._layout.assign_resources(usable)
        before = (set(self.lists), self.error)
        lists = arrangement.lists
        await asyncio.gather(
            *(self._publish_mapping(resource, id_mapping(part), epoch) for resource, part in lists.items())
        )
        for resource, part in lists.items():
            await self.lists.setdefault(resource, AdvertisedDevices()).update(part, epoch)
        self._log_changes(arrangement)
        await super().update(arrangement.devices, epoch)
        if before != (set(self.lists), self.error):
            await self.notify()

    def _log_changes(self, arrangement: AdvertisedLists) -> None:
        if self._injection_unknown and any(device.is_nvidia for device in arrangement.devices):
            self._log.warning("injection.unchecked", message=self._injection_unknown)
            self._injection_unknown = ""
        if arrangement.error and arrangement.error != self.error:
            self._log.error("node.not-advertised", message=arrangement.error)
        elif self.error and not arrangement.error:
            self._log.info("node.advertised")
        for note in arrangement.warnings:
            if note not in self._warnings:
                self._log.warning("node.partially-advertised", message=note)
        self.error, self._warnings = arrangement.error, arrangement.warnings
