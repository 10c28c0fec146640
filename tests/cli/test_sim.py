"""``scrubber sim`` on real files: the simulated driver reports what the command creates, breaks and repairs."""

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.locks import SERVICE_LOCK
from scrubber.adapters.sim import control, layout, tenant
from scrubber.cli.main import main
from scrubber.config.value_formats import MAX_XID

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SCRUBBER_")]:
        monkeypatch.delenv(name)


def run(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *words])
    return ended.value.code


def answer(capsys: Capture, *words: str) -> Any:
    assert run(*words, "-o", "json") == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["apiVersion"], output["kind"]) == ("cli.scrubber.dev/v1", "SimDeviceList")
    return output["items"]


@pytest.fixture
def node(tmp_path: Path, capsys: Capture) -> Path:
    directory = tmp_path / "node"
    assert run("create", "--dir", str(directory), "--devices", "2", "--memory", "1MiB") == 0
    capsys.readouterr()
    return directory


def faults(node: Path, index: str = "0") -> control.Faults:
    return control.read_faults(node / "devices" / index)


class TestCreate:
    def test_existing_node_is_reported_and_unchanged(self, node: Path, capsys: Capture) -> None:
        assert run("create", "--dir", str(node), "--devices", "2", "--memory", "1MiB") == 0
        note = f"Note: The simulated node in {node} exists already; it was not changed."
        assert note in capsys.readouterr().err.splitlines()

    def test_create_makes_the_requested_node(self, tmp_path: Path, capsys: Capture) -> None:
        made = answer(capsys, "create", "--dir", str(tmp_path / "n"), "--devices", "3", "--memory", "2MiB")
        assert [each["index"] for each in made] == ["0", "1", "2"]
        for each in made:
            assert each["memoryBytes"] == 2 * 1024 * 1024 == Path(each["memoryFile"]).stat().st_size
            assert (each["parent"], each["split"]) == (None, False)

    def test_create_prints_the_commands_that_serve_the_node_beside_its_directory_and_list_its_devices(
        self, tmp_path: Path, capsys: Capture
    ) -> None:
        directory = tmp_path / "a node"
        assert run("create", "--dir", str(directory), "--devices", "1", "--memory", "1MiB") == 0
        out, err = capsys.readouterr()
        assert "1 MiB" in out
        sockets = f"--socket-dir '{directory}.run'"
        assert err.splitlines() == [
            f"Next: scrubber serve --backend sim --sim-dir '{directory}' \\",
            f"        --state-dir '{directory}.state' {sockets}",
            f"Then: scrubber devices {sockets}",
        ]

    def test_node_directory_may_come_from_the_environment(
        self, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SCRUBBER_SIM_DIR", str(tmp_path / "n"))
        made = answer(capsys, "create", "--devices", "1", "--memory", "4KiB")
        assert [each["memoryBytes"] for each in made] == [4096]

    def test_existing_node_of_another_layout_is_never_overwritten(self, node: Path, capsys: Capture) -> None:
        before = layout.load_node(node)
        assert run("create", "--dir", str(node), "--devices", "5", "--memory", "1MiB") == 2
        assert capsys.readouterr().err.startswith("Error: ")
        assert layout.load_node(node) == before

    @pytest.mark.parametrize("words", [("--devices", "0"), ("--memory", "1000")])
    def test_impossible_node_layout_is_refused(self, tmp_path: Path, capsys: Capture, words: tuple[str, ...]) -> None:
        assert run("create", "--dir", str(tmp_path / "n"), *words) == 2
        assert capsys.readouterr().err.startswith("Error: ")


class TestShape:
    def test_gpu_is_split_and_merged(self, node: Path, capsys: Capture) -> None:
        split = answer(capsys, "split", "--dir", str(node), "--device", "1", "--instances", "2")
        parent = next(each for each in split if each["index"] == "1")
        parts = [each for each in split if each["parent"] == parent["metadata"]["name"]]
        assert parent["split"]
        assert [each["index"] for each in parts] == ["1:0", "1:1"]
        merged = answer(capsys, "merge", "--dir", str(node), "--device", "1")
        assert [(each["index"], each["split"]) for each in merged] == [("0", False), ("1", False)]

    def test_held_gpu_is_not_split(self, node: Path, capsys: Capture) -> None:
        with (node / "devices" / "0" / "memory").open("r+b"):
            assert run("split", "--dir", str(node), "--device", "0") == 3
        assert capsys.readouterr().err.startswith("Error: ")


class TestFault:
    def test_every_fault_option_sets_its_fault(self, node: Path) -> None:
        words = ("--xid", "95", "--ecc", "2", "--slow-clear", "1500ms", "--reset", "fail", "--temperature", "99")
        flags = ("--lost", "--driver-timeout", "--clear-fails", "--untraceable-holder", "--holder-unkillable")
        assert run("fault", "--dir", str(node), "--device", "0", *words, *flags) == 0
        assert faults(node) == control.Faults(
            xid_counts={95: 1},
            active_xids={95: 1},
            ecc=2,
            lost=True,
            stuck=True,
            slow_clear=1.5,
            wont_clear=True,
            reset_fails=True,
            ghost=True,
            unkillable=True,
            temperature=99,
        )
        assert faults(node, "1") == control.Faults()

    def test_recovery_condition_and_counter_options_set_their_faults(self, node: Path) -> None:
        conditions = ("--condition", "pcie-width=x8 of x16", "--condition", "nvlink-down", "--condition", "sulking=a=b")
        words = ("--recovery", "drain-and-reset", "--counter", "retired_pages=3", "--counter", "made_up=0")
        assert run("fault", "--dir", str(node), "--device", "0", *conditions, *words) == 0
        assert faults(node) == control.Faults(
            recovery="drain-and-reset",
            conditions={"pcie-width": "x8 of x16", "nvlink-down": "", "sulking": "a=b"},
            counters={"retired_pages": 3, "made_up": 0},
        )

    @pytest.mark.parametrize("code", [1, MAX_XID])
    def test_lowest_and_highest_xid_can_be_raised(self, node: Path, code: int) -> None:
        assert run("fault", "--dir", str(node), "--device", "0", "--xid", str(code)) == 0
        assert faults(node).active_xids == {code: 1}

    def test_xid_storm_is_raised_by_one_command(self, node: Path) -> None:
        words = ("--device", "0", "--ecc", "1", "--xid", "31", "--repeat", "200", "--rate", "20000")
        assert run("fault", "--dir", str(node), *words) == 0
        assert faults(node) == control.Faults(xid_counts={31: 200}, active_xids={31: 200}, ecc=1)

    def test_fault_without_a_device_hits_every_device(self, node: Path) -> None:
        assert run("fault", "--dir", str(node), "--xid", "95") == 0
        assert [faults(node, each).active_xids for each in ("0", "1")] == [{95: 1}] * 2

    def test_missing_driver_fault_applies_to_the_node(self, node: Path) -> None:
        assert run("fault", "--dir", str(node), "--driver-absent") == 0
        assert control.is_driver_absent(node)

    @pytest.mark.parametrize(
        "words",
        [
            pytest.param((), id="nothing"),
            pytest.param(("--device", "7", "--lost"), id="unknown device"),
            pytest.param(("--device", "0", "--xid", "0"), id="no such XID"),
            pytest.param(("--device", "0", "--xid", str(MAX_XID + 1)), id="no XID that a policy can name"),
            pytest.param(("--device", "0", "--reset", "perhaps"), id="unknown word"),
            pytest.param(("--device", "0", "--recovery", "pray"), id="no such action"),
            pytest.param(("--device", "0", "--condition", "lost"), id="a fault and no condition"),
            pytest.param(("--device", "0", "--counter", "retired_pages"), id="counter without a number"),
            pytest.param(("--device", "0", "--counter", "retired_pages=-1"), id="counter below zero"),
            pytest.param(("--device", "0", "--ecc", "1", "--repeat", "5"), id="repeated, and no XID"),
            pytest.param(("--xid", "31", "--repeat", "5"), id="repeated, and no device"),
            pytest.param(("--device", "0", "--xid", "31", "--repeat", "0"), id="raised never"),
            pytest.param(("--device", "0", "--xid", "31", "--rate", "0"), id="never a second"),
        ],
    )
    def test_impossible_fault_is_refused(self, node: Path, capsys: Capture, words: tuple[str, ...]) -> None:
        assert run("fault", "--dir", str(node), *words) == 2
        assert "Error: " in capsys.readouterr().err
        assert faults(node) == control.Faults()

    def test_directory_without_a_node_is_refused(self, tmp_path: Path, capsys: Capture) -> None:
        assert run("fault", "--dir", str(tmp_path), "--device", "0", "--lost") == 2
        assert "is not a simulated node" in capsys.readouterr().err


class TestClear:
    @pytest.fixture(autouse=True)
    def broken(self, node: Path) -> None:
        for index in ("0", "1"):
            assert run("fault", "--dir", str(node), "--device", index, "--xid", "95", "--lost") == 0
        assert run("fault", "--dir", str(node), "--driver-absent") == 0

    def test_clear_removes_the_faults_of_a_device(self, node: Path) -> None:
        assert run("clear", "--dir", str(node), "--device", "0") == 0
        assert faults(node) == control.Faults(xid_counts={95: 1})
        assert faults(node, "1").lost

    def test_clear_can_remove_one_condition(self, node: Path) -> None:
        assert run("clear", "--dir", str(node), "--device", "0", "--condition", "lost") == 0
        assert not faults(node).lost
        assert faults(node).active_xids == {95: 1}

    def test_clear_can_remove_a_condition_by_its_code(self, node: Path) -> None:
        conditions = ("--condition", "pcie-width", "--condition", "sulking")
        assert run("fault", "--dir", str(node), "--device", "0", *conditions, "--counter", "retired_pages=3") == 0
        assert run("clear", "--dir", str(node), "--device", "0", "--condition", "pcie-width") == 0
        assert faults(node).conditions == {"sulking": ""}
        assert run("clear", "--dir", str(node), "--condition", "sulking", "--condition", "power-brake") == 0
        assert (faults(node).conditions, faults(node).counters) == ({}, {"retired_pages": 3})

    def test_clear_without_a_device_removes_the_faults_of_the_node(self, node: Path) -> None:
        assert run("clear", "--dir", str(node)) == 0
        assert not control.is_driver_absent(node)
        assert not faults(node).lost
        assert not faults(node, "1").lost

    def test_clear_of_an_unknown_condition_is_refused(self, node: Path, capsys: Capture) -> None:
        assert run("clear", "--dir", str(node), "--condition", "sulking") == 2
        assert "sulking" in capsys.readouterr().err


class TestTenant:
    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run in a separate process: a tenant changes the signal handling of its process."""
        command = [sys.executable, "-m", "scrubber.cli.main", "sim", "tenant", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_text_written_by_a_tenant_is_read_by_the_next_one(self, node: Path) -> None:
        memory = str(node / "devices" / "0" / "memory")
        assert self.run("--device", memory, "--write", "-secret- ").returncode == 0
        first, *_ = self.run("--device", memory, "--read").stdout.splitlines()
        seen = json.loads(first)
        assert seen["residue_bytes"] == 1024 * 1024
        assert seen["found"].startswith("-secret- -secret-")

    def test_unexpected_memory_content_exits_with_one(self, node: Path) -> None:
        assert self.run("--device", str(node / "devices" / "0" / "memory"), "--expect", "x").returncode == 1

    def test_tenant_without_a_device_is_a_usage_error(self, tmp_path: Path) -> None:
        ended = self.run("--device", str(tmp_path / "none"))
        assert ended.returncode == 2
        assert "cannot be opened" in ended.stderr

    def test_every_tenant_option_reaches_the_program(self, monkeypatch: pytest.MonkeyPatch) -> None:
        commands: list[list[str]] = []

        def note(argv: list[str]) -> int:
            commands.append(argv)
            return 0

        monkeypatch.setattr(tenant, "main", note)
        words = ("--device=d", "--resize=4KiB", "--expect=e", "--write=--w", "--ready-file=r", "--hold=forever")
        switches = ("--read", "--in-flight", "--mmap", "--leave-leftover", "--sigkill")
        assert run("tenant", *words, *switches) == 0
        (argv,) = commands
        assert set(argv) == {*words, *switches} - {"--resize=4KiB"} | {"--resize=4096"}

    def test_tenant_command_has_the_options_of_the_program(self, capsys: Capture) -> None:
        def flags() -> set[str]:
            return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", capsys.readouterr().out))

        with pytest.raises(SystemExit):
            tenant.main(["--help"])
        programs = flags()
        assert run("tenant", "--help") == 0
        assert flags() == programs


class TestFirmware:
    def test_firmware_command_sets_the_version_reported_by_the_driver(self, node: Path) -> None:
        assert run("fault", "--dir", str(node), "--device", "0", "--firmware", "97.1-b") == 0
        assert (faults(node).firmware, faults(node, "1").firmware) == ("97.1-b", control.Faults().firmware)

    def test_invalid_firmware_version_is_refused(self, node: Path, capsys: Capture) -> None:
        assert run("fault", "--dir", str(node), "--device", "0", "--firmware", "a b") == 2
        assert "is not a firmware version" in capsys.readouterr().err
        assert faults(node) == control.Faults()


class TestReboot:
    def test_reboot_lifts_transient_faults(self, node: Path, capsys: Capture) -> None:
        control.add_faults(node, "0", lost=True)
        assert run("reboot", "--dir", str(node)) == 0
        assert not faults(node).lost
        assert capsys.readouterr() == ("", "")

    def test_reboot_is_refused_while_a_device_is_held_or_a_service_runs(self, node: Path, capsys: Capture) -> None:
        control.add_faults(node, "0", lost=True)
        with (node / "devices" / "0" / "memory").open("rb"):
            assert run("reboot", "--dir", str(node)) == 3
        assert "Device 0 is held" in capsys.readouterr().err
        with (node / "locks" / SERVICE_LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert run("reboot", "--dir", str(node)) == 3
        assert "stop it first" in capsys.readouterr().err
        assert faults(node).lost

    def test_reboot_without_a_node_is_refused(self, tmp_path: Path, capsys: Capture) -> None:
        assert run("reboot", "--dir", str(tmp_path)) == 2
        assert capsys.readouterr().err.startswith("Error: ")
