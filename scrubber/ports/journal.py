"""One event, three records: the audit row in the transaction, then the log line and the metric after the commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scrubber.domain.evidence import ScrubRecord

__all__ = ["Event", "Journal"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened and is worth remembering.

    Attributes:
        name: stable, dotted: ``handover.granted``, ``handover.refused``, ``scrub.finished``, ``health.quarantined`` …
        device: None for the node.
        actor: ``service``, ``plugin``, or ``uid:1000``.
        fields: JSON-able scalars only; seconds and bytes by suffix.
    """

    name: str
    at: float
    device: str | None = None
    scrub: str | None = None
    actor: str = "service"
    fields: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


class Journal(Protocol):
    def tell(self, events: Sequence[Event]) -> None:
        """Write log lines and move metrics for events that are already durable (or need not be). Never raises."""

    def scrubbed(self, record: ScrubRecord) -> None:
        """Move metrics for what the steps of a scrub did, once it is durable; its event is told apart. Never raises.

        The check of a hand-over that was granted is told here too, and has no event of its own.
        """
