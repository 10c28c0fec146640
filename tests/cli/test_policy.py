"""``scrubber policy``: a file is validated, shown and explained before a node uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scrubber.cli.main import main
from scrubber.config.policy_file import load_policy
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.policy import RequiredProof


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
def test_every_bundled_policy_is_valid(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = run(capsys, "check", name, "-o", "json")
    assert status == 0
    assert json.loads(out)["kind"] == "PolicyCheckList"
    assert json.loads(out)["items"] == [{"file": name, "name": name, "digest": load_policy(name).digest}]


def test_policy_errors_name_line_and_hint_while_valid_files_are_still_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nsharing: sometime\nlimits: {drivercall: 1s}\n")
    status, out, err = run(capsys, "check", str(bad), "default", "-o", "name")
    assert status == 2
    assert out == "default\n"
    assert f'{bad}:2: sharing: "sometime" is not a valid value; write one of same-tenant, never.' in err
    assert f'{bad}:3: unknown key "drivercall" in "limits"; did you mean "driverCall"?' in err


@pytest.mark.parametrize("output", ["yaml", "json", "table"])
@pytest.mark.parametrize("command", ["show", "explain", "xids"])
def test_bundled_default_is_evaluated_only_with_a_note_that_it_may_not_be_in_force(
    capsys: pytest.CaptureFixture[str], command: str, output: str
) -> None:
    named = run(capsys, command, "default", "-o", output)
    status, out, err = run(capsys, command, "-o", output)
    assert named == (status, out, "")
    assert err.startswith("Note: No POLICY was given, so this is the bundled policy default.")
    assert "`scrubber doctor` names the file of the policy in force." in err


def test_show_includes_default_values(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "trusted", "-o", "json")
    shown = json.loads(out)
    assert shown["handOver"]["sameTenant"] == "checks"
    assert (shown["limits"]["leftoverGracePeriod"], shown["limits"]["minClearRate"]) == ("30s", "64MiB/s")
    assert (shown["unauthorizedUse"], shown["maintenance"]["interval"]) == ("refuse", "never")
    assert shown["digest"] == load_policy("trusted").digest


@pytest.mark.parametrize(
    ("words", "answer", "exception"),
    [
        (("default",), "start-by-exception", "same-container"),
        (("default", "--unwatched"), "scrub-first", None),
        (("default", "--hygiene", "dirty", "--health", "suspect"), "scrub-first", None),
        (("default", "--hand-over", "other-tenant", "--hygiene", "clean"), "start-with-certificate", None),
        (("default", "--hand-over", "same-pod"), "scrub-first", None),
        (("default", "--hygiene", "scrubbing"), "wait-for-scrub", None),
        (("default", "--hygiene", "clean", "--health", "quarantined"), "refuse", None),
        (("strict",), "scrub-first", None),
        (("trusted", "--hand-over", "same-tenant"), "start-by-exception", "same-tenant"),
        (("trusted", "--hand-over", "other-tenant"), "scrub-first", None),
    ],
)
def test_explain_gives_the_decision_that_the_node_would_make(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], answer: str, exception: str | None
) -> None:
    found = explained(capsys, *words)
    assert (found["decision"], found["exception"]) == (answer, exception)
    assert found["reason"]


def test_explain_names_the_steps_of_both_paths(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "explain", "strict")
    assert "holders → reset → memory → on-chip → settings → health" in out
    assert "holders → settings → health" in out


def test_policy_for_trusted_namespaces_does_not_apply_to_others() -> None:
    trusted = load_policy("trusted")
    checks = {kind for kind in HandOverKind if trusted.required_proof(kind) is RequiredProof.CHECKS}
    assert checks == {HandOverKind.SAME_CONTAINER, HandOverKind.SAME_POD, HandOverKind.SAME_TENANT}


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
            handOver: {sameContainer: certificate}
            health: {quarantineAfter: {too-hot: 2m, pcie-width: never}}
            xids: {ignore: [94]}
          - {name: shared, resources: [nvidia.com/gpu.shared], enforcement: observe}
        """
    )
    return path


@pytest.mark.parametrize(
    ("words", "override", "answer"),
    [
        (("--model", "NVIDIA L40S"), "small", "scrub-first"),
        (("--model", "NVIDIA L4", "--resource", "nvidia.com/gpu.shared"), "small", "scrub-first"),
        (("--resource", "nvidia.com/gpu.shared"), "shared", "start-by-exception"),
        (("--model", "NVIDIA H200", "--resource", "nvidia.com/gpu"), None, "start-by-exception"),
        ((), None, "start-by-exception"),
    ],
)
def test_explain_selects_the_first_matching_override(
    capsys: pytest.CaptureFixture[str], file: Path, words: tuple[str, ...], override: str | None, answer: str
) -> None:
    found = explained(capsys, str(file), *words)
    assert (found["override"], found["decision"]) == (override, answer)
    assert found["policy"] == ("mine" if override is None else f"mine/{override}")
    _, out, _ = run(capsys, "explain", str(file), *words)
    assert ("none of small, shared matches" if override is None else f"{override} is the first that matches") in out


