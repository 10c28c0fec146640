"""Use of one device by processes that were not granted it: how long its next scrub waits, and which events get a row.

Whoever can open a device can void its certificate as often as it is made. Each time costs a scrub and audit rows, so without a
bound a single process would push everybody's history out of the audit trail within hours. A start that waits for the device is
never held up by this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from scrubber.domain.evidence import Outcome, ScrubRecord
from scrubber.ports import Clock, Event

__all__ = ["Disturbances", "was_disturbed"]

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 600.0
"""Seconds before the scrub that follows the second disturbance; it doubles with each one, up to the longest."""
_FORGOTTEN = 2 * _LONGEST_PAUSE
"""Seconds without a disturbance after which the next one counts as the first."""
_TOLD_AGAIN = 60.0
"""Seconds for which events of one kind and cause share a row."""
_COALESCED = frozenset({"certificate.issued", "device.touched", "scrub.finished", "scrub.started", "use.ungranted"})
"""Events that a process without a grant can cause as often as it wants."""

_BY_A_PROCESS = frozenset({"fence-broken", "held", "unknown-holder", "walk-unfinished"})
"""Findings of a scrub that was held up by a process without a grant, and not by an earlier tenant's pod."""

_Kind = tuple[str, ...]


def was_disturbed(scrub: ScrubRecord) -> bool:
    """Whether the finished ``scrub`` was held up by a process that was not granted the device."""
    return scrub.outcome is Outcome.HELD_UP and any(finding.code in _BY_A_PROCESS for finding in scrub.findings)


@dataclass(slots=True)
class _Told:
    """When events of one kind last got a row, and how many came since without one."""

    at: float
    untold: int = 0


class Disturbances:
    """One device's since its last grant. Not durable: a service that starts has seen none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times = 0
        self._last = 0.0
        self._allocations = 0
        self._told: dict[_Kind, _Told] = {}

    def note(self, allocations: int) -> None:
        """The device was used, or its scrub was disturbed, by a process that was not granted it.

        Args:
            allocations: how often the kubelet had allocated the device by then.
        """
        now = self._clock.monotonic()
        self._times = 1 if now - self._last > _FORGOTTEN else self._times + 1
        self._last, self._allocations = now, allocations

    def forget(self) -> None:
        """The device was granted: its next scrub is for that use."""
        self._times = 0
        self._told.clear()

    def pause(self, allocations: int) -> float:
        """Seconds for which a scrub that no start waits for is still put off; 0 once the kubelet has allocated the device."""
        if self._times < 2 or allocations != self._allocations:
            return 0.0
        pause: float = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._times - 2, 16))
        return max(0.0, self._last + pause - self._clock.monotonic())

    def coalesced(self, events: Iterable[Event]) -> tuple[Event, ...]:
        """``events`` without those whose kind got a row within the last minute; the next row of a kind counts them.

        Everything is kept until the device was disturbed twice, and so is whatever a person ordered.
        """
        if self._times < 2:
            return tuple(events)
        now = self._clock.monotonic()
        kept: list[Event] = []
        for event in events:
            told = self._told.get(_kind(event)) if event.name in _COALESCED and event.actor == "service" else None
            if told is not None and now - told.at < _TOLD_AGAIN:
                continue
            if told is not None and told.untold:
                kept.append(replace(event, fields={**event.fields, "times": told.untold + 1}))
            else:
                kept.append(event)
        return tuple(kept)

    def stored(self, events: Iterable[Event], rows: Iterable[Event]) -> None:
        """Of ``events``, ``rows`` are in the audit trail now; the others are to be counted in the next row of their kind."""
        now = self._clock.monotonic()
        self._told = {kind: told for kind, told in self._told.items() if now - told.at < _FORGOTTEN}
        written = {_kind(row) for row in rows}
        for event in events:
            if event.name in _COALESCED and _kind(event) in written:
                self._told[_kind(event)] = _Told(now)
            elif event.name in _COALESCED and _kind(event) in self._told:
                self._told[_kind(event)].untold += 1


def _kind(event: Event) -> _Kind:
    """What events have in common that share a row: their name and their cause. Found residue is never left out."""
    found = event.scrub if event.fields.get("residue_bytes") or event.fields.get("leftovers") else None
    return (event.name, str(found), *(str(event.fields.get(each)) for each in ("outcome", "use", "pod_uid", "path")))
