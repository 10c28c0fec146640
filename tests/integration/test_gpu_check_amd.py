"""``make gpu-check BACKEND=amd`` without a GPU: it runs over a simulated machine, finds its faults, and claims nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.amd.machine import AmdMachine, Part
from tests.gpu.outcome import Verdict

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
DEADLINE = 200.0


@dataclass(frozen=True)
class Ran:
    """A finished run of the check."""

    status: int
    output: str
    results: dict[str, dict[str, Any]]

    def verdicts(self, verdict: Verdict) -> set[str]:
        return {name for name, each in self.results.items() if each["verdict"] == verdict}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[AmdMachine]:
    with AmdMachine.create(tmp_path / "m", gpus=1, tidy=True) as made:
        yield made


@pytest.fixture
def part(machine: AmdMachine) -> Part:
    return next(iter(machine.parts.values()))


def check(machine: AmdMachine, *arguments: str) -> Ran:
    out = machine.root.parent / "out"
    command = [
        sys.executable,
        "-m",
        "tests.gpu.amd",
        "--quick",
        "--dry-run",
        "--amd-root",
        str(machine.root),
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    reports = list(out.glob("dry-run-*.json"))
    results = json.loads(reports[0].read_text())["results"] if reports else []
    return Ran(done.returncode, done.stdout + done.stderr, {each["name"]: each for each in results})


def test_gpu_check_on_a_simulated_amd_machine_runs_every_part_and_stores_no_figures(
    machine: AmdMachine, part: Part
) -> None:
    before = {path: path.read_bytes() for path in RESULTS.iterdir()}
    machine.add_record(part, 2)
    tool = machine.root / "opt/rocm/bin/amd-smi"
    tool.parent.mkdir()
    tool.write_text("""#!/bin/sh\necho '[{"gpu": 0, "bdf": "0000:0C:00.0", "uuid": "x"}]'\n""")
    tool.chmod(0o755)
    ran = check(machine, "--allow-reset", "--allow-settings")
    assert ran.status == 0, ran.output
    assert "DRY RUN" in ran.output
    assert {path: path.read_bytes() for path in RESULTS.iterdir()} == before
    assert ran.verdicts(Verdict.UNAVAILABLE) <= {"kill.no-result"}
    expected = {
        *("inventory.0", "inventory.amd-smi", "health", "health.records", "settings.read", "settings.restored"),
        *("holders.idle", "holders.listed", "holders.report", "holders.used-memory", "holders.gone", "coverage"),
        *("attack.global-memory.before", "attack.global-memory.after"),
        *("attack.local-memory.before", "attack.local-memory.after", "kill.next-scrub"),
        *("bench.slow-path", "bench.fast-path", "diagnostics.quick", "reset.plan", "reset"),
    }
    assert ran.verdicts(Verdict.PASSED) - {"kill.no-result"} == expected
    for place in ("global-memory", "local-memory"):
        left = ran.results[f"attack.{place}.before"]["figures"]
        assert left["found_bytes"] == left["left_bytes"] > 0


def test_amd_gpu_whose_cleaner_shader_does_nothing_fails_the_gpu_check(machine: AmdMachine, part: Part) -> None:
    shader = part.gpu / "run_cleaner_shader"
    shader.unlink()
    shader.symlink_to("/dev/null")  # accepts the request
    ran = check(machine, "--only", "attack")
    assert (ran.status, ran.verdicts(Verdict.FAILED)) == (1, {"attack.local-memory.after"}), ran.output


def test_local_memory_without_a_cleaner_shader_is_reported_as_not_judged(machine: AmdMachine, part: Part) -> None:
    (part.gpu / "run_cleaner_shader").unlink()
    ran = check(machine, "--only", "attack")
    assert ran.status == 0, ran.output
    assert ran.verdicts(Verdict.UNAVAILABLE) == {"attack.local-memory.after"}
    assert ran.results["attack.local-memory.before"]["figures"]["found_bytes"] > 0


def test_amd_memory_that_does_not_clear_fails_the_gpu_check_and_the_other_parts_continue(
    machine: AmdMachine, part: Part
) -> None:
    (part.memory.parent / "spoiled").touch()
    ran = check(machine, "--only", "coverage", "settings")
    assert (ran.status, ran.verdicts(Verdict.FAILED)) == (1, {"coverage"}), ran.output
    assert "settings.read" in ran.verdicts(Verdict.PASSED)


def test_amd_gpu_in_use_is_not_checked(machine: AmdMachine, part: Part) -> None:
    with machine.hold(part) as pid:
        ran = check(machine)
    assert ran.status == 2, ran.output
    assert f"in use by PID {pid}" in ran.output
