"""Check that the pages can be found: the index lists each of them, links lead to files, and the README stays short."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
README_LIMIT = 150

CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
URL = re.compile(r"[a-z]+:")


def linked_files(page: Path) -> Iterator[Path]:
    """Yield the target of each relative link of ``page``, without its fragment, as an absolute path."""
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path = link.partition("#")[0]
        if path and not URL.match(path):
            yield (page.parent / path).resolve()


def pages_to_list() -> set[Path]:
    """Return the pages of ``docs/``. A folder with its own ``README.md`` is listed by that page alone."""
    return {
        page
        for page in DOCS.rglob("*.md")
        if page != INDEX
        and (page.parent == DOCS or page.name == "README.md" or not (page.parent / "README.md").exists())
    }


def test_index_lists_every_page_of_the_documentation_exactly_once() -> None:
    listed = Counter(path for path in linked_files(INDEX) if path.suffix == ".md" and path.is_relative_to(DOCS))
    assert listed == dict.fromkeys(pages_to_list(), 1)


def test_index_lists_the_runbooks() -> None:
    assert DOCS / "runbooks" / "README.md" in set(linked_files(INDEX))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_of_a_page_lead_to_existing_files(page: Path) -> None:
    assert [str(path) for path in linked_files(page) if not path.exists()] == []


def test_readme_has_fewer_than_150_lines() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < README_LIMIT


def test_readme_links_to_the_index_and_to_the_tour() -> None:
    assert {INDEX, DOCS / "tour.md"} <= set(linked_files(README))
