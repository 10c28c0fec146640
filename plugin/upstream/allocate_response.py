"""Determines what a vendor's response to ``Allocate`` would give a container, as far as it can be read.

Invariant: a response that plainly reaches a device that was not allocated is detected here, before a container starts
with it, because the gate covers only the allocated devices. What cannot be read (a mount of a whole directory, a hook)
is not judged.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.injection import NVIDIA_VISIBLE_DEVICES_VARIABLE, VOLUME_MOUNT_ROOT
from plugin.upstream.device_ids import DeviceIds

__all__ = ["DevicePaths", "referenced_devices", "uses_envvar"]

NO_DEVICE_VALUES = ("", "void", "none", VOLUME_MOUNT_ROOT)
"""Values of the variable that name no device."""


@dataclass(frozen=True, slots=True)
class DevicePaths:
    """How containers reach the devices of the service: device id → paths on the host and in the container."""

    paths: Mapping[str, frozenset[str]]
    device_ids: DeviceIds

    def unallocated_devices(self, response: kubelet.ContainerAllocateResponse, allocated: Iterable[str]) -> list[str]:
        """Return the devices that ``response`` reaches and that are not ``allocated``.

        A path shared by an allocated device counts for that device.
        """
        mine = frozenset(allocated)
        found: set[str] = set()
        for owners in referenced_devices(response, self):
            if not owners & mine:
                found |= owners
        return sorted(found)


def referenced_devices(answer: kubelet.ContainerAllocateResponse, device_paths: DevicePaths) -> list[frozenset[str]]:
    """For each path and each name in ``answer``, return the devices of the service that it may mean, if any."""
    pairs = [(each.host_path, each.container_path) for each in answer.devices]
    pairs += [(each.host_path, each.container_path) for each in answer.mounts]
    # The file on the host is what a container gets, whatever its name in the container is.
    owners = [_owners(host, device_paths) or _owners(container, device_paths) for host, container in pairs]
    everything = frozenset(device_paths.paths)
    for name in _names(answer):
        if name == "all":
            owners += [frozenset({device}) for device in everything]
        elif device := device_paths.device_ids.resolve(name).device:
            owners.append(frozenset({device}))
    return [each for each in owners if each]


def _owners(path: str, device_paths: DevicePaths) -> frozenset[str]:
    """Return the devices that are reached by ``path``, also below the root of a driver that runs in a container."""
    plain = posixpath.normpath(path)
    return frozenset(device for device, known in device_paths.paths.items() if plain.endswith(tuple(known)))


def uses_envvar(answer: kubelet.ContainerAllocateResponse) -> bool:
    """Return whether the response names devices to NVIDIA's runtime by the variable that any pod can set."""
    return answer.envs.get(NVIDIA_VISIBLE_DEVICES_VARIABLE, "") not in NO_DEVICE_VALUES


def _names(answer: kubelet.ContainerAllocateResponse) -> list[str]:
    """Return every name of a device that a container runtime would read."""
    value = answer.envs.get(NVIDIA_VISIBLE_DEVICES_VARIABLE, "")
    names = [] if value in NO_DEVICE_VALUES else value.split(",")
    qualified = [each.name for each in answer.cdi_devices]
    for each in answer.annotations.values():
        qualified += [word for word in each.split(",") if "=" in word and "/" in word.partition("=")[0]]
    names += [each.partition("=")[2] for each in qualified]
    under = f"{VOLUME_MOUNT_ROOT}/"
    inside = [posixpath.normpath(each.container_path) for each in answer.mounts]
    names += [path.removeprefix(under) for path in inside if path.startswith(under)]
    return [name.strip() for name in names if name.strip()]
