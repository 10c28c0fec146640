"""The audit trail as a file: what ``audit export`` writes and ``audit verify --file`` reads, one JSON document a line.

The promise: a row is written with exactly what was hashed, and read as exactly what is written. A line that is not whole,
says something twice, or is of another kind is a flaw of the trail, never passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from scrubber.cli.render.output import API_VERSION
from scrubber.domain.errors import LedgerFailure
from scrubber.ports.record import AuditHead, AuditRow, TrailPage

__all__ = ["ROW_KIND", "TRAIL_KIND", "DamagedExport", "read_pages", "row_data", "trail_data"]

TRAIL_KIND = "AuditTrail"
ROW_KIND = "AuditRow"

_MAX_LINE = 4 * 1024 * 1024
"""Characters of a line. No row is nearly as long."""

_TYPES: dict[str, tuple[type, ...]] = {
    "sequence": (int,),
    "at": (float, int),
    "name": (str,),
    "device": (str, type(None)),
    "scrub": (str, type(None)),
    "actor": (str,),
    "fields": (str,),
    "prev_hash": (str,),
    "hash": (str,),
}


class DamagedExport(Exception):
    """The file was an export, and something happened to it; the text says what and where."""


def trail_data(page: TrailPage) -> dict[str, Any]:
    """The first line: the two ends of what follows. A hash is empty where the chain begins."""
    return {"pruned": _head_data(page.preceding_head), "head": _head_data(page.head)}


def row_data(row: AuditRow) -> dict[str, Any]:
    """A row as it is stored; ``fields`` is text, because its hash is over text."""
    return {name: getattr(row, name) for name in _TYPES}


def read_pages(stream: TextIO, name: str) -> Iterator[TrailPage]:
    """The trail in ``stream``: a page for its first line, then one a row.

    Args:
        name: the name of the file, for people.

    Raises:
        LedgerFailure: it is no export of a trail.
        DamagedExport: it was one.
    """
    first = stream.readline(_MAX_LINE)
    try:
        document = _parse_document(first, TRAIL_KIND)
        start, head = _parse_head(document.get("pruned")), _parse_head(document.get("head"))
    except ValueError as error:
        raise LedgerFailure(
            f"{name} is no export of an audit trail ({error}); scrubber audit export makes one."
        ) from None
    yield TrailPage(start, head)
    number = 1
    while line := stream.readline(_MAX_LINE):
        number += 1
        try:
            row = _parse_row(_parse_document(line, ROW_KIND))
        except ValueError as error:
            raise DamagedExport(
                f"Line {number} of {name} is no audit row ({error}): it was edited or cut off."
            ) from None
        yield TrailPage(start, head, (row,))


def _parse_document(line: str, kind: str) -> dict[str, Any]:
    try:
        found = json.loads(line, object_pairs_hook=_reject_duplicate_keys)
    except RecursionError:
        raise ValueError("too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}") from None
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise ValueError(f"not of the kind {kind}")
    if found.get("apiVersion") != API_VERSION:
        raise ValueError(f"not of the version {API_VERSION}")
    return found


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("something is in it twice")
    return found


def _parse_row(document: dict[str, Any]) -> AuditRow:
    values = {name: document.get(name, ...) for name in _TYPES}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, _TYPES[name]):
            raise ValueError(f"{name} is missing or of the wrong type")
    if odd := document.keys() - values.keys() - {"apiVersion", "kind"}:
        raise ValueError(f"{min(odd)} is not of a row")
    try:
        values["at"] = float(values["at"])
    except OverflowError:
        raise ValueError("at is no time") from None
    if not abs(values["at"]) < float("inf"):
        raise ValueError("at is no time")
    return AuditRow(**values)


def _head_data(place: AuditHead) -> dict[str, Any]:
    return {"sequence": place.sequence, "hash": place.hash}


def _parse_head(found: Any) -> AuditHead:
    if isinstance(found, dict):
        sequence, digest = found.get("sequence"), found.get("hash")
        if isinstance(sequence, int) and not isinstance(sequence, bool) and isinstance(digest, str):
            return AuditHead(sequence, digest)
    raise ValueError("its ends are missing")
