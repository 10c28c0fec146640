"""Turns each event into one log line and one update of the metrics.

Invariant: :meth:`StructlogJournal.record` never raises. Its events have already happened, and often are already
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
from scrubber.observability.registry.events import EVENTS, Component
from scrubber.ports.record import Event

__all__ = ["StructlogJournal"]

_LEVELS: Final[Mapping[str, int]] = {
    each.name: each.levels[0] for each in EVENTS if Component.SERVICE in each.components and each.levels
}
"""The usual level of each event. One with an unknown name is logged at INFO."""

_HARMLESS: Final = frozenset({ErrorClass.IGNORE, ErrorClass.APPLICATION})
"""Classes of signals that imply no problem of the device."""

_RESERVED_KEYS: Final = frozenset(
    {
        *("actor", "component", "device", "event", "exc_info", "level", "log_level", "scrub_id"),
        *("stack_info", "timestamp", "traceback"),
    }
)
"""Keys of a log line that an event's own fields must not overwrite."""


class StructlogJournal:
    """A :class:`scrubber.ports.record.Journal`.

    Args:
        registry: registry of the metrics; no global registry is used.
        logger: writes the lines; it accepts the time of the event, in wall-clock seconds, as ``timestamp``.
        signals: the codes that have metrics of their own.

    Attributes:
        metrics: the metrics, for modules that report current state.
    """

    def __init__(self, *, registry: CollectorRegistry, logger: FilteringBoundLogger, signals: SignalTable) -> None:
        self.metrics = MetricsRecorder(registry, signals)
        self._logger = logger

    def record(self, events: Sequence[Event]) -> None:
        """Log each event and update the metrics. Never raises; a line that cannot be written is counted."""
        for event in events:
            self.metrics.count(event)
            call_without_context(_unrelated_context_keys(event, get_contextvars()), partial(self._write, event))

    def _write(self, event: Event) -> None:
        try:
            self._logger.log(_level(event), event.name, **_log_fields(event))
        except (OSError, ValueError):  # the stream is closed or its reader is gone
            self.metrics.service.count_lost_line()

    def record_scrub(self, scrub: ScrubRecord) -> None:
        """Update the metrics for the steps of a scrub. Never raises."""
        self.metrics.record_scrub(scrub)


def _level(event: Event) -> int:
    if event.name == "health.errors-reported" and event.fields.get("class") in _HARMLESS:
        return logging.INFO
    return _LEVELS.get(event.name, logging.INFO)


def _unrelated_context_keys(event: Event, bound: Mapping[str, object]) -> Collection[str]:
    """Return the context keys that do not apply to ``event``.

    No key applies to an event of another device, or of the node. The tenant applies only within a scrub and to the
    result of its own hand-over: a tenant that requests a device did not cause what is detected about it meanwhile.
    """
    if bound.get("device", event.device) != event.device:
        return CONTEXT_KEYS
    return () if "scrub_id" in bound or event.name.startswith("handover.") else ("tenant",)


def _log_fields(event: Event) -> dict[str, object]:
    """Return the fields of the event itself, which override the context; so does an empty tenant."""
    line: dict[str, object] = {"timestamp": event.at}
    if event.device is not None:
        line["device"] = event.device
    if event.scrub is not None:
        line["scrub_id"] = event.scrub
    line["actor"] = event.actor
    for name, value in event.fields.items():
        line[f"field_{name}" if name in _RESERVED_KEYS else name] = value
    return line
