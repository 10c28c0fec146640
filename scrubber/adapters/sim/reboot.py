"""A reboot of the simulated node, as far as its devices and whoever asks for its boot can tell.

The machine goes on. So a reboot is refused while anything lives that a real one would have ended: a service on the node,
or a holder of a device. Promise: afterwards the node says another boot, its driver is loaded anew, and the memory of its
devices is what it was: what survives a reboot in real memory is nobody's to promise.
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
    """Let the node in ``directory`` look as after a reboot.

    Raises:
        AlreadyRunning: a service works on it; stop that first.
        DeviceBusy: somebody holds a device.
        InvalidConfiguration: there is no simulated node here.
        Unreadable: the control file of a device makes no sense.
    """
    devices = load_node(directory).devices
    lock = os.open(directory / "locks" / SERVICE_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for found in devices:
            if lease.is_held(found.memory, found.inode):
                raise DeviceBusy(
                    f"Device {found.device.index} is held by a process, which a reboot would end: end it first."
                )
        for found in devices:
            control.update_faults(found.directory, Faults.after_reboot)
            write_json(found.directory / "settings.json", dict(found.defaults))
        control.record_reboot(directory)
    except BlockingIOError:
        raise AlreadyRunning(f"A scrub service works on the node in {directory}: stop it first.") from None
    finally:
        os.close(lock)
