"""The kubelet's device checkpoint: an internal format, so it is used for corroboration and hints, never for decisions.

It contains a pod's UID, its container and its devices, including init containers, which PodResources never lists. It is
written when devices are allocated and not when a pod ends: its information about an inactive pod is stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

__all__ = ["CHECKPOINT", "Checkpoint", "CheckpointEntry", "CheckpointFile", "parse_checkpoint", "read_checkpoint"]

CHECKPOINT = Path("device-plugins", "kubelet_internal_checkpoint")
"""Its path relative to the kubelet's directory."""

_MAX_BYTES = 64 * 1024 * 1024
_CHUNK_SIZE = 256 * 1024
"""Bytes per read: the buffer for the whole requested size is allocated first."""


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """The devices of one resource in one container."""

    pod_uid: str
    container: str
    resource: str
    devices: frozenset[str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All entries; ``error`` is the message that explains why there are none, empty when the file could be read.

    A checkpoint that does not exist is readable and empty: nothing was ever allocated.
    """

    entries: tuple[CheckpointEntry, ...] = ()
    error: str = ""


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True)
    pod_uid: str = Field(alias="PodUID", min_length=1)
    container: str = Field(alias="ContainerName", min_length=1)
    resource: str = Field(alias="ResourceName", min_length=1)
    devices: Mapping[str, tuple[str, ...] | None] | None = Field(alias="DeviceIDs")


class _Data(BaseModel):
    model_config = ConfigDict(strict=True)
    entries: tuple[_Entry, ...] | None = Field(alias="PodDeviceEntries")


class _File(BaseModel):
    model_config = ConfigDict(strict=True)
    data: _Data = Field(alias="Data")


class CheckpointFile:
    """The checkpoint in ``kubelet_dir``, for repeated reads.

    Every call reads the current bytes of the file; only the parsed result is cached, as long as the bytes are the same.
    Times and inodes are no evidence here: the kubelet may write twice within one tick of the file system's clock.
    """

    def __init__(self, kubelet_dir: Path) -> None:
        self._path = kubelet_dir / CHECKPOINT
        self._parsed: tuple[bytes, Checkpoint] | None = None

    def read(self) -> Checkpoint:
        """Return the current checkpoint; never raises."""
        path = self._path
        try:
            with path.open("rb") as file:
                parts, size = [], 0
                while size <= _MAX_BYTES and (part := file.read(_CHUNK_SIZE)):
                    parts.append(part)
                    size += len(part)
                text = b"".join(parts)
        except FileNotFoundError:
            return Checkpoint()
        except OSError as exc:
            return Checkpoint(error=f"The kubelet's checkpoint {path} cannot be read: {exc.strerror or exc}.")
        if len(text) > _MAX_BYTES:
            return Checkpoint(error=f"The kubelet's checkpoint {path} is larger than {_MAX_BYTES} bytes.")
        if self._parsed is None or self._parsed[0] != text:
            self._parsed = (text, parse_checkpoint(text))
        return self._parsed[1]


def read_checkpoint(kubelet_dir: Path) -> Checkpoint:
    """Read the checkpoint in ``kubelet_dir`` once; never raises."""
    return CheckpointFile(kubelet_dir).read()


def parse_checkpoint(text: bytes) -> Checkpoint:
    """Parse the JSON that the kubelet writes; any other structure is rejected as a whole, with a message."""
    try:
        parsed = _File.model_validate_json(text)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        return Checkpoint(error=f"The kubelet's checkpoint has an unknown format ({problem}).")
    entries = (
        CheckpointEntry(
            entry.pod_uid,
            entry.container,
            entry.resource,
            frozenset(device for devices in (entry.devices or {}).values() for device in devices or ()),
        )
        for entry in parsed.data.entries or ()
    )
    return Checkpoint(tuple(entry for entry in entries if entry.devices))
