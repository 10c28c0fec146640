"""``make gpu-check`` without a GPU: the whole check runs over the stand-ins, finds their faults, and claims nothing.

The measured values are meaningless for real GPUs; these runs show that the check itself works and reports correctly.
"""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.paths import SlowPath, rates
from bench.gpu.targets import TARGETS, evaluate_targets
from scrubber.ports.device import EraseReport
from tests import forkserver
from tests.adapters.sim_rig import Tenant
from tests.gpu.__main__ import main
from tests.gpu.outcome import Log, Report, Verdict, dump, file_name, finished, render
from tests.gpu.parts.attacks import nothing_found
from tests.nvidia.build import LIBRARY
from tests.nvidia.machine import MIB, Machine

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
DEADLINE = 400.0
"""Seconds; for a check that hangs."""


@dataclass(frozen=True)
class Ran:
    """A finished run of the check."""

    status: int
    output: str
    report: dict[str, Any]

    def verdict(self, name: str) -> str:
        return next(str(each["verdict"]) for each in self.report["results"] if each["name"] == name)

    def figure(self, name: str, key: str) -> object:
        return next(each["figures"][key] for each in self.report["results"] if each["name"] == name)

    @property
    def failed(self) -> set[str]:
        return {each["name"] for each in self.report["results"] if each["verdict"] == Verdict.FAILED}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine.create(tmp_path / "world", gpus=1, mebibytes=17, reserved_mebibytes=1) as made:
        yield made


def words(machine: Machine) -> tuple[str, ...]:
    return "--quick", "--stand-ins", str(machine.root), "--out", str(machine.root.parent / "out")


def ran(machine: Machine, status: int, output: str) -> Ran:
    reports = list((machine.root.parent / "out").glob("*.json"))
    return Ran(status, output, json.loads(reports[0].read_text()) if reports else {})


