"""The health of devices as NVIDIA's driver reports it: snapshots on request, and events as they occur."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from scrubber.adapters.children.driver_response import (
    counts,
    optional_count,
    optional_number,
    optional_text,
    texts,
)
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.nvidia.driver_requests import device_request, gpu_uuid
from scrubber.domain.device import Device
from scrubber.domain.telemetry import Signal, Snapshot

__all__ = ["DriverEvents", "NvidiaTelemetry", "UsageInterpreter"]


class DriverEvents(Protocol):
    """What the driver reported on its own initiative.

    It reports XIDs once, as events; NVML has no call that lists them.
    """

    def xids(self, device: str) -> Mapping[int, int]:
        """Return the XIDs that are not cleared for the device with this id, each with how often it was seen."""

    def event_stream_error(self, device: str) -> str | None:
        """Return the message why events of the device may be missed at present; None while they are not."""

    def inforom_corrupt(self, device: str) -> bool:
        """Whether the InfoROM of the device's GPU was found corrupt."""

    def listen(self) -> AsyncIterator[Signal]:
        """Return the signals from now on."""


class UsageInterpreter(Protocol):
    """Decides whether the driver's reply about usage means that a device is held."""

    async def usage_shows_holder(self, device: Device, answer: Message) -> bool:
        """Whether any process but named infrastructure holds ``device``, by the driver's reply to ``used``."""


class NvidiaTelemetry:
    """:class:`scrubber.ports.Telemetry` of NVML."""

    def __init__(self, driver_pool: RequestPool, events: DriverEvents, holders: UsageInterpreter) -> None:
        self._driver_pool = driver_pool
        self._events = events
        self._holders = holders

    async def snapshot(self, device: Device) -> Snapshot:
        answer = await self._driver_pool.request(gpu_uuid(device), device_request(device, "snapshot"))
        conditions = texts(answer, "conditions")
        if (stream_error := self._events.event_stream_error(device.id)) is not None:
            conditions["event-stream-lost"] = stream_error
        if self._events.inforom_corrupt(device.id):
            conditions["inforom-corrupt"] = "its checksums are wrong"
        return Snapshot(
            device.id,
            errors=dict(self._events.xids(device.id)),
            ecc_uncorrected=optional_count(answer, "ecc_uncorrected"),
            temperature_celsius=optional_number(answer, "temperature_celsius"),
            is_held=None if answer.get("processes") is None else await self._holders.usage_shows_holder(device, answer),
            recovery_action=optional_text(answer, "recovery"),
            settings=texts(answer, "settings"),
            defaults=texts(answer, "defaults"),
            conditions=conditions,
            counters=counts(answer, "counters"),
        )

    def signals(self) -> AsyncIterator[Signal]:
        return self._events.listen()
