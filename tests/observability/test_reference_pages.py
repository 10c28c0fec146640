"""The committed reference pages are generated from the declarations, and every code has a description."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from scripts.gen_reference import BLOCKS, PAGES, blocks_of, error_classes, render
from scrubber.domain import errors
from scrubber.domain.codes import ErrorCode
from scrubber.domain.evidence import FindingCode

ROOT = Path(__file__).parents[2]
CLASSES = error_classes()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_committed_page_equals_the_generated_one(page: Path) -> None:
    committed = page.read_text()
    assert render(committed) == committed, "run python scripts/gen_reference.py"


def test_every_generated_table_is_on_exactly_one_page() -> None:
    found = Counter(name for page in PAGES for name in blocks_of(page.read_text()))
    assert found == dict.fromkeys(BLOCKS, 1)


def test_rendering_keeps_the_text_around_a_table() -> None:
    page = "before\n<!-- generated: metrics/buckets -->\nold\n<!-- end -->\nafter\n"
    rendered = render(page)
    assert rendered.startswith("before\n<!-- generated: metrics/buckets -->\n\n| bounds")
    assert rendered.endswith("|\n\n<!-- end -->\nafter\n")
    assert render(rendered) == rendered


@pytest.mark.parametrize("code", [*ErrorCode, *FindingCode], ids=lambda code: f"{type(code).__name__}-{code}")
def test_description_of_a_code_fits_a_table_cell(code: ErrorCode | FindingCode) -> None:
    assert re.fullmatch(r"[A-Z][^|\n]*[^.]\.", code.description)
    assert ". " not in code.description
    assert "  " not in code.description
    for runbook in re.findall(r"`(Scrubber\w+)`", code.description):
        assert (ROOT / "docs" / "runbooks" / f"{runbook}.md").is_file()


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_is_raised(code: ErrorCode) -> None:
    assert CLASSES[code], "remove it from scrubber/domain/codes.py"


def test_codes_of_a_start_are_read_from_the_refusals() -> None:
    assert CLASSES[ErrorCode.SCRUBBING] == {errors.NotReady}
    assert CLASSES[ErrorCode.DEVICE_BUSY] == {errors.NotReady, errors.DeviceBusy}
    assert CLASSES[ErrorCode.DEVICE_LOST] == {errors.NotReady, errors.DeviceLost}
    assert CLASSES[ErrorCode.CHILD_DIED] == {errors.Unavailable}
    assert CLASSES[ErrorCode.WRONG_USER] == {errors.PermissionDenied}
