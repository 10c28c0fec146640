"""Faults and telemetry of a simulated device: what a command writes, and what the driver then says.

An XID is two things: an event, counted for good, and a condition that stands until it is cleared or the device is
reset. Promise: a reader sees the old file or the new one, never half of it, and two writers do not lose each other's
change. The questions child imports this module.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from scrubber.adapters.sim.layout import SimDevice, load, read_json, write_json
from scrubber.domain.device import find_device
from scrubber.domain.errors import InvalidRequest, Unreadable

__all__ = ["CONDITIONS", "Faults", "change", "clear", "driver_absent", "fault", "read", "read_all"]

CONDITIONS = (
    "xid",
    "ecc",
    "lost",
    "stuck",
    "slow-clear",
    "wont-clear",
    "reset",
    "driver-absent",
    "ghost",
    "unkillable",
    "temperature",
    "recovery",
)
"""What :func:`clear` can lift, by name."""

_ATTRIBUTES = {"xid": "xids_standing", "reset": "reset_fails"}
_USUAL_TEMPERATURE = 41
_RECOVERIES = ("none", "reset", "reboot")


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with a device. The default is: nothing.

    Attributes:
        xids_seen: XID → how often it was raised since the node was made; never goes down.
        xids_standing: XIDs whose condition was not lifted yet.
        ecc: uncorrected ECC errors.
        lost: the device fell off the bus: every question is answered so.
        stuck: no question about it is ever answered.
        slow_clear: seconds that clearing all of its memory takes at least; 0 for as fast as it goes.
        wont_clear: bytes that were cleared come back before they are verified.
        reset_fails: a reset is tried and fails.
        ghost: it is reported held, and no process can be found.
        unkillable: whoever holds it cannot be ended.
        recovery: what the driver asks for: ``none``, ``reset``, ``reboot``.
    """

    xids_seen: Mapping[int, int] = field(default_factory=dict)
    xids_standing: frozenset[int] = frozenset()
    ecc: int = 0
    lost: bool = False
    stuck: bool = False
    slow_clear: float = 0.0
    wont_clear: bool = False
    reset_fails: bool = False
    ghost: bool = False
    unkillable: bool = False
    temperature: int = _USUAL_TEMPERATURE
    recovery: str = "none"

    def with_xid(self, code: int) -> Faults:
        """One more of XID ``code``, standing."""
        seen = {**self.xids_seen, code: self.xids_seen.get(code, 0) + 1}
        return replace(self, xids_seen=seen, xids_standing=self.xids_standing | {code})

    def after_reset(self) -> Faults:
        """What a successful reset leaves: it lifts XIDs, ECC errors, ghosts and the driver's own request."""
        return replace(self, xids_standing=frozenset(), ecc=0, recovery="none", ghost=False)

    def without(self, conditions: Iterable[str]) -> Faults:
        """Lift ``conditions`` (names of :data:`CONDITIONS`); how often an XID was seen stays."""
        usual = Faults()
        lifted: dict[str, object] = {}
        for name in conditions:
            attribute = _ATTRIBUTES.get(name, name.replace("-", "_"))
            if name != "driver-absent":  # the node's, in a file of its own
                lifted[attribute] = getattr(usual, attribute)
        return replace(self, **lifted)  # type: ignore[arg-type]

    def joined(self, parent: Faults) -> Faults:
        """What an instance suffers: its own faults and those of the GPU that it is cut from."""
        codes = self.xids_standing | parent.xids_standing
        seen = {
            code: self.xids_seen.get(code, 0) + parent.xids_seen.get(code, 0)
            for code in {*self.xids_seen, *parent.xids_seen}
        }
        return Faults(
            xids_seen=seen,
            xids_standing=codes,
            ecc=self.ecc + parent.ecc,
            lost=self.lost or parent.lost,
            stuck=self.stuck or parent.stuck,
            slow_clear=max(self.slow_clear, parent.slow_clear),
            wont_clear=self.wont_clear or parent.wont_clear,
            reset_fails=self.reset_fails or parent.reset_fails,
            ghost=self.ghost or parent.ghost,
            unkillable=self.unkillable or parent.unkillable,
            temperature=max(self.temperature, parent.temperature),
            recovery=self.recovery if self.recovery != "none" else parent.recovery,
        )

    def to_json(self) -> dict[str, object]:
        document = {name: getattr(self, name) for name in _PLAIN}
        document["xids"] = {
            str(code): {"seen": seen, "standing": code in self.xids_standing}
            for code, seen in sorted(self.xids_seen.items())
        }
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, object], where: str) -> Faults:
        """The faults in ``document``; keys that are absent mean that nothing is wrong.

        Raises:
            Unreadable: a value is of the wrong kind; ``where`` names the file.
        """
        values = {name: document[name] for name in _PLAIN if name in document}
        for name, value in values.items():
            if not isinstance(value, _PLAIN[name]) or (isinstance(value, bool) and _PLAIN[name] is not bool):
                raise Unreadable(f"{where}: {name!r} makes no sense ({value!r}).")
            if name in _RANGES and not _RANGES[name][0] <= value <= _RANGES[name][1]:  # type: ignore[operator]
                lowest, highest = _RANGES[name]
                raise Unreadable(f"{where}: {name!r} is out of range ({lowest:g} to {highest:g}).")
        if values.get("recovery", "none") not in _RECOVERIES:
            raise Unreadable(f"{where}: 'recovery' must be one of {', '.join(_RECOVERIES)}.")
        xids = document.get("xids", {})
        try:
            seen = {int(code): int(each["seen"]) for code, each in xids.items()}  # type: ignore[attr-defined]
            standing = frozenset(int(code) for code, each in xids.items() if each["standing"])  # type: ignore[attr-defined]
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise Unreadable(f"{where}: 'xids' makes no sense.") from error
        if not all(1 <= code <= _HIGHEST_XID and 0 <= times <= _MOST_COUNTED for code, times in seen.items()):
            raise Unreadable(f"{where}: 'xids' holds a number out of range.")
        return cls(xids_seen=seen, xids_standing=standing, **values)  # type: ignore[arg-type]


