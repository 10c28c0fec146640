"""Metrics of each device: its current state, its last scrub and the signals of its driver."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from scrubber.domain.assignment import Claim
from scrubber.domain.evidence import PathKind, ScrubRecord, Step
from scrubber.domain.policy import Enforcement
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import ADVERTISED, OPERATOR_CAUSE, Hygiene
from scrubber.observability.metrics.labels import OTHER, KnownCodes, bounded_label, non_negative_number, xid_label
from scrubber.observability.metrics.labels import numeric_field as field_of
from scrubber.observability.metrics.page import SnapshotMetric
from scrubber.observability.metrics.status import DeviceStatus
from scrubber.observability.registry import service_metrics as declared
from scrubber.ports.record import Event

__all__ = ["MAX_DEVICES", "MAX_HOLDERS_PER_DEVICE", "MAX_XIDS_PER_DEVICE", "DeviceMetrics"]

MAX_DEVICES: Final = 1024
"""Limit of devices with stored history. The least recently used are dropped: MIG instances are created and destroyed.
"""
MAX_XIDS_PER_DEVICE: Final = 16
"""Limit of XIDs of one device that are counted by number; further ones are counted together."""

MAX_HOLDERS_PER_DEVICE: Final = 8
"""Limit of pods and units that are shown for one device, those that have held it longest."""

_MODES: Final = tuple(sorted(Enforcement))
_USES: Final = declared.UNAUTHORIZED_USES.label_values("use")
_KNOWN_USES: Final = frozenset(_USES)
_VERIFICATIONS: Final = declared.FAILED_VERIFICATIONS.label_values("code")


@dataclass(slots=True)
class _DeviceHistory:
    """Stored history of one device, beside its record."""

    xids: dict[str, float] = field(default_factory=dict)
    xid_last_seen: dict[str, float] = field(default_factory=dict)
    steps: dict[tuple[str, str], float] = field(default_factory=dict)
    coverage: float | None = None
    clear_rate: float | None = None
    unauthorized_uses: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_USES, 0.0))
    failed_verifications: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_VERIFICATIONS, 0.0))
    unexplained_residue: float = 0.0


_NO_EVENTS: Final = _DeviceHistory()


class DeviceMetrics:
    """The metrics with a device label.

    Attributes:
        members: the metrics.
    """

    def __init__(self, codes: KnownCodes) -> None:
        self._histories: OrderedDict[str, _DeviceHistory] = OrderedDict()
        self._devices: Sequence[DeviceStatus] | None = None
        self._state = SnapshotMetric(declared.DEVICE_STATE)
        self._info = SnapshotMetric(declared.DEVICE_INFO)
        self._advertised = SnapshotMetric(declared.DEVICE_ADVERTISED)
        self._signal = SnapshotMetric(declared.DEVICE_CONDITION)
        self._quarantine_start = SnapshotMetric(declared.QUARANTINE_START)
        self._held_start = SnapshotMetric(declared.DEVICE_HELD_START)
        self._certificate = SnapshotMetric(declared.CERTIFICATE_ISSUED)
        self._break_glass = SnapshotMetric(declared.BREAK_GLASS_ACTIVE)
        self._break_glass_end = SnapshotMetric(declared.BREAK_GLASS_EXPIRY)
        self._enforcement = SnapshotMetric(declared.DEVICES)
        self._claims = SnapshotMetric(declared.CLAIMS)
        self._jobs = SnapshotMetric(declared.JOBS)
        self._coverage = SnapshotMetric(declared.MEMORY_COVERAGE)
        self._rate = SnapshotMetric(declared.CLEAR_RATE)
        self._steps = SnapshotMetric(declared.LAST_SCRUB_STEP_DURATION)
        self._xids = SnapshotMetric(declared.XIDS)
        self._xid_last_seen = SnapshotMetric(declared.XID_LAST_SEEN)
        self._unauthorized_uses = SnapshotMetric(declared.UNAUTHORIZED_USES)
        self._failed_verifications = SnapshotMetric(declared.FAILED_VERIFICATIONS)
        self._unexplained_residue = SnapshotMetric(declared.UNEXPLAINED_RESIDUE_BYTES)
        self._by_record: tuple[
            tuple[SnapshotMetric, Callable[[DeviceStatus], Iterator[tuple[tuple[str, ...], float]]]], ...
        ] = (
            (self._state, _state),
            (self._info, lambda each: iter([((each.device.index, each.device.model), 1.0)])),
            (self._advertised, lambda each: iter([((), float(each.advertised))])),
            (self._signal, lambda each: (((code,), 1.0) for code in _signals(each.record, codes))),
            (self._quarantine_start, lambda each: _out_of_service(each, codes)),
            (self._held_start, _held),
            (self._certificate, _certificate),
            (self._break_glass, lambda each: iter([((), 1.0)] if each.record.break_glass is not None else ())),
            (self._break_glass_end, _break_glass_end),
        )
        self.members = (
            *(member for member, _ in self._by_record),
            *(
                self._enforcement,
                self._claims,
                self._jobs,
                self._coverage,
                self._rate,
                self._steps,
                self._xids,
                self._xid_last_seen,
                self._unauthorized_uses,
                self._failed_verifications,
                self._unexplained_residue,
            ),
        )
        self.update(())

    def update(self, devices: Sequence[DeviceStatus]) -> None:
        """Update all series. ``devices`` is complete: series of other devices are removed.

        The identical sequence object means that nothing has changed.
        """
        if devices is not self._devices:
            self._devices = devices
            for member, series in self._by_record:
                member.series = {(each.device.id, *labels): value for each in devices for labels, value in series(each)}
            self._claims.series = _by_end(_claims(devices, jobs=False), "prepared", "releasing")
            self._jobs.series = _by_end(_claims(devices, jobs=True), "running", "ending")
            self._enforcement.series = {(mode,): sum(each.enforcement is mode for each in devices) for mode in _MODES}
        present = {each.device.id for each in devices}
        kept = [(device, each) for device, each in list(self._histories.items()) if device in present]
        self._coverage.series = {(device,): each.coverage for device, each in kept if each.coverage is not None}
        self._rate.series = {(device,): each.clear_rate for device, each in kept if each.clear_rate is not None}
        self._steps.series = {(device, *names): value for device, each in kept for names, value in each.steps.items()}
        # Copied first, each in one step: the event loop's thread keeps counting.
        self._xids.series = {(device, code): times for device, each in kept for code, times in dict(each.xids).items()}
        self._xid_last_seen.series = {
            (device, code): at for device, each in kept for code, at in dict(each.xid_last_seen).items()
        }
        # Of every device, at 0 too: an increase from 0 is visible, the beginning of a series is not.
        counted = [(device, self._histories.get(device, _NO_EVENTS)) for device in present]
        self._unauthorized_uses.series = {
            (device, use): times for device, each in counted for use, times in dict(each.unauthorized_uses).items()
        }
        self._failed_verifications.series = {
            (device, code): times for device, each in counted for code, times in each.failed_verifications.items()
        }
        self._unexplained_residue.series = {(device,): each.unexplained_residue for device, each in counted}

    def on_signal(self, event: Event) -> None:
        """Count the XIDs of one code that occurred since the last report."""
        code, new = xid_label(event.fields.get("code")), field_of(event, "new")
        if code is None or not new or event.device is None:
            return
        history = self._history_of(event.device)
        code = code if code in history.xids or len(history.xids) < MAX_XIDS_PER_DEVICE else OTHER
        history.xids[code] = history.xids.get(code, 0.0) + new
        history.xid_last_seen[code] = event.at

    def on_unauthorized_use(self, event: Event) -> None:
        if event.device is not None:
            uses = self._history_of(event.device).unauthorized_uses
            use = bounded_label(_KNOWN_USES, event.fields.get("use"))
            uses[use] = uses.get(use, 0.0) + 1

    def on_unexplained_residue(self, event: Event) -> None:
        if event.device is not None:
            self._history_of(event.device).unexplained_residue += field_of(event, "residue_bytes") or 0.0

    def record_scrub(self, record: ScrubRecord) -> None:
        if record.path is not PathKind.SLOW:
            return
        history = self._history_of(record.device)
        history.steps = {
            (step.step.value, step.verdict.value): non_negative_number(step.seconds) or 0.0 for step in record.steps
        }
        for code in {finding.code for step in record.steps for finding in step.findings} & set(_VERIFICATIONS):
            history.failed_verifications[code] += 1
        memory = next((step.measured for step in record.steps if step.step is Step.MEMORY), {})
        total, verified = (
            non_negative_number(memory.get("total_bytes")),
            non_negative_number(memory.get("verified_bytes")),
        )
        if total and verified is not None:
            history.coverage = verified / total
        cleared, seconds = (
            non_negative_number(memory.get("cleared_bytes")),
            non_negative_number(memory.get("clear_seconds")),
        )
        if cleared and seconds:
            history.clear_rate = cleared / seconds

    def _history_of(self, device: str) -> _DeviceHistory:
        # Never absent for a moment: the thread of a scrape would show 0, and Prometheus would count everything again.
        history = self._histories.setdefault(device, _DeviceHistory())
        self._histories.move_to_end(device)
        while len(self._histories) > MAX_DEVICES:
            self._histories.popitem(last=False)
        return history


def _claims(devices: Sequence[DeviceStatus], *, jobs: bool) -> list[Claim]:
    """Return the claims, or the jobs, that have devices, once for each device."""
    claims = (grant.claim for each in devices for grant in each.record.open_grants if grant.claim is not None)
    return [each for each in claims if (each.manager is not None) is jobs]


def _by_end(claims: Sequence[Claim], before: str, after: str) -> dict[tuple[str, ...], float]:
    """Return the number of ``claims`` before and after their release: one is prepared as long as it is on any device."""
    prepared = {each.uid for each in claims if each.is_prepared}
    releasing = {each.uid for each in claims} - prepared
    return {(before,): float(len(prepared)), (after,): float(len(releasing))}


def _state(each: DeviceStatus) -> Iterator[tuple[tuple[str, ...], float]]:
    yield (each.record.hygiene.value, each.record.health.value), 1.0


def _signals(record: DeviceRecord, known: KnownCodes) -> set[str]:
    """Return the codes of the device's problems: current warnings, and the cause of being out of service or suspect."""
    codes = {each.code for each in record.warnings} | ({record.cause.code} if record.cause is not None else set())
    return {known.cause_class(code) for code in codes} - {OPERATOR_CAUSE}


def _out_of_service(each: DeviceStatus, codes: KnownCodes) -> Iterator[tuple[tuple[str, ...], float]]:
    cause = each.record.cause
    if cause is not None and each.record.health not in ADVERTISED:
        yield (codes.cause_class(cause.code), cause.recovery_method.value), cause.since


def _held(each: DeviceStatus) -> Iterator[tuple[tuple[str, ...], float]]:
    """Since when each pod or unit without a grant keeps the device from being scrubbed."""
    if each.record.hygiene is Hygiene.IN_USE:
        return iter(())
    since: dict[tuple[str, ...], float] = {}
    for holder in each.holders:
        if holder.is_blocking:
            labels = (holder.code, holder.owner.label)
            since[labels] = min(holder.since, since.get(labels, holder.since))
    return iter(sorted(since.items(), key=lambda item: item[1])[:MAX_HOLDERS_PER_DEVICE])


def _certificate(each: DeviceStatus) -> Iterator[tuple[tuple[str, ...], float]]:
    if each.record.certificate is not None:
        yield (), each.record.certificate.issued_at


def _break_glass_end(each: DeviceStatus) -> Iterator[tuple[tuple[str, ...], float]]:
    if each.record.break_glass is not None:
        yield (), each.record.break_glass.until
