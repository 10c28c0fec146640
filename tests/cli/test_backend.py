"""``scrubber backend check``: what it finds in the sample program, and in programs that misbehave."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from scrubber.adapters.ledger.state_directory import StateDirectory
from scrubber.adapters.sim import shape
from scrubber.cli.main import main
from tests.adapters.command_rig import SAMPLE, hostile

SECRET = b"secret"
ERASES = "answer(method='m', actions=['a'], checks=[], totalBytes=1024, clearedBytes=1024)"
"""A program that does nothing and claims that it does."""


@dataclass
class Checked:
    status: int
    document: Mapping[str, Any]

    def results(self, device: str = "") -> dict[str, str]:
        """Return the results by check: of ``device``, or of what concerns no device."""
        return {each["name"]: each["result"] for each in self.document["checks"] if (each["deviceID"] or "") == device}

    def message(self, name: str) -> str:
        return next(str(each["message"]) for each in self.document["checks"] if each["name"] == name)


class Administrator:
    """An administrator with a program over a simulated node of two devices."""

    def __init__(self, directory: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self.node = directory / "node"
        self.state_dir = directory / "state"
        self.state_dir.mkdir(mode=0o700)
        self._capture = capture
        shape.create(self.node, devices=2, memory=shape.MIB, node_name="node-1")
        self.devices = [
            json.loads((self.node / "devices" / index / "device.json").read_text())["id"] for index in ("0", "1")
        ]

    def memory(self, index: str) -> Path:
        return self.node / "devices" / index / "memory"

    def check(self, *words: str, program: Path = SAMPLE, telemetry: str = "30s") -> Checked:
        config = self.directory / "command.yaml"
        deadlines = (
            f"{{inventory: 30s, capabilities: 30s, holders: 30s, telemetry: {telemetry}, reset-plan: {telemetry}}}"
        )
        config.write_text(f"program: {program}\nenvironment: {{SIMULATED_NODE: {self.node}}}\ndeadlines: {deadlines}\n")
        words = ("--config", str(config), "--state-dir", str(self.state_dir), "-o", "json", *words)
        with pytest.raises(SystemExit) as ended:
            main(["backend", "check", *words])
        out, err = self._capture.readouterr()
        assert isinstance(ended.value.code, int)
        return Checked(ended.value.code, json.loads(out) if out else {"error": err})


@pytest.fixture
def administrator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Administrator:
    return Administrator(tmp_path, capsys)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_check_without_a_device_to_erase_finds_the_sample_in_order_and_changes_no_device(
    administrator: Administrator,
) -> None:
    files = sorted(path for path in administrator.node.rglob("*") if path.is_file())
    before = {path: digest(path) for path in files}
    found = administrator.check()
    assert (found.status, found.document["verdict"]) == (5, "warning"), found
    assert found.results() == {"inventory": "ok", "identity": "ok", "holders": "missing", "erase": "skipped"}
    for device in administrator.devices:
        assert found.results(device) == {"telemetry": "ok", "holders": "ok", "settings": "ok", "reset-plan": "ok"}
    assert {path: digest(path) for path in sorted(administrator.node.rglob("*")) if path.is_file()} == before


def test_named_device_is_reset_diagnosed_erased_and_set_to_its_defaults_and_the_other_one_is_not_touched(
    administrator: Administrator,
) -> None:
    for index in ("0", "1"):
        with administrator.memory(index).open("r+b") as memory:
            memory.write(SECRET)
    found = administrator.check("--erase", "0", "--yes")
    assert found.status == 5, found
    work = ("reset", "diagnose", "erase", "erase-again", "settings-apply")
    results = found.results(administrator.devices[0])
    assert {name: results.get(name) for name in work} == dict.fromkeys(work, "ok")
    assert not set(work) & found.results(administrator.devices[1]).keys()
    assert found.message("settings-apply").startswith("Every setting has its default value: ")
    assert not administrator.memory("0").read_bytes().strip(b"\0")
    assert administrator.memory("1").read_bytes().startswith(SECRET)


def test_device_is_not_erased_without_confirmation(administrator: Administrator) -> None:
    administrator.memory("0").write_bytes(SECRET)
    found = administrator.check("--erase", "0", "--no-input")
    assert found.status == 2
    assert "pass --yes to confirm" in found.document["error"]
    assert administrator.memory("0").read_bytes() == SECRET


def test_device_is_not_erased_while_a_service_has_the_state_directory(administrator: Administrator) -> None:
    lock = StateDirectory(administrator.state_dir).lock()
    administrator.memory("0").write_bytes(SECRET)
    try:
        found = administrator.check("--erase", "0", "--yes")
    finally:
        os.close(lock)
    assert found.status == 3
    assert "stop it first" in found.document["error"]
    assert administrator.memory("0").read_bytes() == SECRET


def test_nothing_is_done_to_a_device_that_a_process_holds(administrator: Administrator) -> None:
    administrator.memory("0").write_bytes(SECRET)
    holder = "import sys; file = open(sys.argv[1], 'rb'); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holder, str(administrator.memory("0"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = administrator.check("--erase", "0", "--yes")
        process.communicate()
    results = found.results(administrator.devices[0])
    assert (found.status, results["erase"]) == (1, "held")
    assert not {"reset", "diagnose", "erase-again", "settings-apply"} & results.keys()
    assert administrator.memory("0").read_bytes() == SECRET


def test_device_is_not_erased_without_a_state_directory_that_shows_whether_a_service_runs(
    administrator: Administrator,
) -> None:
    administrator.memory("0").write_bytes(SECRET)
    administrator.state_dir.rmdir()
    found = administrator.check("--erase", "0", "--yes")
    assert found.status == 2
    assert "nothing shows whether a service uses the device" in str(found.document["error"])
    assert administrator.memory("0").read_bytes() == SECRET
    assert administrator.check().status == 5


def test_unknown_device_to_erase_is_a_usage_error(administrator: Administrator) -> None:
    found = administrator.check("--erase", "no-such-device", "--yes")
    assert found.status == 2
    assert "No device matches" in found.document["error"]


@pytest.mark.parametrize(
    ("body", "result", "message"),
    [
        ("print('nonsense')", "wrong", "not one JSON object"),
        ("answer(); answer()", "wrong", "not one JSON object"),
        ("sys.stdout.write('x' * (2 << 20))", "wrong", "more than 1048576 bytes"),
        ("request['id'] = 'other'; answer()", "wrong", "id is 'other'"),
        ("sys.exit(1)", "wrong", "status 1"),
        ("answer(message='gone', code='lost'); sys.exit(10)", "fault", "gone"),
        ("answer(message='in use'); sys.exit(11)", "held", "in use"),
        ("answer(message='not now'); sys.exit(12)", "unanswered", "not now"),
    ],
)
def test_program_that_misbehaves_fails_the_check_with_a_message(
    administrator: Administrator, body: str, result: str, message: str
) -> None:
    found = administrator.check(program=hostile(administrator.directory, body))
    assert (found.status, found.document["verdict"]) == (1, "error")
    assert found.results("dev-0")["telemetry"] == result
    assert message in found.message("telemetry")


def test_verb_that_hangs_is_reported_as_timed_out_and_the_rest_is_checked(administrator: Administrator) -> None:
    program = hostile(administrator.directory, "subprocess.Popen(['sleep', '987'])\ntime.sleep(987)")
    found = administrator.check(program=program, telemetry="1s")
    assert found.status == 1
    assert (found.results("dev-0")["telemetry"], found.results("dev-0")["holders"]) == ("timed-out", "ok")
    assert "did not finish within 1 s" in found.message("telemetry")


def test_verb_that_uses_more_than_half_of_its_deadline_is_reported_as_slow(
    administrator: Administrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scrubber.backend_check._SLOW", 0.0)  # as if every run had taken so long
    program = hostile(administrator.directory, ERASES)
    program.write_text(program.read_text().replace(', "holders"', ""))
    found = administrator.check("--erase", "0", "--yes", program=program)
    assert (found.status, found.document["verdict"]) == (5, "warning")
    assert found.results("dev-0")["telemetry"] == found.results("dev-0")["erase"] == "slow"
    assert "deadlines.telemetry in the file" in found.message("telemetry")
    assert "(--timeout of this check; limits in the policy of the service)" in found.message("erase")


def test_optional_verb_that_is_missing_is_a_warning_that_names_the_consequence(administrator: Administrator) -> None:
    program = hostile(administrator.directory, "answer()")
    text = program.read_text().replace('"reset", "reset-plan", "diagnose", ', "")
    program.write_text(text)
    found = administrator.check(program=program)
    assert (found.status, found.document["verdict"]) == (5, "warning"), found
    assert found.results() == {
        "inventory": "ok",
        "identity": "ok",
        "diagnose": "missing",
        "reset": "missing",
        "settings": "missing",
        "erase": "skipped",
    }
    assert "waits for an operator" in found.message("reset")


def test_result_with_a_missing_verb_is_printed_as_yaml(
    administrator: Administrator, capsys: pytest.CaptureFixture[str]
) -> None:
    found = administrator.check()
    with pytest.raises(SystemExit):
        main(["backend", "check", "--config", str(administrator.directory / "command.yaml"), "-o", "yaml"])
    checks = yaml.safe_load(capsys.readouterr().out)["checks"]
    assert [each["name"] for each in checks] == [each["name"] for each in found.document["checks"]]


@pytest.mark.parametrize("verb", ["capabilities", "inventory"])
def test_devices_that_cannot_be_listed_are_reported_under_the_verb_that_failed(
    administrator: Administrator, verb: str
) -> None:
    program = hostile(administrator.directory, "answer()")
    program.write_text(program.read_text().replace("if verb ==", f"if verb == '{verb}': sys.exit(1)\nif verb ==", 1))
    found = administrator.check(program=program)
    assert (found.status, found.results()) == (1, {verb: "wrong", "devices": "skipped"})
    assert found.message("devices") == "The devices cannot be listed, so nothing else was checked."


def test_device_whose_users_cannot_be_found_is_a_warning(administrator: Administrator) -> None:
    program = hostile(administrator.directory, "answer()")
    program.write_text(
        program.read_text().replace(', "holders"', "").replace('"nodes": [{"path": memory}]', '"nodes": []')
    )
    found = administrator.check(program=program)
    assert found.results("dev-0")["holders"] == "missing"
    assert (
        "The inventory names no node of dev-0 and the program does not support holders: no process that uses the device "
        "can be found."
    ) in [each["message"] for each in found.document["checks"]]


def test_program_without_a_verb_that_every_program_needs_is_wrong(administrator: Administrator) -> None:
    program = hostile(administrator.directory, "answer()")
    program.write_text(program.read_text().replace('"erase", ', ""))
    found = administrator.check(program=program)
    assert found.status == 1
    assert "Verbs that every program needs are missing: erase." in found.message("capabilities")


def test_erasure_without_evidence_is_a_warning(administrator: Administrator) -> None:
    found = administrator.check("--erase", "0", "--yes", program=hostile(administrator.directory, ERASES))
    assert (found.status, found.results("dev-0")["erase-again"]) == (5, "missing")
    assert "The program reports no residueBytes" in found.message("erase-again")


def test_reset_that_is_unavailable_is_skipped_with_the_reason_of_the_program(administrator: Administrator) -> None:
    body = ERASES.replace("actions=['a']", "actions=[], unavailable='Only its whole bus can be reset.'")
    found = administrator.check("--erase", "0", "--yes", program=hostile(administrator.directory, body))
    assert found.results("dev-0")["reset"] == "skipped"
    assert found.message("reset") == "Only its whole bus can be reset."


def test_erasure_that_leaves_what_it_claims_to_have_cleared_is_wrong(administrator: Administrator) -> None:
    body = (
        "memory = here / 'devices/0/memory'\n"
        "left = 1024 - memory.read_bytes()[:1024].count(0)\n"
        "answer(method='m', actions=['a'], checks=[], totalBytes=1024, clearedBytes=1024, verifiedBytes=1024, residueBytes=left)"
    )
    administrator.memory("0").write_bytes(SECRET + bytes(1018))
    found = administrator.check("--erase", "0", "--yes", program=hostile(administrator.directory, body))
    assert found.status == 1
    assert found.results("dev-0")["erase-again"] == "wrong", found
    assert "The audit found 6 bytes after the device was cleared." in found.message("erase-again")


def test_program_that_others_may_write_does_not_run(administrator: Administrator) -> None:
    program = hostile(administrator.directory, "(here / 'ran').touch()")
    program.chmod(0o777)
    found = administrator.check(program=program)
    assert (found.status, found.results()) == (1, {"program": "wrong"})
    assert "writable by others" in found.message("program")
    assert not (administrator.node / "ran").exists()


def test_table_has_a_row_for_each_check_and_counts_the_problems(
    administrator: Administrator, capsys: pytest.CaptureFixture[str]
) -> None:
    administrator.check()
    config = administrator.directory / "command.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["backend", "check", "--config", str(config)])
    out, err = capsys.readouterr()
    assert ended.value.code == 5
    assert out.splitlines()[0].split() == ["CHECK", "DEVICE", "RESULT", "SECONDS", "MESSAGE"]
    assert "Checks: 12; 0 failed, 1 missing or slow." in err
