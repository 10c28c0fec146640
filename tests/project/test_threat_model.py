"""The documents are accurate: what they name exists, and open points of the threat model are in its work list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import scrubber
from tests.attacks.programs import names

ROOT = Path(__file__).parents[2]
PAGE, _, WORK_LIST = (ROOT / "docs" / "threat-model.md").read_text().partition("## Open risks")
ROWS = dict(re.findall(r"^\| ([ATSWBD]\d+[a-z]?) \| (.*) \|$", PAGE, re.MULTILINE))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RENAMES = ROOT / "docs" / "contributing" / "language.md"
"""Lists names that the code no longer has, or does not have yet."""
RECIPES = sorted((ROOT / "docs" / "contributing").glob("add-*.md"))
"""Their examples exist in a copy of the tree only: ``test_recipes.py``."""


CLAIMS = {
    name: (attacker, tests, risk)
    for name, attacker, tests, risk in re.findall(
        r"^\| ([SBD]\d+[a-z]?|W\d+[a-z]?) \| (.*) \| ([^|]*) \| ([^|]*) \|$", PAGE, re.MULTILINE
    )
}
"""Of each row that makes a claim: what precedes the last two columns, the tests, and the residual risk."""


def written_tests() -> set[str]:
    suites = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "tests").rglob("*_contract.py")]
    return {
        name for path in suites for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def test_threat_model_has_no_duplicate_rows() -> None:
    assert len(re.findall(r"^\| [ATSWBD]\d+[a-z]? \| ", PAGE, re.MULTILINE)) == len(ROWS) > 80


def test_every_test_named_in_the_threat_model_exists() -> None:
    assert set(re.findall(r"`(test_\w+)(?:\[\w+\])?`", PAGE)) - written_tests() == set()


@pytest.mark.parametrize("row", sorted(CLAIMS))
def test_row_has_tests_or_says_why_nothing_tests_it(row: str) -> None:
    before, tests, risk = CLAIMS[row]
    assert all(cell.strip() for cell in before.split(" | ")), "the row has an empty cell"
    assert re.search(r"`test_\w+(\[\w+\])?`", tests) or re.match(r"not tested: \w+ \w+ \w+", tests), tests
    assert re.match(r"(as )?[A-Z]\d|covered|residual|detected|open|\*\*open|the certificate claims", risk), risk


def test_every_claim_has_the_columns_of_its_table() -> None:
    assert {name[0] for name in CLAIMS} == set("SWBD")
    assert CLAIMS.keys() == {name for name in ROWS if name[0] in "SWBD"}
    headers = re.findall(r"^\| id \| (?:boundary|source|capability) \| .*$", PAGE, re.MULTILINE)
    assert len(headers) == 4
    for header in headers:
        assert "| attacker" in header
        assert header.endswith("| what holds | tests | residual risk |")


def test_every_attack_program_is_in_a_row_and_every_case_is_an_attack_program() -> None:
    assert set(re.findall(r"`test_\w+\[(\w+)\]`", PAGE)) == set(names())


def test_security_policy_names_the_supported_version_and_contradicts_no_row() -> None:
    policy = (ROOT / "SECURITY.md").read_text()
    major, minor, _ = scrubber.__version__.split(".")
    assert f"| {major}.{minor}.x" in policy
    assert set(re.findall(r"\b([TSWBD]\d{1,2}[a-z]?)\b", policy)) <= ROWS.keys()


def test_every_open_threat_is_in_the_work_list() -> None:
    still_open = {name for name, text in ROWS.items() if "**open" in text}
    assert still_open - set(re.findall(r"\b[ATSWBD]\d+[a-z]?\b", WORK_LIST)) == set(), (
        "open, and missing from the work list"
    )


def test_threat_with_an_existing_test_is_not_in_the_work_list() -> None:
    assert set(re.findall(r"`(test_\w+)`", WORK_LIST)) & written_tests() == set()


def test_every_row_reference_of_the_threat_model_exists() -> None:
    assert set(re.findall(r"\b([ATSWBD]\d{1,2}[a-z]?)\b", PAGE + WORK_LIST)) - ROWS.keys() == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_in_the_pages_exist(page: Path) -> None:
    text = page.read_text()
    if page in RECIPES:
        text = re.sub(r"^ *(```|~~~).*?^ *\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    links = {link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if not (page.parent / link).exists()}
    assert links == set(), "dead links"
    modules = re.findall(
        r"`((?:scrubber|plugin|domain|engine|adapters|ports|api|tests|docs|deploy|policies)/[\w./-]+)`", text
    )
    roots = (ROOT, ROOT / "scrubber")
    assert {name for name in modules if not any((root / name).exists() for root in roots)} <= AT_RUN_TIME


def test_events_and_metrics_named_in_the_pages_exist() -> None:
    code = "".join(path.read_text() for part in ("scrubber", "plugin") for path in (ROOT / part).rglob("*.py"))
    text = "".join(page.read_text() for page in PAGES if page not in (RENAMES, *RECIPES))
    kinds = "certificate|device|handover|health|leftover|scrub|unauthorized|uninspected"
    events = set(re.findall(rf"`((?:{kinds})\.[a-z.-]*[a-z])`", text))
    metrics = set(re.findall(r"`(scrubber_[a-z0-9_]+)", text))
    assert len(events) > 3
    assert len(metrics) > 1
    assert {name for name in events | metrics if f'"{name}"' not in code} == set()


AT_RUN_TIME = {"plugin/plugin.sock"}
"""A socket of the service whose path begins like a directory of the tree."""
