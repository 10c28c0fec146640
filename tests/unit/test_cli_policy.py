"""``scrubber policy``: a file is judged, shown and explained before a node has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scrubber.cli.main import main
from scrubber.config.policy_file import load_policy
from scrubber.domain.handover import HandOver
from scrubber.domain.policy import Proof


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["policy", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    status, out, _ = run(capsys, "explain", *words, "-o", "json")
    assert status == 0
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", ["default", "strict", "trusted"])
def test_every_policy_that_ships_is_one(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = run(capsys, "check", name, "-o", "json")
    assert status == 0
    assert json.loads(out) == [{"file": name, "name": name, "digest": load_policy(name).digest}]


def test_what_is_wrong_is_told_with_line_and_hint_and_the_good_ones_are_told_all_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nsharing: sometime\nlimits: {questoin: 1s}\n")
    status, out, err = run(capsys, "check", str(bad), "default", "-o", "name")
    assert status == 2
    assert out == "default\n"
    assert f'{bad}:2: sharing: "sometime" is not known; write one of same-tenant, never.' in err
    assert f'{bad}:3: unknown key "questoin" in "limits"; did you mean "question"?' in err


def test_all_values_are_shown_those_included_that_the_file_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "trusted", "-o", "json")
    shown = json.loads(out)
    assert shown["proofs"]["same-tenant"] == "checks"
    assert shown["limits"]["dying-grace"] == 30.0
    assert shown["ungranted"] == "refuse"


@pytest.mark.parametrize(
    ("words", "answer", "exception"),
    [
        (("default",), "go-by-exception", "same-container"),
        (("default", "--unwatched"), "scrub", None),
        (("default", "--hygiene", "dirty", "--health", "suspect"), "scrub", None),
        (("default", "--kind", "other-tenant", "--hygiene", "clean"), "go-on-certificate", None),
        (("default", "--kind", "same-pod"), "scrub", None),
        (("default", "--hygiene", "scrubbing"), "wait-for-scrub", None),
        (("default", "--hygiene", "clean", "--health", "quarantined"), "refuse", None),
        (("strict",), "scrub", None),
        (("trusted", "--kind", "same-tenant"), "go-by-exception", "same-tenant"),
        (("trusted", "--kind", "other-tenant"), "scrub", None),
    ],
)
def test_what_a_policy_would_decide_is_explained_by_what_decides_it_on_the_node(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], answer: str, exception: str | None
) -> None:
    found = explained(capsys, *words)
    assert (found["answer"], found["exception"]) == (answer, exception)
    assert found["reason"]


def test_an_explanation_names_the_steps_of_both_paths(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "explain", "strict")
    assert "holders → reset → memory → on-chip → settings → health" in out
    assert "holders → settings → health" in out


def test_a_policy_for_trusted_namespaces_never_reaches_beyond_them() -> None:
    trusted = load_policy("trusted")
    checks = {kind for kind in HandOver if trusted.proof_for(kind) is Proof.CHECKS}
    assert checks == {HandOver.SAME_CONTAINER, HandOver.SAME_POD, HandOver.SAME_TENANT}
