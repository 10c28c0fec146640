"""Which container was allocated which devices: per pod, container and resource, with the plugin's reply, durably.

Promise: an allocation is in ``kubelet_internal_checkpoint`` before its pod is admitted, and the plugin's reply is
replayed from there at every start of the container, whichever process was restarted in between. The file has the real
kubelet's shape; its checksum is our own, because the real one hashes a Go value.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from plugin.api import deviceplugin_pb2 as api

FILE_NAME = "kubelet_internal_checkpoint"
NO_NUMA_NODE = -1


class CheckpointUnreadable(Exception):
    """The checkpoint exists and cannot be used; the message contains the reason."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices of one container of one resource. ``by_node``: NUMA node (-1: none) → ids, sorted."""

    pod_uid: str
    container: str
    resource: str
    by_node: Mapping[int, tuple[str, ...]]
    response_bytes: bytes
    """A serialised ``ContainerAllocateResponse``."""

    @property
    def devices(self) -> frozenset[str]:
        return frozenset(each for ids in self.by_node.values() for each in ids)

    @property
    def response(self) -> api.ContainerAllocateResponse:
        return api.ContainerAllocateResponse.FromString(self.response_bytes)


class Allocations:
    """Every allocation on the node; at most one per pod, container and resource."""

    def __init__(self, entries: Collection[Allocation] = ()) -> None:
        self._pods: dict[str, dict[str, dict[str, Allocation]]] = {}
        for each in entries:
            self.add(each)

    def __iter__(self) -> Iterator[Allocation]:
        for containers in self._pods.values():
            for resources in containers.values():
                yield from resources.values()

    def add(self, allocation: Allocation) -> None:
        containers = self._pods.setdefault(allocation.pod_uid, {})
        containers.setdefault(allocation.container, {})[allocation.resource] = allocation

    def get(self, pod_uid: str, container: str, resource: str) -> Allocation | None:
        return self._pods.get(pod_uid, {}).get(container, {}).get(resource)

    def of_container(self, pod_uid: str, container: str) -> list[Allocation]:
        """A container's allocations, one per resource."""
        return list(self._pods.get(pod_uid, {}).get(container, {}).values())

    def allocated_devices(self, resource: str) -> set[str]:
        """Return the devices of ``resource`` that are allocated to any container."""
        return {device for each in self if each.resource == resource for device in each.devices}

    def resources(self) -> set[str]:
        return {each.resource for each in self}

    def retain_pods(self, pod_uids: Collection[str]) -> bool:
        """Forget the pods that are not in ``pod_uids``; return whether any was forgotten."""
        gone = self._pods.keys() - set(pod_uids)
        for uid in gone:
            del self._pods[uid]
        return bool(gone)


def group_by_numa_node(
    devices: Collection[str], numa_nodes: Mapping[str, tuple[int, ...]]
) -> dict[int, tuple[str, ...]]:
    """Return the devices by NUMA node; a device with several nodes is listed under each."""
    grouped: dict[int, list[str]] = {}
    for device in sorted(devices):
        for node in numa_nodes.get(device) or (NO_NUMA_NODE,):
            grouped.setdefault(node, []).append(device)
    return {node: tuple(ids) for node, ids in grouped.items()}


def write_checkpoint(directory: Path, allocations: Allocations, registered: Mapping[str, Collection[str]]) -> None:
    """Replace the checkpoint atomically. ``registered``: resource → its healthy devices.

    Raises:
        OSError: the directory cannot be written; the old checkpoint remains.
    """
    data = {
        "PodDeviceEntries": [
            {
                "PodUID": each.pod_uid,
                "ContainerName": each.container,
                "ResourceName": each.resource,
                "DeviceIDs": {str(node): list(ids) for node, ids in each.by_node.items()},
                "AllocResp": base64.b64encode(each.response_bytes).decode(),
            }
            for each in allocations
        ],
        "RegisteredDevices": {resource: sorted(ids) for resource, ids in registered.items()},
    }
    draft = directory / f".{FILE_NAME}.new"
    with open(draft, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        json.dump({"Data": data, "Checksum": _checksum(data)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, directory / FILE_NAME)


def read_checkpoint(directory: Path) -> tuple[Allocations, dict[str, set[str]]]:
    """Return allocations and registered devices as last written; empty when there is no checkpoint.

    Raises:
        CheckpointUnreadable: not JSON, not of this shape, or damaged.
    """
    path = directory / FILE_NAME
    try:
        document = json.loads(path.read_text())
        data = document["Data"]
        if document["Checksum"] != _checksum(data):
            raise CheckpointUnreadable(f"{path}: checkpoint is corrupted")
        entries = [_entry(raw) for raw in data["PodDeviceEntries"]]
        registered = {resource: set(ids) for resource, ids in data["RegisteredDevices"].items()}
    except FileNotFoundError:
        return Allocations(), {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, binascii.Error, DecodeError) as error:
        raise CheckpointUnreadable(f"{path}: {error}") from error
    return Allocations(entries), registered


def _entry(raw: dict[str, Any]) -> Allocation:
    answer = base64.b64decode(raw["AllocResp"], validate=True)
    api.ContainerAllocateResponse.FromString(answer)
    by_node = {int(node): tuple(ids) for node, ids in raw["DeviceIDs"].items()}
    return Allocation(raw["PodUID"], raw["ContainerName"], raw["ResourceName"], by_node, answer)


def _checksum(data: object) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())
