"""The threat model says what is so: the tests that it names exist, and what it calls open is in its work list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE, _, WORK_LIST = (ROOT / "docs" / "threat-model.md").read_text().partition("## Open rows, by risk")
ROWS = dict(re.findall(r"^\| ([TSWBD]\d+[a-z]?) \| (.*) \|$", PAGE, re.MULTILINE))


def test_no_row_is_there_twice() -> None:
    assert len(re.findall(r"^\| [TSWBD]\d+[a-z]? \| ", PAGE, re.MULTILINE)) == len(ROWS) > 80


def test_every_test_that_it_names_is_there() -> None:
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    } | set(re.findall(r"def (test_\w+)", (ROOT / "tests/contract/backend_contract.py").read_text()))
    assert set(re.findall(r"`(test_\w+)`", PAGE)) - written == set()


@pytest.mark.parametrize("row", sorted(name for name, text in ROWS.items() if "**open" in text))
def test_what_is_open_is_in_the_work_list(row: str) -> None:
    assert re.search(rf"\b{row}\b", WORK_LIST), f"{row} is open, and nobody is to mend it"
