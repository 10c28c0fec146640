"""The table of XIDs: every row contains a code's meaning, the source of that meaning, and the code's text."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrubber.config.bundled import bundled_policies, bundled_xid_table
from scrubber.config.policy_file import load_policy
from scrubber.config.xid_file import XidRow, load_xid_table, parse_xid_table
from scrubber.config.yaml_document import parse_yaml
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.health.signal_table import ErrorClass

SHIPPED = load_xid_table()

CLASSIFIED = {
    ErrorClass.IGNORE: [
        14,
        37,
        38,
        43,
        44,
        63,
        66,
        67,
        92,
        93,
        *range(106, 109),
        121,
        137,
        141,
        152,
        153,
        157,
        160,
        161,
    ],
    ErrorClass.APPLICATION: [
        *(8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, *range(82, 87), 88, 89, 94),
        *(*range(96, 106), *range(126, 136), 139),
    ],
    ErrorClass.RESET: [46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158],
    ErrorClass.REBOOT: [79, 151],
    ErrorClass.CONTEXT: [45, 54, 74, 78, *range(144, 151), 154, 159],
    ErrorClass.REPAIR: [61, *range(122, 126), 142],
}


def test_xid_table_has_exactly_the_known_codes_with_their_classes() -> None:
    assert {code: row.error_class for code, row in SHIPPED.items()} == {
        code: kind for kind, codes in CLASSIFIED.items() for code in codes
    }


@pytest.mark.parametrize("code", sorted(SHIPPED))
def test_every_xid_row_has_a_source_and_a_short_note(code: int) -> None:
    row = SHIPPED[code]
    assert row.code == code
    assert row.source
    assert row.note
    assert not row.note.endswith("."), "a phrase without a full stop"


@pytest.mark.parametrize("code", [63, 68, 69, 94, 109, 121])
def test_xid_that_public_tools_classify_differently_is_marked_as_disputed(code: int) -> None:
    assert "disputed:" in SHIPPED[code].note
    assert "gpud" in SHIPPED[code].note


def test_no_other_xids_are_marked_as_disputed() -> None:
    assert {code for code, row in SHIPPED.items() if "disputed" in row.note} == {63, 68, 69, 94, 109, 121}


def test_policy_has_classes_and_notes_of_the_xid_table_where_it_sets_no_others(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nxids: {reset: [94, 4242]}\n")
    policy = load_policy(file)
    assert policy.error_classes == {
        **{c: row.error_class for c, row in SHIPPED.items()},
        94: ErrorClass.RESET,
        4242: ErrorClass.RESET,
    }
    assert policy.error_notes == {code: row.note for code, row in SHIPPED.items()}


def test_reworded_xid_note_does_not_change_the_policy(tmp_path: Path) -> None:
    text = bundled_xid_table().read_bytes()
    file = tmp_path / "xid.yaml"
    file.write_bytes(text.replace(b"an uncorrectable ECC error", b"two bits of a word were wrong"))
    assert load_xid_table(file) != SHIPPED
    assert {code: row.error_class for code, row in load_xid_table(file).items()} == load_policy("default").error_classes


GOOD = "sources: {us: Seen.}\nxids:\n  - {code: 13, class: application, source: us, note: an exception}\n"


def test_range_of_xid_codes_becomes_one_row_per_code_in_order() -> None:
    text = GOOD + "  - code: 3-4\n    class: reset\n    source: us\n    note: >-\n      two\n      lines\n"
    assert list(parse_xid_table(text.encode(), "xid.yaml").values()) == [
        XidRow(3, ErrorClass.RESET, "us", "two lines"),
        XidRow(4, ErrorClass.RESET, "us", "two lines"),
        XidRow(13, ErrorClass.APPLICATION, "us", "an exception"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            GOOD + "  - {code: 12-14, class: reset, source: us, note: again}\n",
            "xid.yaml:4: xids.code: XID 13 is already listed (13); keep one of them.",
            id="twice",
        ),
        pytest.param(
            GOOD + "  - {code: 14, class: rest, source: us, note: x}\n",
            'xid.yaml:4: xids.class: "rest" is not a valid value; did you mean "reset"?',
            id="no such class",
        ),
        pytest.param(
            GOOD + "  - {code: 14, class: reset, source: them, note: x}\n",
            'xid.yaml:4: xids.source: the source "them" is not explained; write one of us, or explain it under sources.',
            id="a source that is not explained",
        ),
        pytest.param(
            GOOD + "  - {code: 14, class: reset, source: us}\n",
            'xid.yaml:4: the key "note" is missing; add a line such as note: what the code means.',
            id="no note",
        ),
        pytest.param(
            GOOD + "  - {code: 14, source: us, note: x}\n",
            'xid.yaml:4: the key "class" is missing; add a line such as class: unknown.',
            id="no class",
        ),
        pytest.param(
            GOOD + "  - {code: 14, class: reset, source: us, notes: x, note: y}\n",
            'xid.yaml:4: unknown key "notes" in "xids"; did you mean "note"?',
            id="unknown key",
        ),
        pytest.param(
            GOOD + "  - {code: 14, class: reset, source: us, note: ''}\n",
            'xid.yaml:4: xids.note: "" is not valid here; write at least one character that is not a space.',
            id="an empty note",
        ),
        pytest.param(
            GOOD + '  - {code: 14, class: reset, source: us, note: "\\u3000"}\n',
            'xid.yaml:4: xids.note: "\\u3000" is not valid here; write at least one character that is not a space.',
            id="a note of spaces",
        ),
        pytest.param(
            GOOD + "  - {code: 4-2, class: reset, source: us, note: x}\n",
            'xid.yaml:4: xids.code: the range "4-2" is empty; write the lower number first: 2-4.',
            id="an empty range",
        ),
        pytest.param(
            "sources: {us: Seen.}\n",
            'xid.yaml:1: the key "xids" is missing; add a line such as '
            "xids: [{code: 79, class: reboot, source: action, note: off the bus}].",
            id="no rows",
        ),
        pytest.param(
            "- 79\n",
            "xid.yaml:1: a table of XIDs is a mapping with the keys sources and xids; begin with a line such as sources:.",
            id="not a mapping",
        ),
    ],
)
def test_invalid_xid_table_is_refused_with_line_and_hint(text: str, message: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        parse_xid_table(text.encode(), "xid.yaml")
    assert str(caught.value) == message


def test_missing_xid_table_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=r"xid\.yaml: the table of XIDs cannot be read: No such file"):
        load_xid_table(tmp_path / "xid.yaml")


@pytest.mark.parametrize("path", [bundled_xid_table(), *bundled_policies().values()], ids=lambda path: path.stem)
def test_bundled_files_parse_alike_with_both_yaml_parsers(path: Path) -> None:
    content = path.read_bytes()
    assert parse_yaml(content, "file", bundled=True) == parse_yaml(content, "file")


@pytest.mark.parametrize(
    "content",
    [b"sources: {a: b\n", b"sources:\n\ta: b\n", b"sources: &x {}\n", b"--- a\n--- b\n", b'sources: "\\q"\n', b"- 1\n"],
)
def test_damaged_bundled_xid_table_is_reported_like_any_other(content: bytes) -> None:
    messages = []
    for ours in (True, False):
        with pytest.raises(InvalidConfiguration) as refused:
            parse_xid_table(content, "xid.yaml", bundled=ours)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
