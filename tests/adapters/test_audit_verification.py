"""Verification of saved heads and of exports that may have been edited."""

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from scrubber.adapters.ledger.chain import chain_events
from scrubber.adapters.ledger.saved_heads import SavedHead
from scrubber.adapters.ledger.verification import AuditLogVerification, AuditLogVerifier, ChainVerdict
from scrubber.cli.audit_file import ROW_KIND, TRAIL_KIND, DamagedExport, audit_log_data, read_pages, row_data
from scrubber.cli.render.output import document
from scrubber.domain.errors import LedgerFailure
from scrubber.ports.record import CHAIN_START, AuditHead, AuditLogPage
from tests.ledger_samples import event

ROWS = chain_events(CHAIN_START, [event(number=number) for number in range(20)])
HEAD = ROWS[-1].head


class TestSavedHead:
    @pytest.mark.parametrize(
        "written", [f"7:{'0123456789ab' * 5}cdef", f" 7:{'0123456789AB' * 5}CDEF\n", f"007:{'0123456789ab' * 5}cdef"]
    )
    def test_saved_head_is_parsed_with_surrounding_whitespace_and_any_case(self, written: str) -> None:
        assert SavedHead.parse(written) == SavedHead(7, "0123456789ab" * 5 + "cdef")

    def test_audit_log_head_round_trips_as_saved_head(self) -> None:
        assert str(SavedHead.parse(f"{HEAD.sequence}:{HEAD.hash}")) == f"20:{HEAD.hash}"

    @pytest.mark.parametrize(
        ("written", "message"),
        [
            ("20", "is not SEQ:HASH"),
            ("", "is not SEQ:HASH"),
            (f"x:{'a' * 64}", "is not SEQ:HASH"),
            (f"-1:{'a' * 64}", "is not SEQ:HASH"),
            (f"0:{'a' * 64}", "is not SEQ:HASH"),
            (f"{'9' * 19}:{'a' * 64}", "is not SEQ:HASH"),
            (f"\N{ARABIC-INDIC DIGIT THREE}:{'a' * 64}", "is not SEQ:HASH"),
            ("20:", "is not hexadecimal"),
            (f"20:{'g' * 64}", "is not hexadecimal"),
            (f"20:0x{'a' * 12}", "is not hexadecimal"),
            ("20:0123456789ab", "has 12 digits; a SHA-256 has 64"),
            (f"20:{'a' * 63}", "has 63 digits"),
            (f"20:{'a' * 65}", "has 65 digits"),
        ],
    )
    def test_malformed_saved_head_is_refused_with_the_reason(self, written: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            SavedHead.parse(written)


def examined(*kept: str, pruned: int = 0) -> AuditLogVerification:
    examination = AuditLogVerifier(SavedHead.parse(each) for each in kept)
    start = ROWS[pruned - 1].head if pruned else CHAIN_START
    examination.add_page(AuditLogPage(start, HEAD, ROWS[pruned:10]))
    examination.add_page(AuditLogPage(start, HEAD, ROWS[10:]))
    return examination.result()


def place(sequence: int) -> str:
    return f"{sequence}:{ROWS[sequence - 1].hash}"


class TestAuditLogVerification:
    @pytest.mark.parametrize(
        ("kept", "pruned", "verdict", "standings"),
        [
            ((), 0, ChainVerdict.INTACT, []),
            ((place(1), place(20), place(11)), 0, ChainVerdict.INTACT, ["found"] * 3),
            ((place(4),), 4, ChainVerdict.INTACT, ["found"]),
            ((place(3),), 4, ChainVerdict.CANNOT_TELL, ["unknown"]),
            ((place(3), place(9)), 4, ChainVerdict.CANNOT_TELL, ["unknown", "found"]),
            ((place(3), f"9:{'0' * 64}"), 4, ChainVerdict.BROKEN, ["unknown", "replaced"]),
            ((f"4:{'0' * 64}",), 4, ChainVerdict.BROKEN, ["replaced"]),
            ((f"21:{'0' * 64}",), 0, ChainVerdict.BROKEN, ["truncated"]),
            ((f"1:{'0' * 64}", place(1)), 0, ChainVerdict.BROKEN, ["replaced", "found"]),
            ((place(1), place(1)), 0, ChainVerdict.INTACT, ["found"]),
        ],
    )
    def test_verdict_on_an_intact_audit_log_is_the_worst_status_of_its_saved_heads(
        self, kept: Sequence[str], pruned: int, verdict: ChainVerdict, standings: list[str]
    ) -> None:
        found = examined(*kept, pruned=pruned)
        assert found.verdict is verdict
        assert [each.status.value for each in found.comparisons] == standings
        assert (found.message == f"The audit log is intact: {20 - pruned} rows.") == (verdict is ChainVerdict.INTACT)

    def test_saved_head_of_a_missing_middle_row_is_reported_as_replaced(self) -> None:
        examination = AuditLogVerifier([SavedHead.parse(place(7))])
        examination.add_page(AuditLogPage(CHAIN_START, HEAD, (*ROWS[:6], *ROWS[7:])))
        found = examination.result()
        assert found.comparisons[0].status == "replaced"
        assert found.message == "Audit row 7 is missing."

    @pytest.mark.parametrize(("pruned", "seen", "end"), [(0, 6, 6), (4, 6, 6), (4, 4, 4), (0, 0, 0)])
    def test_saved_head_beyond_the_last_row_is_cut_off_whatever_end_is_recorded(
        self, pruned: int, seen: int, end: int
    ) -> None:
        examination = AuditLogVerifier([SavedHead.parse(place(7)), SavedHead.parse(place(20))])
        examination.add_page(AuditLogPage(ROWS[pruned - 1].head if pruned else CHAIN_START, HEAD, ROWS[pruned:seen]))
        found = examination.result()
        assert found.verdict is ChainVerdict.BROKEN
        assert [each.status for each in found.comparisons] == ["truncated"] * 2
        assert f"ends at row {end} here" in found.comparisons[0].message

    def test_read_error_takes_precedence_over_other_audit_log_problems(self) -> None:
        examination = AuditLogVerifier()
        examination.add_page(AuditLogPage(CHAIN_START, HEAD, ROWS[:4]))
        found = examination.result("Line 6 is odd.")
        assert (found.verdict, found.message, found.rows) == (ChainVerdict.BROKEN, "Line 6 is odd.", 4)

    def test_audit_log_without_any_page_is_reported_as_broken(self) -> None:
        found = AuditLogVerifier([SavedHead.parse(place(1))]).result()
        assert (found.verdict, found.rows) == (ChainVerdict.BROKEN, 0)


Edit = Callable[[list[str]], Sequence[str]]


def exported(start: AuditHead = CHAIN_START) -> list[str]:
    documents = [document(audit_log_data(AuditLogPage(start, HEAD)), TRAIL_KIND)]
    documents += [document(row_data(row), ROW_KIND) for row in ROWS[start.sequence :]]
    return [json.dumps(each, separators=(",", ":")) + "\n" for each in documents]


def judged(lines: Sequence[str]) -> AuditLogVerification:
    examination, flaw = AuditLogVerifier(), ""
    try:
        for page in read_pages(io.StringIO("".join(lines)), "audit.jsonl"):
            examination.add_page(page)
    except DamagedExport as error:
        flaw = str(error)
    return examination.result(flaw)


def changed(number: int, **values: Any) -> Edit:
    def edit(lines: list[str]) -> Sequence[str]:
        return [*lines[:number], json.dumps(json.loads(lines[number]) | values) + "\n", *lines[number + 1 :]]

    return edit


def replaced(number: int, old: str, new: str) -> Edit:
    def edit(lines: list[str]) -> Sequence[str]:
        assert old in lines[number]
        return [*lines[:number], lines[number].replace(old, new), *lines[number + 1 :]]

    return edit


class TestExportVerification:
    @pytest.mark.parametrize("start", [CHAIN_START, ROWS[11].head, HEAD])
    def test_unmodified_export_is_intact(self, start: AuditHead) -> None:
        found = judged(exported(start))
        assert (found.verdict, found.rows, found.pruned) == (ChainVerdict.INTACT, 20 - start.sequence, start)

    def test_reformatted_export_is_intact(self) -> None:
        lines = [json.dumps(json.loads(line), sort_keys=True) + "\r\n" for line in exported()]
        assert judged(lines).verdict is ChainVerdict.INTACT

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda lines: lines[:-1], "ends at row 19, but 20 rows were written"),
            (lambda lines: lines[:1], "ends at row 0, but 20 rows were written"),
            (lambda lines: [*lines[:9], lines[9][:40]], "Line 10 of audit.jsonl"),
            (lambda lines: [*lines[:9], *lines[10:]], "row 9 is missing"),
            (lambda lines: [*lines, lines[-1]], "row 20 is where row 21 is expected"),
            (lambda lines: [*lines, "{}\n"], "Line 22 of audit.jsonl"),
            (lambda lines: [*lines[:5], lines[6], lines[5], *lines[7:]], "row 5 is missing"),
            (changed(7, actor="uid:0"), "row 7 was changed"),
            (changed(7, timestamp=0.5), "row 7 was changed"),
            (changed(7, fields="{}"), "row 7 was changed"),
            (changed(7, deviceID=None), "row 7 was changed"),
            (changed(7, event="\ud800"), "row 7 was changed"),
            (changed(7, previousHash="0" * 64), "row 7 does not continue"),
            (changed(0, head={"sequence": 20, "hash": "0" * 64}), "is not the recorded head"),
            (changed(0, head={"sequence": 21, "hash": "0" * 64}), "but 21 rows were written"),
            (changed(0, pruned={"sequence": 1, "hash": "0" * 64}), "where row 2 is expected"),
            (changed(7, sequence="7"), "sequence is missing or of the wrong type"),
            (changed(7, sequence=True), "sequence is missing or of the wrong type"),
            (changed(7, fields={"number": 6}), "fields is missing or of the wrong type"),
            (changed(7, timestamp=1e400), "timestamp is not a time"),
            (changed(7, timestamp=10**400), "timestamp is not a time"),
            (replaced(7, '"timestamp":100.0', '"timestamp":NaN'), "timestamp is not a time"),
            (replaced(7, '"sequence":7', f'"sequence":{"7" * 5_000}'), "Line 8 of"),
            (changed(7, more="x"), "more is not a key of a row"),
            (changed(7, kind="AuditLog"), "its kind is not AuditRow"),
            (changed(7, apiVersion="cli.scrubber.dev/v2"), "its apiVersion is not"),
            (replaced(7, '"event":', '"event":"x","event":'), "a key is duplicated"),
            (replaced(7, '"actor":"service",', ""), "actor is missing"),
            (lambda lines: [*lines[:7], "[" * 100_000 + "\n", *lines[7:]], "too deep"),
            (lambda lines: [*lines[:7], "\n", *lines[7:]], "Line 8 of"),
            (lambda lines: [*lines[:7], "x" * 5_000_000, *lines[7:]], "Line 8 of"),
            (lambda lines: [*lines[:7], "\x00\x1b[2J\n", *lines[7:]], "Line 8 of"),
        ],
    )
    def test_modification_of_an_export_is_named(self, edit: Edit, message: str) -> None:
        found = judged(edit(exported()))
        assert found.verdict is ChainVerdict.BROKEN
        assert message in found.message

    @pytest.mark.parametrize(
        "first",
        [
            "",
            "hello\n",
            "{}\n",
            "[]\n",
            "\N{REPLACEMENT CHARACTER}\x00",
            '{"apiVersion":"cli.scrubber.dev/v1","kind":"AuditLog"}\n',
            '{"apiVersion":"cli.scrubber.dev/v1","kind":"AuditLog","pruned":{"sequence":true,"hash":""},"head":{}}\n',
            '{"apiVersion":"cli.scrubber.dev/v9","kind":"AuditLog","pruned":{"sequence":0,"hash":""}}\n',
            '{"apiVersion":"cli.scrubber.dev/v1","kind":"DeviceList","items":[]}\n',
        ],
    )
    def test_file_that_is_no_export_is_reported_as_not_an_export(self, first: str) -> None:
        with pytest.raises(
            LedgerFailure, match=r"audit.jsonl is not an export of an audit log \(.*\)\. Run `scrubber audit export`"
        ):
            judged([first, *exported()[1:]])
