"""The audit trail notices whatever happens to it, wherever it happens."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from scrubber.adapters.ledger.chain import append, check, event_of
from scrubber.adapters.ledger.examination import ChainVerdict, Examination
from scrubber.adapters.ledger.kept import KeptHead
from scrubber.cli.exported import ROW_KIND, TRAIL_KIND, Flawed, pages, row_data, trail_data
from scrubber.cli.output import document
from scrubber.ports.record import START, AuditRow, Event, Head, TrailPage

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
trails = st.lists(events, min_size=1, max_size=8).map(lambda told: append(START, told))

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
def test_a_trail_written_in_any_number_of_commits_is_one_chain(told: list[Event], split: int) -> None:
    first = append(START, told[:split])
    head = first[-1].head if first else START
    second = append(head, told[split:])
    assert (*first, *second) == append(START, told)
    assert check((*first, *second), START, (*first, *second)[-1].head if told else START).intact


@given(events)
def test_an_event_is_remembered_as_it_was(event: Event) -> None:
    (row,) = append(START, [event])
    assert event_of(row) == event


@given(trails, st.data())
def test_an_edited_row_is_noticed(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(trail) - 1))
    edited = data.draw(st.sampled_from(EDITS))(trail[index])
    report = check((*trail[:index], edited, *trail[index + 1 :]), START, trail[-1].head)
    assert not report.intact


@given(trails, st.data())
def test_a_deleted_row_is_noticed(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(trail) - 1))
    report = check((*trail[:index], *trail[index + 1 :]), START, trail[-1].head)
    assert not report.intact


@given(trails, st.data())
def test_a_swapped_pair_is_noticed(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    assume(len(trail) > 1)
    one = data.draw(st.integers(0, len(trail) - 2))
    swapped = (*trail[:one], trail[one + 1], trail[one], *trail[one + 2 :])
    assert not check(swapped, START, trail[-1].head).intact


@given(trails, st.data())
def test_a_trail_rewritten_from_some_row_on_has_another_head(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    """Whoever writes the file can forge a chain; a copy of the head that was kept elsewhere still shows it."""
    index = data.draw(st.integers(0, len(trail) - 1))
    before = trail[index - 1].head if index else START
    told = [event_of(row) for row in trail[index:]]
    forged = append(before, [replace(told[0], name=told[0].name + "x"), *told[1:]])
    assert check((*trail[:index], *forged), START, forged[-1].head).intact
    assert forged[-1].head != trail[-1].head
    assert not check((*trail[:index], *forged), START, trail[-1].head).intact


@given(trails, st.data())
def test_a_pruned_trail_is_verified_from_where_it_was_pruned(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(trail)))
    pruned, kept = trail[cut - 1].head, trail[cut:]
    assert check(kept, pruned, trail[-1].head).intact
    if kept:
        assert not check(kept, Head(pruned.sequence, "0" * 64), trail[-1].head).intact
        assert not check(kept[1:], pruned, trail[-1].head).intact


@given(trails)
def test_rows_behind_the_recorded_head_are_noticed(trail: tuple[AuditRow, ...]) -> None:
    beyond = append(trail[-1].head, [Event("forged", 0.0)])
    assert not check((*trail, *beyond), START, trail[-1].head).intact


def judged(trail: Sequence[AuditRow], *kept: Head, pruned: Head = START) -> ChainVerdict:
    examination = Examination([KeptHead.read(str(each)) for each in kept])
    examination.take(TrailPage(pruned, trail[-1].head if trail else pruned, tuple(trail)))
    return examination.found().verdict


@given(trails, st.data())
def test_a_head_that_was_kept_is_found_until_its_row_is_given_up(
    trail: tuple[AuditRow, ...], data: st.DataObject
) -> None:
    kept = data.draw(st.sampled_from(trail)).head
    assert judged(trail, kept) is ChainVerdict.INTACT
    cut = data.draw(st.integers(0, len(trail)))
    pruned = trail[cut - 1].head if cut else START
    wanted = ChainVerdict.INTACT if kept.sequence >= cut else ChainVerdict.CANNOT_TELL
    assert judged(trail[cut:], kept, pruned=pruned) is wanted


@given(trails, st.data())
def test_a_trail_rewritten_or_cut_before_a_head_that_was_kept_is_broken(
    trail: tuple[AuditRow, ...], data: st.DataObject
) -> None:
    kept = data.draw(st.integers(0, len(trail) - 1))
    index = data.draw(st.integers(0, kept))
    told = [event_of(row) for row in trail[index:]]
    before = trail[index - 1].head if index else START
    forged = append(before, [replace(told[0], name=told[0].name + "x"), *told[1:]])
    assert judged((*trail[:index], *forged)) is ChainVerdict.INTACT
    assert judged((*trail[:index], *forged), trail[kept].head) is ChainVerdict.BROKEN
    assert judged(trail[:index], trail[kept].head) is ChainVerdict.BROKEN


def exported(trail: Sequence[AuditRow]) -> str:
    ends = TrailPage(START, trail[-1].head)
    documents = [document(trail_data(ends), TRAIL_KIND), *(document(row_data(row), ROW_KIND) for row in trail)]
    return "".join(json.dumps(each) + "\n" for each in documents)


@given(trails)
def test_an_export_is_read_as_it_was_written(trail: tuple[AuditRow, ...]) -> None:
    text = exported(trail)
    assert text.isascii()
    assert tuple(row for page in pages(io.StringIO(text), "a file") for row in page.rows) == trail


@given(trails, st.data())
def test_an_export_that_lost_anything_is_broken(trail: tuple[AuditRow, ...], data: st.DataObject) -> None:
    whole = exported(trail)
    first = whole.index("\n") + 1
    length = data.draw(st.integers(first, len(whole) - 2))  # without its last line break it is still whole
    examination, flaw = Examination(), ""
    try:
        for page in pages(io.StringIO(whole[:length]), "a file"):
            examination.take(page)
    except Flawed as error:
        flaw = str(error)
    assert examination.found(flaw).verdict is ChainVerdict.BROKEN
