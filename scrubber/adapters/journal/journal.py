"""One event, one log line, one movement of the metrics.

The promise: :meth:`StructlogJournal.tell` never raises. What it is told has already happened, and often is already
durable; a closed pipe at the other end of the log must not undo a hand-over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from structlog.typing import FilteringBoundLogger

from scrubber.adapters.journal.logging import timestamp
from scrubber.adapters.journal.metrics import Metrics
from scrubber.domain.policy import XidClass
from scrubber.ports.journal import Event

__all__ = ["StructlogJournal"]

_LEVELS: Final[Mapping[str, int]] = {
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
    """

    def __init__(self, *, registry: CollectorRegistry, logger: FilteringBoundLogger) -> None:
        self._metrics = Metrics(registry)
        self._logger = logger

    def tell(self, events: Sequence[Event]) -> None:
        """Write a line and move the metrics for each event. Never raises; a line that cannot be written is counted."""
        for event in events:
            self._metrics.count(event)
            try:
                self._logger.log(_level(event), event.name, **_line(event))
            except (OSError, ValueError):  # the stream is gone or closed
                self._metrics.line_lost()

    def devices(self, states: Iterable[tuple[str, str, str]]) -> None:
        """Show the present states: (device id, hygiene, health) of every device there is; the others are forgotten."""
        self._metrics.devices(states)

    def enforcement(self, devices: Iterable[tuple[str, str, bool]]) -> None:
        """Show how the devices are judged: (device id, enforcement, whether its glass is broken) of every one there is.

        The others are forgotten.
        """
        self._metrics.enforcement(devices)

    def ledger(self, ok: bool) -> None:
        """Show whether the ledger stores changes. Until it is told, the metric says that it does not."""
        self._metrics.ledger(ok)

    def audit_head(self, sequence: int, hash: str) -> None:
        """Show the last row of the audit trail, for whoever keeps it outside the node."""
        self._metrics.audit_head(sequence, hash)

    def key(self, key_id: str) -> None:
        """Show which key signs the certificates."""
        self._metrics.key(key_id)

    def children(self, abandoned: int) -> None:
        """Show how many child processes had to be abandoned since the start, those that died later included."""
        self._metrics.children(abandoned)


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