_PLAIN: Mapping[str, type | tuple[type, ...]] = {
    "ecc": int,
    "lost": bool,
    "stuck": bool,
    "slow_clear": (int, float),
    "wont_clear": bool,
    "reset_fails": bool,
    "ghost": bool,
    "unkillable": bool,
    "temperature": int,
    "recovery": str,
}

_HIGHEST_XID = 9999
_MOST_COUNTED = 1 << 53
_RANGES: Mapping[str, tuple[float, float]] = {
    "ecc": (0, _MOST_COUNTED),
    "slow_clear": (0, 3600),
    "temperature": (-273, 10_000),
}
"""What such a number can be at all; what lies outside would not even fit into the ledger."""


def read(place: Path) -> Faults:
    """The faults written for the device in directory ``place`` alone.

    Raises:
        Unreadable: the control file makes no sense.
    """
    path = place / "control.json"
    return Faults.from_json(read_json(path), str(path)) if path.exists() else Faults()


def read_all(places: Iterable[Path]) -> Faults:
    """The faults of a device whose control directories are ``places``: its own, then its parent's."""
    first, *rest = places
    faults = read(first)
    for place in rest:
        faults = faults.joined(read(place))
    return faults


def change(place: Path, how: Callable[[Faults], Faults], *, mend: bool = False) -> Faults:
    """Read, change and replace the control file of the device in ``place``; one writer at a time.

    Raises:
        Unreadable: the file makes no sense; with ``mend`` a fresh one takes its place instead.
    """
    with _only_writer(place):
        try:
            faults = how(read(place))
        except Unreadable:
            if not mend:
                raise
            faults = Faults()
        write_json(place / "control.json", faults.to_json())
    return faults


def driver_absent(directory: Path) -> bool:
    """Whether the node's driver is gone. A node file that makes no sense is no driver."""
    path = directory / "control.json"
    return path.exists() and read_json(path).get("driver_absent") is not False


def fault(
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
) -> Faults:
    """Add faults to ``device`` (UUID, unique prefix or index; an instance's parent too); answers what now stands.

    ``ecc`` adds that many errors; ``slow_clear`` is the seconds that clearing the whole memory takes at least;
    ``driver_absent`` concerns the node and needs no device.

    Raises:
        InvalidRequest: no such device, a value out of its range, or nothing to do.
        BadConfiguration: there is no simulated node in ``directory``.
    """
    _check("xid", xid, 1, 999, "an XID is a number such as 31, 79 or 95")
    _check("ecc", ecc, 1, 1_000_000, "it is how many uncorrected errors are added")
    _check("slow_clear", slow_clear, 0.001, 3600, "it is the seconds that clearing takes at least")
    _check("temperature", temperature, -40, 150, "it is in degrees Celsius")
    if reset not in (None, "ok", "fail"):
        raise InvalidRequest(f"reset {reset!r} is unknown: write ok or fail.")
    if recovery not in (None, *_RECOVERIES):
        raise InvalidRequest(f"recovery {recovery!r} is unknown: write none, reset or reboot.")

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
        )

    flags = (lost, stuck, wont_clear, ghost, unkillable)
    of_device = any(flags) or any(each is not None for each in (xid, ecc, slow_clear, reset, temperature, recovery))
    if not of_device and not driver_absent:
        raise InvalidRequest(f"Say what should go wrong: {', '.join(CONDITIONS)}.")
    found = _find(directory, device) if device is not None else None
    if of_device and found is None:
        raise InvalidRequest("Say which device: its UUID, a unique prefix of it, or its index.")
    if driver_absent:
        _set_driver_absent(directory, True)
    if found is None:
        return Faults()
    return change(found.directory, how) if of_device else read(found.directory)


def clear(directory: Path, device: str | None = None, which: Iterable[str] | None = None) -> None:
    """Lift the conditions ``which`` (all of :data:`CONDITIONS` by default) of ``device``, or of the whole node.

    With every condition or ``driver-absent`` among them, the driver is back as well.

    Raises:
        InvalidRequest: no such device or condition.
        BadConfiguration: there is no simulated node in ``directory``.
    """
    names = CONDITIONS if which is None else tuple(which)
    for name in names:
        if name not in CONDITIONS:
            raise InvalidRequest(f"No condition is called {name!r}; there are: {', '.join(CONDITIONS)}.")
    places = [each.directory for each in load(directory).devices] if device is None else []
    if device is not None:
        places = [_find(directory, device).directory]
    for place in places:
        change(place, lambda faults: faults.without(names), mend=which is None)
    if "driver-absent" in names:
        _set_driver_absent(directory, False)


def _find(directory: Path, wanted: str) -> SimDevice:
    devices = {each.device.id: each for each in load(directory).devices}
    return devices[find_device((each.device for each in devices.values()), wanted).id]


def _set_driver_absent(directory: Path, absent: bool) -> None:
    load(directory)  # refuses what is no node
    with _only_writer(directory):
        if absent or (directory / "control.json").exists():
            write_json(directory / "control.json", {"driver_absent": absent})


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
