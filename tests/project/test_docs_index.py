"""Check that the pages can be found and used: the index lists each of them, links lead to files and headings, YAML is valid.

And the README stays short.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from scrubber import __version__

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
README_LIMIT = 150

CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
YAML = re.compile(r"^ *```yaml\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
URL = re.compile(r"[a-z]+:")


def linked_files(page: Path) -> Iterator[Path]:
    """Yield the target of each relative link of ``page``, without its fragment, as an absolute path."""
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path = link.partition("#")[0]
        if path and not URL.match(path):
            yield (page.parent / path).resolve()


def anchors(page: Path) -> set[str]:
    """Return the fragments that lead to the headings of ``page``."""
    headings = HEADING.findall(FENCED.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


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


def test_commands_and_manifests_of_the_pages_install_this_version() -> None:
    file = re.compile(
        r"(?:newTag: |docker://REGISTRY/scrubber:|IMAGE=REGISTRY/scrubber:|dist/(?:gpu-)?scrubber[-_])(\d+\.\d+\.\d+)"
    )
    found = {(page.name, version) for page in PAGES for version in file.findall(page.read_text(encoding="utf-8"))}
    assert {name for name, _ in found} >= {"README.md", "deploying.md", "releasing.md"}
    assert {each for each in found if each[1] != __version__} == set()


def test_index_lists_the_runbooks() -> None:
    assert DOCS / "runbooks" / "README.md" in set(linked_files(INDEX))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_of_a_page_lead_to_existing_files(page: Path) -> None:
    assert [str(path) for path in linked_files(page) if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_a_heading_lead_to_an_existing_one(page: Path) -> None:
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        if fragment and not URL.match(link) and target.suffix == ".md" and fragment not in anchors(target):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_yaml_of_a_page_is_valid(page: Path) -> None:
    for block in YAML.findall(page.read_text(encoding="utf-8")):
        list(yaml.safe_load_all(textwrap.dedent(block)))


def test_readme_has_fewer_than_150_lines() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < README_LIMIT


def test_readme_links_to_the_index_and_to_the_tour() -> None:
    assert {INDEX, DOCS / "tour.md"} <= set(linked_files(README))
