"""Verification of the audit trail detects every kind of change at every position."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from scrubber.adapters.ledger.chain import chain_events, event_of, verify_chain
from scrubber.adapters.ledger.saved_heads import SavedHead
from scrubber.adapters.ledger.verification import ChainVerdict, TrailVerifier
from scrubber.cli.audit_file import ROW_KIND, TRAIL_KIND, DamagedExport, read_pages, row_data, trail_data
from scrubber.cli.render.output import document
from scrubber.ports.record import CHAIN_START, AuditHead, AuditRow, Event, TrailPage

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
trails = st.lists(events, min_size=1, max_size=8).map(lambda told: chain_events(CHAIN_START, told))

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
def test_audit_rows_written_in_any_number_of_commits_form_one_chain(told: list[Event], split: int) -> None:
    first = chain_events(CHAIN_START, told[:split])
    head = first[-1].head if first else CHAIN_START
    second = chain_events(head, told[split:])
    assert (*first, *second) == chain_events(CHAIN_START, told)
    assert verify_chain((*first, *second), CHAIN_START, (*first, *second)[-1].head if told else CHAIN_START).intact


@given(events)
def test_audit_row_decodes_to_the_event_that_was_appended(event: Event) -> None:
    (row,) = chain_events(CHAIN_START, [event])
    assert event_of(row) == event


@given(trails, st.data())
def test_edited_audit_row_is_detected(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(trail) - 1))
    edited = data.draw(st.sampled_from(EDITS))(trail[index])
    report = verify_chain((*trail[:index], edited, *trail[index + 1 :]), CHAIN_START, trail[-1].head)
    assert not report.intact


@given(trails, st.data())
def test_deleted_audit_row_is_detected(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(trail) - 1))
    report = verify_chain((*trail[:index], *trail[index + 1 :]), CHAIN_START, trail[-1].head)
    assert not report.intact


@given(trails, st.data())
def test_swapped_audit_rows_are_detected(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    assume(len(trail) > 1)
    one = data.draw(st.integers(0, len(trail) - 2))
    swapped = (*trail[:one], trail[one + 1], trail[one], *trail[one + 2 :])
    assert not verify_chain(swapped, CHAIN_START, trail[-1].head).intact


@given(trails, st.data())
def test_rewritten_audit_log_has_another_head(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    """An attacker who can write the file can forge a chain; a copy of the head kept elsewhere still reveals it."""
    index = data.draw(st.integers(0, len(trail) - 1))
    before = trail[index - 1].head if index else CHAIN_START
    told = [event_of(row) for row in trail[index:]]
    forged = chain_events(before, [replace(told[0], name=told[0].name + "x"), *told[1:]])
    assert verify_chain((*trail[:index], *forged), CHAIN_START, forged[-1].head).intact
    assert forged[-1].head != trail[-1].head
    assert not verify_chain((*trail[:index], *forged), CHAIN_START, trail[-1].head).intact


@given(trails, st.data())
def test_pruned_audit_log_verifies_from_its_pruning_point(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(trail)))
    pruned, kept = trail[cut - 1].head, trail[cut:]
    assert verify_chain(kept, pruned, trail[-1].head).intact
    if kept:
        assert not verify_chain(kept, AuditHead(pruned.sequence, "0" * 64), trail[-1].head).intact
        assert not verify_chain(kept[1:], pruned, trail[-1].head).intact


@given(trails)
def test_audit_rows_after_the_recorded_head_are_detected(trail: tuple[AuditRow, ...]) -> None:
    beyond = chain_events(trail[-1].head, [Event("forged", 0.0)])
    assert not verify_chain((*trail, *beyond), CHAIN_START, trail[-1].head).intact


def judged(trail: Sequence[AuditRow], *kept: AuditHead, pruned: AuditHead = CHAIN_START) -> ChainVerdict:
    examination = TrailVerifier([SavedHead.parse(str(each)) for each in kept])
    examination.add_page(TrailPage(pruned, trail[-1].head if trail else pruned, tuple(trail)))
    return examination.result().verdict


@given(trails, st.data())
def test_saved_head_is_found_until_its_row_is_pruned(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    kept = data.draw(st.sampled_from(trail)).head
    assert judged(trail, kept) is ChainVerdict.INTACT
    cut = data.draw(st.integers(0, len(trail)))
    pruned = trail[cut - 1].head if cut else CHAIN_START
    wanted = ChainVerdict.INTACT if kept.sequence >= cut else ChainVerdict.CANNOT_TELL
    assert judged(trail[cut:], kept, pruned=pruned) is wanted


@given(trails, st.data())
def test_audit_log_rewritten_or_truncated_before_a_saved_head_is_broken(
    trail: tuple[AuditRow, ...], data: st.DataObject
) -> None:
    kept = data.draw(st.integers(0, len(trail) - 1))
    index = data.draw(st.integers(0, kept))
    told = [event_of(row) for row in trail[index:]]
    before = trail[index - 1].head if index else CHAIN_START
    forged = chain_events(before, [replace(told[0], name=told[0].name + "x"), *told[1:]])
    assert judged((*trail[:index], *forged)) is ChainVerdict.INTACT
    assert judged((*trail[:index], *forged), trail[kept].head) is ChainVerdict.BROKEN
    assert judged(trail[:index], trail[kept].head) is ChainVerdict.BROKEN


def exported(trail: Sequence[AuditRow]) -> str:
    ends = TrailPage(CHAIN_START, trail[-1].head)
    documents = [document(trail_data(ends), TRAIL_KIND), *(document(row_data(row), ROW_KIND) for row in trail)]
    return "".join(json.dumps(each) + "\n" for each in documents)


@given(trails)
def test_audit_export_reads_back_as_written(trail: tuple[AuditRow, ...]) -> None:
    text = exported(trail)
    assert text.isascii()
    assert tuple(row for page in read_pages(io.StringIO(text), "a file") for row in page.rows) == trail


@given(trails, st.data())
def test_truncated_audit_export_is_broken(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    whole = exported(trail)
    first = whole.index("\n") + 1
    length = data.draw(st.integers(first, len(whole) - 2))  # without its last line break it is still complete
    examination, flaw = TrailVerifier(), ""
    try:
        for page in read_pages(io.StringIO(whole[:length]), "a file"):
            examination.add_page(page)
    except DamagedExport as error:
        flaw = str(error)
    assert examination.result(flaw).verdict is ChainVerdict.BROKEN
