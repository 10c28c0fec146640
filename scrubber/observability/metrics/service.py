"""Metrics of the service itself: build, queues, ledger and audit log, child processes, and its view of the kubelet."""

from __future__ import annotations

import platform
from typing import Final

from scrubber.observability.metrics.create import create_counter, create_gauge, create_histogram
from scrubber.observability.metrics.labels import OTHER, non_negative_number
from scrubber.observability.metrics.page import MetricsPage, SnapshotMetric
from scrubber.observability.metrics.status import ServiceStatus
from scrubber.observability.registry import service_metrics as declared
from scrubber.ports.record import Event

__all__ = ["ServiceMetrics"]

_POLICY_DIGITS: Final = 12
_HASH_PARTS: Final = 8
_PART_DIGITS: Final = 8
_BREAKER_LABELS = frozenset(declared.BREAKER_OPEN.label_values("breaker"))
_CHILDREN: Final = declared.CHILD_PROCESS_STARTS.label_values("child")
"""Last name components of the modules that run in child processes."""


class ServiceMetrics:
    """The metrics without a device label.

    Attributes:
        members: metrics of current state.
    """

    def __init__(self, page: MetricsPage) -> None:
        self._create_event_metrics(page)
        self._handovers_waiting = SnapshotMetric(declared.HANDOVERS_WAITING)
        self._eraser_slots = SnapshotMetric(declared.ERASER_SLOTS)
        self._erasers_waiting = SnapshotMetric(declared.ERASER_QUEUE_LENGTH)
        self._children = SnapshotMetric(declared.CHILD_PROCESS_STARTS)
        self._abandoned = SnapshotMetric(declared.CHILD_PROCESSES_ABANDONED)
        self._ledger_ok = SnapshotMetric(declared.LEDGER_OK)
        self._ledger_bytes = SnapshotMetric(declared.LEDGER_SIZE)
        # Sequence and whole hash of one row, consistent within one scrape. A sample is a float with 53 bits of
        # precision, hence the parts; the hash as a label would create a new series for each row.
        self._head = SnapshotMetric(declared.AUDIT_HEAD_SEQUENCE)
        self._hash = SnapshotMetric(declared.AUDIT_HEAD_HASH)
        self._intact = SnapshotMetric(declared.AUDIT_INTACT)
        self._verified = SnapshotMetric(declared.AUDIT_VERIFIED)
        self._kubelet = SnapshotMetric(declared.KUBELET_TRUSTED)
        self._restarts = SnapshotMetric(declared.KUBELET_RESTARTS)
        self._policy = SnapshotMetric(declared.POLICY_INFO)
        self._key = SnapshotMetric(declared.SIGNING_KEY_INFO)
        self._build = SnapshotMetric(declared.BUILD_INFO)
        self._yielded = SnapshotMetric(declared.NODE_YIELDED)
        self._waiting_for_driver = SnapshotMetric(declared.WAITING_FOR_DRIVER)
        self._yield_start = SnapshotMetric(declared.YIELD_START)
        self._agent_pause = SnapshotMetric(declared.AGENT_PAUSE)
        self.members = (
            *(self._handovers_waiting, self._eraser_slots, self._erasers_waiting, self._children, self._abandoned),
            *(self._ledger_ok, self._ledger_bytes, self._head, self._hash, self._intact, self._verified),
            *(self._kubelet, self._restarts, self._policy, self._key, self._build, self._yielded, self._yield_start),
            *(self._agent_pause, self._waiting_for_driver),
        )
        self.update(ServiceStatus())

    def _create_event_metrics(self, page: MetricsPage) -> None:
        counted = page.library_registry
        self._lost_lines = create_counter(declared.LOG_LINES_LOST, counted)
        self._policy_rejected = create_gauge(declared.POLICY_REJECTED, counted)
        self._breaker = create_gauge(declared.BREAKER_OPEN, counted)
        for what in sorted(_BREAKER_LABELS):
            self._breaker.labels(what)
        self._commits = create_histogram(declared.LEDGER_COMMIT_DURATION, counted)
        self._failures = create_counter(declared.LEDGER_FAILURES, counted)

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
        self._yielded.set(int(status.yielded))
        self._waiting_for_driver.set(int(status.waiting_for_driver))
        self._yield_start.series = {(requester.value,): since for requester, since in status.yield_starts.items()}
        self._agent_pause.set(status.agent_pause_seconds)
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