def check(machine: Machine, *arguments: str) -> Ran:
    """Run the check in this process, with children that are forked."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(output):
        patch.setattr(asyncio, "create_subprocess_exec", forkserver.start_child)
        status = main([*words(machine), *arguments])
    return ran(machine, status, output.getvalue())


def checked_by_make(machine: Machine) -> Ran:
    """Run the whole check as ``make gpu-check`` does."""
    command = [sys.executable, "-m", "tests.gpu", *words(machine)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False)
    return ran(machine, done.returncode, done.stdout + done.stderr)


# --- whole runs


def test_gpu_check_on_stand_ins_runs_every_part_and_stores_no_figures(machine: Machine) -> None:
    before = {path: path.read_bytes() for path in RESULTS.iterdir()}
    found = checked_by_make(machine)
    assert found.status == 0, found.output
    assert found.failed == set()
    assert found.report["dry"] is True
    assert found.report["targets"] == []
    assert "DRY RUN" in found.output
    assert [path.name for path in (machine.root.parent / "out").iterdir()] == ["dry-run-h200-580.65.06.json"]
    assert {path: path.read_bytes() for path in RESULTS.iterdir()} == before
    for place in ("global-memory", "shared-memory", "registers"):
        assert found.figure(f"attack.{place}.before", "found_bytes") == found.figure(
            f"attack.{place}.before", "left_bytes"
        )
        assert found.figure(f"attack.{place}.after", "found_bytes") == 0
        assert found.figure(f"attack.{place}.after", "looked_bytes")
        assert found.figure(f"attack.{place}.after", "residue_bytes")
    for name in ("holders.listed", "holders.device-node", "holders.used-memory", "holders.gone"):
        assert found.verdict(name) == Verdict.PASSED
    for name in ("kill.no-result", "kill.fence", "kill.memory", "kill.next-scrub"):
        assert found.verdict(name) in (Verdict.PASSED, Verdict.UNAVAILABLE)
    for name in ("inventory.nvidia-smi", "settings.compute-mode", "coverage", "coverage.on-chip", "diagnostics.quick"):
        assert found.verdict(name) == Verdict.PASSED
    for name in ("bench.limits", "bench.passes", "bench.slow-path", "bench.fork", "bench.events", "bench.fast-path"):
        assert found.verdict(name) == Verdict.PASSED
    assert found.verdict("reset") == Verdict.UNAVAILABLE
    assert machine.gpus[0].text("compute_mode") == "0"
    assert machine.gpus[0].resets() == 0


def test_gpu_check_attacks_and_scrubs_a_mig_instance_separately(tmp_path: Path) -> None:
    with Machine.create(tmp_path / "world", gpus=1, mebibytes=129, reserved_mebibytes=1) as machine:
        attacked, beside = machine.gpus[0].split("1g.18gb", "1g.18gb")
        beside.fill("another tenant's")
        found = check(machine, "--device", attacked.uuid, "--only", "settings", "holders", "attack")
        assert found.status == 0, found.output
        assert found.verdict("settings.compute-mode") == Verdict.UNAVAILABLE
        assert found.figure("attack.mig-instance.before", "found_bytes")
        assert found.figure("attack.mig-instance.after", "found_bytes") == 0
        assert beside.content().startswith(b"another tenant's")


def test_memory_that_does_not_clear_fails_the_gpu_check_and_the_other_parts_continue(machine: Machine) -> None:
    machine.gpus[0].set("wont_clear", "")
    found = check(machine, "--only", "coverage", "diagnostics", "bench.starting")
    assert found.status == 1
    assert found.failed == {"coverage", "diagnostics.quick"}
    assert found.verdict("bench.fork") == Verdict.PASSED
    assert "FAILED coverage" in found.output


def test_unassigned_memory_that_stays_in_use_fails_the_gpu_check(tmp_path: Path) -> None:
    with Machine.create(tmp_path / "world", gpus=1, mebibytes=129, reserved_mebibytes=1) as machine:
        machine.gpus[0].set("used", 80 * MIB)
        found = check(machine, "--only", "coverage")
    assert (found.status, found.failed) == (1, {"coverage"})
    assert f"{16 * MIB} stay in use although no process holds the device" in found.output


def test_streaming_multiprocessor_that_never_runs_fails_the_gpu_check(machine: Machine) -> None:
    machine.gpus[0].set("sm_dead", 2)
    found = check(machine, "--only", "coverage")
    assert (found.status, found.failed) == (1, {"coverage.on-chip"})


def test_compute_mode_that_cannot_be_changed_is_reported_as_a_missing_fence(machine: Machine) -> None:
    machine.gpus[0].fail("nvmlDeviceSetComputeMode", 4)
    found = check(machine, "--only", "settings", "coverage")
    assert found.status == 0, found.output
    assert found.verdict("settings.compute-mode") == Verdict.UNAVAILABLE
    assert any(str(each).startswith("fence:") for each in found.figure("coverage", "not_covered"))  # type: ignore[attr-defined]


def test_gpu_check_with_leave_settings_changes_no_settings(machine: Machine) -> None:
    machine.gpus[0].set("gpu_locked_clocks", "1000 1000")
    machine.gpus[0].set("compute_mode", 2)
    found = check(machine, "--leave-settings", "--only", "settings", "bench.starting")
    assert found.status == 0, found.output
    assert (machine.gpus[0].text("gpu_locked_clocks"), machine.gpus[0].text("compute_mode")) == ("1000 1000", "2")


def test_gpu_check_makes_a_reset_only_with_allow_reset(machine: Machine) -> None:
    found = check(machine, "--allow-reset", "--only", "reset")
    assert found.status == 0, found.output
    assert machine.gpus[0].resets() == 1


def test_gpu_check_does_not_touch_a_device_in_use(machine: Machine) -> None:
    gpu = machine.gpus[0]
    gpu.fill("secret")
    holder = "import os, signal, sys; os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY); print('{\"ready\": 1}', flush=True); signal.pause()"
    tenant = Tenant([sys.executable, "-c", holder, str(gpu.node)]).until_ready()
    try:
        found = check(machine)
    finally:
        tenant.end()
    assert found.status == 2
    assert f"in use by PID {tenant.pid}" in found.output
    assert gpu.content().startswith(b"secret")
    assert found.report == {}


def test_gpu_check_without_a_driver_checks_nothing_and_reports_the_reason(machine: Machine) -> None:
    machine.remove_driver()
    found = check(machine)
    assert found.status == 2
    assert "driver" in found.output


def test_gpu_check_imports_only_the_standard_library_and_the_adapters() -> None:
    """CuPy and NVML's bindings are imported only by its children."""
    third_party = "{'cupy', 'google', 'grpc', 'numpy', 'prometheus_client', 'pydantic', 'pynvml', 'structlog', 'tenacity', 'typer', 'yaml'}"
    code = f"import sys, tests.gpu.__main__; print(*{third_party} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_flag_suggested_for_a_missing_driver_is_accepted_by_the_gpu_check(machine: Machine) -> None:
    (machine.library_directory / LIBRARY).write_bytes(b"")
    found = check(machine)
    assert "--nvidia-driver-root" in found.output
    again = check(machine, "--nvidia-driver-root", str(machine.root))
    assert (again.status, again.output) == (2, found.output)


