"""Whatever is in a table and however narrow the terminal: no line is too wide, and no letter of a text is lost."""

from hypothesis import given
from hypothesis import strategies as st

from scrubber.cli.cells import shortened, width, wrapped
from scrubber.cli.table import Column, lines_of

texts = st.text(
    st.characters(exclude_categories=("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"), include_characters=" ")
)
columns = st.builds(
    Column,
    title=st.sampled_from(["A", "INDEX", "CERTIFICATE"]),
    least=st.sampled_from([0, 8, 20]),
    drop=st.integers(0, 3),
    ids=st.booleans(),
    below=st.booleans(),
)


@given(texts, st.integers(2, 60))
def test_what_is_wrapped_fits_and_is_all_there(text: str, room: int) -> None:
    lines = wrapped(text, room)
    assert all(width(line) <= room for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@given(st.data(), st.lists(columns, min_size=1, max_size=8), st.integers(4, 120))
def test_no_line_of_a_table_is_too_wide(data: st.DataObject, header: list[Column], room: int) -> None:
    rows = data.draw(st.lists(st.tuples(*(texts for _ in header)), max_size=4))
    assert all(width(line) <= room for line in lines_of(header, rows, room))


@given(st.data(), st.integers(2, 5), st.integers(4, 120))
def test_no_line_of_a_list_is_too_wide_and_everything_stands_there(data: st.DataObject, cells: int, room: int) -> None:
    rows = data.draw(st.lists(st.tuples(*(texts for _ in range(cells))), min_size=1, max_size=4))
    lines = lines_of((), rows, room)
    assert all(width(line) <= room for line in lines)
    letters = sorted("".join("".join(row) for row in rows).replace(" ", ""))
    assert sorted("".join(lines).replace(" ", "")) == letters


@given(st.sets(st.text("ab-0", max_size=30), max_size=12))
def test_a_shortened_id_is_the_beginning_of_one_only(ids: set[str]) -> None:
    for whole, short in shortened(ids).items():
        if short != whole:
            beginning = short.removesuffix("…")
            assert [each for each in ids if each.startswith(beginning)] == [whole]
