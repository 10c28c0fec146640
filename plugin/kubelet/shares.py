"""Time slicing: one device advertised as several replicas, as in NVIDIA's plugin.

A share is the device under another id, ``<device id>::<n>``. Invariants: the state of a device applies to each of its
shares (health, NUMA node, quarantine), and a container that has several shares of a device gets that device once. This
module does not decide which pods may use a device at the same time: the service decides that before each start.

Pure. Source: the documentation and the code of NVIDIA's device plugin, version 0.20.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict, index_sort_key
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.resource_mapping import REPLICA_SEPARATOR

__all__ = [
    "MAX_SHARES",
    "SHARED_SUFFIX",
    "SharePreference",
    "TimeSlicing",
    "choose_shares",
    "id_mapping",
    "whole_devices",
]

SHARED_SUFFIX = ".shared"
"""Suffix of a resource that is renamed because it is shared."""
MAX_SHARES = 256
"""Limit of shares of one device: the list has to fit into one message to the kubelet."""


class SharePreference(StrEnum):
    """The device that the next share is preferably taken from; as in NVIDIA's plugin."""

    DISTRIBUTED = "distributed"
    """The device with the fewest allocated shares."""
    PACKED = "packed"
    """The device with the most allocated shares."""


@dataclass(frozen=True, slots=True)
class TimeSlicing:
    """What is advertised as shares.

    Attributes:
        shares: resource, by its unshared name → number of shares of each of its devices; at least 2.
        use_shared_suffix: whether a shared resource is advertised under a name with :data:`SHARED_SUFFIX`.
        single_share_only: whether a container that requests more than one share is refused: a second one gives it
            nothing.
        preference: the device to take the next share from.
    """

    shares: Mapping[str, int] = field(default_factory=dict)
    use_shared_suffix: bool = False
    single_share_only: bool = False
    preference: SharePreference = SharePreference.DISTRIBUTED

    def advertised_name(self, resource: str) -> str:
        """Return the name under which the devices of ``resource`` are advertised."""
        return resource + SHARED_SUFFIX if self.use_shared_suffix and resource in self.shares else resource

    def shares_of(self, resource: str, device: AdvertisedDevice) -> tuple[AdvertisedDevice, ...]:
        """Return the shares of a device of ``resource``; the device itself where it is not shared."""
        count = self.shares.get(resource)
        if count is None:
            return (device,)
        return tuple(
            replace(device, id=f"{device.id}{REPLICA_SEPARATOR}{number}", share_of=device.id) for number in range(count)
        )

    def check_request(self, container: Sequence[AdvertisedDevice]) -> None:
        """Refuse a combination that no container may have.

        Raises:
            InvalidRequest: more than one share, where one is the maximum.
        """
        if self.single_share_only and len(container) > 1 and any(device.share_of for device in container):
            raise InvalidRequest(
                f"The container requests {len(container)} shares of devices, but the maximum is one "
                "(failRequestsGreaterThanOne): a second share would give it no more of a device."
            )


def whole_devices(devices: Iterable[AdvertisedDevice]) -> tuple[AdvertisedDevice, ...]:
    """Return the devices behind ``devices``, each once."""
    whole = (replace(device, id=device.share_of, share_of="") if device.share_of else device for device in devices)
    return tuple({device.id: device for device in whole}.values())


def id_mapping(devices: Iterable[AdvertisedDevice]) -> dict[str, str]:
    """Return the device of each id: for a share, the device that it is a share of."""
    return {device.id: device.device_id for device in devices}


def choose_shares(
    available: Iterable[str],
    chosen: Sequence[str],
    size: int,
    devices: Mapping[str, AdvertisedDevice],
    preference: SharePreference,
    readiness: Callable[[AdvertisedDevice | None], int],
) -> tuple[str, ...]:
    """Return ``chosen`` and enough shares of ``available`` to make ``size``; fewer when there are not enough.

    Shares are chosen one after the other: from a device that is in service, then by ``preference``, then from the
    device of which this container has the fewest shares, then from the readiest.

    Args:
        available: unallocated shares, without those in ``chosen``.
    """
    free: dict[str, list[str]] = {}
    for id_ in sorted(set(available), reverse=True):
        free.setdefault(_device(id_, devices), []).append(id_)
    total = Counter(device.device_id for device in devices.values())
    given = {device: max(total[device] - len(ids), 0) for device, ids in free.items()}
    mine = Counter(_device(id_, devices) for id_ in chosen)
    towards = -1 if preference is SharePreference.PACKED else 1

    def rank(device: str) -> tuple[bool, int, int, int, tuple[list[tuple[int, str]], str]]:
        one = devices.get(free[device][-1])
        out = one is not None and one.verdict in (ServiceVerdict.WITHHELD, ServiceVerdict.HELD)
        place = index_sort_key(one) if one is not None else ([], device)
        return (out, towards * given[device], mine[device], -readiness(one), place)

    taken = list(chosen)
    while free and len(taken) < size:
        device = min(free, key=rank)
        taken.append(free[device].pop())
        given[device] += 1
        mine[device] += 1
        if not free[device]:
            del free[device]
    return tuple(taken)


def _device(id_: str, devices: Mapping[str, AdvertisedDevice]) -> str:
    """Return the device of ``id_``; an id that is not listed counts as a separate device."""
    device = devices.get(id_)
    return id_ if device is None else device.device_id
