"""For any table and any terminal width: no line is too wide, and no character of a text is lost."""

from hypothesis import given
from hypothesis import strategies as st

from scrubber.cli.render.table import OutputColumn, table_lines
from scrubber.cli.render.text_layout import display_width, shorten_ids, wrap

texts = st.text(
    st.characters(exclude_categories=("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"), include_characters=" ")
)
columns = st.builds(
    OutputColumn,
    title=st.sampled_from(["A", "INDEX", "CERTIFICATE"]),
    min_width=st.sampled_from([0, 8, 20]),
    drop_priority=st.integers(0, 3),
    holds_ids=st.booleans(),
    can_move_below=st.booleans(),
)


@given(texts, st.integers(2, 60))
def test_wrapped_text_fits_the_width_and_is_complete(text: str, room: int) -> None:
    lines = wrap(text, room)
    assert all(display_width(line) <= room for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@given(st.data(), st.lists(columns, min_size=1, max_size=8), st.integers(4, 120))
def test_no_line_of_a_table_exceeds_the_width(data: st.DataObject, header: list[OutputColumn], room: int) -> None:
    rows = data.draw(st.lists(st.tuples(*(texts for _ in header)), max_size=4))
    assert all(display_width(line) <= room for line in table_lines(header, rows, room))


@given(st.data(), st.integers(2, 5), st.integers(4, 120))
def test_no_line_of_a_list_exceeds_the_width_and_all_text_is_present(
    data: st.DataObject, cells: int, room: int
) -> None:
    rows = data.draw(st.lists(st.tuples(*(texts for _ in range(cells))), min_size=1, max_size=4))
    lines = table_lines((), rows, room)
    assert all(display_width(line) <= room for line in lines)
    letters = sorted("".join("".join(row) for row in rows).replace(" ", ""))
    assert sorted("".join(lines).replace(" ", "")) == letters


@given(st.sets(st.text("ab-0", max_size=30), max_size=12))
def test_shortened_id_is_a_prefix_of_one_id_only(ids: set[str]) -> None:
    for whole, short in shorten_ids(ids).items():
        if short != whole:
            beginning = short.removesuffix("…")
            assert [each for each in ids if each.startswith(beginning)] == [whole]
