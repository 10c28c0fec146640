"""One event, one log line, one movement of the metrics.

The promise: :meth:`StructlogJournal.record` never raises. What it is told has already happened, and often is already
durable; a closed pipe at the other end of the log must not undo a hand-over.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry
from structlog.contextvars import get_contextvars
from structlog.typing import FilteringBoundLogger

from scrubber.domain.evidence import ScrubRecord
from scrubber.domain.health.signal_table import ErrorClass, SignalTable
from scrubber.observability.log_context import CONTEXT_KEYS, call_without_context
from scrubber.observability.metrics.recorder import MetricsRecorder
from scrubber.ports.record import Event

__all__ = ["StructlogJournal"]

_LEVELS: Final[Mapping[str, int]] = {
    "audit.broken": logging.ERROR,
    "audit.unread": logging.WARNING,
    "breaker.opened": logging.ERROR,
    "certificate.voided": logging.WARNING,
    "device.touched": logging.WARNING,
    "eraser.orphan": logging.WARNING,
    "glass.broken": logging.ERROR,
    "glass.mended": logging.WARNING,
    "handover.refused": logging.WARNING,
    "health.condemned": logging.ERROR,
    "health.quarantined": logging.ERROR,
    "health.recovery-failed": logging.WARNING,
    "health.signal": logging.WARNING,
    "health.suspect": logging.WARNING,
    "leftover.ended": logging.WARNING,
    "leftover.pod-ended": logging.WARNING,
    "baseline.accepted": logging.WARNING,
    "key.created": logging.WARNING,
    "operator.quarantined": logging.WARNING,
    "operator.reset": logging.WARNING,
    "policy.rejected": logging.ERROR,
    "process.uninspected": logging.WARNING,
    "residue.unexplained": logging.ERROR,
    "stranger.ended": logging.WARNING,
    "tenant.blamed": logging.ERROR,
    "uninspected.ended": logging.WARNING,
    "use.ungranted": logging.WARNING,
}
"""What is louder than a note. Every other event, one with an unknown name included, is told at INFO."""

_HARMLESS: Final = frozenset({ErrorClass.IGNORE, ErrorClass.APPLICATION})
"""Classes of signals that say nothing about the device."""

_LOG_FIELD_NAMES: Final = {"tenant_namespace": "tenant"}
"""Fields that a line has under the name by which every line, of whatever event, is searched."""

_RESERVED_KEYS: Final = frozenset(
    {
        *("actor", "component", "device", "event", "exc_info", "level", "log_level", "scrub_id"),
        *("stack_info", "tenant", "timestamp", "traceback"),
    }
)
"""Keys of a line that an event's own fields must not overwrite."""


class StructlogJournal:
    """A :class:`scrubber.ports.record.Journal`.

    Args:
        registry: where the metrics live; no registry is shared behind the caller's back.
        logger: what lines are written with; it takes a time of their own, in wall-clock seconds, as ``timestamp``.
        signals: the codes that have metrics of their own.

    Attributes:
        metrics: for whoever knows what is so at present.
    """

    def __init__(self, *, registry: CollectorRegistry, logger: FilteringBoundLogger, signals: SignalTable) -> None:
        self.metrics = MetricsRecorder(registry, signals)
        self._logger = logger

    def record(self, events: Sequence[Event]) -> None:
        """Write a line and move the metrics for each event. Never raises; a line that cannot be written is counted."""
        for event in events:
            self.metrics.count(event)
            call_without_context(_unrelated_context_keys(event, get_contextvars()), partial(self._write, event))

    def _write(self, event: Event) -> None:
        try:
            self._logger.log(_level(event), event.name, **_log_fields(event))
        except (OSError, ValueError):  # the stream is gone or closed
            self.metrics.service.count_lost_line()

    def record_scrub(self, scrub: ScrubRecord) -> None:
        """Move the metrics for what the steps of a scrub did. Never raises."""
        self.metrics.record_scrub(scrub)


def _level(event: Event) -> int:
    if event.name == "health.signal" and event.fields.get("class") in _HARMLESS:
        return logging.INFO
    return _LEVELS.get(event.name, logging.INFO)


def _unrelated_context_keys(event: Event, bound: Mapping[str, object]) -> Collection[str]:
    """What is bound and says nothing about ``event``.

    Nothing that is bound is about another device, or the node. And a tenant who asks for a device has not done what is
    found out about it meanwhile: only what the hand-over itself comes to is told with who asked.
    """
    if bound.get("device", event.device) != event.device:
        return CONTEXT_KEYS
    return () if "scrub_id" in bound or event.name.startswith("handover.") else ("tenant",)


def _log_fields(event: Event) -> dict[str, object]:
    """What the event itself says, which wins over what is bound: its own tenant also where that is nobody."""
    line: dict[str, object] = {"timestamp": event.at}
    if event.device is not None:
        line["device"] = event.device
    if event.scrub is not None:
        line["scrub_id"] = event.scrub
    line["actor"] = event.actor
    for name, value in event.fields.items():
        line[_LOG_FIELD_NAMES.get(name) or (f"field_{name}" if name in _RESERVED_KEYS else name)] = value
    return line
