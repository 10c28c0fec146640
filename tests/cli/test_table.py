"""Tables that fit a width: how columns are shortened, and in which order."""

import pytest

from scrubber.cli.render.table import OutputColumn, table_lines
from scrubber.cli.render.text_layout import display_width, shorten_ids, wrap

IDS = ("GPU-1f3a09c2-7d51-4e0b", "GPU-1f3a09c2-0c5d-2b1e")
DEVICES = (
    OutputColumn("INDEX"),
    OutputColumn("DEVICE", holds_ids=True),
    OutputColumn("TENANT", min_width=8),
    OutputColumn("MEMORY", drop_priority=1),
    OutputColumn("MODEL", drop_priority=2),
    OutputColumn("CAUSE", min_width=20, can_move_below=True),
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
def test_wide_characters_take_two_cells_and_combining_ones_none(text: str, cells: int) -> None:
    assert display_width(text) == cells


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
def test_text_wraps_between_words_and_long_words_at_their_joints(text: str, room: int, lines: list[str]) -> None:
    assert wrap(text, room) == lines


def test_ids_are_shortened_to_a_distinguishable_prefix() -> None:
    assert shorten_ids(IDS) == {IDS[0]: "GPU-1f3a09c2-7…", IDS[1]: "GPU-1f3a09c2-0…"}
    assert shorten_ids(IDS[:1]) == {IDS[0]: "GPU-1f3a09c2…"}
    assert shorten_ids(["SIM-GPU-aa", "SIM-GPU-ab"]) == {"SIM-GPU-aa": "SIM-GPU-aa", "SIM-GPU-ab": "SIM-GPU-ab"}
    assert shorten_ids(["GPU-1f3a09c2", "GPU-1f3a09c2-7d51-4e0b"])["GPU-1f3a09c2-7d51-4e0b"] == "GPU-1f3a09c2-…"


def test_table_without_a_width_limit_is_not_truncated() -> None:
    header, first, second = table_lines(DEVICES, ROWS, None)
    assert header.split() == ["INDEX", "DEVICE", "TENANT", "MEMORY", "MODEL", "CAUSE"]
    assert all(cell in first for cell in ROWS[0])
    assert second.split()[1] == IDS[1]


def test_table_lines_have_no_trailing_blanks() -> None:
    assert table_lines(("A", "B"), [("x", ""), ("long", "y")], None) == ["A     B", "x", "long  y"]


def test_less_width_drops_the_least_important_column_and_shortens_ids() -> None:
    assert table_lines(DEVICES, ROWS, 90) == [
        "INDEX  DEVICE           TENANT          MEMORY   CAUSE",
        "0      GPU-1f3a09c2-7…  team-a/train-0  141 GiB  xid-95: the device says that it needs a",
        "                                                 reset.",
        "1      GPU-1f3a09c2-0…  -               141 GiB  -",
    ]


def test_little_width_moves_the_long_column_below_its_row() -> None:
    assert table_lines(DEVICES, ROWS, 50) == [
        "INDEX  DEVICE           TENANT          MEMORY",
        "0      GPU-1f3a09c2-7…  team-a/train-0  141 GiB",
        "    xid-95: the device says that it needs a reset.",
        "1      GPU-1f3a09c2-0…  -               141 GiB",
    ]


def test_moved_column_fits_even_without_room_for_its_indent() -> None:
    columns = (
        OutputColumn("A"),
        OutputColumn("A"),
        OutputColumn("A", can_move_below=True),
        OutputColumn("A", can_move_below=True),
    )
    assert list(table_lines(columns, [("", "", "", "wide")], 4)) == ["A  A", "", "  wi", "  de"]


def test_very_little_width_turns_every_row_into_a_list() -> None:
    assert table_lines(DEVICES, ROWS[:1], 24) == [
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


def test_wrapped_property_value_is_indented_below_its_start() -> None:
    rows = [("cause", "the device says that it needs a reset, and nobody did it"), ("way back", "reset")]
    assert table_lines((), rows, 44) == [
        "cause     the device says that it needs a",
        "          reset, and nobody did it",
        "way back  reset",
    ]


def test_single_column_text_is_not_wrapped() -> None:
    assert table_lines((), [("key: a value that is longer than the line",)], 20) == [
        "key: a value that is longer than the line"
    ]


def test_cell_colour_depends_on_its_content_not_on_its_wrapping() -> None:
    seen = []

    def paint(cell: str, text: str) -> str:
        seen.append((cell, text))
        return f"<{text}>" if cell == "a b" else text

    assert table_lines((), [("x", "a b"), ("y", "c")], 80, paint) == ["x  <a b>", "y  c"]
    assert ("a b", "a b") in seen


def test_wide_characters_do_not_shift_the_following_columns() -> None:
    lines = table_lines(("A", "B"), [("東京", "x"), ("cafe\u0301", "y")], 80)
    assert [display_width(line[: line.index(end)]) for line, end in zip(lines, "Bxy", strict=True)] == [6, 6, 6]


def test_empty_table_is_its_header_and_empty_list_is_nothing() -> None:
    assert table_lines(("A", "B"), [], 80) == ["A  B"]
    assert table_lines((), [], 80) == []
