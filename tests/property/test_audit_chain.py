"""Verification of the audit log detects every kind of change at every position."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from scrubber.adapters.ledger.chain import chain_events, event_of, verify_chain
from scrubber.adapters.ledger.saved_heads import SavedHead
from scrubber.adapters.ledger.verification import AuditLogVerifier, ChainVerdict
from scrubber.cli.audit_file import ROW_KIND, TRAIL_KIND, DamagedExport, audit_log_data, read_pages, row_data
from scrubber.cli.render.output import document
from scrubber.ports.record import CHAIN_START, AuditHead, AuditLogPage, AuditRow, Event

finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=8)
scalars = st.none() | st.booleans() | st.integers() | finite | texts
events = st.builds(
    Event,
    name=texts,
    at=finite,
    device=st.none() | texts,
    scrub=st.none() | texts,
    actor=texts,
    fields=st.dictionaries(texts, scalars, max_size=3),
)
audit_logs = st.lists(events, min_size=1, max_size=8).map(lambda events: chain_events(CHAIN_START, events))

EDITS: Sequence[Callable[[AuditRow], AuditRow]] = (
    lambda row: replace(row, at=row.at + 1.0 if abs(row.at) < 1e9 else 0.0),
    lambda row: replace(row, name=row.name + "x"),
    lambda row: replace(row, device="x" if row.device is None else None),
    lambda row: replace(row, scrub="x" if row.scrub is None else None),
    lambda row: replace(row, actor=row.actor + "x"),
    lambda row: replace(row, fields=row.fields + " "),
    lambda row: replace(row, sequence=row.sequence + 1),
    lambda row: replace(row, prev_hash="0" * 64),
    lambda row: replace(row, hash="0" * 64),
)


@given(st.lists(events, max_size=12), st.integers(0, 12))
def test_audit_rows_written_in_any_number_of_commits_form_one_chain(events: list[Event], split: int) -> None:
    first = chain_events(CHAIN_START, events[:split])
    head = first[-1].head if first else CHAIN_START
    second = chain_events(head, events[split:])
    assert (*first, *second) == chain_events(CHAIN_START, events)
    assert verify_chain((*first, *second), CHAIN_START, (*first, *second)[-1].head if events else CHAIN_START).intact


@given(events)
def test_audit_row_decodes_to_the_event_that_was_appended(event: Event) -> None:
    (row,) = chain_events(CHAIN_START, [event])
    assert event_of(row) == event


@given(audit_logs, st.data())
def test_edited_audit_row_is_detected(audit_log: tuple[AuditRow, ...], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(audit_log) - 1))
    edited = data.draw(st.sampled_from(EDITS))(audit_log[index])
    report = verify_chain((*audit_log[:index], edited, *audit_log[index + 1 :]), CHAIN_START, audit_log[-1].head)
    assert not report.intact


@given(audit_logs, st.data())
def test_deleted_audit_row_is_detected(audit_log: tuple[AuditRow, ...], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(audit_log) - 1))
    report = verify_chain((*audit_log[:index], *audit_log[index + 1 :]), CHAIN_START, audit_log[-1].head)
    assert not report.intact


@given(audit_logs, st.data())
def test_swapped_audit_rows_are_detected(audit_log: tuple[AuditRow, ...], data: st.DataObject) -> None:
    assume(len(audit_log) > 1)
    one = data.draw(st.integers(0, len(audit_log) - 2))
    swapped = (*audit_log[:one], audit_log[one + 1], audit_log[one], *audit_log[one + 2 :])
    assert not verify_chain(swapped, CHAIN_START, audit_log[-1].head).intact


@given(audit_logs, st.data())
def test_rewritten_audit_log_has_another_head(audit_log: tuple[AuditRow, ...], data: st.DataObject) -> None:
    """An attacker who can write the file can forge a chain; a copy of the head kept elsewhere still reveals it."""
    index = data.draw(st.integers(0, len(audit_log) - 1))
    before = audit_log[index - 1].head if index else CHAIN_START
    events = [event_of(row) for row in audit_log[index:]]
    forged = chain_events(before, [replace(events[0], name=events[0].name + "x"), *events[1:]])
    assert verify_chain((*audit_log[:index], *forged), CHAIN_START, forged[-1].head).intact
    assert forged[-1].head != audit_log[-1].head
    assert not verify_chain((*audit_log[:index], *forged), CHAIN_START, audit_log[-1].head).intact


@given(audit_logs, st.data())
def test_pruned_audit_log_verifies_from_its_pruning_point(audit_log: tuple[AuditRow, ...], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(audit_log)))
    pruned, kept = audit_log[cut - 1].head, audit_log[cut:]
    assert verify_chain(kept, pruned, audit_log[-1].head).intact
    if kept:
        assert not verify_chain(kept, AuditHead(pruned.sequence, "0" * 64), audit_log[-1].head).intact
        assert not verify_chain(kept[1:], pruned, audit_log[-1].head).intact


@given(audit_logs)
def test_audit_rows_after_the_recorded_head_are_detected(audit_log: tuple[AuditRow, ...]) -> None:
    beyond = chain_events(audit_log[-1].head, [Event("forged", 0.0)])
    assert not verify_chain((*audit_log, *beyond), CHAIN_START, audit_log[-1].head).intact


def judged(audit_log: Sequence[AuditRow], *kept: AuditHead, pruned: AuditHead = CHAIN_START) -> ChainVerdict:
    examination = AuditLogVerifier([SavedHead.parse(str(each)) for each in kept])
    examination.add_page(AuditLogPage(pruned, audit_log[-1].head if audit_log else pruned, tuple(audit_log)))
    return examination.result().verdict


@given(audit_logs, st.data())
def test_saved_head_is_found_until_its_row_is_pruned(audit_log: tuple[AuditRow, ...], data: st.DataObject) -> None:
    kept = data.draw(st.sampled_from(audit_log)).head
    assert judged(audit_log, kept) is ChainVerdict.INTACT
    cut = data.draw(st.integers(0, len(audit_log)))
    pruned = audit_log[cut - 1].head if cut else CHAIN_START
    expected = ChainVerdict.INTACT if kept.sequence >= cut else ChainVerdict.CANNOT_TELL
    assert judged(audit_log[cut:], kept, pruned=pruned) is expected


@given(audit_logs, st.data())
def test_audit_log_rewritten_or_truncated_before_a_saved_head_is_broken(
    audit_log: tuple[AuditRow, ...], data: st.DataObject
) -> None:
    kept = data.draw(st.integers(0, len(audit_log) - 1))
    index = data.draw(st.integers(0, kept))
    events = [event_of(row) for row in audit_log[index:]]
    before = audit_log[index - 1].head if index else CHAIN_START
    forged = chain_events(before, [replace(events[0], name=events[0].name + "x"), *events[1:]])
    assert judged((*audit_log[:index], *forged)) is ChainVerdict.INTACT
    assert judged((*audit_log[:index], *forged), audit_log[kept].head) is ChainVerdict.BROKEN
    assert judged(audit_log[:index], audit_log[kept].head) is ChainVerdict.BROKEN


def exported(audit_log: Sequence[AuditRow]) -> str:
    ends = AuditLogPage(CHAIN_START, audit_log[-1].head)
    documents = [document(audit_log_data(ends), TRAIL_KIND), *(document(row_data(row), ROW_KIND) for row in audit_log)]
    return "".join(json.dumps(each) + "\n" for each in documents)


@given(audit_logs)
def test_audit_export_reads_back_as_written(audit_log: tuple[AuditRow, ...]) -> None:
    text = exported(audit_log)
    assert text.isascii()
    assert tuple(row for page in read_pages(io.StringIO(text), "a file") for row in page.rows) == audit_log


@given(audit_logs, st.data())
def test_truncated_audit_export_is_broken(audit_log: tuple[AuditRow, ...], data: st.DataObject) -> None:
    whole = exported(audit_log)
    first = whole.index("\n") + 1
    length = data.draw(st.integers(first, len(whole) - 2))  # without its last line break it is still complete
    examination, flaw = AuditLogVerifier(), ""
    try:
        for page in read_pages(io.StringIO(whole[:length]), "a file"):
            examination.add_page(page)
    except DamagedExport as error:
        flaw = str(error)
    assert examination.result(flaw).verdict is ChainVerdict.BROKEN
