"""Tables that fit: what is done with a column where room is short, and in which order."""

import pytest

from scrubber.cli.cells import shortened, width, wrapped
from scrubber.cli.table import Column, lines_of

IDS = ("GPU-1f3a09c2-7d51-4e0b", "GPU-1f3a09c2-0c5d-2b1e")
DEVICES = (
    Column("INDEX"),
    Column("DEVICE", ids=True),
    Column("TENANT", least=8),
    Column("MEMORY", drop=1),
    Column("MODEL", drop=2),
    Column("CAUSE", least=20, below=True),
)
ROWS = (
    ("0", IDS[0], "team-a/train-0", "141 GiB", "NVIDIA H200", "xid-95: the device says that it needs a reset."),
    ("1", IDS[1], "-", "141 GiB", "NVIDIA H200", "-"),
)


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("", 0),
        ("abc", 3),
        ("café", 4),
        ("cafe\u0301", 4),
        ("東京", 4),
        ("한", 2),
        ("\u1112\u1161\u11ab", 2),
        ("🙂", 2),
        ("…", 1),
    ],
)
def test_wide_letters_take_two_cells_and_combining_ones_none(text: str, cells: int) -> None:
    assert width(text) == cells


@pytest.mark.parametrize(
    ("text", "room", "lines"),
    [
        ("", 10, [""]),
        ("one two three", 7, ["one two", "three"]),
        ("one  two", 20, ["one  two"]),
        ("/var/lib/kubelet/device-plugins", 20, ["/var/lib/kubelet/", "device-plugins"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("東京都", 5, ["東京", "都"]),
        ("ab", 0, ["ab"]),
    ],
)
def test_text_is_broken_between_words_and_a_long_word_at_its_joints(text: str, room: int, lines: list[str]) -> None:
    assert wrapped(text, room) == lines


def test_ids_are_shortened_to_what_still_tells_them_apart() -> None:
    assert shortened(IDS) == {IDS[0]: "GPU-1f3a09c2-7…", IDS[1]: "GPU-1f3a09c2-0…"}
    assert shortened(IDS[:1]) == {IDS[0]: "GPU-1f3a09c2…"}
    assert shortened(["SIM-GPU-aa", "SIM-GPU-ab"]) == {"SIM-GPU-aa": "SIM-GPU-aa", "SIM-GPU-ab": "SIM-GPU-ab"}
    assert shortened(["GPU-1f3a09c2", "GPU-1f3a09c2-7d51-4e0b"])["GPU-1f3a09c2-7d51-4e0b"] == "GPU-1f3a09c2-…"


def test_without_an_end_of_the_line_everything_is_whole() -> None:
    header, first, second = lines_of(DEVICES, ROWS, None)
    assert header.split() == ["INDEX", "DEVICE", "TENANT", "MEMORY", "MODEL", "CAUSE"]
    assert all(cell in first for cell in ROWS[0])
    assert second.split()[1] == IDS[1]


def test_the_last_of_the_line_is_no_blank() -> None:
    assert lines_of(("A", "B"), [("x", ""), ("long", "y")], None) == ["A     B", "x", "long  y"]


def test_with_less_room_the_least_important_column_goes_first_and_ids_are_shortened() -> None:
    assert lines_of(DEVICES, ROWS, 90) == [
        "INDEX  DEVICE           TENANT          MEMORY   CAUSE",
        "0      GPU-1f3a09c2-7…  team-a/train-0  141 GiB  xid-95: the device says that it needs a",
        "                                                 reset.",
        "1      GPU-1f3a09c2-0…  -               141 GiB  -",
    ]


def test_with_little_room_the_long_column_stands_below_its_row() -> None:
    assert lines_of(DEVICES, ROWS, 50) == [
        "INDEX  DEVICE           TENANT          MEMORY",
        "0      GPU-1f3a09c2-7…  team-a/train-0  141 GiB",
        "    xid-95: the device says that it needs a reset.",
        "1      GPU-1f3a09c2-0…  -               141 GiB",
    ]


def test_what_stands_below_its_row_fits_where_there_is_no_room_for_its_indent() -> None:
    columns = (Column("A"), Column("A"), Column("A", below=True), Column("A", below=True))
    assert list(lines_of(columns, [("", "", "", "wide")], 4)) == ["A  A", "", "  wi", "  de"]


def test_with_hardly_any_room_every_row_is_a_list() -> None:
    assert lines_of(DEVICES, ROWS[:1], 24) == [
        "INDEX",
        "  0",
        "DEVICE",
        "  GPU-1f3a09c2-7d51-4e0b",
        "TENANT",
        "  team-a/train-0",
        "MEMORY",
        "  141 GiB",
        "MODEL",
        "  NVIDIA H200",
        "CAUSE",
        "  xid-95: the device",
        "  says that it needs a",
        "  reset.",
    ]


def test_a_property_is_wrapped_under_itself() -> None:
    rows = [("cause", "the device says that it needs a reset, and nobody did it"), ("way back", "reset")]
    assert lines_of((), rows, 44) == [
        "cause     the device says that it needs a",
        "          reset, and nobody did it",
        "way back  reset",
    ]


def test_a_text_of_one_column_is_left_alone() -> None:
    assert lines_of((), [("key: a value that is longer than the line",)], 20) == [
        "key: a value that is longer than the line"
    ]


def test_a_cell_is_painted_by_what_it_says_and_not_by_how_it_is_wrapped() -> None:
    seen = []

    def paint(cell: str, text: str) -> str:
        seen.append((cell, text))
        return f"<{text}>" if cell == "a b" else text

    assert lines_of((), [("x", "a b"), ("y", "c")], 80, paint) == ["x  <a b>", "y  c"]
    assert ("a b", "a b") in seen


def test_wide_letters_do_not_shift_what_stands_behind_them() -> None:
    lines = lines_of(("A", "B"), [("東京", "x"), ("cafe\u0301", "y")], 80)
    assert [width(line[: line.index(end)]) for line, end in zip(lines, "Bxy", strict=True)] == [6, 6, 6]


def test_a_table_without_rows_is_its_header_and_a_list_without_any_is_nothing() -> None:
    assert lines_of(("A", "B"), [], 80) == ["A  B"]
    assert lines_of((), [], 80) == []
