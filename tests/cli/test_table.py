"""Tables: complete lines for scripts, folded ones that fit on terminals, and the columns of each output format."""

import pytest

from scrubber.cli.render.table import (
    OutputColumn,
    TableSection,
    display_width,
    render_lines,
    shorten_ids,
    table_lines,
    table_renderables,
    wrap,
)

IDS = ("GPU-1f3a09c2-7d51-4e0b", "GPU-1f3a09c2-0c5d-2b1e")
HEADER = (
    OutputColumn("INDEX"),
    OutputColumn("DEVICE", holds_ids=True),
    OutputColumn("TENANT", min_width=8),
    OutputColumn("MEMORY", wide=True),
    OutputColumn("CAUSE", min_width=12),
    OutputColumn("MODEL", wide=True),
)
ROWS = (
    ("0", IDS[0], "team-a/train-0", "141 GiB", "xid-95: the device says that it needs a reset.", "NVIDIA H200"),
    ("1", IDS[1], "-", "141 GiB", "-", "NVIDIA H200"),
)
TABLE = TableSection("", HEADER, ROWS)
PROPERTIES = TableSection("", (), (("cause", "the device says that it needs a reset"), ("recovery", "reset")))


@pytest.mark.parametrize(
    ("text", "cells"),
    [("", 0), ("abc", 3), ("café", 4), ("cafe\u0301", 4), ("東京", 4), ("\u1112\u1161\u11ab", 2), ("🙂", 2), ("…", 1)],
)
def test_wide_characters_take_two_cells_and_combining_ones_none(text: str, cells: int) -> None:
    assert display_width(text) == cells


