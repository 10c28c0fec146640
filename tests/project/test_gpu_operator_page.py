"""The page about the GPU Operator: it covers every known break, and the tests that it names exist."""

import re
from pathlib import Path

from tests.doctor.stage import every_check_name

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu-operator.md").read_text()
OPEN = {25}
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


def test_every_break_has_a_check_of_doctor_that_exists(short_tmp: Path) -> None:
    checks = {
        number: re.findall(r"`([a-z-]+)`", row.split("|")[0])
        for number, row in rows("| # | doctor check | not visible on the node |").items()
    }
    assert list(checks) == list(range(1, 26))
    assert all(checks.values())
    assert {name for names in checks.values() for name in names} <= set(every_check_name(short_tmp))


def test_every_request_that_users_made_elsewhere_is_answered() -> None:
    requests = PAGE[PAGE.index("## What users asked for elsewhere") :]
    numbers = {
        "12",
        "379",
        "383",
        "519",
        "1014",
        "2570",
        "2880",
        "1782",
        "1859",
        "1330",
        "1455",
        "202",
        "661",
        "313",
        "59110",
    }
    assert set(re.findall(r"^\| \[[\w-]+(?:/[\w-]+)?#(\d+)\]", requests, re.MULTILINE)) == numbers
