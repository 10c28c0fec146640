"""The architecture page: every path that it names exists, and it names every module of the domain and the engine."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PLACES = [
    (path, name)
    for path, names in re.findall(r"`([\w/]+\.py)` \(((?:`\w+`(?:, )?)+)\)", PAGE)
    for name in re.findall(r"\w+", names)
]


def test_architecture_page_locates_more_than_fifty_definitions() -> None:
    assert len(PLACES) > 50


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_definition_named_on_the_architecture_page_exists_in_its_file(path: str, name: str) -> None:
    file = next(root / path for root in (ROOT / "scrubber", ROOT) if (root / path).is_file())
    assert re.search(rf"^\s*(?:async )?(?:def|class) {name}\b|^{name}\b.* = ", file.read_text(), re.MULTILINE)


@pytest.mark.parametrize("part", ["domain", "engine", "engine/device"])
def test_architecture_page_names_every_module_of_domain_and_engine(part: str) -> None:
    modules = {f"{part}/{file.name}" for file in (ROOT / "scrubber" / part).glob("*.py")} - {f"{part}/__init__.py"}
    assert {module for module in modules if f"`{module}`" not in PAGE} == set()
