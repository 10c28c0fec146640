"""One event, one log line, one movement of the metrics.

The promise: :meth:`StructlogJournal.tell` never raises. What it is told has already happened, and often is already
durable; a closed pipe at the other end of the log must not undo a hand-over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from structlog.typing import FilteringBoundLogger

from scrubber.adapters.journal.logging import timestamp
from scrubber.adapters.journal.metrics import Metrics
from scrubber.domain.evidence import ScrubRecord
from scrubber.domain.policy import XidClass
from scrubber.ports.journal import Event

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
    "residue.unexplained": logging.ERROR,
    "stranger.ended": logging.WARNING,
    "tenant.blamed": logging.ERROR,
    "use.ungranted": logging.WARNING,
}
"""What is louder than a note. Every other event, one with an unknown name included, is told at INFO."""

_HARMLESS: Final = frozenset({XidClass.IGNORE, XidClass.APPLICATION})
"""Classes of signals that say nothing about the device."""

_OURS: Final = frozenset(
    {"actor", "device", "event", "exc_info", "level", "log_level", "scrub", "stack_info", "timestamp"}
)
"""Keys of a line that an event's own fields must not overwrite."""


class StructlogJournal:
    """A :class:`scrubber.ports.journal.Journal`.

    Args:
        registry: where the metrics live; no registry is shared behind the caller's back.
        logger: what lines are written with; see :func:`configure_logging`.

    Attributes:
        metrics: for whoever knows what is so at present.
    """

    def __init__(self, *, registry: CollectorRegistry, logger: FilteringBoundLogger) -> None:
        self.metrics = Metrics(registry)
        self._logger = logger

    def tell(self, events: Sequence[Event]) -> None:
        """Write a line and move the metrics for each event. Never raises; a line that cannot be written is counted."""
        for event in events:
            self.metrics.count(event)
            try:
                self._logger.log(_level(event), event.name, **_line(event))
            except (OSError, ValueError):  # the stream is gone or closed
                self.metrics.service.line_lost()

    def scrubbed(self, record: ScrubRecord) -> None:
        """Move the metrics for what the steps of a scrub did. Never raises."""
        self.metrics.scrubbed(record)


def _level(event: Event) -> int:
    if event.name == "health.signal" and event.fields.get("class") in _HARMLESS:
        return logging.INFO
    return _LEVELS.get(event.name, logging.INFO)


def _line(event: Event) -> dict[str, object]:
    line: dict[str, object] = {"timestamp": timestamp(event.at)}
    if event.device is not None:
        line["device"] = event.device
    if event.scrub is not None:
        line["scrub"] = event.scrub
    line["actor"] = event.actor
    for name, value in event.fields.items():
        # JSON has no word for a number that is not one.
        shown = str(value) if isinstance(value, float) and not math.isfinite(value) else value
        line[f"field_{name}" if name in _OURS else name] = shown
    return line
