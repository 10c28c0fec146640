"""Hand-overs, counted and timed."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Histogram

from scrubber.adapters.journal.labels import BUCKETS, REFUSALS, field, one_of
from scrubber.adapters.journal.page import Page
from scrubber.domain.evidence import Path
from scrubber.domain.handover import HandOver
from scrubber.ports.journal import Event

__all__ = ["HandOvers"]

_KINDS = frozenset(HandOver)
_PATHS = frozenset(Path)
_NO_PATH: Final = "none"
_GRANTED: Final = "granted"

_WAITS = tuple(sorted((*BUCKETS, 15, 20, 25)))
"""A start waits for 25 s at most: without bounds in between 11 s and 24 s would read the same."""


class HandOvers:
    """The metrics of hand-overs."""

    def __init__(self, page: Page) -> None:
        self._answers = Counter(
            "scrubber_handovers",
            "Hand-overs that were answered: granted, or the code of the refusal.",
            ("kind", "path", "outcome"),
            registry=page.counted,
        )
        self._duration = Histogram(
            "scrubber_handover_duration_seconds",
            "How long a container start waited for each device: until the grant, or until the refusal.",
            ("path", "outcome"),
            buckets=_WAITS,
            registry=page.counted,
        )
        for path in Path:
            self._duration.labels(path.value, _GRANTED)
            for kind in HandOver:
                self._answers.labels(kind.value, path.value, _GRANTED)
        for code in sorted(REFUSALS):
            self._answers.labels(HandOver.UNKNOWN.value, _NO_PATH, code)

    def granted(self, event: Event) -> None:
        kind = one_of(_KINDS, event.fields.get("kind"), HandOver.UNKNOWN.value)
        self._answered(kind, one_of(_PATHS, event.fields.get("path"), _NO_PATH), _GRANTED, event)

    def refused(self, event: Event) -> None:
        """A refusal has neither kind nor path: it may come before either is known."""
        self._answered(HandOver.UNKNOWN.value, _NO_PATH, one_of(REFUSALS, event.fields.get("code")), event)

    def _answered(self, kind: str, path: str, outcome: str, event: Event) -> None:
        self._answers.labels(kind, path, outcome).inc()
        seconds = field(event, "seconds")
        if seconds is not None:
            self._duration.labels(path, outcome).observe(seconds)
