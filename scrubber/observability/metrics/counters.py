"""Counters and histograms from events and scrub records: hand-overs, quarantines, scrubs.

The outcome of a scrub is counted from its event, as in the audit log. The results of its steps are taken from its
record; the checks of a hand-over's fast path are steps as well, of a record without such an event.
"""

from __future__ import annotations

from typing import Final

from scrubber.domain.evidence import (
    Outcome,
    PathKind,
    ScrubRecord,
    ScrubTrigger,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.states import OPERATOR_CAUSE
from scrubber.observability.log_context import current_trace_id
from scrubber.observability.metrics.create import create_counter, create_histogram
from scrubber.observability.metrics.labels import (
    OTHER,
    REFUSAL_CODES,
    KnownCodes,
    bounded_label,
    exemplar,
    non_negative_number,
    numeric_field,
)
from scrubber.observability.metrics.page import MetricsPage
from scrubber.observability.registry import service_metrics as declared
from scrubber.ports.record import Event

__all__ = ["MAX_TENANTS", "HandoverMetrics", "QuarantineMetrics", "ScrubMetrics"]

_KINDS = frozenset(HandOverKind)
_PATHS = frozenset(PathKind)
_NO_PATH: Final = "none"
_GRANTED: Final = "granted"


# See docs/decisions/0037-metrics.md.
class HandoverMetrics:
    """The metrics of hand-overs."""

    def __init__(self, page: MetricsPage) -> None:
        self._handovers = create_counter(declared.HANDOVERS, page.library_registry)
        self._duration = create_histogram(declared.HANDOVER_DURATION, page.library_registry)
        for path in PathKind:
            self._duration.labels(path.value, _GRANTED)
            for kind in HandOverKind:
                self._handovers.labels(kind.value, path.value, _GRANTED)
        for code in sorted(REFUSAL_CODES):
            self._handovers.labels(HandOverKind.UNKNOWN.value, _NO_PATH, code)

    def on_granted(self, event: Event) -> None:
        kind = bounded_label(_KINDS, event.fields.get("kind"), HandOverKind.UNKNOWN.value)
        self._count_result(kind, bounded_label(_PATHS, event.fields.get("path"), _NO_PATH), _GRANTED, event)

    def on_refused(self, event: Event) -> None:
        """Count a refusal. It has neither kind nor path, because it may come before either is known."""
        self._count_result(
            HandOverKind.UNKNOWN.value, _NO_PATH, bounded_label(REFUSAL_CODES, event.fields.get("code")), event
        )

    def _count_result(self, kind: str, path: str, outcome: str, event: Event) -> None:
        self._handovers.labels(kind, path, outcome).inc()
        seconds = numeric_field(event, "duration_seconds")
        if seconds is not None:
            self._duration.labels(path, outcome).observe(seconds, exemplar(event.scrub, current_trace_id()))


MAX_TENANTS: Final = 64
"""Limit of tenants counted by name during the life of one service: each is a series, and namespaces come and go."""
_MAX_UNBLAMED_TENANTS: Final = 32
"""Limit of tenants that get a series at 0 at their first grant, so that their first quarantine is visible as a step.
The other names are reserved for tenants that cause one.
"""


class QuarantineMetrics:
    """The metrics of quarantines."""

    def __init__(self, page: MetricsPage, codes: KnownCodes) -> None:
        self._codes = codes
        self._quarantines = create_counter(declared.QUARANTINES, page.library_registry)
        self._by_tenant = create_counter(declared.TENANT_QUARANTINES, page.library_registry)
        self._tenants: set[str] = set()
        for cause in sorted(codes.causes | {OTHER}):
            self._quarantines.labels(cause)

    def on_quarantined(self, event: Event) -> None:
        """Count a quarantine, except by an operator, which :meth:`on_operator_quarantine` counts."""
        if event.fields.get("cause") != OPERATOR_CAUSE:
            self._quarantines.labels(self._codes.cause_class(event.fields.get("cause"))).inc()
            self.on_tenant_blamed(event)

    def on_operator_quarantine(self, event: Event) -> None:
        self._quarantines.labels(OPERATOR_CAUSE).inc()

    def on_granted(self, event: Event) -> None:
        tenant = _tenant(event)
        if tenant and len(self._tenants) < _MAX_UNBLAMED_TENANTS:
            self._tenants.add(tenant)
            self._by_tenant.labels(tenant)

    def on_tenant_blamed(self, event: Event) -> None:
        tenant = _tenant(event)
        if not tenant:
            return
        if len(self._tenants) < MAX_TENANTS:
            self._tenants.add(tenant)
        self._by_tenant.labels(tenant if tenant in self._tenants else OTHER).inc()


def _tenant(event: Event) -> str:
    tenant = event.fields.get("tenant")
    return tenant.encode(errors="replace").decode() if isinstance(tenant, str) else ""


_TRIGGERS = frozenset(ScrubTrigger)
_OUTCOMES = frozenset(Outcome)

_KILLED_BY_EVENT: Final = {
    "leftover.process.killed": "leftover-process",
    "leftover.pod.killed": "leftover-pod",
    "unauthorized.process.killed": "unauthorized-process",
    "uninspected.process.killed": "uninspected-process",
    "eraser.orphan.found": "orphaned-eraser",
}
"""Event → what was killed."""

_METHODS: Final = {"the simulated": "sim", "nvidia-smi": "nvidia-smi"}
"""Beginning of a plan's method → label."""
_RESETS = frozenset(declared.RESETS.label_values("outcome"))


class ScrubMetrics:
    """The metrics of scrubs."""

    def __init__(self, page: MetricsPage, codes: KnownCodes) -> None:
        self._codes = codes
        counted = page.library_registry
        self._scrubs = create_counter(declared.SCRUBS, counted)
        self._duration = create_histogram(declared.SCRUB_DURATION, counted)
        self._steps = create_histogram(declared.STEP_DURATION, counted)
        self._findings = create_counter(declared.FINDINGS, counted)
        self._cleared = create_counter(declared.CLEARED_BYTES, counted)
        self._verified = create_counter(declared.VERIFIED_BYTES, counted)
        self._residue = create_counter(declared.RESIDUE_BYTES, counted)
        self._kills = create_counter(declared.KILLS, counted)
        self._resets = create_counter(declared.RESETS, counted)
        for path in PathKind:
            for trigger in ScrubTrigger:
                for outcome in Outcome:
                    self._scrubs.labels(path.value, trigger.value, outcome.value)
        for finding in sorted(codes.findings):
            self._findings.labels(*map(str, finding))
        for target in _KILLED_BY_EVENT.values():
            self._kills.labels(target)
        for method in (*_METHODS.values(), OTHER):
            for result in sorted(_RESETS | {OTHER}):
                self._resets.labels(method, result)

    def on_finished(self, event: Event) -> None:
        labels = (
            bounded_label(_PATHS, event.fields.get("path")),
            bounded_label(_TRIGGERS, event.fields.get("trigger")),
            bounded_label(_OUTCOMES, event.fields.get("outcome")),
        )
        self._scrubs.labels(*labels).inc()
        self._residue.inc(numeric_field(event, "residue_bytes") or 0.0)
        seconds = numeric_field(event, "duration_seconds")
        if seconds is not None:  # unknown if the service ended during the scrub
            self._duration.labels(*labels).observe(seconds, exemplar(event.scrub, current_trace_id()))

    def on_killed(self, event: Event) -> None:
        """Count a kill, unless the orphan of an eraser could not be killed."""
        if event.fields.get("killed", True) is not False:
            self._kills.labels(_KILLED_BY_EVENT[event.name]).inc()

    def record_scrub(self, record: ScrubRecord) -> None:
        named = exemplar(record.id, current_trace_id())
        for step in record.steps:
            seconds = non_negative_number(step.seconds) or 0.0
            self._steps.labels(step.step.value, record.path.value, step.verdict.value).observe(seconds, named)
            for finding in step.findings:
                self._findings.labels(*map(str, self._codes.finding_labels(finding))).inc()
            if step.step is Step.RESET:
                self._reset(step)
            if step.step is Step.MEMORY:
                self._cleared.inc(non_negative_number(step.measured.get("cleared_bytes")) or 0.0)
                self._verified.inc(non_negative_number(step.measured.get("verified_bytes")) or 0.0)

    def _reset(self, step: StepResult) -> None:
        words = str(step.measured.get("method"))
        method = next((label for begin, label in _METHODS.items() if words.startswith(begin)), OTHER)
        outcome = "ok"
        if step.verdict is not Verdict.PASSED:
            severe = sorted(step.findings, key=lambda finding: finding.severity is Severity.NOTE)
            outcome = bounded_label(_RESETS, severe[0].code if severe else None)
        self._resets.labels(method, outcome).inc()
