"""Limits what unauthorized use of a device costs: pauses before the next scrub, and coalesced audit rows.

A process that can open a device can void its certificate as often as one is issued. Each time costs a scrub and audit
rows, so without a bound a single process would push all other history out of the audit log within hours. A start that
waits for the device is never delayed by this. Every event is counted in some row. The last omitted event of each kind
gets its row together with the next grant, so the scrub and the certificate that a grant rests on are in the audit log
with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from scrubber.domain.evidence import FindingCode, Outcome, ScrubRecord
from scrubber.ports.record import Event
from scrubber.ports.runtime import Clock

__all__ = ["Disturbances", "was_disturbed"]

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 600.0
"""Seconds before the scrub that follows the second disturbance; doubled with each further one, up to the longest."""
_FORGET_AFTER = 2 * _LONGEST_PAUSE
"""Seconds without a disturbance after which the next one counts as the first."""
_ROW_INTERVAL = 60.0
"""Seconds for which events of one kind and cause share a row."""
_TOUCHED, _USER = "device.marked-dirty", "unauthorized.use.detected"
_COALESCED = frozenset({"certificate.issued", "scrub.finished", "scrub.started", _TOUCHED, _USER})
"""Events that a process without a grant can cause as often as it wants."""

_BY_A_PROCESS = frozenset(
    {FindingCode.FENCE_BROKEN, FindingCode.DEVICE_BUSY, FindingCode.UNKNOWN_HOLDER, FindingCode.UNINSPECTED_PROCESSES}
)
"""Findings of a scrub that was blocked by a process without a grant, and not by an earlier tenant's pod."""

_Kind = tuple[str, ...]


def was_disturbed(scrub: ScrubRecord) -> bool:
    """Return whether the finished ``scrub`` was blocked by a process that was not granted the device."""
    return scrub.outcome is Outcome.BLOCKED and any(finding.code in _BY_A_PROCESS for finding in scrub.findings)


@dataclass(slots=True)
class _RowState:
    """State of one kind of event: time of its last row, number of events omitted since, and the last two of those."""

    at: float
    omitted: int = 0
    last: Event | None = None
    before: Event | None = None

    def omit(self, event: Event) -> None:
        self.omitted, self.last, self.before = self.omitted + 1, event, self.last

    def rows(self, *, last_separately: bool = False) -> tuple[Event, ...]:
        """Return the rows for the omitted events; empty when there are none.

        Args:
            last_separately: give the last event a separate row.
        """
        if self.last is None:
            return ()
        if last_separately and self.before is not None:
            return _counting(self.before, self.omitted - 1), self.last
        return (_counting(self.last, self.omitted),)


# See docs/decisions/0020-unauthorized-use.md.
class Disturbances:
    """Counts unauthorized use of one device since its last grant, to bound what it costs. Not durable."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times = 0
        self._last = 0.0
        self._allocations = 0
        self._row_states: dict[_Kind, _RowState] = {}

    def count(self, allocations: int) -> None:
        """Note that the device was used, or its scrub was disturbed, by a process that was not granted it.

        Args:
            allocations: how often the kubelet had allocated the device by then.
        """
        now = self._clock.monotonic()
        self._times = 1 if now - self._last > _FORGET_AFTER else self._times + 1
        self._last, self._allocations = now, allocations

    def reset(self) -> None:
        """Start over after a grant, which committed the rows of :meth:`omitted_rows`."""
        self._times = 0
        self._row_states.clear()

    def pause(self, allocations: int) -> float:
        """Return the seconds to delay a scrub that no start waits for; 0 once the kubelet has allocated the device."""
        if self._times < 2 or allocations != self._allocations:
            return 0.0
        pause: float = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._times - 2, 16))
        return max(0.0, self._last + pause - self._clock.monotonic())

    def coalesce(self, events: Iterable[Event]) -> tuple[Event, ...]:
        """Return the rows for ``events``, without events whose kind got a row within the last minute.

        The next row of a kind counts those omitted before. Every event has a row until the device was disturbed twice,
        and so has every operator action. Rows for events that were omitted over a minute ago come first. The
        ``device.marked-dirty`` event that led to a row that names a user gets a separate row before it.
        """
        now = self._clock.monotonic()
        rows: list[Event] = []
        written: set[_Kind | None] = set()
        for event in events:
            kind = _kind(event)
            state = None if kind is None or kind in written else self._row_states.get(kind)
            if state is not None and self._times >= 2 and now - state.at < _ROW_INTERVAL:
                continue
            rows.append(event if state is None else _counting(event, state.omitted + 1))
            written.add(kind)
        names_user = any(row.name == _USER for row in rows)
        earlier: list[Event] = []
        for kind, state in self._row_states.items():
            if kind in written:
                continue
            if names_user and kind[0] == _TOUCHED:
                earlier += state.rows(last_separately=True)
            elif now - state.at >= _ROW_INTERVAL:
                earlier += state.rows()
        return (*earlier, *rows)

    def note_stored(self, events: Iterable[Event], rows: Iterable[Event]) -> None:
        """Note that of ``events``, ``rows`` are in the audit log; the next row of their kind counts the others."""
        now = self._clock.monotonic()
        written = {kind for row in rows if (kind := _kind(row)) is not None}
        self._row_states |= {kind: _RowState(now) for kind in written}
        for event in events:
            kind = _kind(event)
            if kind is not None and kind not in written:
                self._row_states[kind].omit(event)
        self._row_states = {
            kind: state for kind, state in self._row_states.items() if state.omitted or now - state.at < _ROW_INTERVAL
        }

    def omitted_rows(self) -> tuple[Event, ...]:
        """Return a row for each kind with events omitted since its last row: the last such event, with their number."""
        return tuple(row for state in self._row_states.values() for row in state.rows())


def _counting(event: Event, times: int) -> Event:
    """Return ``event`` as a row that represents ``times`` events."""
    return event if times == 1 else replace(event, fields={**event.fields, "times": times})


def _kind(event: Event) -> _Kind | None:
    """Return what events that share a row have in common: name and cause. None for an event with a separate row."""
    if event.name not in _COALESCED or event.actor != "service":
        return None
    found = event.scrub if event.fields.get("residue_bytes") or event.fields.get("leftovers_killed") else None
    return (event.name, str(found), *(str(event.fields.get(each)) for each in ("outcome", "use", "pod_uid", "path")))
