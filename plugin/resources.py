"""Which resource a device is advertised as, and the list of each resource.

Promises: a device once listed stays listed where it was, because the kubelet shows an omitted device as healthy. No resource mixes kinds of instances behind one name: a node
that cannot be advertised as the administrator asked is not advertised, with a sentence that says why.

The decision is pure (:class:`Layout`); :class:`Resources` acts on it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from plugin.announcements import Announce, to_nobody
from plugin.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.kubelet import resource_complaint
from plugin.logs import Log
from plugin.shares import Sharing, meanings

__all__ = ["NVIDIA", "SIMULATED", "Arrangement", "Layout", "MigStrategy", "Resources"]

SIMULATED = "scrubber.dev/gpu"
NVIDIA = "nvidia.com/gpu"
UNKNOWN = "unknown"
"""The profile of an instance of which the driver says nothing: two of them need not be alike."""


class MigStrategy(StrEnum):
    """How instances of a GPU are advertised; as in NVIDIA's plugin."""

    NONE = "none"
    """Whole GPUs only."""
    SINGLE = "single"
    """All GPUs of the node are cut into instances of one profile, or none is: one resource."""
    MIXED = "mixed"
    """A resource for each profile, beside that of the whole GPUs."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What is advertised as what.

    Attributes:
        lists: resource → its full list, in the order of the devices.
        devices: all devices as they are to be seen, advertised or not.
        complaint: why the node cannot be advertised as asked; empty when it can.
        notes: what is left out, and what would change that.
    """

    lists: Mapping[str, tuple[AdvertisedDevice, ...]]
    devices: tuple[AdvertisedDevice, ...] = ()
    complaint: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """The rule, and what it has decided so far.

    Attributes:
        resource: the name for whole devices; empty: by what they are.
        sharing: which of them are advertised as shares.
        listed: id → resources under which the device was ever listed, by their names when they are not shared. An
            instance may come back under its old id as one of another profile.
    """

    mig: MigStrategy = MigStrategy.NONE
    resource: str = ""
    sharing: Sharing = field(default_factory=Sharing)
    listed: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def arrange(self, devices: Iterable[AdvertisedDevice]) -> tuple[Layout, Arrangement]:
        """Deal ``devices`` out, and remember where each has gone."""
        devices = tuple(devices)
        complaint = self._complaint(devices) if self.mig is MigStrategy.SINGLE else ""
        judged = tuple(device.withheld(complaint) if complaint and device.nvidia else device for device in devices)
        listed = dict(self.listed)
        lists: dict[str, list[AdvertisedDevice]] = {}
        notes: Counter[str] = Counter()
        for device in judged:
            home = self._home(device)
            if not home and not device.gone:
                notes[self._note(device)] += 1
            # A device that only a service that is not ready has named may not be all of its kind.
            waits = device.nvidia and (
                complaint or (self.mig is MigStrategy.SINGLE and device.verdict is ServiceVerdict.NONE)
            )
            if home and not waits:
                listed[device.id] = listed.get(device.id, frozenset()) | {home}
            for resource in sorted(listed.get(device.id, ())):
                name = self.sharing.called(resource)
                moved = f"Device {device.id} is not advertised as {name} any more."
                seen = device if resource == home else device.withheld(moved)
                lists.setdefault(name, []).extend(self.sharing.split(resource, seen))
        unmet = self.sharing.shares.keys() - set().union(*listed.values()) if judged else set()
        arrangement = Arrangement(
            {resource: tuple(part) for resource, part in sorted(lists.items())},
            judged,
            complaint,
            (
                *(f"{note} ({count} of them)" for note, count in sorted(notes.items())),
                *(f"The configuration file shares {resource}, and this node has none" for resource in sorted(unmet)),
            ),
        )
        return replace(self, listed=listed), arrangement

    def _complaint(self, devices: Iterable[AdvertisedDevice]) -> str:
        """Why the GPUs of this node are not of one kind. What only a service that is not ready has said counts not."""
        gpus = [
            device
            for device in devices
            if device.nvidia and not device.gone and device.verdict is not ServiceVerdict.NONE
        ]
        instances = [device for device in gpus if device.parent]
        profiles = sorted({device.profile or UNKNOWN for device in instances})
        if UNKNOWN in profiles:
            why = "the driver does not say which profile an instance has"
        elif instances and len(instances) < len(gpus):
            why = "some GPUs of this node are cut into MIG instances and some are not"
        elif len(profiles) > 1:
            why = f"the MIG instances of this node have different profiles ({', '.join(profiles)})"
        else:
            return ""
        return f"With --mig-strategy single nothing can be advertised: {why}. Choose mixed, or cut all GPUs alike."

    def _home(self, device: AdvertisedDevice) -> str:
        """The resource of a device; empty for none."""
        if not device.nvidia:
            return self.resource or SIMULATED
        whole = self.resource or NVIDIA
        if not device.parent or self.mig is MigStrategy.SINGLE:
            return whole
        if self.mig is MigStrategy.NONE:
            return ""
        name = _mig_resource(whole, device.profile)
        return "" if device.profile in ("", UNKNOWN) or resource_complaint(name) else name

    def _note(self, device: AdvertisedDevice) -> str:
        """Why a device has no resource."""
        if self.mig is MigStrategy.NONE:
            return "MIG instances are not advertised: --mig-strategy is none; choose single or mixed"
        return f'A MIG instance of profile "{device.profile}" is not advertised: no resource can be called after that'


