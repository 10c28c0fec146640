"""Jobs of Slurm on the running service, without a kubelet: prolog, steps, epilog, and what happens if one of them fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from scrubber.emulator.playground import Playground
from tests.integration import log_lines
from tests.integration.acting import QUICK, SOON, history
from tests.integration.slurm import Slurmd, SlurmJob

ALICE = SlurmJob(4711, "alice")
BOB = SlurmJob(4712, "bob")


@asynccontextmanager
async def node_with_slurm(directory: Path, devices: int = 1) -> AsyncIterator[tuple[Playground, Slurmd]]:
    """Run the service on a node without a kubelet, with clean devices; in the end its log has only declared events."""
    stage = Playground(directory=directory / "stage", devices=devices, memory="2MiB", policy=QUICK)
    stage.service.arguments = [*stage.service.arguments, "--no-kubelet"]
    slurmd = Slurmd(stage)
    try:
        made = await stage.run_command(
            "sim", "create", "--dir", str(stage.sim_dir), "--devices", str(devices), "--memory", "2MiB"
        )
        assert made.returncode == 0, made.stderr
        await stage.service.start()
        await stage.wait_until_clean(SOON)
        yield stage, slurmd
        log_lines.check(stage)
    finally:
        await slurmd.close()
        await stage.close()


async def _reported_end(stage: Playground) -> None:
    """Wait until the end of a job was reported."""
    async with asyncio.timeout(SOON):
        while True:
            if await history(stage, "job.end-reported"):
                return
            await asyncio.sleep(0.05)


async def test_job_gets_a_clean_device_and_the_next_one_nothing_of_its_data(short_tmp: Path) -> None:
    async with node_with_slurm(short_tmp) as (stage, slurmd):
        started = await slurmd.prolog(ALICE)
        assert (started.returncode, started.stdout, started.stderr) == (0, "", "")
        assert (await slurmd.step(ALICE)).found == "clean"
        listed = json.loads((await stage.run_command("devices", "-o", "json")).stdout)
        (device,) = listed["items"]
        assert device["assignedTo"] == {
            "tenant": "alice",
            "pod": None,
            "container": None,
            "claim": None,
            "job": {"manager": "slurm", "id": "4711", "user": "alice", "userID": 1000},
        }
        assert "job 4711 of alice" in (await stage.run_command("devices")).stdout
        assert "job 4711 of alice (slurm)" in (await stage.run_command("device", "0")).stdout

        await slurmd.end(ALICE)
        assert (await slurmd.epilog(ALICE, "--wait", "20s")).returncode == 0
        assert (await slurmd.prolog(BOB)).returncode == 0
        assert (await slurmd.step(BOB)).found == "clean"
        granted = await history(stage, "handover.granted")
        assert [(row["tenant"], row["job"], row["grant"]) for row in granted] == [
            ("alice", "slurm/4711", 1),
            ("bob", "slurm/4712", 2),
        ]
        assert [row["job"] for row in await history(stage, "job.end-reported")] == ["slurm/4711"]
        assert await history(stage, "unauthorized.use.detected") == []


async def test_node_without_a_kubelet_is_ready_and_nothing_is_reported_about_a_kubelet(short_tmp: Path) -> None:
    async with node_with_slurm(short_tmp) as (stage, _):
        names = [json.loads(line)["event"] for line in stage.service.log.read_text().splitlines()]
        assert "kubelet.none" in names
        assert "kubelet.untrusted" not in names
        info = await stage.read_client.service_info()
        assert info.kubelet_status == "none"
        assert "kubelet" not in info.paths
        checked = json.loads((await stage.run_command("doctor", "-o", "json")).stdout)
        (kubelet,) = [each for each in checked["checks"] if each["name"] == "kubelet"]
        assert "without a kubelet" in kubelet["message"]
        assert {"device-plugins", "pod-resources"}.isdisjoint(each["name"] for each in checked["checks"])


async def test_step_that_outlives_its_job_keeps_the_device_from_the_next_job(short_tmp: Path) -> None:
    async with node_with_slurm(short_tmp) as (_, slurmd):
        await slurmd.prolog(ALICE)
        outliving = await slurmd.step(ALICE)
        assert (await slurmd.epilog(ALICE)).returncode == 0
        refused = await slurmd.prolog(BOB, "--wait", "1s")
        assert refused.returncode != 0
        assert "job 4711 of alice" in refused.stderr
        waiting = asyncio.ensure_future(slurmd.prolog(BOB))
        await outliving.kill()
        assert (await waiting).returncode == 0
        assert (await slurmd.step(BOB)).found == "clean"


async def test_service_that_was_killed_between_prolog_and_epilog_leaves_the_device_with_its_job(
    short_tmp: Path,
) -> None:
    async with node_with_slurm(short_tmp) as (stage, slurmd):
        await slurmd.prolog(ALICE)
        step = await slurmd.step(ALICE)
        await stage.service.kill()
        away = await slurmd.epilog(ALICE)
        assert away.returncode == 0
        assert "job 4711 was not reported" in away.stderr
        await stage.service.start()
        await stage.wait_for_devices(lambda devices: [each.state for each in devices] == ["in-use"], SOON)
        assert step.process.returncode is None
        # The epilog was lost: the next prolog reports the end.
        waiting = asyncio.ensure_future(slurmd.prolog(BOB))
        await slurmd.end(ALICE)
        assert (await waiting).returncode == 0
        assert (await slurmd.step(BOB)).found == "clean"


async def test_prolog_that_was_killed_while_it_waited_leaves_nothing_behind(short_tmp: Path) -> None:
    async with node_with_slurm(short_tmp) as (stage, slurmd):
        await slurmd.prolog(ALICE)
        step = await slurmd.step(ALICE)
        waiting = await slurmd.start_prolog(BOB)
        await _reported_end(stage)
        waiting.kill()
        await waiting.wait()
        assert step.process.returncode is None
        await slurmd.end(ALICE)
        await stage.wait_until_clean(SOON)
        assert (await slurmd.prolog(SlurmJob(4713, "carol"))).returncode == 0


async def test_prolog_fails_and_epilog_succeeds_while_the_service_is_away(short_tmp: Path) -> None:
    async with node_with_slurm(short_tmp) as (stage, slurmd):
        await stage.service.stop()
        refused = await slurmd.prolog(ALICE, "--wait", "1s")
        assert refused.returncode != 0
        assert "not reachable" in refused.stderr
        assert (await slurmd.prolog(SlurmJob(4714, "alice", gpus=""))).returncode == 0
        waiting = asyncio.ensure_future(slurmd.prolog(ALICE))
        await stage.service.start()
        assert (await waiting).returncode == 0


async def test_job_of_several_devices_gets_all_or_none(short_tmp: Path) -> None:
    async with node_with_slurm(short_tmp, devices=2) as (stage, slurmd):
        quarantined = await stage.run_command("quarantine", "1", "--reason", "fan")
        assert quarantined.returncode == 0
        refused = await slurmd.prolog(SlurmJob(4711, "alice", gpus="0,1"))
        assert refused.returncode != 0
        assert "quarantined" in refused.stderr
        assert await history(stage, "handover.granted") == []
        assert (await slurmd.prolog(ALICE)).returncode == 0
