"""Checks of the ledger's tables without the ledger's code: plain SQL and JSON, no codec.

A part of the soak's judge (:mod:`tests.chaos.judgement`); standard library only.
"""

from __future__ import annotations

import bisect
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["GatedStart", "LedgerTables", "monotonic_times"]


_EDGE = 0.05
"""Seconds between the moment at which a clock is set and its record."""


class GatedStart(Protocol):
    """A start that passed the gate; ``at`` is on the monotonic clock."""

    @property
    def at(self) -> float: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def uid(self) -> str: ...
    @property
    def container(self) -> str: ...


class LedgerTables:
    """Devices, grants, and the number of audit rows of each name."""

    def __init__(self, path: str) -> None:
        connection = sqlite3.connect(path)
        try:
            self._devices = {
                row[0]: json.loads(row[1]) for row in connection.execute("SELECT device, document FROM devices")
            }
            self._grants: defaultdict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
            for device, number, document in connection.execute(
                "SELECT device, sequence, document FROM grants ORDER BY device, sequence"
            ):
                self._grants[device].append((number, json.loads(document)))
            self._audit = Counter(dict(connection.execute("SELECT name, count(*) FROM audit GROUP BY name")))
            rows, first, last = connection.execute(
                "SELECT count(*), min(sequence), max(sequence) FROM audit"
            ).fetchone()
            self._audit_flaws = (
                [] if not rows or rows == last - first + 1 else ["ledger: rows of the audit log are missing"]
            )
        finally:
            connection.close()

    def breaches(
        self,
        starts: Iterable[tuple[GatedStart, float]],
        clock: Sequence[tuple[float, float]],
        claims: Mapping[str, Collection[str]],
    ) -> Iterator[str]:
        """Return what is wrong after the last pod is gone.

        Args:
            starts: each with the time of the previous start on any of its devices.
            clock: (monotonic seconds, what to add to them to get the ledger's time from then on), in order.
            claims: UID of a pod → UIDs of its claims.
        """
        for device, record in self._devices.items():
            out_of_service = record["health"] in ("quarantined", "condemned") and record["cause"] is not None
            if record["open_grants"]:
                yield f"leak: {device} has grants open in the end: {record['open_grants']}"
            if record["hygiene"] != "clean" and not out_of_service:
                yield f"leak: {device} is {record['hygiene']} and {record['health']} in the end"
        for device, grants in self._grants.items():
            if [number for number, _ in grants] != list(range(1, len(grants) + 1)):
                yield f"ledger: the grants of {device} are not numbered from 1 on without a gap"
        yield from self._audit_flaws
        times = {
            device: monotonic_times([grant["at"] for _, grant in grants], clock)
            for device, grants in self._grants.items()
        }
        yield from self._starts_without_a_grant(starts, times, claims)

    def _starts_without_a_grant(
        self,
        starts: Iterable[tuple[GatedStart, float]],
        times: Mapping[str, Sequence[float]],
        claims: Mapping[str, Collection[str]],
    ) -> Iterator[str]:
        for start, since in starts:
            for device in start.devices:
                at = times.get(device, [])
                first, last = bisect.bisect_right(at, since), bisect.bisect_right(at, start.at)
                between = [grant for _, grant in self._grants.get(device, [])[first:last]]
                uids = {_granted_to(grant) for grant in between}
                if not uids & {None, start.uid, *claims.get(start.uid, ())}:
                    yield f"ledger: {start.container} of pod {start.uid} started on {device}, and no grant says so"

    def counts(self) -> dict[str, int]:
        names = {
            "grants": "handover.granted",
            "scrubs": "scrub.finished",
            "leftovers ended": "leftover.process.killed",
            "quarantines": "health.quarantined",
            "returns from quarantine": "health.healthy",
            "unauthorized uses": "unauthorized.use.detected",
            "pods adopted": "device.adopted",
        }
        return {title: self._audit[name] for title, name in names.items()}


def _granted_to(grant: Mapping[str, Any]) -> str | None:
    """Return the UID of a grant's claim or pod; None where the ledger does not know it."""
    if grant["claim"] is not None:
        return str(grant["claim"]["uid"])
    return None if grant["assignment"] is None else grant["assignment"]["pod"]["uid"]


def monotonic_times(walls: Sequence[float], clock: Sequence[tuple[float, float]]) -> list[float]:
    """Return when a clock that was set now and then showed these times, of which each was read after the one before.

    Args:
        clock: (monotonic seconds, what to add to them to get the clock's time from then on), in order.
    """
    found: list[float] = []
    ends = [*(begun for begun, _ in clock[1:]), float("inf")]
    for wall in walls:
        earliest = found[-1] if found else float("-inf")
        candidates = (
            wall - offset
            for (begun, offset), end in zip(clock, ends, strict=True)
            if begun - _EDGE <= wall - offset <= end + _EDGE
        )
        found.append(max(earliest, next((each for each in candidates if each >= earliest - _EDGE), earliest)))
    return found
