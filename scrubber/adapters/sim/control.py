"""Faults and telemetry of a simulated device: what a command writes, and what the driver then reports.

An XID is two things: an event, counted permanently, and a condition that lasts until it is cleared or the device is
reset. Promise: a reader sees the old file or the new one, never a part of it, and two writers do not lose each other's
change. The driver's child imports this module.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scrubber.adapters.sim.faults import (
    CONDITION_CODES,
    CONDITIONS,
    MAX_XID,
    RECOVERY_ACTIONS,
    Faults,
    is_firmware_version,
    parse_conditions,
    parse_counters,
)
from scrubber.adapters.sim.layout import SimDevice, load_node, read_json_if_exists, write_json
from scrubber.domain.device import find_device
from scrubber.domain.errors import InvalidRequest, Unreadable

__all__ = [
    "CONDITIONS",
    "MAX_XID",
    "Faults",
    "add_faults",
    "boot_count",
    "clear_faults",
    "find_sim_device",
    "is_driver_absent",
    "read_combined_faults",
    "read_faults",
    "record_reboot",
    "update_faults",
]


def read_faults(directory: Path) -> Faults:
    """Return the faults written for the device in ``directory`` alone.

    Raises:
        Unreadable: the control file is malformed.
    """
    path = directory / "control.json"
    document = read_json_if_exists(path)
    return Faults() if document is None else Faults.from_json(document, str(path))


def read_combined_faults(directories: Iterable[Path]) -> Faults:
    """Return the faults of a device whose control directories are ``directories``: its own, then its parent's."""
    first, *rest = directories
    faults = read_faults(first)
    for place in rest:
        faults = faults.combined_with(read_faults(place))
    return faults


def update_faults(directory: Path, update: Callable[[Faults], Faults], *, repair: bool = False) -> Faults:
    """Read, change and replace the control file of the device in ``directory``; one writer at a time.

    Raises:
        Unreadable: the file is malformed; with ``repair`` it is replaced by a new one instead.
    """
    with _only_writer(directory):
        try:
            faults = update(read_faults(directory))
        except Unreadable:
            if not repair:
                raise
            faults = Faults()
        write_json(directory / "control.json", faults.to_json())
    return faults


def is_driver_absent(directory: Path) -> bool:
    """Whether the node's driver is absent. A malformed value of ``driver_absent`` counts as absent.

    Raises:
        Unreadable: the rest of the node's file is malformed.
    """
    return _read_node_control(directory).driver_absent is not False


def boot_count(directory: Path) -> int:
    """Return how many reboots of the node were simulated (:mod:`scrubber.adapters.sim.reboot`).

    Raises:
        Unreadable: the node's file is malformed.
    """
    return _read_node_control(directory).boots


def record_reboot(directory: Path) -> None:
    """Record another boot of the node, with its driver loaded."""
    _update_node_control(directory, lambda node: _NodeControl(driver_absent=False, boots=node.boots + 1))


def add_faults(
    directory: Path,
    device: str | None = None,
    *,
    xid: int | None = None,
    ecc: int | None = None,
    lost: bool = False,
    stuck: bool = False,
    slow_clear: float | None = None,
    wont_clear: bool = False,
    reset: str | None = None,
    driver_absent: bool = False,
    ghost: bool = False,
    unkillable: bool = False,
    temperature: int | None = None,
    recovery: str | None = None,
    conditions: Mapping[str, str] | None = None,
    counters: Mapping[str, int] | None = None,
    firmware: str | None = None,
) -> Faults:
    """Add faults to ``device`` (UUID, unique prefix or index; an instance's parent too), or to every GPU of the node.

    Returns the faults that the named device now has, or no faults for the whole node. Instances have the faults of
    their GPU.

    ``ecc`` adds that many errors; ``slow_clear`` is the minimum number of seconds for clearing the whole memory;
    ``driver_absent`` concerns the node and needs no device; ``conditions`` are added, by code, each with its reading;
    ``counters`` are set; ``firmware`` is the version of the VBIOS that a user has written to the device.

    Raises:
        InvalidRequest: no such device, a value out of its range, or nothing to do.
        InvalidConfiguration: there is no simulated node in ``directory``.
    """
    _check("xid", xid, 1, MAX_XID, "an XID is a number such as 31, 79 or 95")
    _check("ecc", ecc, 1, 1_000_000, "the number of uncorrected errors to add")
    _check("slow_clear", slow_clear, 0.001, 3600, "the minimum duration of clearing in seconds")
    _check("temperature", temperature, -40, 150, "degrees Celsius")
    if reset not in (None, "ok", "fail"):
        raise InvalidRequest(f"reset {reset!r} is unknown: use ok or fail.")
    if recovery not in (None, *RECOVERY_ACTIONS):
        raise InvalidRequest(
            f"recovery {recovery!r} is unknown: use {', '.join(RECOVERY_ACTIONS[:-1])} or {RECOVERY_ACTIONS[-1]}."
        )
    if firmware is not None and not is_firmware_version(firmware):
        raise InvalidRequest(
            f"{firmware!r} is not a firmware version: use letters, digits, dots and hyphens, such as 96.00.89."
        )
    new_conditions, new_counters = parse_conditions(conditions or {}), parse_counters(counters or {})

    def how(faults: Faults) -> Faults:
        if xid is not None:
            faults = faults.with_xid(xid)
        return replace(
            faults,
            ecc=faults.ecc + (ecc or 0),
            lost=faults.lost or lost,
            stuck=faults.stuck or stuck,
            slow_clear=faults.slow_clear if slow_clear is None else slow_clear,
            wont_clear=faults.wont_clear or wont_clear,
            reset_fails=faults.reset_fails if reset is None else reset == "fail",
            ghost=faults.ghost or ghost,
            unkillable=faults.unkillable or unkillable,
            temperature=faults.temperature if temperature is None else temperature,
            recovery=faults.recovery if recovery is None else recovery,
            conditions={**faults.conditions, **new_conditions},
            counters={**faults.counters, **new_counters},
            firmware=faults.firmware if firmware is None else firmware,
        )

    flags = (lost, stuck, wont_clear, ghost, unkillable)
    of_device = any((*flags, new_conditions, new_counters)) or any(
        each is not None for each in (xid, ecc, slow_clear, reset, temperature, recovery, firmware)
    )
    if not of_device and not driver_absent:
        raise InvalidRequest(f"Name what to inject: {', '.join(CONDITIONS)} or counter.")
    if device is None:
        devices = [each for each in load_node(directory).devices if each.parent_directory is None]
    else:
        devices = [find_sim_device(directory, device)]
    if driver_absent:
        _set_driver_absent(directory, True)
    active = [update_faults(each.directory, how) if of_device else read_faults(each.directory) for each in devices]
    return Faults() if device is None else active[0]


