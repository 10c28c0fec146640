"""What the kubelet remembers about claims, in memory and in ``dra_manager_state``.

Promise: a claim is in the file before a driver is called for it, and the mark that it is prepared is not: a restarted
kubelet knows the claims and their devices, and calls the driver again before it starts another sandbox with them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_NAME = "dra_manager_state"


class DraCheckpointUnreadable(Exception):
    """The checkpoint exists and cannot be used; the kubelet does not start with it."""


@dataclass(frozen=True, slots=True)
class ClaimDevice:
    """One device of an answer to ``NodePrepareResources``."""

    pool: str
    name: str
    requests: tuple[str, ...]
    """Empty: every request."""
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


@dataclass(slots=True)
class ClaimInfo:
    """A claim that is used, or was, by pods of this node."""

    uid: str
    name: str
    namespace: str
    pods: set[str] = field(default_factory=set)
    """UIDs of the pods that refer to it."""
    drivers: dict[str, list[ClaimDevice]] = field(default_factory=dict)
    """Devices by driver, as answered; an answer to a second call is appended."""
    prepared: bool = False

    def devices(self, request: str = "") -> Iterator[tuple[str, ClaimDevice]]:
        """Yield the devices with their driver, of one request or of all."""
        base = request.partition("/")[0]
        for driver, devices in self.drivers.items():
            for each in devices:
                if not base or not each.requests or base in each.requests:
                    yield driver, each


class ClaimInfos:
    """All claims by namespace and name."""

    def __init__(self, entries: Iterable[ClaimInfo] = ()) -> None:
        self._claims = {(each.namespace, each.name): each for each in entries}

    def __iter__(self) -> Iterator[ClaimInfo]:
        return iter(list(self._claims.values()))

    def get(self, namespace: str, name: str) -> ClaimInfo | None:
        return self._claims.get((namespace, name))

    def add(self, claim: ClaimInfo) -> None:
        self._claims[claim.namespace, claim.name] = claim

    def remove(self, claim: ClaimInfo) -> None:
        self._claims.pop((claim.namespace, claim.name), None)

    def of_pod(self, uid: str) -> list[ClaimInfo]:
        """Return the claims that a pod refers to."""
        return [each for each in self if uid in each.pods]


def encode_checkpoint(claims: ClaimInfos) -> str:
    entries = [
        {
            "ClaimUID": each.uid,
            "ClaimName": each.name,
            "Namespace": each.namespace,
            "PodUIDs": {uid: {} for uid in sorted(each.pods)},
            "DriverState": {
                driver: {"Devices": [_device_document(device) for device in devices]}
                for driver, devices in each.drivers.items()
            },
        }
        for each in claims
    ]
    data = json.dumps(
        {"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1", "ClaimInfoStateList": entries}
    )
    return json.dumps({"Data": data, "Checksum": zlib.crc32(data.encode())})


def decode_checkpoint(text: str) -> ClaimInfos:
    """Return the claims, none of them prepared.

    Raises:
        DraCheckpointUnreadable: not JSON, not of this shape, or damaged.
    """
    try:
        document = json.loads(text)
        if document["Checksum"] != zlib.crc32(document["Data"].encode()):
            raise DraCheckpointUnreadable("checkpoint is corrupted")
        return ClaimInfos(_claim(each) for each in json.loads(document["Data"])["ClaimInfoStateList"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DraCheckpointUnreadable(str(error)) from error


def write_checkpoint(directory: Path, claims: ClaimInfos) -> None:
    """Replace the checkpoint atomically.

    Raises:
        OSError: the directory cannot be written; the old checkpoint remains.
    """
    draft = directory / f".{FILE_NAME}.new"
    with open(draft, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(encode_checkpoint(claims))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, directory / FILE_NAME)


def read_checkpoint(directory: Path) -> ClaimInfos:
    """Return the claims as last written, none of them prepared; none when there is no checkpoint.

    Raises:
        DraCheckpointUnreadable: not JSON, not of this shape, or damaged.
    """
    path = directory / FILE_NAME
    try:
        return decode_checkpoint(path.read_text())
    except FileNotFoundError:
        return ClaimInfos()
    except (OSError, ValueError, DraCheckpointUnreadable) as error:
        raise DraCheckpointUnreadable(f"{path}: {error}") from error


def _device_document(device: ClaimDevice) -> dict[str, Any]:
    return {
        "PoolName": device.pool,
        "DeviceName": device.name,
        "ShareID": device.share_id,
        "RequestNames": list(device.requests),
        "CDIDeviceIDs": list(device.cdi_ids),
    }


def _claim(document: dict[str, Any]) -> ClaimInfo:
    drivers = {
        driver: [
            ClaimDevice(
                pool=each["PoolName"],
                name=each["DeviceName"],
                requests=tuple(each["RequestNames"]),
                cdi_ids=tuple(each["CDIDeviceIDs"]),
                share_id=each["ShareID"],
            )
            for each in state["Devices"]
        ]
        for driver, state in document["DriverState"].items()
    }
    pods = set(document["PodUIDs"])
    return ClaimInfo(document["ClaimUID"], document["ClaimName"], document["Namespace"], pods, drivers)
