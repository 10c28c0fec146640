"""The metrics of the service. What happened is counted from events alone, so that a dashboard and the audit trail
cannot disagree; what is so at present is told by the service.

Every label is bounded: a value that the code does not know is counted as ``other``, whatever an event says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scrubber.domain import errors
from scrubber.domain.evidence import Occasion, Outcome, Path
from scrubber.domain.handover import HandOver
from scrubber.domain.policy import Enforcement
from scrubber.domain.signals import SIGNALS
from scrubber.ports.journal import Event

__all__ = ["Metrics"]

OTHER: Final = "other"

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Seconds. The client's default ends at 10, where a slow path only begins."""

_EXEMPLAR_CHARACTERS = 128
"""OpenMetrics: all label names and values of an exemplar together."""

_KINDS = frozenset(HandOver)
_PATHS = frozenset(Path)
_OCCASIONS = frozenset(Occasion)
_OUTCOMES = frozenset(Outcome)
_USES = frozenset({"stranger", "unannounced", "foreign-assignment"})


def _codes(base: type[errors.ScrubberError]) -> frozenset[str]:
    """The codes of ``base`` and of every error of the house below it."""
    tree = (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, base))
    return frozenset(each.code for each in tree)


_REFUSALS = _codes(errors.ScrubberError) | {
    "breaker",
    "earlier-pod-lives",
    "foreign-assignment",
    "pod-unreadable",
    "reassigned",
    "scrub-held-up",
    "scrubbing",
    "sharing",
    "spent",
    "starting",
    "unassigned",
}
"""Every error's own code, and those that the engine gives instead where it can say more."""

_XID = "xid"
_CAUSES = _codes(errors.DeviceFault) | SIGNALS.keys() | {_XID, "operator"}
"""Every device fault's code, those of the one table of what goes wrong, and a person's word. All XIDs are one class."""

_XID_CODE = re.compile(rf"(?:{_XID}-)?([0-9]+)", re.ASCII)
_LARGEST_XID = 200
"""The catalogue of NVIDIA's ends below; a driver may say any number."""
_XIDS = frozenset(map(str, range(1, _LARGEST_XID + 1)))

_MOST_TENANTS = 64
"""Tenants that are counted by name in the life of one service: each is a series, and namespaces come and go."""

_HASH_DIGITS = 12

_STOPPED = frozenset({"resets", "soft"})
_MODES = frozenset(Enforcement)


def _one_of(known: frozenset[str], value: object, otherwise: str = OTHER) -> str:
    return str(value) if isinstance(value, str) and value in known else otherwise


def cause_class(code: object) -> str:
    """The bounded class of a cause: ``xid-95`` is ``xid``, any other known one is itself, the unheard-of ``other``."""
    if isinstance(code, str) and code.startswith(f"{_XID}-"):
        return _XID
    return _one_of(_CAUSES, code)


def _xid_label(code: object) -> str | None:
    """The number of an XID (``95`` or ``xid-95``), ``other`` for one that no catalogue has; None for another signal."""
    if isinstance(code, int) and not isinstance(code, bool):
        return str(code) if 1 <= code <= _LARGEST_XID else OTHER
    match = _XID_CODE.fullmatch(code) if isinstance(code, str) else None
    return None if match is None else _one_of(_XIDS, match[1])


def _measured(event: Event, name: str) -> float | None:
    """A field that is a number and not negative; None when it is absent or makes no sense (NaN, infinite)."""
    value = event.fields.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < 2.0**63 else None


