"""``scrubber doctor`` on a node with the shipped daemons: as root, as a group member, as an unprivileged user; and without them."""

from __future__ import annotations

import asyncio
import grp
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scrubber.emulator.playground import Playground
from tests.doctor.stage import Ended, run, run_unprivileged, until_trusted
from tests.integration.acting import QUICK, SOON, running, staged, writer

ROOT = os.geteuid() == 0
OPERATORS = next(each for each in grp.getgrall() if each.gr_gid != 0) if ROOT else grp.getgrgid(os.getegid())

OF_THE_MACHINE = {"ledger-disk", "cgroups"}
"""A stage has no disk of its own, and the machine may mount cgroup v2 without ``nsdelegate``."""


NODE_ROOT = "/proc/self/root"
"""This machine is the node. Its PID 1 need not show its root directory to the tests, which doctor compares otherwise."""


async def examined(stage: Playground, *words: str) -> Ended:
    return await run("--socket-dir", stage.socket_dir, "--node-root", NODE_ROOT, "-o", "json", *words)


def wrong(ended: Ended) -> dict[str, str]:
    return {name: level for name, level in ended.levels.items() if level != "ok"}


@asynccontextmanager
async def with_operators(**flags: str) -> AsyncIterator[Playground]:
    """A stage whose service lets a group read and act; other users may traverse its directory."""
    async with Playground(devices=1, memory="2MiB", policy=QUICK) as stage:
        stage.directory.chmod(0o755)
        for flag, value in flags.items():
            stage.service.arguments = [*stage.service.arguments, f"--{flag.replace('_', '-')}", value]
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(SOON)
        yield stage


async def test_doctor_finds_a_working_node_healthy_by_what_the_service_reports() -> None:
    async with staged(devices=1) as stage:
        await running(stage, writer("a", "team-a"))
        await until_trusted(stage.read_client)
        ended = await examined(stage)
        assert set(wrong(ended)) <= OF_THE_MACHINE, ended.out
        assert (ended.code, ended.err) == (5, "")
        assert ended.check("ledger-lock")["message"] == f"The service (PID {stage.service.pid}) has the ledger open."
        assert str(stage.directory / "state") in ended.check("state-dir")["message"]
        assert ended.check("policy")["message"].startswith(f"{NODE_ROOT}{QUICK} is in force")
        assert str(stage.kubelet.root) in ended.check("kubelet")["message"]
        assert "1 container uses our devices" in ended.check("pod-resources")["message"]
        info = await stage.read_client.service_info()
        assert info.key_id in ended.check("signing-key-id")["message"]


async def test_doctor_changes_neither_state_directory_nor_audit_log() -> None:
    def state(stage: Playground) -> dict[str, tuple[int, int, int]]:
        found = (path for path in (stage.directory / "state").rglob("*") if "-wal" not in path.name)
        return {path.name: (path.stat().st_mode, path.stat().st_ino, path.stat().st_size) for path in found}

    async with staged(devices=1) as stage:
        before, head = state(stage), (await stage.read_client.service_info()).audit_head
        assert (await examined(stage)).code == 5
        assert (state(stage), (await stage.read_client.service_info()).audit_head) == (before, head)


async def test_doctor_reports_a_policy_file_broken_under_the_running_service(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    shutil.copy(QUICK, policy)
    async with staged(devices=1, policy=str(policy)) as stage:
        policy.write_text("name: quick\nnonsense: 1\n")
        ended = await examined(stage)
        assert (ended.code, wrong(ended).get("policy")) == (1, "error")
        assert f"{policy}:2" in ended.check("policy")["message"]


async def test_doctor_reports_a_break_glass_override_and_a_quarantine() -> None:
    async with staged(devices=2) as stage:
        for words in (("break-glass", "0", "--duration", "5m"), ("quarantine", "1")):
            done = await stage.run_command(
                *words, "--reason", "a test", *(["--yes"] if words[0] == "break-glass" else [])
            )
            assert done.returncode == 0, done.stderr
        ended = await examined(stage)
        assert {"break-glass": "warning", "devices": "warning"}.items() <= wrong(ended).items()
        assert "a test" in ended.check("break-glass")["message"]
        assert ended.check("devices")["message"].startswith("1 of 2 devices are out of service (quarantined)")


async def test_doctor_checks_the_state_directory_after_the_service_was_killed() -> None:
    async with staged(devices=1) as stage:
        await stage.service.kill()
        ended = await examined(stage, "--state-dir", str(stage.directory / "state"))
        assert ended.code == 1
        assert "Is scrubber serve running?" in ended.report["checks"][0]["message"]
        # What its children had open they may have for a moment longer.
        assert {"state-dir": "ok", "signing-key": "ok"}.items() <= ended.levels.items()
        assert "capabilities" not in ended.levels


async def test_operator_in_the_admin_group_may_use_doctor_without_root() -> None:
    async with with_operators(admin_group=OPERATORS.gr_name) as stage:
        ended = await run_unprivileged("--socket-dir", stage.socket_dir, "-o", "json", gids=[OPERATORS.gr_gid])
        assert ended.levels["service"] == "ok"
        assert ended.check("permissions")["message"].endswith("and may read and act.")
        if ROOT:
            assert ended.check("sockets")["message"].count(f"the group {OPERATORS.gr_name} may") == 2
            # The state directory is the service's alone: its mode is seen, and nothing behind it.
            assert {"state-dir": "ok", "signing-key": "warning"}.items() <= ended.levels.items()


async def test_doctor_advises_an_operator_with_read_access_how_to_get_admin_access() -> None:
    async with with_operators(read_group=OPERATORS.gr_name) as stage:
        ended = await run_unprivileged("--socket-dir", stage.socket_dir, "-o", "json", gids=[OPERATORS.gr_gid])
        assert ended.levels["service"] == "ok"
        if ROOT:
            check = ended.check("permissions")
            assert (check["level"], "may read, but not act" in check["message"]) == ("warning", True)
            assert "--admin-group GROUP" in check["remedy"]


@pytest.mark.parametrize("groups", [{}, {"admin_group": OPERATORS.gr_name}])
async def test_doctor_advises_an_unprivileged_user_how_to_get_access_and_shows_the_other_checks(
    groups: dict[str, str],
) -> None:
    async with with_operators(**groups) as stage:
        ended = await run_unprivileged("--socket-dir", stage.socket_dir, "-o", "json")
        if ROOT:
            assert ended.code == 1
            assert "may neither read nor act" in ended.check("permissions")["message"]
            assert ("usermod -aG" in ended.check("permissions")["remedy"]) == bool(groups)
        assert ended.levels["dependencies"] == "ok"


async def test_several_doctor_runs_at_once_do_not_disturb_each_other() -> None:
    async with staged(devices=1) as stage:
        await until_trusted(stage.read_client)
        several = await asyncio.gather(*(examined(stage) for _ in range(4)))
        assert [set(wrong(each)) <= OF_THE_MACHINE for each in several] == [True] * 4, [each.out for each in several]
