"""The fence around a device that is worked on: exclusive-process mode, and a note of what it was before.

Promise: the note is on the disk before the fence stands, and is removed only when it does not stand any more. So a fence
whose maker was killed is known to whoever comes next, and is taken down; and while its maker may still be at work it
is left.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from scrubber.adapters.locks import lock_path
from scrubber.domain.device import Device
from scrubber.domain.errors import Unavailable, Unreadable

__all__ = ["ComputeModeFence", "GpuControl"]

_RECORDS = "fences"
_EXCLUSIVE = "exclusive-process"
_MAX_RECORD_BYTES = 64


class GpuControl(Protocol):
    """What has to be asked of the driver around a piece of work. Raises as :meth:`scrubber.ports.Telemetry.snapshot`."""

    async def compute_mode(self, device: Device) -> str | None:
        """Its compute mode now, in words that :meth:`unfence` takes (``exclusive-process`` while it is fenced); None when it
        has none (an instance).
        """

    async def fence(self, device: Device) -> None:
        """Set exclusive-process mode: who has a context keeps it, and nobody gets a second one."""

    async def unfence(self, device: Device, compute_mode: str) -> None:
        """Set the mode that there was before."""

    async def memory(self, device: Device) -> tuple[int, int, int]:
        """Bytes in all, reserved by the driver (0 where it does not say), and in use, of those in all."""

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        """Bytes in use above the idle level, once there are none or ``deadline`` seconds are over."""


class ComputeModeFence:
    """Fences of all devices; their notes lie in a directory beside the locks."""

    def __init__(self, gpu: GpuControl, locks: Path) -> None:
        self._gpu = gpu
        self._records = locks / _RECORDS

    async def enable(self, device: Device) -> bool:
        """Let nobody else open a context on ``device``; False when it cannot be fenced.

        Raises:
            Unavailable: the note cannot be written; the device is as it was.
            ScrubberError: as the driver says; :meth:`disable` does what is left to do.
        """
        mode = await self._gpu.compute_mode(device)
        if mode is None:
            return False
        self._write(device, mode)
        await self._gpu.fence(device)
        return True

    async def is_enabled(self, device: Device) -> bool:
        """Whether nobody took it down since it was put up. Raises as :meth:`enable`."""
        return await self._gpu.compute_mode(device) == _EXCLUSIVE

    async def disable(self, device: Device) -> None:
        """Put back what the note says, if there is one. Precondition: nobody of ours works on ``device``.

        Raises:
            Unavailable: the note cannot be read, or not be removed.
            ScrubberError: as the driver says; the note stays, and whoever comes next tries again.
        """
        mode = self._read(device)
        if mode is None:
            return
        await self._gpu.unfence(device, mode)
        try:
            self._record_path(device).unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(
                f"{self._record_path(device)} cannot be removed: {error.strerror}. It is tried again."
            ) from error

    def _record_path(self, device: Device) -> Path:
        return lock_path(self._records, device.id)

    def _read(self, device: Device) -> str | None:
        note = self._record_path(device)
        try:
            with note.open("rb") as file:
                mode = file.read(_MAX_RECORD_BYTES + 1).decode("ascii", "replace").strip(" \n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"{note} cannot be read, so the fence of {device.id} stays: {error.strerror}.") from error
        if not mode or len(mode) > _MAX_RECORD_BYTES:
            raise Unreadable(
                f"{note} does not say which compute mode {device.id} had: set it by hand and remove the file."
            )
        return mode

    def _write(self, device: Device, mode: str) -> None:
        """Durable, and in one step: a note that is there is whole."""
        note = self._record_path(device)
        fresh = note.with_name(f".{device.id}.new")
        try:
            self._records.mkdir(mode=0o700, exist_ok=True)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(f"{mode}\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(note)
            directory = os.open(self._records, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise Unavailable(
                f"{note} cannot be written, and without it no device is fenced: {error.strerror}."
            ) from error
