"""The simulated driver's reports about a device: snapshots from a child, and signals when its control file changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TypeGuard

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import SimDevice
from scrubber.adapters.sim.signal_watch import SignalWatch
from scrubber.domain.device import Device
from scrubber.domain.errors import Unreadable
from scrubber.domain.telemetry import Signal, Snapshot

__all__ = ["DRIVER_MODULE", "SimTelemetry", "device_request", "texts"]

DRIVER_MODULE = "scrubber.adapters.sim.driver"


class SimTelemetry:
    """:class:`scrubber.ports.Telemetry` of the control files."""

    def __init__(self, inventory: SimInventory, driver_pool: RequestPool, watch: SignalWatch) -> None:
        self._inventory = inventory
        self._driver_pool = driver_pool
        self._watch = watch

    async def snapshot(self, device: Device) -> Snapshot:
        answer = await self._driver_pool.request(
            device.id, device_request(self._inventory.find_sim_device(device), "snapshot")
        )
        recovery = answer.get("recovery")
        if not isinstance(recovery, str | None):
            raise Unreadable("The driver's response is invalid: 'recovery' is not a string.")
        return Snapshot(
            device.id,
            errors=_errors(answer),
            ecc_uncorrected=_count(answer, "ecc_uncorrected"),
            temperature_celsius=_count(answer, "temperature_celsius"),
            recovery_action=recovery,
            settings=texts(answer, "settings"),
            defaults=texts(answer, "defaults"),
            conditions=texts(answer, "conditions"),
            counters=_counts(answer, "counters"),
        )

    def signals(self) -> AsyncIterator[Signal]:
        return self._watch.listen()


def device_request(found: SimDevice, name: str, **more: object) -> Message:
    """Build a request to the driver's child about one device."""
    device = found.device
    return {"ask": name, "place": str(found.directory), "index": device.index, "id": device.id, **more}


def texts(answer: Message, key: str) -> Mapping[str, str]:
    """Return the object of texts under ``key``.

    Raises:
        Unreadable: there is none.
    """
    found = _object(answer, key)
    valid = {name: text for name, text in found.items() if isinstance(text, str)}
    if len(valid) != len(found):
        raise Unreadable(f"The driver's response is invalid: {key!r} contains a value that is not a string.")
    return valid


def _object(answer: Message, key: str) -> dict[str, object]:
    found = answer.get(key)
    if not isinstance(found, dict):
        raise Unreadable(f"The driver's response is invalid: {key!r} is not an object.")
    return found


def _counts(answer: Message, key: str) -> Mapping[str, int]:
    found = _object(answer, key)
    counted = {name: times for name, times in found.items() if _is_number(times)}
    if len(counted) != len(found):
        raise Unreadable(f"The driver's response is invalid: {key!r} contains a value that is not a count.")
    return counted


def _errors(answer: Message) -> Mapping[int, int]:
    try:
        return {int(code): times for code, times in _counts(answer, "xids").items()}
    except ValueError as error:
        raise Unreadable("The driver's response is invalid: 'xids' contains a key that is not an XID.") from error


def _count(answer: Message, key: str) -> int:
    found = answer.get(key)
    if not _is_number(found):
        raise Unreadable(f"The driver's response is invalid: {key!r} is not a number.")
    return found


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
