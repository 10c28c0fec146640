"""The audit log as a file: written by ``audit export`` and read by ``audit verify --file``, one JSON document per line.

Invariants: a row is written with exactly what was hashed, and read exactly as written. An incomplete line, one with a
duplicate key or one of another kind is reported as damage, never skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from scrubber.cli.render.output import API_VERSION
from scrubber.domain.errors import LedgerFailure
from scrubber.ports.record import AuditHead, AuditLogPage, AuditRow

__all__ = ["ROW_KIND", "TRAIL_KIND", "DamagedExport", "audit_log_data", "read_pages", "row_data"]

TRAIL_KIND = "AuditLog"
ROW_KIND = "AuditRow"

_MAX_LINE = 4 * 1024 * 1024
"""Limit of a line in characters. No row is nearly as long."""

_FIELDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "sequence": ("sequence", (int,)),
    "timestamp": ("at", (float, int)),
    "event": ("name", (str,)),
    "deviceID": ("device", (str, type(None))),
    "scrubID": ("scrub", (str, type(None))),
    "actor": ("actor", (str,)),
    "fields": ("fields", (str,)),
    "previousHash": ("prev_hash", (str,)),
    "hash": ("hash", (str,)),
}
"""By key: the attribute of a row, and its types. The timestamp is the number that was hashed, in seconds."""


class DamagedExport(Exception):
    """The file was an export and is damaged; the message describes the damage and its place."""


def audit_log_data(page: AuditLogPage) -> dict[str, Any]:
    """Return the first line: the two ends of the exported rows. A hash is empty where the chain begins."""
    return {"pruned": _head_data(page.preceding_head), "head": _head_data(page.head)}


def row_data(row: AuditRow) -> dict[str, Any]:
    """Return a row as it is stored; ``fields`` is text, because its hash covers the text."""
    return {key: getattr(row, name) for key, (name, _) in _FIELDS.items()}


def read_pages(stream: TextIO, name: str) -> Iterator[AuditLogPage]:
    """Read the log in ``stream``: yield a page for its first line, then one for each row.

    Args:
        name: the name of the file, for messages.

    Raises:
        LedgerFailure: it is not an export of an audit log.
        DamagedExport: it is a damaged one.
    """
    first = stream.readline(_MAX_LINE)
    try:
        document = _parse_document(first, TRAIL_KIND)
        start, head = _parse_head(document.get("pruned")), _parse_head(document.get("head"))
    except ValueError as error:
        raise LedgerFailure(
            f"{name} is not an export of an audit log ({error}). Run `scrubber audit export` to create one."
        ) from None
    yield AuditLogPage(start, head)
    number = 1
    while line := stream.readline(_MAX_LINE):
        number += 1
        try:
            row = _parse_row(_parse_document(line, ROW_KIND))
        except ValueError as error:
            raise DamagedExport(
                f"Line {number} of {name} is not an audit row ({error}): it was edited or truncated."
            ) from None
        yield AuditLogPage(start, head, (row,))


def _parse_document(line: str, kind: str) -> dict[str, Any]:
    try:
        found = json.loads(line, object_pairs_hook=_reject_duplicate_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}") from None
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise ValueError(f"its kind is not {kind}")
    if found.get("apiVersion") != API_VERSION:
        raise ValueError(f"its apiVersion is not {API_VERSION}")
    return found


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is duplicated")
    return found


def _parse_row(document: dict[str, Any]) -> AuditRow:
    values: dict[str, Any] = {}
    for key, (name, types) in _FIELDS.items():
        values[name] = document.get(key, ...)
        if isinstance(values[name], bool) or not isinstance(values[name], types):
            raise ValueError(f"{key} is missing or of the wrong type")
    if odd := document.keys() - _FIELDS.keys() - {"apiVersion", "kind"}:
        raise ValueError(f"{min(odd)} is not a key of a row")
    try:
        values["at"] = float(values["at"])
    except OverflowError:
        raise ValueError("timestamp is not a time") from None
    if not abs(values["at"]) < float("inf"):
        raise ValueError("timestamp is not a time")
    return AuditRow(**values)


def _head_data(place: AuditHead) -> dict[str, Any]:
    return {"sequence": place.sequence, "hash": place.hash}


def _parse_head(found: Any) -> AuditHead:
    if isinstance(found, dict):
        sequence, digest = found.get("sequence"), found.get("hash")
        if isinstance(sequence, int) and not isinstance(sequence, bool) and isinstance(digest, str):
            return AuditHead(sequence, digest)
    raise ValueError("its pruned or head is missing")
