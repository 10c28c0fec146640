"""The fence around a device that a job works on: exclusive-process mode, and a record of the mode before it.

Promise: the record is on disk before the fence is enabled, and is removed only after the fence was disabled. So the
fence of a process that was killed is known to the next user of the device, and is removed by it; while its creator may
still be at work, it is left alone.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Protocol

from scrubber.adapters.locks import lock_path
from scrubber.completion import run_to_completion
from scrubber.domain.device import Device
from scrubber.domain.errors import Unavailable, Unreadable
from scrubber.durability import sync_directory

__all__ = ["ComputeModeFence", "GpuControl"]

_RECORDS = "fences"
_EXCLUSIVE = "exclusive-process"
_MAX_RECORD_BYTES = 64
_RECORD = re.compile(rb"([a-z0-9]+(?:-[a-z0-9]+)*)\n?")


class GpuControl(Protocol):
    """The driver calls that surround a job. Raises as :meth:`scrubber.ports.Telemetry.snapshot`."""

    async def compute_mode(self, device: Device) -> str | None:
        """Return the present compute mode, in words that :meth:`unfence` accepts; None for an instance, which has none.

        While the device is fenced the mode is ``exclusive-process``.
        """

    async def fence(self, device: Device) -> None:
        """Set exclusive-process mode: a process with a context keeps it, and no other process gets one."""

    async def unfence(self, device: Device, compute_mode: str) -> None:
        """Set the compute mode from before the fence."""

    async def memory(self, device: Device) -> tuple[int, int, int]:
        """Return bytes: total, reserved by the driver (part of the total; 0 where it is not reported), and in use."""

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        """Wait until memory use is at the idle level, or for ``deadline`` seconds; return the bytes above it."""


# See docs/decisions/0021-slow-path-order-and-coverage.md.
class ComputeModeFence:
    """Fences of all devices; their records are in a directory beside the locks."""

    def __init__(self, gpu: GpuControl, locks: Path) -> None:
        self._gpu = gpu
        self._records = locks / _RECORDS

    async def enable(self, device: Device) -> bool:
        """Keep other processes from opening a context on ``device``; return False when it cannot be fenced.

        Raises:
            Unavailable: the record cannot be written; the device is unchanged.
            ScrubberError: from the driver; :meth:`disable` does what is left to do.
        """
        mode = await self._gpu.compute_mode(device)
        if mode is None:
            return False
        await run_to_completion(asyncio.to_thread(self._write, device, mode))  # it waits for the disk
        await self._gpu.fence(device)
        return True

    async def is_enabled(self, device: Device) -> bool:
        """Whether the fence of :meth:`enable` is still in place. Raises as :meth:`enable`."""
        return await self._gpu.compute_mode(device) == _EXCLUSIVE

    async def disable(self, device: Device) -> None:
        """Restore the mode of the record, if there is one. Precondition: no job of this service works on ``device``.

        Raises:
            Unavailable: the record cannot be read, or cannot be removed.
            ScrubberError: from the driver; the record stays, and the next user of the device tries again.
        """
        mode = self._read(device)
        if mode is None:
            return
        await self._gpu.unfence(device, mode)
        try:
            self._record_path(device).unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(
                f"{self._record_path(device)} cannot be removed: {error.strerror}. This is retried."
            ) from error

    def _record_path(self, device: Device) -> Path:
        return lock_path(self._records, device.id)

    def _read(self, device: Device) -> str | None:
        note = self._record_path(device)
        try:
            with note.open("rb") as file:
                content = file.read(_MAX_RECORD_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(
                f"{note} cannot be read, so the fence of {device.id} stays in place: {error.strerror}."
            ) from error
        record = _RECORD.fullmatch(content) if len(content) <= _MAX_RECORD_BYTES else None
        if record is None:
            raise Unreadable(
                f"{note} does not contain the compute mode that {device.id} had: set it manually and remove the file."
            )
        return record[1].decode("ascii")

    def _write(self, device: Device, mode: str) -> None:
        """Write the record durably and atomically: a record that exists is complete."""
        note = self._record_path(device)
        fresh = note.with_name(f".{device.id}.new")
        try:
            self._records.mkdir(mode=0o700, exist_ok=True)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(f"{mode}\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(note)
            sync_directory(self._records)
            sync_directory(self._records.parent)
        except OSError as error:
            raise Unavailable(
                f"{note} cannot be written, and no device is fenced without it: {error.strerror}."
            ) from error
