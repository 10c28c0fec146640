"""Every target's oracle holds for its seeds and for a few hundred inputs that are the same in every run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.lines import lines_of, reached_lines
from tests.fuzz.loop import close
from tests.fuzz.mutation import generated, minimise
from tests.fuzz.record import Run, read_runs, report
from tests.fuzz.structure import EDITS, edited, json_input, mostly_edited, text_input
from tests.fuzz.table import all_targets, module_of
from tests.fuzz.target import SOCKET_GOAL, Target

PAGE = Path(__file__).parents[2] / "docs" / "contributing" / "fuzzing.md"
TARGETS = all_targets()


@pytest.fixture(autouse=True, scope="module")
def servers() -> Iterator[None]:
    """Stop the targets' servers after the last test."""
    yield
    close()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_oracle_holds_for_every_seed_and_for_generated_inputs(target: Target) -> None:
    outcomes = Counter(target.check(each) for each in target.seeds)
    assert outcomes[True], "no seed is accepted: the target tests nothing"
    for data in islice(generated(target, seed=1), target.share):
        try:
            target.check(data)
        except Exception as error:
            error.add_note(f"{target.name}: the input is {data!r}")
            raise


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_target_is_declared_completely(target: Target) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", target.name)
    assert target.goal >= SOCKET_GOAL
    assert target.covers
    assert all(lines_of(module) for module in target.covers)
    assert all(len(seed) <= target.longest for seed in target.seeds)
    assert module_of(target.name)


def test_names_of_targets_are_unique() -> None:
    assert not [name for name, count in Counter(each.name for each in TARGETS).items() if count > 1]


def test_goals_of_all_targets_are_more_than_a_million_inputs() -> None:
    assert sum(each.goal for each in TARGETS) >= 1_000_000


def test_page_lists_every_target_with_its_oracle() -> None:
    rows = re.findall(r"^\| `([^|]+)` \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(each.name, each.parser, each.oracle) for each in TARGETS], (
        f"the table of {PAGE} is not that of the targets"
    )


def test_generated_inputs_depend_on_the_seed_alone() -> None:
    target = TARGETS[0]
    first = list(islice(generated(target, seed=1), 50))
    assert first == list(islice(generated(target, seed=1), 50))
    assert first != list(islice(generated(target, seed=2), 50))


def test_finding_is_minimised_to_what_it_needs() -> None:
    assert minimise(b"abcXdefYghi" * 20, lambda data: b"X" in data and b"Y" in data[data.index(b"X") :]) == b"XY"


def test_edits_change_one_value_of_a_document_and_leave_the_document_itself_as_it_is() -> None:
    document = {"a": [1, 2], "b": {"c": "x"}}
    assert edited(b"", document) == document
    assert edited(b"\1\0\0", document) == {"a": None, "b": {"c": "x"}}
    assert edited(b"\1\2\0", document) == {"b": {"c": "x"}}
    assert edited(b"\4\6\0", document) == {"a": [1, 1], "b": {"c": "x"}}
    assert json_input(EDITS, document) == b'{"a": [1, 2], "b": {"c": "x"}}'
    assert json_input(b"[1]", document) == b"[1]"
    assert document == {"a": [1, 2], "b": {"c": "x"}}


def test_edits_change_words_of_a_text() -> None:
    assert text_input(EDITS, b"a=b c\n") == b"a=b c\n"
    assert text_input(EDITS + b"\0\2\0\1\0\3\2", b"a=b c\n") == b"0=0 c\n"
    assert text_input(b"x", b"a=b c\n") == b"x"


def test_file_that_is_mostly_edited_is_fuzzed_whole_only_where_it_begins_as_a_comment() -> None:
    assert mostly_edited(b"\1\0\0", {"a": 1}) == mostly_edited(EDITS + b"\1\0\0", {"a": 1}) == b'{"a": null}'
    assert mostly_edited(b"# a", {"a": 1}) == b"# a"


def test_lines_that_an_input_reaches_are_counted() -> None:
    target = next(each for each in TARGETS if each.name == "process-cgroup")
    module = module_of(target.name)
    none, there = reached_lines(module, target.name, [])
    reached, _ = reached_lines(module, target.name, list(target.seeds))
    assert none == 0
    assert 5 < reached < there


def test_runs_of_one_commit_are_summed(tmp_path: Path) -> None:
    target = TARGETS[0]

    def run(commit: str, seed: int, finding: str = "") -> Run:
        return Run(
            target=target.name,
            commit=commit,
            seed=seed,
            inputs=1_000,
            accepted=250,
            cpu_seconds=2.0,
            grown_bytes=seed << 20,
            reached=seed,
            lines=9,
            finding=finding,
        )

    record = tmp_path / "record"
    runs = [run("a", 1), run("a", 2, "replay it"), run("b", 3)]
    record.write_text("".join(map(str, runs)))
    assert read_runs(record) == runs
    assert read_runs(tmp_path / "none") == []
    page = report(runs, [target], "a")
    assert page.startswith("Fuzzing of a: 2,000 inputs, 1 findings.")
    assert f"| {target.name} | 2,000 | {target.goal:,} | 25% | 500 | 2 of 9 | 2.0 MiB | 1 |" in page


def test_saved_input_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "input"
    saved.write_bytes(b"0::/a\n")
    assert main(["--target", "process-cgroup", "--replay", str(saved)]) == 0
    saved.write_bytes(b"x")
    assert main(["--target", "process-cgroup", "--replay", str(saved)]) == 0
    assert capsys.readouterr().out == "accepted\nrefused\n"
