"""``scrubber policy``: a file is judged, shown and explained before a node has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scrubber.cli.main import main
from scrubber.config.policy_file import load_policy
from scrubber.domain.basis import HandOver
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
    assert json.loads(out)["kind"] == "PolicyCheckList"
    assert json.loads(out)["items"] == [{"file": name, "name": name, "digest": load_policy(name).digest}]


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
    assert shown["hand-over"]["same-tenant"] == "checks"
    assert (shown["limits"]["dying-grace"], shown["limits"]["memory-rate"]) == ("30s", "64MiB/s")
    assert (shown["ungranted"], shown["maintenance"]["every"]) == ("refuse", "never")
    assert shown["digest"] == load_policy("trusted").digest


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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(
        """\
        name: mine
        xids: {reset: [94]}
        overrides:
          - name: small
            models: ["NVIDIA L4*"]
            sharing: never
            hand-over: {same-container: certificate}
            health: {sustained: {too-hot: 2m, pcie-width: never}}
            xids: {ignore: [94]}
          - {name: shared, resources: [nvidia.com/gpu.shared], enforcement: observe}
        """
    )
    return path


@pytest.mark.parametrize(
    ("words", "override", "answer"),
    [
        (("--model", "NVIDIA L40S"), "small", "scrub"),
        (("--model", "NVIDIA L4", "--resource", "nvidia.com/gpu.shared"), "small", "scrub"),
        (("--resource", "nvidia.com/gpu.shared"), "shared", "go-by-exception"),
        (("--model", "NVIDIA H200", "--resource", "nvidia.com/gpu"), None, "go-by-exception"),
        ((), None, "go-by-exception"),
    ],
)
def test_the_policy_of_a_device_is_explained_with_the_override_that_fits(
    capsys: pytest.CaptureFixture[str], file: Path, words: tuple[str, ...], override: str | None, answer: str
) -> None:
    found = explained(capsys, str(file), *words)
    assert (found["override"], found["answer"]) == (override, answer)
    assert found["policy"] == ("mine" if override is None else f"mine/{override}")
    _, out, _ = run(capsys, "explain", str(file), *words)
    assert ("none of small, shared fits" if override is None else f"{override} is the first that fits") in out


def test_what_follows_from_a_soft_condition_is_explained(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    sustained = explained(capsys, str(file), "--model", "NVIDIA L4")["sustained"]
    assert isinstance(sustained, dict)
    assert (sustained["too-hot"], sustained["pcie-width"], sustained["nvlink-down"]) == (120.0, None, 600.0)
    _, out, _ = run(capsys, "explain", str(file), "--model", "NVIDIA L4")
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert lines["lasting 2m"].strip() == "takes the device out of service: too-hot"
    assert "pcie-width" in lines["for however long"]


@pytest.mark.parametrize(
    ("words", "kind", "source", "way_back"),
    [
        (("default", "--xid", "95"), "reset", "action", "reset"),
        (("default", "--xid", "79"), "reboot", "action", "reboot"),
        (("default", "--xid", "61"), "service", "unused", "person"),
        (("default", "--xid", "48"), "reset", "procedure", "reset"),
        (("default", "--xid", "31"), "application", "action", None),
        (("default", "--xid", "154"), "context", "procedure", None),
        (("default", "--xid", "4242"), "unknown", "none", None),
        (("MINE", "--xid", "94"), "reset", "policy", "reset"),
        (("MINE", "--xid", "94", "--model", "NVIDIA L4"), "ignore", "policy", None),
    ],
)
def test_what_follows_from_an_xid_is_explained_with_the_way_back(
    capsys: pytest.CaptureFixture[str], file: Path, words: tuple[str, ...], kind: str, source: str, way_back: str | None
) -> None:
    words = tuple(str(file) if word == "MINE" else word for word in words)
    xid = explained(capsys, *words)["xid"]
    assert isinstance(xid, dict)
    assert (xid["class"], xid["source"], xid["way_back"]) == (kind, source, way_back)
    _, out, _ = run(capsys, "explain", *words)
    assert ("way back" in out) is (way_back is not None)


def test_an_xid_that_a_policy_gives_a_class_has_the_policy_for_its_source(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    _, out, _ = run(capsys, "xids", str(file), "-o", "json")
    listed = {each["code"]: each for each in json.loads(out)["items"]}
    assert (listed[94]["class"], listed[94]["source"]) == ("reset", "policy")
    assert (listed[95]["class"], listed[95]["source"]) == ("reset", "action")
    assert all(each["note"] for each in listed.values())
    _, out, _ = run(capsys, "xids")
    assert out.splitlines()[0].split() == ["CODE", "CLASS", "SOURCE", "NOTE"]


def test_an_override_is_shown_with_whom_it_is_for_and_what_differs(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    _, out, _ = run(capsys, "show", str(file), "-o", "json")
    shown = json.loads(out)
    small, shared = shown["overrides"]
    digest = load_policy(file).overrides[0].policy.digest
    assert shown["xids"] == {"reset": [94]}
    assert small == {
        "name": "small",
        "models": ["NVIDIA L4*"],
        "digest": digest,
        "hand-over": {"same-container": "certificate"},
        "sharing": "never",
        "health": {"sustained": {"too-hot": "2m", "pcie-width": "never"}},
        "xids": {"ignore": [94]},
    }
    assert (shared["resources"], shared["enforcement"]) == (["nvidia.com/gpu.shared"], "observe")


def test_a_policy_is_shown_as_a_list_of_values_too(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    _, out, _ = run(capsys, "show", str(file), "-o", "table")
    rows = {
        name: value for name, *rest in (line.split(maxsplit=1) for line in out.splitlines()) for value in (rest or [""])
    }
    assert rows["overrides.small.sharing"] == "never"
    assert rows["overrides.small.models"] == "NVIDIA L4*"
    assert (rows["memory.pattern"], rows["settings"], rows["overrides.shared.digest"][:8]) == (
        "false",
        "",
        load_policy(file).overrides[1].policy.digest[:8],
    )


@pytest.mark.parametrize("words", [(), ("--all-xids",)])
@pytest.mark.parametrize("name", ["default", "strict", "trusted", "MINE"])
def test_what_is_shown_is_a_policys_file_and_the_same_policy(
    capsys: pytest.CaptureFixture[str], file: Path, name: str, words: tuple[str, ...]
) -> None:
    name = str(file) if name == "MINE" else name
    status, out, _ = run(capsys, "show", name, *words)
    assert status == 0
    before, saved = load_policy(name), file.with_name("saved.yaml")
    saved.write_text(out)
    status, out, err = run(capsys, "check", str(saved), "-o", "json")
    assert (status, err) == (0, "")
    assert json.loads(out)["items"][0]["digest"] == before.digest
    assert load_policy(saved) == before
    assert f"# digest of {before.name}: {before.digest}" in saved.read_text()


def test_of_xids_those_are_shown_that_the_policy_gives_another_class_unless_all_are_asked_for(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    _, out, _ = run(capsys, "show", str(file))
    assert "xids:\n  reset: [94]\n" in out
    _, out, _ = run(capsys, "show", str(file), "--all-xids")
    assert "  reboot: [79, 151]\n" in out


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            "45",
            "where the driver says itself what the device needs, even if that is nothing, the code is only recorded",
        ),
        ("95", "the device is out of service; where the driver itself asks for something, that decides"),
        ("4242", "where the driver itself asks for something, that decides"),
    ],
)
def test_whether_the_drivers_own_word_decides_is_said_for_each_xid(
    capsys: pytest.CaptureFixture[str], code: str, sentence: str
) -> None:
    _, out, _ = run(capsys, "explain", "default", "--xid", code)
    assert sentence in out
