"""What is read back from disk or from an export: documents of the ledger, its pages, its audit log."""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from scrubber.adapters.ledger import documents as stored
from scrubber.adapters.ledger.chain import ChainReport, chain_events
from scrubber.adapters.ledger.json_codec import CodecError, Document
from scrubber.adapters.ledger.offline import read_pages, verify_ledger
from scrubber.adapters.ledger.saved_heads import SavedHead
from scrubber.adapters.ledger.verification import AuditLogVerifier, ChainVerdict
from scrubber.cli.audit_file import ROW_KIND, TRAIL_KIND, DamagedExport, audit_log_data, row_data
from scrubber.cli.audit_file import read_pages as read_export
from scrubber.cli.render.output import API_VERSION
from scrubber.domain.agent_pause import AgentPause, AgentPauseRecord, LabelChange, PauseWay
from scrubber.domain.errors import LedgerFailure, ScrubberError
from scrubber.domain.node_record import NodeRecord, YieldRequest, YieldRequester
from scrubber.domain.states import Cause, RecoveryMethod
from scrubber.ports.record import CHAIN_START, AuditLogPage, AuditRow
from tests.fuzz.structure import EDIT_SEEDS, json_input
from tests.fuzz.target import SLOW_GOAL, target
from tests.ledger_samples import certificate, event, fill, grant, record, scrub

_DOCUMENTS: tuple[tuple[Document[Any], Any], ...] = (
    (
        stored.RECORD,
        record(
            3,
            cause=Cause("xid-79", "The GPU has fallen off the bus.", RecoveryMethod.RESET, 5.0, "system"),
            certificate=certificate("C-1"),
            last_grant=grant(1, "C-1"),
            open_grants=(grant(1, "C-1"),),
        ),
    ),
    (stored.GRANT, grant(2)),
    (stored.CERTIFICATE, certificate("C-2")),
    (stored.SCRUB, scrub("S-1")),
    (
        stored.NODE,
        NodeRecord(yields=(YieldRequest(YieldRequester.OPERATOR, "tests", "uid:0", 5.0),), overridden=(("a", "b"),)),
    ),
    (
        stored.PAUSE,
        AgentPauseRecord(
            AgentPause("P-1", PauseWay.LABELS, ("GPU-a", "GPU-z"), 5.0, changes=(LabelChange("a", None, "b"),)),
            ("GPU-b",),
        ),
    ),
)
_TEXTS = tuple(document.encode(value) for document, value in _DOCUMENTS)


_SETS = ("devices", "shares")
"""Fields of an assignment that are sets: a list in another order, or with a repetition, is an equal document."""


def _ordered(found: Any, *path: str) -> Any:
    """Return what JSON contains in a form in which equal documents are equal, and no number equals true or false."""
    if isinstance(found, dict):
        return {name: _ordered(value, *path, name) for name, value in found.items()}
    if isinstance(found, list):
        is_set = path[-2:-1] == ("assignment",) and path[-1] in _SETS
        return sorted(set(found)) if is_set else [_ordered(value, *path) for value in found]
    return (isinstance(found, bool), found)


@target(
    "ledger-document",
    parser="the documents in the ledger",
    covers=("scrubber.adapters.ledger.json_codec",),
    oracle="a document is refused, or decodes to a value that is encoded as an equal document",
    seeds=(*EDIT_SEEDS, *(text.encode() for text in _TEXTS), *(b"\0" + bytes((n,)) + b"\5\0\3" for n in range(6))),
    words=(b'"format":1', b"null", b"[" * 3000, b"9" * 5000),
)
def ledger_document(data: bytes) -> bool:
    text = json_input(data, *(json.loads(each) for each in _TEXTS)).decode(errors="surrogateescape")
    accepted = False
    for document, _ in _DOCUMENTS:
        try:
            value = document.decode(text)
        except CodecError:
            continue
        accepted = True
        assert document.decode(document.encode(value)) == value
        assert _ordered(json.loads(document.encode(value))) == _ordered(json.loads(text))
    try:
        fields = stored.decode_fields(text)
    except CodecError:
        return accepted
    assert stored.decode_fields(stored.encode_fields(fields)) == fields
    return True


