"""What is so of each device at present, and what its last scrub and its driver said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from scrubber.domain.evidence import Path, ScrubRecord, Step
from scrubber.domain.health import ADVERTISED, OPERATOR
from scrubber.domain.policy import Enforcement
from scrubber.domain.record import DeviceRecord
from scrubber.observability.metrics.facts import Shown
from scrubber.observability.metrics.labels import OTHER, Codes, measured, xid_label
from scrubber.observability.metrics.labels import field as field_of
from scrubber.observability.metrics.page import Present
from scrubber.ports.record import Event

__all__ = ["MOST_DEVICES", "MOST_XIDS", "DeviceMetrics"]

MOST_DEVICES: Final = 1024
"""Devices of which something is kept. Those that came first are forgotten: instances of GPUs are made and unmade."""
MOST_XIDS: Final = 16
"""XIDs of one device that are counted by number; further ones are counted together."""

_MODES: Final = tuple(sorted(Enforcement))


@dataclass(slots=True)
class _History:
    """What is kept of one device, beside its record."""

    xids: dict[str, float] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    steps: dict[tuple[str, str], float] = field(default_factory=dict)
    coverage: float | None = None
    rate: float | None = None


class DeviceMetrics:
    """The metrics that have a device.

    Attributes:
        members: the metrics.
    """

    def __init__(self, known: Codes) -> None:
        self._histories: dict[str, _History] = {}
        self._shown: Sequence[Shown] | None = None
        one = ("device",)
        self._state = Present(
            "scrubber_device_state", "1 for the state each device is in.", ("device", "hygiene", "health")
        )
        self._info = Present("scrubber_device_info", "1 for each device.", ("device", "index", "model"))
        self._offered = Present(
            "scrubber_device_offered", "1 while the kubelet is told that the device is healthy.", one
        )
        self._signal = Present(
            "scrubber_device_signal", "1 while something is off with the device, by code.", ("device", "code")
        )
        self._out = Present(
            "scrubber_quarantine_start_timestamp_seconds",
            "Since when a device has been out of service, by its cause and its way back.",
            ("device", "cause_class", "way_back"),
        )
        self._certificate = Present(
            "scrubber_certificate_issued_timestamp_seconds", "When the device's unused certificate was issued.", one
        )
        self._glass = Present(
            "scrubber_break_glass", "1 while a person has the device handed out whatever is known of it.", one
        )
        self._glass_end = Present("scrubber_break_glass_end_timestamp_seconds", "When that ends by itself.", one)
        self._enforcement = Present("scrubber_enforcement", "Devices, by how they are judged.", ("mode",))
        self._coverage = Present(
            "scrubber_memory_coverage_ratio",
            "Verified part of the device's memory, by the last slow path that cleared it.",
            one,
        )
        self._rate = Present(
            "scrubber_clear_rate_bytes_per_second", "How fast the last slow path cleared the device's memory.", one
        )
        self._steps = Present(
            "scrubber_last_scrub_step_duration_seconds",
            "How long the steps of the device's last slow path took.",
            ("device", "step", "verdict"),
        )
        self._xids = Present("scrubber_xids", "XIDs that devices showed, by number.", ("device", "code"), counter=True)
        self._seen = Present(
            "scrubber_xid_last_seen_timestamp_seconds",
            "When the device was last told to have shown an XID.",
            ("device", "code"),
        )
        self._by_record: tuple[tuple[Present, Callable[[Shown], Iterator[tuple[tuple[str, ...], float]]]], ...] = (
            (self._state, _state),
            (self._info, lambda each: iter([((each.device.index, each.device.model), 1.0)])),
            (self._offered, lambda each: iter([((), float(each.offered))])),
            (self._signal, lambda each: (((code,), 1.0) for code in _signals(each.record, known))),
            (self._out, lambda each: _out_of_service(each, known)),
            (self._certificate, _certificate),
            (self._glass, lambda each: iter([((), 1.0)] if each.record.glass is not None else ())),
            (self._glass_end, _glass_end),
        )
        self.members = (
            *(member for member, _ in self._by_record),
            *(self._enforcement, self._coverage, self._rate, self._steps, self._xids, self._seen),
        )
        self.show(())

    def show(self, devices: Sequence[Shown]) -> None:
        """Bring all series up to date: ``devices`` are all that there are, the others are shown no more.

        The very same sequence as before is taken to say the same.
        """
        if devices is not self._shown:
            self._shown = devices
            for member, series in self._by_record:
                member.series = {(each.device.id, *labels): value for each in devices for labels, value in series(each)}
            self._enforcement.series = {(mode,): sum(each.enforcement is mode for each in devices) for mode in _MODES}
        present = {each.device.id for each in devices}
        kept = [(device, each) for device, each in list(self._histories.items()) if device in present]
        self._coverage.series = {(device,): each.coverage for device, each in kept if each.coverage is not None}
        self._rate.series = {(device,): each.rate for device, each in kept if each.rate is not None}
        self._steps.series = {(device, *names): value for device, each in kept for names, value in each.steps.items()}
        # Copied first, each in one go: the loop's thread goes on counting.
        self._xids.series = {(device, code): times for device, each in kept for code, times in dict(each.xids).items()}
        self._seen.series = {(device, code): at for device, each in kept for code, at in dict(each.seen).items()}

    def signal(self, event: Event) -> None:
        """XIDs of one code that came since they were last told of."""
        code, new = xid_label(event.fields.get("code")), field_of(event, "new")
        if code is None or not new or event.device is None:
            return
        history = self._of(event.device)
        code = code if code in history.xids or len(history.xids) < MOST_XIDS else OTHER
        history.xids[code] = history.xids.get(code, 0.0) + new
        history.seen[code] = event.at

    def scrubbed(self, record: ScrubRecord) -> None:
        if record.path is not Path.SLOW:
            return
        history = self._of(record.device)
        history.steps = {(step.step.value, step.verdict.value): measured(step.seconds) or 0.0 for step in record.steps}
        memory = next((step.measured for step in record.steps if step.step is Step.MEMORY), {})
        total, verified = measured(memory.get("total_bytes")), measured(memory.get("verified_bytes"))
        if total and verified is not None:
            history.coverage = verified / total
        cleared, seconds = measured(memory.get("cleared_bytes")), measured(memory.get("clear_seconds"))
        if cleared and seconds:
            history.rate = cleared / seconds

    def _of(self, device: str) -> _History:
        history = self._histories.pop(device, None) or _History()
        self._histories[device] = history  # now the newest
        while len(self._histories) > MOST_DEVICES:
            del self._histories[next(iter(self._histories))]
        return history


def _state(each: Shown) -> Iterator[tuple[tuple[str, ...], float]]:
    yield (each.record.hygiene.value, each.record.health.value), 1.0


def _signals(record: DeviceRecord, known: Codes) -> set[str]:
    """Codes of what is off with a device: warnings that stand, and the cause for which it is out of service or suspect."""
    codes = {each.code for each in record.lasting} | ({record.cause.code} if record.cause is not None else set())
    return {known.cause_class(code) for code in codes} - {OPERATOR}


def _out_of_service(each: Shown, known: Codes) -> Iterator[tuple[tuple[str, ...], float]]:
    cause = each.record.cause
    if cause is not None and each.record.health not in ADVERTISED:
        yield (known.cause_class(cause.code), cause.way_back.value), cause.since


def _certificate(each: Shown) -> Iterator[tuple[tuple[str, ...], float]]:
    if each.record.certificate is not None:
        yield (), each.record.certificate.issued_at


def _glass_end(each: Shown) -> Iterator[tuple[tuple[str, ...], float]]:
    if each.record.glass is not None:
        yield (), each.record.glass.until