def _mig_resource(whole: str, profile: str) -> str:
    """``nvidia.com/mig-1g.10gb.me`` for the profile ``1g.10gb+me``: a resource's name may hold no plus sign."""
    domain = whole.partition("/")[0]
    return f"{domain}/mig-{profile.replace('+', '.')}"


Publish = Callable[[Sequence[AdvertisedDevice], str], Mapping[str, str]]
"""Makes devices usable by containers before they are advertised; answers id → why it could not."""


def _nothing_to_publish(devices: Sequence[AdvertisedDevice], epoch: str) -> Mapping[str, str]:
    return {}


class Resources(AdvertisedDevices):
    """The node's devices, dealt out to a list for each resource.

    Args:
        announce: told of every list before it is shown.

    Attributes:
        lists: resource → its list; one that is there stays.
        complaint: see :class:`Arrangement`.
    """

    def __init__(
        self, layout: Layout, *, log: Log, publish: Publish = _nothing_to_publish, announce: Announce = to_nobody
    ) -> None:
        super().__init__()
        self.lists: dict[str, AdvertisedDevices] = {}
        self.complaint = ""
        self._layout = layout
        self._log = log
        self._publish = publish
        self._announce = announce
        self._showing = asyncio.Lock()
        self._notes: tuple[str, ...] = ()

    async def show(self, devices: tuple[AdvertisedDevice, ...], epoch: str) -> None:
        async with self._showing:  # announcing takes a while, and what was seen later is shown later
            await self._show(devices, epoch)

    async def _show(self, devices: tuple[AdvertisedDevice, ...], epoch: str) -> None:
        refusals = self._publish(devices, epoch)
        usable = [
            device.withheld(refusals[device.id])
            if device.id in refusals and device.verdict is ServiceVerdict.OFFERED
            else device
            for device in devices
        ]
        self._layout, arrangement = self._layout.arrange(usable)
        before = (set(self.lists), self.complaint)
        lists = arrangement.lists
        await asyncio.gather(*(self._announce(resource, meanings(part), epoch) for resource, part in lists.items()))
        for resource, part in lists.items():
            await self.lists.setdefault(resource, AdvertisedDevices()).show(part, epoch)
        self._say(arrangement)
        await super().show(arrangement.devices, epoch)
        if before != (set(self.lists), self.complaint):
            await self.ring()

    def _say(self, arrangement: Arrangement) -> None:
        if arrangement.complaint and arrangement.complaint != self.complaint:
            self._log.error("node.not-advertised", sentence=arrangement.complaint)
        elif self.complaint and not arrangement.complaint:
            self._log.info("node.advertised")
        for note in arrangement.notes:
            if note not in self._notes:
                self._log.warning("node.partly-advertised", sentence=note)
        self.complaint, self._notes = arrangement.complaint, arrangement.notes
