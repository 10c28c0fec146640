"""The service's metrics in a separate registry, and records to feed them."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.device import Device
from scrubber.domain.evidence import (
    Finding,
    Outcome,
    PathKind,
    ScrubRecord,
    ScrubTrigger,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.policy import Enforcement
from scrubber.domain.record import DeviceRecord
from scrubber.observability.metrics.recorder import MetricsRecorder
from scrubber.observability.metrics.status import DeviceStatus, ServiceStatus
from scrubber.ports.record import Event

__all__ = ["NOON", "Measures", "event", "finding", "memory", "scrub", "shown"]

NOON = 1_767_182_400.25
Value = str | int | float | bool | None


class Measures:
    """The metrics, and the values that they expose."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = MetricsRecorder(self.registry, NVIDIA_SIGNALS)
        self.facts = ServiceStatus()
        self.metrics.read_status = lambda: self.facts

    def __call__(self, *events: Event) -> None:
        for each in events:
            self.metrics.count(each)

    def show(self, *devices: DeviceStatus, **facts: object) -> None:
        """Set the complete list of devices and the other fields of the status."""
        self.facts = replace(self.facts, devices=devices, **facts)  # type: ignore[arg-type]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of a series; None if there is no such series."""
        return self.registry.get_sample_value(name, labels)

    def labels(self, name: str) -> list[dict[str, str]]:
        """Return the labels of every series of the sample ``name``."""
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        return [dict(sample.labels) for sample in samples if sample.name == name]

    def page(self, accept: str = "") -> str:
        """Return the page that Prometheus scrapes."""
        return self.metrics.page.render(accept)[1].decode()

    def series(self) -> int:
        """Return the number of series on the page: its lines that are not comments."""
        return sum(not line.startswith("#") for line in self.page().splitlines())


def event(name: str, **fields: Value) -> Event:
    return Event(name, NOON, "GPU-a", "S-1", fields=fields)


def shown(
    device: str = "GPU-a", record: DeviceRecord | None = None, *, offered: bool = True, observed: bool = False
) -> DeviceStatus:
    described = Device(device, "0", "A model", 1024)
    mode = Enforcement.OBSERVE if observed else Enforcement.ENFORCE
    return DeviceStatus(described, record or DeviceRecord(device), offered, mode)


def finding(step: Step, code: str, severity: Severity = Severity.FAULT) -> Finding:
    return Finding(step, code, severity, "A message.")


def memory(seconds: float = 1.0, **measured: Value) -> StepResult:
    return StepResult(Step.MEMORY, Verdict.PASSED, seconds, measured=measured)


def scrub(
    *steps: StepResult, device: str = "GPU-a", path: PathKind = PathKind.SLOW, id: str = "scrub-1"
) -> ScrubRecord:
    return ScrubRecord(id, device, path, ScrubTrigger.RELEASE, NOON, NOON + 1, Outcome.PASSED, tuple(steps))
