"""Events of the simulated driver: what a change of the node's files means, reported within milliseconds."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from scrubber.adapters.inotify import Inotify
from scrubber.adapters.signal_stream import SignalBroadcaster, SignalStream
from scrubber.adapters.sim import control
from scrubber.adapters.sim.faults import Faults
from scrubber.adapters.sim.layout import device_directories, load_node
from scrubber.domain.errors import InvalidConfiguration, ScrubberError, Unreadable
from scrubber.domain.telemetry import Signal

__all__ = ["SignalWatch", "fault_signals"]

_STRUCTURE = frozenset({"node.json", "device.json", "memory", "devices", "instances", ""})
_FAULTS = "control.json"
_DEBOUNCE_SECONDS = 0.005
"""Seconds after a change during which further changes are left in the kernel's queue.

Files that change a thousand times per second are read two hundred times, and no change is lost.
"""


def fault_signals(device: str, before: Faults | None, after: Faults | None) -> tuple[Signal, ...]:
    """Return the signals for ``device`` when its faults go from ``before`` to ``after``; None is a malformed file."""
    if before == after:
        return ()
    if before is None or after is None:
        return (Signal(device, "changed"),)
    raised = [
        Signal(device, "xid", code)
        for code, seen in sorted(after.xid_counts.items())
        if seen > before.xid_counts.get(code, 0)
    ]
    if after.ecc > before.ecc:
        raised.append(Signal(device, "ecc", after.ecc))
    if after.lost and not before.lost:
        raised.append(Signal(device, "lost"))
    return tuple(raised) or (Signal(device, "changed"),)


class SignalWatch:
    """Watches the node in ``directory`` from :meth:`start` to :meth:`close`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._inotify: Inotify | None = None
        self._signals = SignalBroadcaster()
        self._faults: dict[Path, Faults | None] = {}
        self._ids: dict[Path, str] = {}
        self._driver_absent = False
        self._debounce: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to watch; what is already wrong causes no event.

        Raises:
            InvalidConfiguration: the kernel has no watches left for this user.
        """
        try:
            self._inotify = Inotify()
            self._scan_all()
        except OSError as error:
            raise InvalidConfiguration(f"{self._directory} cannot be watched: {error}.") from error
        self._resume_reading()

    def close(self) -> None:
        """Stop watching; every stream ends."""
        if self._debounce is not None:
            self._debounce.cancel()
            self._debounce = None
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None
        self._signals.close()

    def listen(self) -> SignalStream:
        """Return the signals from now on."""
        return self._signals.subscribe()

    def _resume_reading(self) -> None:
        if self._inotify is not None:
            asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._handle_changes)

    def _handle_changes(self) -> None:
        if self._inotify is None:
            return
        changes = [
            (place, name)
            for place, name in dict.fromkeys(self._inotify.read())
            if name == _FAULTS or name in _STRUCTURE or name.isdigit()
        ]
        if not changes:  # a temporary file, which is about to replace one of these: the next change must not wait
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._inotify.fileno())
        self._debounce = loop.call_later(_DEBOUNCE_SECONDS, self._resume_reading)
        signals: list[Signal] = []
        if any(name in _STRUCTURE or name.isdigit() for _, name in changes):
            signals += self._scan_all()
        for place, name in changes:
            if name == _FAULTS:
                signals += self._scan_node() if place == self._directory else self._scan_device(place)
            elif name in ("device.json", "memory"):
                signals += [Signal(id_, "changed") for id_ in self._affected_ids(place)]
        self._signals.publish(signals)

    def _scan_all(self) -> list[Signal]:
        """Watch what exists now, and return signals for the changes since the last scan."""
        watched = [self._directory, self._directory / "devices"]
        places = [place for _, place in device_directories(self._directory)]
        for place in (*watched, *places, *(place / "instances" for place in places)):
            self._watch(place)
        before = dict(self._ids)
        with suppress(InvalidConfiguration):  # the inventory raises it for its caller
            self._ids.update((found.directory, found.device.id) for found in load_node(self._directory).devices)
        for place in set(self._ids) - set(places):
            del self._ids[place]
            self._faults.pop(place, None)
        signals = [] if self._ids == before else [Signal(None, "changed")]
        for place in places:
            signals += self._scan_device(place)
        return signals + self._scan_node()

    def _scan_device(self, place: Path) -> list[Signal]:
        before = self._faults.get(place, Faults())
        try:
            after: Faults | None = control.read_faults(place)
        except Unreadable:
            after = None
        self._faults[place] = after
        return [signal for id_ in self._affected_ids(place) for signal in fault_signals(id_, before, after)]

    def _scan_node(self) -> list[Signal]:
        before = self._driver_absent
        try:
            self._driver_absent = control.is_driver_absent(self._directory)
        except ScrubberError:
            self._driver_absent = True
        return [] if before == self._driver_absent else [Signal(None, "driver")]

    def _affected_ids(self, place: Path) -> list[str]:
        """Return the device in ``place``, or its instances: a fault of the GPU is a fault of each of them."""
        instances = [id_ for each, id_ in self._ids.items() if each.parent == place / "instances"]
        return instances or ([self._ids[place]] if place in self._ids else [])

    def _watch(self, place: Path) -> None:
        if self._inotify is not None:
            self._inotify.add(place)