class _Present(Collector):
    """What is so at present: series that are replaced as a whole, so that a scrape never sees half of a change."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self.series: Mapping[tuple[str, ...], float] = {}

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self.series.items():
            family.add_metric(labels, value)
        yield family


class _AuditHead(Collector):
    """The last row of the audit trail as two numbers of one row, whenever it is scraped.

    A float holds 53 bits: a number, unlike a label, makes no new series with each row.
    """

    def __init__(self) -> None:
        self.head = (0, 0)

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        sequence, hash48 = self.head
        yield GaugeMetricFamily(
            "scrubber_audit_head_sequence", "Rows that were ever written to the audit trail.", sequence
        )
        yield GaugeMetricFamily(
            "scrubber_audit_head_hash48",
            "First 48 bits of the hash of the audit trail's last row, as a number: 12 hexadecimal digits.",
            hash48,
        )


class Metrics:
    """All metrics of the service, in ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._handovers = Counter(
            "scrubber_handovers",
            "Hand-overs that were answered: granted, or the code of the refusal.",
            ("kind", "path", "outcome"),
            registry=registry,
        )
        self._handover_duration = Histogram(
            "scrubber_handover_duration_seconds",
            "How long a container start waited for each device: until the grant, or until the refusal.",
            ("path", "outcome"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._scrubs = Counter(
            "scrubber_scrubs", "Scrubs that ended.", ("path", "occasion", "outcome"), registry=registry
        )
        self._scrub_duration = Histogram(
            "scrubber_scrub_duration_seconds", "How long scrubs took.", ("path",), buckets=_BUCKETS, registry=registry
        )
        self._residue = Counter(
            "scrubber_residue_bytes",
            "Bytes of earlier tenants that audits found and scrubs cleared.",
            registry=registry,
        )
        self._leftovers = Counter(
            "scrubber_leftovers_ended", "Processes that outlived their pod and were ended.", registry=registry
        )
        self._quarantines = Counter(
            "scrubber_quarantines", "Devices taken out of service.", ("cause_class",), registry=registry
        )
        self._ungranted = Counter(
            "scrubber_ungranted_uses",
            "Uses of devices without a grant: of a stranger, unannounced by the kubelet, assigned by another plugin.",
            ("use",),
            registry=registry,
        )
        self._lost_lines = Counter("scrubber_log_lines_lost", "Log lines that could not be written.", registry=registry)
        self._ledger_ok = Gauge(
            "scrubber_ledger_ok", "1 while the ledger stores changes; 0 while it does not.", registry=registry
        )
        self._abandoned = Counter(
            "scrubber_children_abandoned", "Child processes that SIGKILL did not end in time.", registry=registry
        )
        self._policy_rejected = Gauge(
            "scrubber_policy_rejected",
            "1 while the policy's file is refused and an older one is in force.",
            registry=registry,
        )
        self._audit = _AuditHead()
        self._key = _Present("scrubber_signing_key_info", "1 for the key that signs certificates.", ("key_id",))
        self._told_abandoned = 0
        for cause in sorted(_CAUSES | {OTHER}):
            self._quarantines.labels(cause)
        for use in sorted(_USES | {OTHER}):
            self._ungranted.labels(use)
        self._xids = Counter("scrubber_xids", "XIDs that devices showed, by number.", ("code",), registry=registry)
        self._tenants: set[str] = set()
        self._tenant_quarantines = Counter(
            "scrubber_tenant_quarantines",
            "Devices taken out of service while one tenant had them, by tenant.",
            ("tenant_namespace",),
            registry=registry,
        )
        self._breaker = Gauge(
            "scrubber_breaker_open",
            "1 while the node's breaker stops what it names: resets by recoveries, quarantines for soft signals.",
            ("what",),
            registry=registry,
        )
        for what in sorted(_STOPPED):
            self._breaker.labels(what)
        self._states = _Present(
            "scrubber_device_state", "1 for the state each device is in.", ("device", "hygiene", "health")
        )
        self._glass = _Present(
            "scrubber_break_glass", "1 while a person has the device handed out whatever is known of it.", ("device",)
        )
        self._enforcement = _Present("scrubber_enforcement", "Devices, by how they are judged.", ("mode",))
        self.enforcement(())
        for collector in (self._states, self._glass, self._enforcement, self._key, self._audit):
            registry.register(collector)

    def devices(self, states: Iterable[tuple[str, str, str]]) -> None:
        """Replace the states shown: (device id, hygiene, health)."""
        self._states.series = {(str(device), str(hygiene), str(health)): 1 for device, hygiene, health in states}

    def enforcement(self, devices: Iterable[tuple[str, str, bool]]) -> None:
        """Replace how the devices are judged: (device id, enforcement, whether its glass is broken)."""
        now = tuple(devices)
        self._glass.series = {(str(device),): 1 for device, _, broken in now if broken}
        self._enforcement.series = {(mode,): sum(each == mode for _, each, _ in now) for mode in sorted(_MODES)}

    def line_lost(self) -> None:
        self._lost_lines.inc()

    def ledger(self, ok: bool) -> None:
        self._ledger_ok.set(int(ok))

    def audit_head(self, sequence: int, hash: str) -> None:
        self._audit.head = (sequence, int(hash[:_HASH_DIGITS] or "0", 16))

    def key(self, key_id: str) -> None:
        self._key.series = {(key_id,): 1}

    def children(self, abandoned: int) -> None:
        self._abandoned.inc(max(0, abandoned - self._told_abandoned))
        self._told_abandoned = max(abandoned, self._told_abandoned)

    def count(self, event: Event) -> None:
        """Move whatever ``event`` moves; most events move nothing. Never raises."""
        match event.name:
            case "handover.granted":
                self._handover(event, "granted")
            case "handover.refused":
                self._handover(event, _one_of(_REFUSALS, event.fields.get("code")))
            case "scrub.finished":
                self._scrub(event)
            case "policy.rejected" | "policy.accepted":
                self._policy_rejected.set(int(event.name == "policy.rejected"))
            case "use.ungranted":
                self._ungranted.labels(_one_of(_USES, event.fields.get("use"))).inc()
            case "leftover.ended":
                self._leftovers.inc()
            case "health.quarantined" if event.fields.get("cause") != "operator":
                self._quarantines.labels(cause_class(event.fields.get("cause"))).inc()
                self._blame(event.fields.get("tenant_namespace"))
            case "health.condemned":  # names a tenant only when it took the device out of his hands
                self._blame(event.fields.get("tenant_namespace"))
            case "health.signal":
                self._signal(event)
            case "breaker.opened" | "breaker.closed" if event.fields.get("what") in _STOPPED:
                self._breaker.labels(event.fields["what"]).set(int(event.name == "breaker.opened"))
            case "operator.quarantined":  # a person's quarantine is counted by this event alone
                self._quarantines.labels("operator").inc()

    def _signal(self, event: Event) -> None:
        code, new = _xid_label(event.fields.get("code")), _measured(event, "new")
        if code is not None and new:
            self._xids.labels(code).inc(new)

    def _blame(self, tenant: object) -> None:
        if not isinstance(tenant, str) or not tenant:
            return
        if len(self._tenants) < _MOST_TENANTS:
            self._tenants.add(tenant)
        self._tenant_quarantines.labels(tenant if tenant in self._tenants else OTHER).inc()

    def _handover(self, event: Event, outcome: str) -> None:
        kind = _one_of(_KINDS, event.fields.get("kind"), HandOver.UNKNOWN.value)
        path = _one_of(_PATHS, event.fields.get("path"), "none")
        self._handovers.labels(kind, path, outcome).inc()
        seconds = _measured(event, "seconds")
        if seconds is not None:
            self._handover_duration.labels(path, outcome).observe(seconds)

    def _scrub(self, event: Event) -> None:
        path = _one_of(_PATHS, event.fields.get("path"))
        occasion = _one_of(_OCCASIONS, event.fields.get("occasion"))
        self._scrubs.labels(path, occasion, _one_of(_OUTCOMES, event.fields.get("outcome"))).inc()
        self._residue.inc(_measured(event, "residue_bytes") or 0.0)
        exemplar = None if event.scrub is None else {"scrub_id": event.scrub}
        if exemplar is not None and sum(map(len, (*exemplar, *exemplar.values()))) > _EXEMPLAR_CHARACTERS:
            exemplar = None
        self._scrub_duration.labels(path).observe(_measured(event, "seconds") or 0.0, exemplar)
