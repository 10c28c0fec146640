"""For any table and any terminal width: no line is too wide, and no character of a text is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.cli.render.table import OutputColumn, TableSection, display_width, shorten_ids, table_lines, wrap

texts = st.text(
    st.characters(exclude_categories=("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"), include_characters=" ")
)
columns = st.builds(
    OutputColumn,
    title=st.sampled_from(["A", "INDEX", "CERTIFICATE"]),
    min_width=st.sampled_from([0, 8, 20]),
    wide=st.booleans(),
    holds_ids=st.booleans(),
)
headers = st.lists(columns, max_size=7).map(lambda some: [OutputColumn("INDEX"), *some])


def letters(*given: str) -> list[str]:
    return sorted("".join(given).replace(" ", ""))


@given(texts, st.integers(2, 60))
def test_wrapped_text_fits_the_width_and_is_complete(text: str, room: int) -> None:
    lines = wrap(text, room)
    assert all(display_width(line) <= room for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@given(st.data(), headers, st.integers(30, 150), st.booleans())
def test_no_line_of_a_table_exceeds_the_width(
    data: st.DataObject, header: list[OutputColumn], room: int, wide: bool
) -> None:
    rows = data.draw(st.lists(st.tuples(*(texts for _ in header)), max_size=4))
    lines = table_lines([TableSection("Title", header, rows)], room, wide=wide)
    assert all(display_width(line) <= room for line in lines)


@given(st.data(), st.integers(2, 5), st.integers(20, 120))
def test_no_line_of_a_list_exceeds_the_width_and_all_text_is_present(
    data: st.DataObject, cells: int, room: int
) -> None:
    rows = data.draw(st.lists(st.tuples(*(texts for _ in range(cells))), min_size=1, max_size=4))
    lines = table_lines([TableSection("", (), rows)], room)
    assert all(display_width(line) <= room for line in lines)
    assert letters(*lines) == letters(*("".join(row) for row in rows))


@pytest.mark.parametrize("headers_shown", [False, True])
@given(st.data(), headers)
def test_script_gets_every_row_on_one_complete_line(
    headers_shown: bool, data: st.DataObject, header: list[OutputColumn]
) -> None:
    rows = data.draw(st.lists(st.tuples(*(texts for _ in header)), min_size=1, max_size=4))
    lines = table_lines([TableSection("", header, rows)], None, wide=True, headers=headers_shown)
    assert len(lines) == len(rows) + headers_shown
    for line, row in zip(lines[headers_shown:], rows, strict=True):
        assert letters(line) == letters(*row)


@given(st.data(), headers)
def test_columns_of_the_wide_format_contain_those_of_the_table_in_the_same_order(
    data: st.DataObject, header: list[OutputColumn]
) -> None:
    named = [OutputColumn(f"C{place}", each.min_width, each.wide) for place, each in enumerate(header)]
    table = TableSection("", named, [["x"] * len(named)])
    narrow, wide = (table_lines([table], None, wide=wide)[0].split() for wide in (False, True))
    assert [each for each in wide if each in narrow] == narrow
    assert wide == [each.title for each in named]


@given(st.sets(st.text("ab-0", max_size=30), max_size=12))
def test_shortened_id_is_a_prefix_of_one_id_only(ids: set[str]) -> None:
    for whole, short in shorten_ids(ids).items():
        if short != whole:
            beginning = short.removesuffix("…")
            assert [each for each in ids if each.startswith(beginning)] == [whole]
