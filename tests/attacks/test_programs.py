"""The attack programs themselves: what each says about itself, and the attack on the mount table that a service reads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks.programs import names, program
from tests.pods import CGROUP_WAYS, DEADLINE, CgroupGround, ground_of, only_with

HERE = Path(__file__).parent


def _can_mount() -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run(["unshare", "--mount", "true"], check=False).returncode


CAN_MOUNT = _can_mount()
if not CAN_MOUNT:
    print("NOT TESTED HERE: mounts with hostile names (no mount namespace can be made)", file=sys.__stderr__)

START_A_SERVICE = """
import subprocess, sys
from pathlib import Path
attack = [sys.executable, "-m", "tests.attacks", sys.argv[1], "--shared", sys.argv[2]]
with subprocess.Popen(attack, stdout=subprocess.PIPE) as running:
    assert b'"ready": true' in running.stdout.readline()
    from scrubber.adapters.cgroups import CgroupContainers
    CgroupContainers(Path(sys.argv[3])).close()
    print("started")
    running.kill()
"""


@only_with(CAN_MOUNT and CGROUP_WAYS)
@pytest.mark.parametrize("name", [name for name in names() if program(name).targets == "mounts"])
def test_no_volume_sub_path_of_a_pod_prevents_the_service_from_starting(name: str, tmp_path: Path) -> None:
    """Each is bind-mounted as the kubelet does it, so that it is in the mount table of the service that starts."""
    ground = ground_of(CGROUP_WAYS[0])
    assert isinstance(ground, CgroupGround)
    try:
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", START_A_SERVICE]
        command += [name, str(tmp_path), str(ground.root)]
        found = subprocess.run(command, capture_output=True, check=False, timeout=DEADLINE)
        assert (found.stdout, found.returncode) == (b"started\n", 0), found.stderr.decode(errors="replace")
    finally:
        ground.clear()


@pytest.mark.parametrize("name", names())
def test_attack_program_says_what_it_tries_what_must_hold_and_which_threat_it_is(name: str) -> None:
    attack = program(name)
    assert all((attack.tries, attack.holds, attack.threats))
    model = (HERE.parents[1] / "docs" / "threat-model.md").read_text()
    for threat in attack.threats:
        (row,) = [line for line in model.splitlines() if line.startswith(f"| {threat} |")]
        assert f"[{name}]`" in row, f"row {threat} does not name the test of this attack"


def test_attack_programs_need_only_the_standard_library() -> None:
    for path in HERE.glob("*.py"):
        if not path.name.startswith("test_"):
            source = path.read_text()
            imported = set(re.findall(r"^(?:import|from) ([\w.]+)", source, re.MULTILINE))
            ours = {each for each in imported if each.startswith("tests.attacks.")}
            assert {each.partition(".")[0] for each in imported - ours} <= sys.stdlib_module_names, path