_ROWS = chain_events(CHAIN_START, [event(number=number) for number in range(3)])
_HEAD = _ROWS[-1].head
_LINES = (
    {"apiVersion": API_VERSION, "kind": TRAIL_KIND, **audit_log_data(AuditLogPage(CHAIN_START, _HEAD))},
    *({"apiVersion": API_VERSION, "kind": ROW_KIND, **row_data(row)} for row in _ROWS),
)
_EXPORT = "".join(f"{json.dumps(each)}\n" for each in _LINES).encode()


@target(
    "audit-export",
    parser="an export of the audit log, compared with a head saved elsewhere",
    covers=("scrubber.cli.audit_file", "scrubber.adapters.ledger.chain", "scrubber.adapters.ledger.verification"),
    oracle="only an export with the rows that were written is intact",
    seeds=(
        *EDIT_SEEDS,
        _EXPORT,
        _EXPORT.replace(b'"hash": ""', '"hash": "é"'.encode()).replace(
            b'"previousHash": ""', '"previousHash": "é"'.encode()
        ),
        _EXPORT[: _EXPORT.index(b"\n") + 1],
        _EXPORT.rpartition(b"\n{")[0] + b"\n",
    ),
    words=(b'"kind"', b'"hash"', b'"previousHash"', b'"sequence"', b'"timestamp"'),
    goal=SLOW_GOAL,
)
def audit_export(data: bytes) -> bool:
    if data.startswith(b"\0"):
        lines = json.loads(json_input(data, list(_LINES)))
        data = "".join(f"{json.dumps(each)}\n" for each in lines).encode() if isinstance(lines, list) else b""
    verifier = AuditLogVerifier([SavedHead(_HEAD.sequence, _HEAD.hash)])
    flaw = ""
    rows: list[AuditRow] = []
    try:
        for page in read_export(io.StringIO(data.decode(errors="replace"), newline="\n"), "export"):
            verifier.add_page(page)
            rows += page.rows
    except (LedgerFailure, DamagedExport) as error:
        flaw = str(error)
    found = verifier.result(flaw)
    if found.verdict is not ChainVerdict.INTACT:
        return False
    assert tuple(rows) == _ROWS[len(_ROWS) - len(rows) :], "a changed row is intact"
    return True


@cache
def _pages() -> bytes:
    """Return the database of a small ledger, in one file."""
    with tempfile.TemporaryDirectory(prefix="ledger-") as directory:
        asyncio.run(fill(Path(directory) / "state", commits=3))
        return (Path(directory) / "state" / "ledger.db").read_bytes()


@cache
def _rows() -> tuple[AuditRow, ...]:
    return _read(b"")[1]


def _read(edits: bytes) -> tuple[ChainReport, tuple[AuditRow, ...]]:
    with tempfile.TemporaryDirectory(prefix="ledger-") as directory:
        (Path(directory) / "ledger.db").write_bytes(_overwritten(edits))
        report = verify_ledger(Path(directory))
        return report, tuple(row for page in read_pages(Path(directory)) for row in page.rows)


def _overwritten(data: bytes) -> bytes:
    """Return the database with what ``data`` says written into it: four bytes for each place, and what to write."""
    pages = bytearray(_pages())
    for at in range(0, min(len(data) - 3, 64), 4):
        place = int.from_bytes(data[at : at + 3], "big") % len(pages)
        pages[place] = data[at + 3]
    return bytes(pages)


@target(
    "ledger-pages",
    parser="the ledger's database, read without a service",
    covers=("scrubber.adapters.ledger.offline", "scrubber.adapters.ledger.pages", "scrubber.adapters.ledger.chain"),
    oracle="overwritten bytes are refused with a message, or the audit log has the rows that were written",
    seeds=(b"", b"\0\0\x12\1", b"\0\x10\0\xff\0\x20\0\0", bytes(range(64))),
    longest=64,
    share=20,
    goal=SLOW_GOAL,
)
def ledger_pages(data: bytes) -> bool:
    try:
        report, rows = _read(data)
    except ScrubberError as error:
        assert str(error), "an error without a message"
        return False
    if report.intact:
        assert rows == _rows(), "a changed row is intact"
    return report.intact
