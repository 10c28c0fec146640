"""Metrics of the service itself: build, queues, ledger and audit log, child processes, and its view of the kubelet."""

from __future__ import annotations

import platform
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from scrubber.observability.metrics.labels import BUCKETS, OTHER, non_negative_number
from scrubber.observability.metrics.page import MetricsPage, SnapshotMetric
from scrubber.observability.metrics.status import ServiceStatus
from scrubber.ports.record import Event

__all__ = ["ServiceMetrics"]

_POLICY_DIGITS: Final = 12
_HASH_PARTS: Final = 8
_PART_DIGITS: Final = 8
_BREAKER_LABELS = frozenset({"resets", "soft-quarantines"})
_CHILDREN: Final = ("driver", "events", "walker", "zygote", "eraser", "diagnosis")
"""Last name components of the modules that run in child processes."""


class ServiceMetrics:
    """The metrics without a device label.

    Attributes:
        members: metrics of current state.
    """

    def __init__(self, page: MetricsPage) -> None:
        self._create_event_metrics(page)
        self._handovers_waiting = SnapshotMetric(
            "scrubber_handovers_waiting", "Container starts waiting for a hand-over."
        )
        self._eraser_slots = SnapshotMetric("scrubber_eraser_slots", "Slots of the eraser pool, by state.", ("state",))
        self._erasers_waiting = SnapshotMetric("scrubber_eraser_queue_length", "Scrubs waiting for an eraser slot.")
        self._children = SnapshotMetric(
            "scrubber_child_process_starts",
            "Child processes started, including replacements.",
            ("child",),
            counter=True,
        )
        self._abandoned = SnapshotMetric(
            "scrubber_child_processes_abandoned",
            "Child processes that did not end in time after SIGKILL.",
            counter=True,
        )
        self._ledger_ok = SnapshotMetric("scrubber_ledger_ok", "1 while the ledger can be written, else 0.")
        self._ledger_bytes = SnapshotMetric(
            "scrubber_ledger_size_bytes", "Size of the ledger's database and its write-ahead log."
        )
        # Sequence and whole hash of one row, consistent within one scrape. A sample is a float with 53 bits of
        # precision, hence the parts; the hash as a label would create a new series for each row.
        self._head = SnapshotMetric("scrubber_audit_head_sequence", "Sequence of the last row of the audit log.")
        self._hash = SnapshotMetric(
            "scrubber_audit_head_hash",
            "SHA-256 of the last row of the audit log, in eight parts of 32 bits; part 0 is the most significant.",
            ("part",),
        )
        self._intact = SnapshotMetric(
            "scrubber_audit_intact", "1 if the whole audit log was intact at its last verification, else 0."
        )
        self._verified = SnapshotMetric(
            "scrubber_audit_verified_timestamp_seconds", "Time of the last verification of the audit log."
        )
        self._kubelet = SnapshotMetric("scrubber_kubelet_trusted", "1 while the kubelet's lists of pods are trusted.")
        self._restarts = SnapshotMetric(
            "scrubber_kubelet_restarts", "Restarts of the kubelet that the service detected.", counter=True
        )
        self._policy = SnapshotMetric(
            "scrubber_policy_info",
            "1 for the policy in force, labelled with its name and digest.",
            ("policy", "digest"),
        )
        self._key = SnapshotMetric(
            "scrubber_signing_key_info", "1 for the key that signs certificates, labelled with its id.", ("key_id",)
        )
        self._build = SnapshotMetric(
            "scrubber_build_info",
            "1, labelled with the versions of the service, its backend, the driver and Python.",
            ("version", "backend", "driver", "python"),
        )
        self.members = (
            *(self._handovers_waiting, self._eraser_slots, self._erasers_waiting, self._children, self._abandoned),
            *(self._ledger_ok, self._ledger_bytes, self._head, self._hash, self._intact, self._verified),
            *(self._kubelet, self._restarts, self._policy, self._key, self._build),
        )
        self.update(ServiceStatus())

    def _create_event_metrics(self, page: MetricsPage) -> None:
        counted = page.library_registry
        self._lost_lines = Counter("scrubber_log_lines_lost", "Log lines that could not be written.", registry=counted)
        self._policy_rejected = Gauge(
            "scrubber_policy_rejected",
            "1 while the policy file is rejected and the previous policy stays in force.",
            registry=counted,
        )
        self._breaker = Gauge(
            "scrubber_breaker_open",
            "1 while the node's circuit breaker is open: for resets by recoveries, or for quarantines on soft signals. Updated every 5 s.",
            ("breaker",),
            registry=counted,
        )
        for what in sorted(_BREAKER_LABELS):
            self._breaker.labels(what)
        self._commits = Histogram(
            "scrubber_ledger_commit_duration_seconds",
            "Duration of ledger commits, including the wait for the ledger's thread.",
            buckets=BUCKETS,
            registry=counted,
        )
        self._failures = Counter("scrubber_ledger_failures", "Ledger commits that failed.", registry=counted)

    def update(self, status: ServiceStatus) -> None:
        """Update all series."""
        self._handovers_waiting.set(status.handovers_waiting)
        self._eraser_slots.series = {("busy",): status.erasers_busy, ("free",): status.erasers_free}
        self._erasers_waiting.set(status.erasers_waiting)
        starts: dict[tuple[str, ...], float] = {(child,): 0 for child in (*_CHILDREN, OTHER)}
        for module, times in status.child_starts.items():
            name = module.rpartition(".")[2]
            starts[(name if name in _CHILDREN else OTHER,)] += times
        self._children.series = starts
        self._abandoned.set(status.children_abandoned)
        self._ledger_ok.set(int(status.ledger_ok))
        self._ledger_bytes.set(status.ledger_bytes)
        head = status.audit_head
        self._head.set(None if head is None else head.sequence)
        self._hash.series = {} if head is None else _parts(head.hash)
        self._kubelet.set(int(status.kubelet_trusted))
        self._restarts.set(status.kubelet_restarts)
        self._policy.series = (
            {} if status.policy is None else {(status.policy[0], status.policy[1][:_POLICY_DIGITS]): 1}
        )

    def set_build_info(self, *, version: str, backend: str, driver: str) -> None:
        """Set the version, backend and driver of this service."""
        self._build.series = {(version, backend, driver, platform.python_version()): 1}

    def set_signing_key(self, key_id: str) -> None:
        """Set the key that signs the certificates."""
        self._key.series = {(key_id,): 1}

    def set_audit_result(self, *, intact: bool, at: float) -> None:
        """Set the result of verifying the whole audit log at ``at`` (wall-clock seconds); absent before the first one."""
        self._intact.set(int(intact))
        self._verified.set(at)

    def observe_commit(self, seconds: float, stored: bool) -> None:
        """Record an attempt of the ledger to store a change."""
        self._commits.observe(non_negative_number(seconds) or 0.0)
        if not stored:
            self._failures.inc()

    def count_lost_line(self) -> None:
        self._lost_lines.inc()

    def on_policy_event(self, event: Event) -> None:
        self._policy_rejected.set(int(event.name == "policy.rejected"))

    def on_breaker_event(self, event: Event) -> None:
        what = event.fields.get("breaker")
        if what in _BREAKER_LABELS:
            self._breaker.labels(what).set(int(event.name == "breaker.opened"))


def _parts(digest: str) -> dict[tuple[str, ...], float]:
    """Return the hexadecimal ``digest``, which is empty before the first row, as eight numbers."""
    digits = digest.zfill(_HASH_PARTS * _PART_DIGITS)
    starts = range(0, len(digits), _PART_DIGITS)
    return {(str(part),): int(digits[at : at + _PART_DIGITS], 16) for part, at in enumerate(starts)}
