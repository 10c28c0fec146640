"""A simulated reboot of the node, as visible from its devices and its boot id.

The machine keeps running. So a reboot is refused while any process lives that a real one would have ended: a service on
the node, or a holder of a device. Promise: afterwards the node reports another boot, its driver is freshly loaded, and
the memory of its devices is unchanged: what survives a reboot in real memory cannot be promised.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from scrubber.adapters.locks import SERVICE_LOCK
from scrubber.adapters.sim import control, lease
from scrubber.adapters.sim.faults import Faults
from scrubber.adapters.sim.layout import load_node, write_json
from scrubber.domain.errors import AlreadyRunning, DeviceBusy

__all__ = ["reboot"]


def reboot(directory: Path) -> None:
    """Make the node in ``directory`` look as after a reboot.

    Raises:
        AlreadyRunning: a service works on it; stop that first.
        DeviceBusy: a process holds a device.
        InvalidConfiguration: there is no simulated node here.
        Unreadable: the control file of a device is malformed.
    """
    devices = load_node(directory).devices
    lock = os.open(directory / "locks" / SERVICE_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for found in devices:
            if lease.is_held(found.memory, found.inode):
                raise DeviceBusy(
                    f"Device {found.device.index} is held by a process, which a reboot would end: stop it first."
                )
        for found in devices:
            control.update_faults(found.directory, Faults.after_reboot)
            write_json(found.directory / "settings.json", dict(found.defaults))
        control.record_reboot(directory)
    except BlockingIOError:
        raise AlreadyRunning(f"A scrub service uses the node in {directory}: stop it first.") from None
    finally:
        os.close(lock)
