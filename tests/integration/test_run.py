"""``scrubber run`` on the running service, without a kubelet: devices belong to a command as long as it has a process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from scrubber.emulator.cgroups import writable_cgroup_parent
from scrubber.emulator.playground import CompletedCommand, Playground, start_module
from tests.integration.acting import SOON, history
from tests.integration.test_jobs import node_with_slurm

__test__ = writable_cgroup_parent() is not None
if not __test__:
    print("NOT TESTED HERE: scrubber run (no cgroup can be created)", file=sys.__stderr__)

HOLD = """
import os, pathlib, sys, time
device = pathlib.Path(sys.argv[1]).open("r+b")
device.write(b"secret")
device.flush()
print("ready", flush=True)
time.sleep(3600)
"""


async def start(stage: Playground, *arguments: str) -> asyncio.subprocess.Process:
    return await start_module(
        "scrubber.cli.main",
        *("run", "--socket-dir", str(stage.socket_dir), "--cgroup-root", str(stage.cgroup_parent), *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )


async def run(stage: Playground, *arguments: str) -> CompletedCommand:
    process = await start(stage, *arguments)
    out, err = await process.communicate()
    return CompletedCommand(process.returncode or 0, out.decode(), err.decode())


def holding(stage: Playground) -> Sequence[str]:
    return (sys.executable, "-S", "-c", HOLD, str(stage.sim_dir / "devices" / "0" / "memory"))


def runs_below(stage: Playground) -> list[str]:
    assert stage.cgroup_parent is not None
    return sorted(each.name for each in (stage.cgroup_parent / "scrubber.slice").glob("scrubber-run*.slice"))


async def test_command_gets_devices_and_variables_and_its_exit_status_is_that_of_run(short_tmp: Path) -> None:
    async with node_with_slurm(short_tmp, devices=2) as (stage, _):
        show = 'echo "$SCRUBBER_DEVICES $SCRUBBER_CGROUP_PARENT"; cat /proc/self/cgroup; exit 7'
        done = await run(stage, "--count", "2", "--", "sh", "-c", show)
        assert (done.returncode, done.stderr) == (7, "")
        devices, parent = done.stdout.splitlines()[0].split(" ")
        listed = await stage.wait_until_clean(SOON)
        assert devices.split(",") == sorted(each.id for each in listed)
        assert f"/scrubber.slice/{parent}/command" in done.stdout
        granted = await history(stage, "handover.granted")
        assert {(row["tenant"], str(row["job"])[:4]) for row in granted} == {("root", "run/")}
        assert (await run(stage, "--", "true")).returncode == 0
        assert parent not in runs_below(stage)  # the next command removes the cgroups of ended ones


async def test_command_that_cannot_be_executed_releases_its_device(short_tmp: Path) -> None:
    async with node_with_slurm(short_tmp) as (stage, _):
        missing = await run(stage, "--", str(short_tmp / "missing"), "--version")
        assert (missing.returncode, "missing cannot be executed" in missing.stderr) == (127, True)
        assert (await run(stage, "--", "/etc")).returncode == 126
        await stage.wait_for_devices(lambda devices: [each.state for each in devices] == ["clean"], SOON)
        unknown = await run(stage, "--user", "no-such-user", "--", "true")
        assert (unknown.returncode, "There is no user no-such-user" in unknown.stderr) == (2, True)


async def test_signal_reaches_the_command_and_its_device_is_scrubbed(short_tmp: Path) -> None:
    async with node_with_slurm(short_tmp) as (stage, _):
        process = await start(stage, "--device", "0", "--", *holding(stage))
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        busy = await run(stage, "--device", "0", "--wait", "1s", "--", "true")
        assert (busy.returncode, "is used by job" in busy.stderr) == (3, True)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == -signal.SIGTERM
        await stage.wait_for_devices(lambda devices: [each.state for each in devices] == ["clean"], SOON)
        assert not (stage.sim_dir / "devices" / "0" / "memory").read_bytes().strip(b"\0")


async def test_process_in_the_background_keeps_the_device_across_a_kill_of_the_service(short_tmp: Path) -> None:
    async with node_with_slurm(short_tmp) as (stage, _):
        process = await start(stage, "--", "sh", "-c", '"$@" & echo "$!"', "sh", *holding(stage))
        assert process.stdout is not None
        lines = {(await process.stdout.readline()).strip() for _ in range(2)}
        (pid,) = (int(each) for each in lines if each.isdigit())
        await stage.service.kill()
        await stage.service.start()
        await stage.wait_for_devices(lambda devices: [each.state for each in devices] == ["in-use"], SOON)
        refused = await run(stage, "--wait", "1s", "--", "true")
        assert refused.returncode == 3
        os.kill(pid, signal.SIGKILL)
        assert (await run(stage, "--", "true")).returncode == 0
        await process.wait()


async def test_run_that_is_killed_while_it_waits_changes_nothing(short_tmp: Path) -> None:
    async with node_with_slurm(short_tmp) as (stage, _):
        holder = await start(stage, "--", *holding(stage))
        assert holder.stdout is not None
        await holder.stdout.readline()
        waiting = await start(stage, "--device", "0", "--", "true")
        async with asyncio.timeout(SOON):
            while True:
                if len(runs_below(stage)) == 2:
                    break
                await asyncio.sleep(0.05)
        waiting.kill()
        await waiting.wait()
        holder.kill()
        await holder.wait()
        assert (await run(stage, "--", "true")).returncode == 0
        assert len(await history(stage, "handover.granted")) == 2
