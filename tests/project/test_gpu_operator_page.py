"""The page about the GPU Operator: it covers every known break, and the tests that it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu-operator.md").read_text()
OPEN = {23, 25}
"""Breaks without a remedy."""


def rows(header: str) -> dict[int, str]:
    """Return the rows of the table with this header, by their number."""
    (table,) = re.findall(rf"^{re.escape(header)}\n\|[-| ]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return {int(number): row for number, row in re.findall(r"^\| (\d+) \|(.*)$", table, re.MULTILINE)}


def test_every_break_has_a_row_with_a_test_unless_it_is_open() -> None:
    answers, tests = rows("| # | problem | answer |"), rows("| # | tests |")
    assert list(answers) == list(range(1, 26))
    assert {number for number, row in answers.items() if "**open**" in row} == OPEN
    assert [number for number, row in tests.items() if "`test_" in row] == [
        each for each in answers if each not in OPEN
    ]


def test_tests_named_in_the_operator_page_exist() -> None:
    defined = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert set(re.findall(r"`(test_\w+)`", PAGE)) <= defined