def test_secret_search_that_read_too_little_does_not_pass() -> None:
    assert nothing_found(0, looked=90, left=100)
    assert not nothing_found(0, looked=89, left=100)
    assert not nothing_found(0, looked=0, left=0)
    assert not nothing_found(8, looked=100, left=100)


# --- the report


def log() -> Log:
    return Log(lambda _: None)


def report(found: Log, *, dry: bool = False) -> Report:
    identity = {"model": "NVIDIA H200 NVL", "driver": "580.65.06", "cupy": "14"}
    return finished(found, made="2026-01-02T03:04Z", quick=False, dry=dry, identity=identity, version="0")


async def test_part_of_the_gpu_check_that_raises_has_failed_with_a_traceback() -> None:
    found = log()

    async def broken() -> None:
        raise ZeroDivisionError("by nothing")

    await found.part("part", 10.0, broken)
    (result,) = found.results
    assert (result.verdict, result.message) == (Verdict.FAILED, "ZeroDivisionError: by nothing")
    assert "in broken" in str(result.figures["traceback"])


async def test_part_of_the_gpu_check_that_does_not_end_has_failed() -> None:
    found = log()

    async def endless() -> None:
        await asyncio.Event().wait()

    await found.part("part", 0.01, endless)
    assert [each.verdict for each in found.results] == [Verdict.FAILED]


def test_targets_are_met_missed_or_unmeasured_and_never_estimated() -> None:
    found = log()
    found.passed("coverage", "", share=0.9951)
    found.passed("bench.slow-path", "", seconds=1.2)
    by_figure = {each.target.figure: each.met for each in evaluate_targets(found.figure)}
    assert by_figure["coverage:share"] is True
    assert by_figure["bench.slow-path:seconds"] is False
    assert by_figure["attack.registers.after:found_bytes"] is None
    report_text = render(report(found))
    assert "MISSED     request to certificate" in report_text
    assert "unmeasured secret found in registers" in report_text


def test_pass_rates_are_compared_with_the_best_rates_of_the_same_run() -> None:
    erased = EraseReport(total_bytes=100, cleared_bytes=90, verified_bytes=90, residue_bytes=0, failed_bytes=0)
    path = SlowPath(1.0, {}, {"audit": 2.0, "clear": 3.0}, erased)
    assert rates(path, {"read": 50.0, "write": 40.0}) == {
        "audit_bytes_per_second": 45.0,
        "audit_share": 0.9,
        "clear_bytes_per_second": 30.0,
        "clear_share": 0.75,
    }


def test_report_file_names_model_and_driver_and_a_dry_run_is_marked() -> None:
    assert file_name(report(log())) == "gpu-h200-nvl-580.65.06.json"
    assert file_name(report(log(), dry=True)) == "dry-run-h200-nvl-580.65.06.json"


def test_report_contains_every_figure_and_target() -> None:
    found = log()
    found.unavailable("attack.mig-instance.after", "none here")
    found.failed("coverage", "short", share=0.5, passes={"audit": 1.5})
    document = json.loads(dump(replace(report(found), seconds=3.0)))
    assert document["results"][1]["figures"] == {"share": 0.5, "passes": {"audit": 1.5}}
    assert [each["met"] for each in document["targets"]].count(None) == len(TARGETS) - 1
    assert document["software"] == {"cupy": "14"}