@pytest.mark.parametrize(
    ("text", "room", "lines"),
    [
        ("", 10, [""]),
        ("one two three", 7, ["one two", "three"]),
        ("one  two", 20, ["one  two"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("東京都", 5, ["東京", "都"]),
        ("[bold]no[/] :smile:", 80, ["[bold]no[/] :smile:"]),
        ("[bold]no[/] :smile:", 12, ["[bold]no[/]", ":smile:"]),
    ],
)
def test_text_is_folded_between_words_and_never_interpreted(text: str, room: int, lines: list[str]) -> None:
    assert wrap(text, room) == lines


def test_ids_are_shortened_to_a_distinguishable_prefix() -> None:
    assert shorten_ids(IDS) == {IDS[0]: "GPU-1f3a09c2-7…", IDS[1]: "GPU-1f3a09c2-0…"}
    assert shorten_ids(IDS[:1]) == {IDS[0]: "GPU-1f3a09c2…"}
    assert shorten_ids(["SIM-GPU-aa", "SIM-GPU-ab"]) == {"SIM-GPU-aa": "SIM-GPU-aa", "SIM-GPU-ab": "SIM-GPU-ab"}
    assert shorten_ids(["GPU-1f3a09c2", "GPU-1f3a09c2-7d51-4e0b"])["GPU-1f3a09c2-7d51-4e0b"] == "GPU-1f3a09c2-…"


class TestWithoutTerminal:
    def test_every_row_is_one_complete_aligned_line(self) -> None:
        assert table_lines([TABLE], None) == [
            "INDEX  DEVICE                  TENANT          CAUSE",
            "0      GPU-1f3a09c2-7d51-4e0b  team-a/train-0  xid-95: the device says that it needs a reset.",
            "1      GPU-1f3a09c2-0c5d-2b1e  -               -",
        ]

    def test_wide_format_has_the_other_columns_as_well(self) -> None:
        lines = table_lines([TABLE], None, wide=True)
        assert lines[0].split() == ["INDEX", "DEVICE", "TENANT", "MEMORY", "CAUSE", "MODEL"]
        assert all(cell in lines[1] for cell in ROWS[0])

    def test_lines_have_no_trailing_blanks(self) -> None:
        table = TableSection("", ("A", "B"), [("x", ""), ("long", "y")])
        assert table_lines([table], None) == ["A     B", "x", "long  y"]

    def test_wide_characters_do_not_shift_the_following_columns(self) -> None:
        lines = table_lines([TableSection("", ("A", "B"), [("東京", "x"), ("cafe\u0301", "y")])], None)
        assert [display_width(line[: line.index(end)]) for line, end in zip(lines, "Bxy", strict=True)] == [6, 6, 6]

    def test_non_printable_characters_are_replaced(self) -> None:
        (line,) = table_lines([TableSection("", (), [("a\x1b[2J\nb", "[red]c[/]\u202e")])], None)
        assert line == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b  [red]c[/]\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("width", [None, 200, 80])
def test_rows_without_titles_have_the_same_cells(width: int | None) -> None:
    without = table_lines([TABLE], width, headers=False)
    assert " ".join(without).split() == " ".join(table_lines([TABLE], width)[1:]).split()
    assert without[0].startswith("0  GPU-"), "aligned without room for the titles"


@pytest.mark.parametrize("width", [None, 80])
def test_sections_have_titles_and_say_when_they_are_empty(width: int | None) -> None:
    sections = [PROPERTIES, TableSection("Conditions", ("CODE", "SINCE"), [])]
    assert table_lines(sections, width, headers=False) == [
        "cause     the device says that it needs a reset",
        "recovery  reset",
        "",
        "Conditions",
        "none",
    ]


@pytest.mark.parametrize("width", [None, 80])
def test_table_without_rows_is_its_titles_and_empty_list_is_nothing(width: int | None) -> None:
    assert table_lines([TableSection("", ("A", "B"), [], empty_message="")], width) == ["A  B"]
    assert table_lines([TableSection("", (), [], empty_message="")], width) == []


class TestOnTerminal:
    def test_table_that_fits_is_the_same_as_for_a_script(self) -> None:
        assert table_lines([TABLE], 93) == table_lines([TABLE], None)

    def test_less_width_shortens_ids(self) -> None:
        assert table_lines([TABLE], 90) == [
            "INDEX  DEVICE           TENANT          CAUSE",
            "0      GPU-1f3a09c2-7…  team-a/train-0  xid-95: the device says that it needs a reset.",
            "1      GPU-1f3a09c2-0…  -               -",
        ]

    def test_little_width_folds_the_widest_text(self) -> None:
        assert table_lines([TABLE], 60) == [
            "INDEX  DEVICE           TENANT          CAUSE",
            "0      GPU-1f3a09c2-7…  team-a/train-0  xid-95: the device",
            "                                        says that it needs a",
            "                                        reset.",
            "1      GPU-1f3a09c2-0…  -               -",
        ]

    def test_very_little_width_turns_every_row_into_a_list_of_all_properties(self) -> None:
        assert table_lines([TABLE], 40) == [
            "INDEX   0",
            "DEVICE  GPU-1f3a09c2-7d51-4e0b",
            "TENANT  team-a/train-0",
            "CAUSE   xid-95: the device says that it",
            "        needs a reset.",
            "",
            "INDEX   1",
            "DEVICE  GPU-1f3a09c2-0c5d-2b1e",
            "TENANT  -",
            "CAUSE   -",
        ]

    def test_folded_property_is_indented_below_its_start(self) -> None:
        assert table_lines([PROPERTIES], 34) == [
            "cause     the device says that it",
            "          needs a reset",
            "recovery  reset",
        ]

    def test_text_in_a_format_of_its_own_is_not_folded(self) -> None:
        text = "key: a value that is longer than the line"
        assert table_lines([TableSection("", (), [(text,)])], 20) == [text]

    def test_folded_cell_is_coloured_by_its_first_word(self) -> None:
        table = TableSection(
            "Title", ("A", OutputColumn("STATE", min_width=12)), [("x" * 8, "quarantined, advertised")]
        )
        assert table_lines([table], 80, colours=True) == [
            "\x1b[1mTitle\x1b[0m",
            "A         STATE",
            "xxxxxxxx  \x1b[31mquarantined, advertised\x1b[0m",
        ]
        assert table_lines([table], 22, colours=True) == [
            "\x1b[1mTitle\x1b[0m",
            "A         STATE",
            "xxxxxxxx  \x1b[31mquarantined,\x1b[0m",
            "          \x1b[31madvertised\x1b[0m",
        ]

    def test_markup_and_emoji_codes_are_text(self) -> None:
        header = (OutputColumn("[b]A[/]"), OutputColumn(":bug:", min_width=7))
        table = TableSection("[b]Title[/]", header, [("[red]x[/red]", ":smile: :smile:")])
        for width, rest in ((80, [":smile: :smile:"]), (22, [":smile:", ":smile:"])):
            rows = [f"[red]x[/red]  {rest[0]}", *(" " * 14 + each for each in rest[1:])]
            assert table_lines([table], width) == ["[b]Title[/]", "[b]A[/]       :bug:", *rows]

    def test_table_is_the_same_with_rich_and_without(self) -> None:
        table = TableSection("Title", HEADER, ROWS)
        for colours in (False, True):
            plain = table_lines([table, PROPERTIES], 200, wide=True, colours=colours)
            by_rich = table_renderables([table, PROPERTIES], 200, wide=True, headers=True)
            assert render_lines(by_rich, 200, colours=colours) == plain

    def test_status_has_the_same_colour_with_rich_and_without(self) -> None:
        table = TableSection(
            "Title", (), [(each, each) for each in ("clean", "suspect", "failed", "in-use", "condemned")]
        )
        by_rich = render_lines(table_renderables([table], 80, wide=False, headers=True), 80, colours=True)
        assert table_lines([table], 80, colours=True) == by_rich
        assert len({line.partition("m")[0] for line in by_rich}) == 6
