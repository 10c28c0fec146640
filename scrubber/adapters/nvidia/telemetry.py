"""What NVIDIA's driver says about the health of devices: snapshots when asked, and events as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.questions import QuestionPool
from scrubber.adapters.nvidia.question import about, counts, gpu_of, optional_count, optional_text, texts
from scrubber.domain.device import Device
from scrubber.domain.telemetry import Signal, Snapshot

__all__ = ["Events", "NvidiaTelemetry", "UsageReader"]


class Events(Protocol):
    """What the driver reported by itself. XIDs are told once, as events; NVML has no call that lists them."""

    def xids(self, device: str) -> Mapping[int, int]:
        """XIDs that still stand for the device with this id, each with how often it was seen."""

    def unheard(self, device: str) -> str | None:
        """Why events of the device may go unseen at present: a sentence; None while they do not."""

    def inforom_corrupt(self, device: str) -> bool:
        """Whether the InfoROM of the device's GPU was found corrupt."""

    def listen(self) -> AsyncIterator[Signal]:
        """Signals from now on."""


class UsageReader(Protocol):
    """Who knows what it means that somebody uses a device."""

    async def held_by(self, device: Device, answer: Message) -> bool:
        """Whether anybody but named infrastructure holds ``device``, by the driver's answer to ``used``."""


class NvidiaTelemetry:
    """:class:`scrubber.ports.Telemetry` of NVML."""

    def __init__(self, questions: QuestionPool, events: Events, holders: UsageReader) -> None:
        self._questions = questions
        self._events = events
        self._holders = holders

    async def snapshot(self, device: Device) -> Snapshot:
        answer = await self._questions.ask(gpu_of(device), about(device, "snapshot"))
        conditions = texts(answer, "conditions")
        if (unheard := self._events.unheard(device.id)) is not None:
            conditions["events-unheard"] = unheard
        if self._events.inforom_corrupt(device.id):
            conditions["inforom-corrupt"] = "its checksums are wrong"
        return Snapshot(
            device.id,
            errors=dict(self._events.xids(device.id)),
            ecc_uncorrected=optional_count(answer, "ecc_uncorrected"),
            temperature_celsius=optional_count(answer, "temperature_celsius"),
            held=None if answer.get("processes") is None else await self._holders.held_by(device, answer),
            recovery=optional_text(answer, "recovery"),
            settings=texts(answer, "settings"),
            defaults=texts(answer, "defaults"),
            conditions=conditions,
            counters=counts(answer, "counters"),
        )

    def signals(self) -> AsyncIterator[Signal]:
        return self._events.listen()
