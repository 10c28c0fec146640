"""The documentation of the audit log: the program and commands that it shows work as described."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scrubber.adapters.ledger.chain import chain_events
from scrubber.adapters.ledger.saved_heads import SavedHead
from scrubber.adapters.ledger.verification import ChainVerdict
from scrubber.cli.audit_file import ROW_KIND, TRAIL_KIND, audit_log_data, row_data
from scrubber.cli.render.output import document
from scrubber.ports.record import CHAIN_START, AuditHead, AuditLogPage
from tests.ledger_samples import event

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
(CHECK,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(TURN,) = re.findall(r"^```sh\n(sequence=.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

EVENTS = [
    event("service.started", at=1.5, device=None, devices=8),
    event("odd", at=1e-7, text="\u00e9\u4e2d\U0001f600\x1b\x7f", big=10**20, small=0.1, none=None, yes=True),
    event("handover.granted", at=1_795_000_000.25, tenant='"red\\'),
    event("scrub.finished", at=100.0, outcome="passed"),
]
ROWS = chain_events(CHAIN_START, EVENTS)
HEAD = ROWS[-1].head


def exported(start: AuditHead = CHAIN_START) -> list[str]:
    documents = [document(audit_log_data(AuditLogPage(start, HEAD)), TRAIL_KIND)]
    documents += [document(row_data(row), ROW_KIND) for row in ROWS[start.sequence :]]
    return [json.dumps(each, separators=(",", ":")) + "\n" for each in documents]


def check(directory: Path, lines: Sequence[str], *heads: str) -> tuple[int, str]:
    """Run the page's own program on ``lines``; return exit code and output."""
    (directory / "check.py").write_text(CHECK)
    (directory / "audit.jsonl").write_text("".join(lines))
    ended = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "check.py", "audit.jsonl", *heads],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stdout + ended.stderr


def test_documented_program_reports_a_complete_export_as_intact(tmp_path: Path) -> None:
    heads = [str(ROWS[1].head), str(ROWS[2].head), str(HEAD)]
    assert check(tmp_path, exported(), *heads) == (0, f"intact: 4 rows, up to {HEAD}\n")


@pytest.mark.parametrize("start", [ROWS[1].head, HEAD])
def test_documented_program_verifies_a_partial_export_from_its_first_row(tmp_path: Path, start: AuditHead) -> None:
    expected = f"intact: {len(ROWS) - start.sequence} rows, up to {HEAD}\n"
    assert check(tmp_path, exported(start), str(start)) == (0, expected)
    assert check(tmp_path, exported(start), str(ROWS[0].head)) == (1, "not in this export: rows 1\n")


def edited(lines: list[str]) -> Sequence[str]:
    return [*lines[:2], lines[2].replace("service", "uid:0"), *lines[3:]]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edited, "row 2 was changed"),
        (lambda lines: [*lines[:2], *lines[3:]], "row 3 was changed, or does not follow"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "row 2 was changed, or does not follow"),
        (lambda lines: lines[:-1], "the end is missing"),
        (lambda lines: [*lines, lines[-1]], "does not follow the row before it"),
    ],
)
def test_documented_program_names_the_modification_of_an_export(
    tmp_path: Path, edit: Callable[[list[str]], Sequence[str]], message: str
) -> None:
    code, output = check(tmp_path, edit(exported()))
    assert code == 1
    assert message in output


@pytest.mark.parametrize(("head", "message"), [(f"2:{'0' * 64}", "row 2 is not the one"), (f"9:{'0' * 64}", "rows 9")])
def test_documented_program_reports_a_saved_head_that_does_not_match(tmp_path: Path, head: str, message: str) -> None:
    code, output = check(tmp_path, exported(), head)
    assert code == 1
    assert message in output


@pytest.mark.parametrize("heads", [(f"2:{'0' * 64}", str(ROWS[1].head)), (str(ROWS[1].head), f"2:{'0' * 64}")])
def test_documented_program_compares_every_saved_head_of_one_row(tmp_path: Path, heads: tuple[str, ...]) -> None:
    code, output = check(tmp_path, exported(), *heads)
    assert (code, output) == (1, "row 2 is not the one that was kept\n")


def turned(*parts: str) -> str:
    lines = re.sub(r'parts="[^"]*"', f'parts="{" ".join(parts)}"', TURN) if parts else TURN
    return subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("part", "digits"),
    [("592167578", "234bc29a"), ("4.294967295e+09", "ffffffff"), ("255", "000000ff"), ("0", "0" * 8)],
)
def test_documented_recipe_converts_metrics_to_an_audit_head(part: str, digits: str) -> None:
    head = turned(*["0"] * 7, part)
    assert head == f"1024:{'0' * 56}{digits}"
    assert SavedHead.parse(head).sequence == 1024


def test_audit_page_lists_every_verdict_and_the_head_of_its_own_recipe() -> None:
    assert set(re.findall(r"^\| \d \| `([a-z-]+)` \|", PAGE, re.MULTILINE)) == {each.value for each in ChainVerdict}
    assert f"`{turned()}`" in PAGE
