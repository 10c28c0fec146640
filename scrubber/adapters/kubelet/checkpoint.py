"""The kubelet's device checkpoint: an internal format, so it is used for corroboration and hints, never for decisions.

It contains a pod's UID, its container and its devices, including init containers, which PodResources never lists. It is
written when devices are allocated and not when a pod ends: its information about an inactive pod is stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.kubelet.strict_json import JsonValue, UnexpectedJson, parse_json

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
        entries = [_entry(each) for each in parse_json(text).member("Data").member("PodDeviceEntries").elements()]
    except UnexpectedJson as exc:
        return Checkpoint(error=f"The kubelet's checkpoint has an unknown format ({exc}).")
    return Checkpoint(tuple(entry for entry in entries if entry.devices))


def _entry(written: JsonValue) -> CheckpointEntry:
    nodes = written.member("DeviceIDs").members()
    return CheckpointEntry(
        written.member("PodUID").text(),
        written.member("ContainerName").text(),
        written.member("ResourceName").text(),
        # The kubelet accepts an empty ID of any plugin on the node.
        frozenset(device.text(may_be_empty=True) for node in nodes for device in node.elements()),
    )