def clear_faults(directory: Path, device: str | None = None, conditions: Iterable[str] | None = None) -> None:
    """Clear the conditions ``conditions`` (all of :data:`CONDITIONS` by default) of ``device``, or of the whole node.

    With every condition or ``driver-absent`` among them, the driver is loaded again as well. Counters stay: nothing
    resets them.

    Raises:
        InvalidRequest: no such device or condition.
        InvalidConfiguration: there is no simulated node in ``directory``.
        Unreadable: the control file of a device is malformed, and not all conditions are to be cleared.
    """
    names = CONDITIONS if conditions is None else tuple(conditions)
    devices = load_node(directory).devices if device is None else (find_sim_device(directory, device),)
    places = [each.directory for each in devices]
    unknown = {name for name in names if name not in CONDITIONS and name not in CONDITION_CODES}
    unknown -= {code for place in places if unknown for code in read_faults(place).conditions}
    if unknown:
        known = ", ".join((*CONDITIONS, *sorted(CONDITION_CODES)))
        raise InvalidRequest(
            f"There is no condition {min(unknown)!r}, and none of that name is active; the conditions are: {known}."
        )
    for place in places:
        update_faults(place, lambda faults: faults.without(names), repair=conditions is None)
    if "driver-absent" in names:
        _set_driver_absent(directory, False)


def find_sim_device(directory: Path, name: str) -> SimDevice:
    """Return the device called ``name``: its UUID, a unique prefix of it, or its index.

    Raises:
        InvalidRequest: there is none, or more than one.
        InvalidConfiguration: there is no simulated node in ``directory``.
    """
    devices = {each.device.id: each for each in load_node(directory).devices}
    return devices[find_device((each.device for each in devices.values()), name).id]


def _set_driver_absent(directory: Path, absent: bool) -> None:
    load_node(directory)  # raises where there is no node
    if absent or (directory / "control.json").exists():
        _update_node_control(directory, lambda node: replace(node, driver_absent=absent))


@dataclass(frozen=True, slots=True)
class _NodeControl:
    """State of the whole node. ``driver_absent`` is the value in the file, of any type."""

    driver_absent: object = False
    boots: int = 0


def _read_node_control(directory: Path) -> _NodeControl:
    path = directory / "control.json"
    document = read_json_if_exists(path)
    if document is None:
        return _NodeControl()
    times = document.get("boots", 0)
    if not isinstance(times, int) or isinstance(times, bool) or times < 0:
        raise Unreadable(f"{path}: 'boots' is invalid ({times!r}).")
    return _NodeControl(document.get("driver_absent"), times)


def _update_node_control(directory: Path, update: Callable[[_NodeControl], _NodeControl]) -> None:
    """Read, change and replace the node's file; a malformed one is replaced by a valid one."""
    with _only_writer(directory):
        try:
            before = _read_node_control(directory)
        except Unreadable:
            before = _NodeControl()
        write_json(directory / "control.json", asdict(update(before)))


@contextmanager
def _only_writer(place: Path) -> Iterator[None]:
    """Hold the lock on the directory itself: it needs no file, and cannot be left behind."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _check(name: str, value: float | None, lowest: float, highest: float, hint: str) -> None:
    if value is not None and not lowest <= value <= highest:
        raise InvalidRequest(f"{name} {value} is out of range ({lowest:g} to {highest:g}): {hint}.")
