"""What NVIDIA's driver says about the health of devices: snapshots when asked, and events as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from scrubber.adapters.children.questions import QuestionPool
from scrubber.adapters.nvidia.question import about, counts, gpu_of, optional_count, optional_text, texts
from scrubber.domain.device import Device
from scrubber.domain.telemetry import Signal, Snapshot

__all__ = ["Events", "NvidiaTelemetry"]


class Events(Protocol):
    """What the driver reported by itself. XIDs are told once, as events; NVML has no call that lists them."""

    def xids(self, device: str) -> Mapping[int, int]:
        """XIDs that still stand for the device with this id, each with how often it was seen."""

    def listen(self) -> AsyncIterator[Signal]:
        """Signals from now on."""


class NvidiaTelemetry:
    """:class:`scrubber.ports.Telemetry` of NVML."""

    def __init__(self, questions: QuestionPool, events: Events) -> None:
        self._questions = questions
        self._events = events

    async def snapshot(self, device: Device) -> Snapshot:
        answer = await self._questions.ask(gpu_of(device), about(device, "snapshot"))
        return Snapshot(
            device.id,
            xids=dict(self._events.xids(device.id)),
            ecc_uncorrected=optional_count(answer, "ecc_uncorrected"),
            temperature_celsius=optional_count(answer, "temperature_celsius"),
            used_bytes=optional_count(answer, "used_bytes"),
            recovery=optional_text(answer, "recovery"),
            settings=texts(answer, "settings"),
            defaults=texts(answer, "defaults"),
            conditions=texts(answer, "conditions"),
            counters=counts(answer, "counters"),
        )

    def signals(self) -> AsyncIterator[Signal]:
        return self._events.listen()