def test_explain_covers_soft_conditions(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    sustained = explained(capsys, str(file), "--model", "NVIDIA L4")["quarantineAfterSeconds"]
    assert isinstance(sustained, dict)
    assert (sustained["too-hot"], sustained["pcie-width"], sustained["nvlink-down"]) == (120.0, None, 600.0)
    _, out, _ = run(capsys, "explain", str(file), "--model", "NVIDIA L4")
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert lines["lasting 2m"].strip() == "takes the device out of service: too-hot"
    assert "pcie-width" in lines["of any duration"]


@pytest.mark.parametrize(
    ("words", "kind", "source", "recovery_method"),
    [
        (("default", "--xid", "95"), "reset", "action", "reset"),
        (("default", "--xid", "79"), "reboot", "action", "reboot"),
        (("default", "--xid", "61"), "repair", "unused", "operator"),
        (("default", "--xid", "48"), "reset", "procedure", "reset"),
        (("default", "--xid", "31"), "application", "action", None),
        (("default", "--xid", "154"), "context", "procedure", None),
        (("default", "--xid", "4242"), "unknown", "none", None),
        (("MINE", "--xid", "94"), "reset", "policy", "reset"),
        (("MINE", "--xid", "94", "--model", "NVIDIA L4"), "ignore", "policy", None),
    ],
)
def test_explain_covers_an_xid_and_its_recovery_action(
    capsys: pytest.CaptureFixture[str],
    file: Path,
    words: tuple[str, ...],
    kind: str,
    source: str,
    recovery_method: str | None,
) -> None:
    words = tuple(str(file) if word == "MINE" else word for word in words)
    xid = explained(capsys, *words)["xid"]
    assert isinstance(xid, dict)
    assert (xid["class"], xid["source"], xid["recoveryMethod"]) == (kind, source, recovery_method)
    _, out, _ = run(capsys, "explain", *words)
    assert any(line.startswith("recovery  ") for line in out.splitlines()) is (recovery_method is not None)


def test_xid_classified_by_the_policy_has_the_policy_as_its_source(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    _, out, _ = run(capsys, "xids", str(file), "-o", "json")
    listed = {each["code"]: each for each in json.loads(out)["items"]}
    assert (listed[94]["class"], listed[94]["source"]) == ("reset", "policy")
    assert (listed[95]["class"], listed[95]["source"]) == ("reset", "action")
    assert all(each["note"] for each in listed.values())
    _, out, _ = run(capsys, "xids")
    assert out.splitlines()[0].split() == ["CODE", "CLASS", "SOURCE", "NOTE"]


def test_show_lists_each_override_with_its_selectors_and_differences(
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
        "handOver": {"sameContainer": "certificate"},
        "sharing": "never",
        "health": {"quarantineAfter": {"too-hot": "2m", "pcie-width": "never"}},
        "xids": {"ignore": [94]},
    }
    assert (shared["resources"], shared["enforcement"]) == (["nvidia.com/gpu.shared"], "observe")


def test_show_prints_a_policy_as_a_flat_table(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    _, out, _ = run(capsys, "show", str(file), "-o", "table")
    rows = {
        name: value for name, *rest in (line.split(maxsplit=1) for line in out.splitlines()) for value in (rest or [""])
    }
    assert rows["overrides.small.sharing"] == "never"
    assert rows["overrides.small.models"] == "NVIDIA L4*"
    assert (rows["memory.patternPass"], rows["settings"], rows["overrides.shared.digest"][:8]) == (
        "false",
        "",
        load_policy(file).overrides[1].policy.digest[:8],
    )


@pytest.mark.parametrize("words", [(), ("--all-xids",)])
@pytest.mark.parametrize("name", ["default", "strict", "trusted", "MINE"])
def test_shown_policy_is_a_file_that_loads_as_the_same_policy(
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


def test_show_lists_only_reclassified_xids_unless_all_are_requested(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    _, out, _ = run(capsys, "show", str(file))
    assert "xids:\n  reset: [94]\n" in out
    _, out, _ = run(capsys, "show", str(file), "--all-xids")
    assert "  reboot: [79, 151]\n" in out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "45",
            "where the driver reports its own recovery action, even none, the code is only recorded",
        ),
        ("95", "the device is out of service; a recovery action that the driver itself requests takes precedence"),
        ("4242", "a recovery action that the driver itself requests takes precedence"),
    ],
)
def test_explain_states_for_each_xid_whether_the_drivers_action_applies(
    capsys: pytest.CaptureFixture[str], code: str, message: str
) -> None:
    _, out, _ = run(capsys, "explain", "default", "--xid", code)
    assert message in out
