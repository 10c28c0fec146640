"""The child that acts as the simulated driver: snapshots, settings and resets.

It treats its caller like a real driver's library, bad behaviour included: a request about a stuck device is never
answered. So it runs in a child, behind :class:`~scrubber.adapters.children.request_pool.RequestPool`. Runs as ``python
-m scrubber.adapters.sim.driver``; its one argument is the node's directory.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault
from scrubber.adapters.children.message import Message
from scrubber.adapters.sim import control, lease
from scrubber.adapters.sim.faults import ABSENT, Faults
from scrubber.adapters.sim.layout import SimDevice, current_settings, read_device, write_json
from scrubber.domain.errors import DeviceLost, ScrubberError

__all__: list[str] = []


def handle(node: Path, request: Message) -> Message:
    """Handle one request; the keys of ``request`` are those that the adapter's classes write."""
    ask = request.get("ask")
    if ask not in _HANDLERS:
        raise Fault("unreadable", f"The simulated driver does not support the request {ask!r}.")
    try:
        found, faults = _require_device(node, request)
        return _HANDLERS[ask](found, faults, request)
    except DeviceLost as error:
        raise Fault("lost", str(error)) from error
    except ScrubberError as error:
        raise Fault("unreadable", str(error)) from error


def _require_device(node: Path, question: Message) -> tuple[SimDevice, Faults]:
    """Return the requested device and its faults, if the driver can report anything about it at all."""
    if control.is_driver_absent(node):
        raise Fault("unreadable", "The driver is not loaded.")
    place, index, device_id = (str(question.get(key)) for key in ("place", "index", "id"))
    if not Path(place).is_dir():
        raise Fault("lost", f"Device {index} no longer exists.")
    found = read_device(Path(place), index, "")
    if found.device.id != device_id:
        raise Fault("lost", f"Device {index} was replaced by another one ({found.device.id}, not {device_id}).")
    faults = control.read_combined_faults(found.control_directories)
    if faults.stuck:
        _never_return()
    if faults.lost:
        raise Fault("lost", f"Device {index} has fallen off the bus.")
    return found, faults


def _snapshot(found: SimDevice, faults: Faults, _: Message) -> Message:
    return {
        "xids": {str(code): times for code, times in sorted(faults.active_xids.items())},
        "ecc_uncorrected": faults.ecc,
        "temperature_celsius": faults.temperature,
        "recovery": None if faults.recovery == ABSENT else faults.recovery,
        "conditions": dict(faults.conditions),
        "counters": dict(faults.counters),
        "settings": current_settings(found.directory, found.defaults),
        "defaults": dict(found.defaults),
    }


def _restore(found: SimDevice, _: Faults, question: Message) -> Message:
    expected = question.get("wanted")
    if not isinstance(expected, dict):
        raise Fault("unreadable", "Settings to restore must be an object.")
    current = current_settings(found.directory, found.defaults)
    applied = {name: str(value) for name, value in expected.items() if name in current}
    write_json(found.directory / "settings.json", {**current, **applied})
    after = current_settings(found.directory, found.defaults)
    return {"values": {name: after[name] for name in applied}}


def _reset(found: SimDevice, faults: Faults, _: Message) -> Message:
    """Reset the device. As on real devices the memory stays as it is: clearing is the eraser's job."""
    if found.device.parent is not None:
        raise Fault("unreadable", f"Device {found.device.index} is an instance: only its whole GPU can be reset.")
    if lease.is_held(found.memory, found.inode):
        raise Fault("held", f"Device {found.device.index} is held by a process, so it cannot be reset.")
    if faults.reset_fails:
        raise Fault("unreadable", f"The reset of device {found.device.index} failed.")
    write_json(found.directory / "settings.json", dict(found.defaults))
    control.update_faults(found.directory, Faults.after_reset)
    return {}


def _never_return() -> NoReturn:
    while True:
        signal.pause()


_HANDLERS: Mapping[object, Callable[[SimDevice, Faults, Message], Message]] = {
    "snapshot": _snapshot,
    "restore": _restore,
    "reset": _reset,
}


def main() -> None:
    link = child.connect_to_parent()
    child.serve(link, partial(handle, Path(link.arguments[0])))


if __name__ == "__main__":
    main()
