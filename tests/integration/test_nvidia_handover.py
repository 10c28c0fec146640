"""From tenant to tenant on NVIDIA GPUs: data and processes of one tenant never reach the next.

The driver and CUDA are stand-ins; the tenants, their memory, the service, the plugin and every decision are real.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scrubber.api.client import AdminClient
from scrubber.emulator.pods import ContainerState, EmulatedPod, PodPhase
from tests.integration.acting import SOON, history, refusal, seen_to_run
from tests.integration.nvidia_stage import NvidiaStage, found_by, staged
from tests.nvidia import holder
from tests.nvidia.machine import MIB, Gpu

OPEN = (
    "import os, signal, sys; os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY); print('ready', flush=True); signal.pause()"
)
"""Opens a device's node without a context on it: the driver does not list such a process."""


@asynccontextmanager
async def node_process(*command: str) -> AsyncIterator[int]:
    """Run a process of the node that belongs to no pod; yields its PID once it is ready."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SOON):
            assert await process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        await process.wait()


def with_a_context(gpu: Gpu) -> tuple[str, ...]:
    return (sys.executable, str(holder.__file__), str(gpu.directory), str(gpu.node), ".", str(MIB))


async def found_by_the_scrub_after(stage: NvidiaStage, pod: EmulatedPod) -> dict[str, int]:
    """Return what the scrub after the pod's end found on its device: bytes by finding."""
    await stage.are("clean")
    scrubs = [
        each.scrub for each in (await stage.read_client.history(limit=1000)).entries if each.event == "scrub.finished"
    ]
    newest = max(scrubs, key=lambda each: each.finished_at)
    findings = [each for step in newest.steps for each in step.findings]
    return {each.code: json.loads(each.evidence_json)["residue_bytes"] for each in findings if "residue" in each.code}


@pytest.mark.parametrize(
    ("place", "finding"), [("global", "residue"), ("shared", "on-chip-residue"), ("registers", "on-chip-residue")]
)
async def test_next_tenant_reads_nothing_of_the_last_tenant(place: str, finding: str) -> None:
    async with staged(gpus=1) as stage:
        pod = await stage.settled(stage.leaving(place, "a", "team-a"))
        left = json.loads(pod.read_log("main"))["filled_bytes"]
        assert left > 0
        await stage.delete(pod)
        assert (await found_by_the_scrub_after(stage, pod))[finding] >= left
        assert await found_by(await stage.kubelet.run(stage.looking(place, "b", "team-b"))) == 0


async def test_certificate_lists_covered_and_not_covered_claims() -> None:
    async with staged(gpus=1) as stage:
        gpu = stage.machine.gpus[0]
        gpu.set("persistence_mode", 1)
        gpu.set("compute_mode", 2)
        result = await stage.command_json("scrub", "0")
        certificate, device = result["certificate"], result["device"]
        covered = {line.partition(":")[0]: line for line in certificate["covered"]}
        assert set(covered) == {"holders", "memory", "on-chip", "settings", "health"}
        found = re.fullmatch(
            r"memory: (\d+) of (\d+) bytes cleared, \1 of \2 bytes read back as zeros", covered["memory"]
        )
        assert found is not None, covered["memory"]
        cleared, total = int(found[1]), int(found[2])
        assert total == gpu.number("total")
        # Not cleared are the driver's reserve, the context of the clearing program, and its counters.
        assert 0 < gpu.usable_bytes - cleared < 3 * MIB
        assert "4 of 4 processors" in covered["on-chip"]
        assert "1 of them restored" in covered["settings"]
        missing = "\n".join(certificate["notCovered"])
        for claim in ("memory:", "on-chip:", "reset: not part of this path", "diagnostics: not part of this path"):
            assert claim in missing
        assert (certificate["driverVersion"], certificate["deviceID"]) == ("580.65.06", device["metadata"]["name"])


async def test_settings_changed_by_a_tenant_are_restored_for_the_next_tenant() -> None:
    async with staged(gpus=1) as stage:
        pod = await stage.settled(stage.leaving("global", "a", "team-a"))
        gpu = stage.gpu_of(pod)
        gpu.set("power_limit", 200_000)
        gpu.set("application_clocks", "3201 345")
        gpu.set("gpu_locked_clocks", "345 345")
        gpu.set("accounting_mode", 1)
        await stage.delete(pod)
        assert await found_by(await stage.kubelet.run(stage.looking("global", "b", "team-b"))) == 0
        assert [gpu.text(each) for each in ("power_limit", "application_clocks", "gpu_locked_clocks")] == [
            gpu.text("power_limit_default"),
            gpu.text("application_clocks_default"),
            "none",
        ]
        assert gpu.number("accounting_mode") == 0


async def test_leftover_process_on_a_gpu_is_killed_and_audited() -> None:
    async with staged(gpus=1) as stage:
        pod = await stage.kubelet.run(stage.littering("a", "team-a"))
        await pod.wait(lambda status: status.phase.terminal, SOON)
        left = stage.pod_processes(pod)
        assert len(left) == 1
        await stage.delete(pod)
        assert await found_by(await stage.kubelet.run(stage.looking("global", "b", "team-b"))) == 0
        assert [row["pid"] for row in await history(stage, "leftover.process.killed")] == left
        assert stage.pod_processes(pod) == []


@pytest.mark.parametrize("has_a_context", [True, False])
async def test_gpu_held_by_a_process_of_the_node_is_granted_to_no_pod(has_a_context: bool) -> None:
    async with staged(gpus=1) as stage:
        gpu = stage.machine.gpus[0]
        command = with_a_context(gpu) if has_a_context else (sys.executable, "-c", OPEN, str(gpu.node))
        async with node_process(*command) as pid:
            refused = await stage.run_command("scrub", "0")
            assert refused.returncode == 3, refused
            assert f"PID {pid}" in refused.stdout
            assert "holds the device without a grant" in refused.stdout
            await stage.are("dirty")
            pod = await stage.kubelet.run(stage.looking("global", "b", "team-b"))
            message = await refusal(pod)
            # The scrub that the start waits for is running, or was blocked: the timing decides which.
            assert "found it still in use" in message or "is scrubbing" in message
            assert "The start is retried" in message
            assert "PID" not in message
        assert await found_by(pod) == 0


async def test_next_pod_gets_the_gpu_of_a_terminating_pod_only_after_its_end() -> None:
    async with staged(gpus=1) as stage:
        first = await stage.settled(stage.leaving("global", "a", "team-a"))
        await stage.kubelet.delete(first, force=True, linger=1.0)
        second = await stage.kubelet.run(stage.looking("global", "b", "team-b"))
        await second.wait(lambda status: status.containers["main"].state is not ContainerState.WAITING, SOON)
        assert stage.pod_processes(first) == []
        assert await found_by(second) == 0


async def test_same_container_restarts_on_checks() -> None:
    async with staged(gpus=1) as stage:
        pod = await stage.settled(stage.leaving("global", "a", "team-a", restart=True))
        await seen_to_run(stage)
        (pid,) = stage.pod_processes(pod)
        os.kill(pid, signal.SIGKILL)
        await pod.wait(lambda status: status.containers["main"].restarts == 1, SOON)
        rows = await history(stage, "handover.granted")
        assert [row["exception"] for row in rows] == [None, "same-container"]


async def test_gpus_are_granted_together_or_not_at_all() -> None:
    async with staged(gpus=2) as stage:
        dying = await stage.settled(stage.leaving("global", "dying", "team-a"))
        await stage.kubelet.delete(dying, force=True, linger=2.0)
        both = await stage.kubelet.run(stage.tenant("both", "team-b", "-c", "print('done')", gpus=2))
        await both.wait(PodPhase.SUCCEEDED, SOON)
        first, *together = await history(stage, "handover.granted")
        assert first["pod"] == "dying"
        assert together[1]["sequence"] - together[0]["sequence"] == 1, "one transaction"


async def test_gpu_that_hangs_does_not_affect_other_gpus() -> None:
    async with staged(gpus=2) as stage:
        stage.machine.gpus[0].hang()
        await stage.offers(1)
        for name in ("a", "b", "c"):
            pod = await stage.kubelet.run(stage.looking("global", name, f"team-{name}"))
            assert pod.device_ids == (stage.machine.gpus[1].uuid,)
            assert await found_by(pod) == 0
            await stage.delete(pod)
        stage.machine.gpus[0].heal()
        await stage.offers(2)


async def test_service_killed_while_clearing_is_followed_by_one_that_removes_the_fence_and_scrubs_again() -> None:
    async with staged(gpus=1) as stage:
        pod = await stage.settled(stage.leaving("global", "a", "team-a"))
        gpu = stage.gpu_of(pod)
        gpu.set("slow_clear", 600)
        await stage.delete(pod)
        await stage.are("scrubbing")
        await clearing(stage)
        assert gpu.number("compute_mode") == 3
        await stage.service.kill()
        gpu.unset("slow_clear")
        next_pod = await stage.kubelet.run(stage.looking("global", "b", "team-b"))
        await stage.service.start()
        assert await found_by(next_pod) == 0
        assert gpu.number("compute_mode") == 0
        assert not list((stage.directory / "state").rglob("fences/*"))


async def test_service_stopped_while_clearing_leaves_no_fence_and_no_process() -> None:
    async with staged(gpus=1) as stage:
        pod = await stage.settled(stage.leaving("global", "a", "team-a"))
        gpu = stage.gpu_of(pod)
        gpu.set("slow_clear", 600)
        await stage.delete(pod)
        await stage.are("scrubbing")
        await clearing(stage)
        children = stage.child_processes(stage.service)
        assert await stage.service.stop(SOON) == 0
        assert stage.running_processes(children) == []
        assert gpu.number("compute_mode") == 0
        gpu.unset("slow_clear")
        await stage.service.start()
        assert await found_by(await stage.kubelet.run(stage.looking("global", "b", "team-b"))) == 0


async def test_tenant_keeps_its_gpu_and_its_data_while_the_service_is_killed_and_restarted() -> None:
    async with staged(gpus=1) as stage:
        pod = await stage.settled(stage.leaving("global", "a", "team-a"))
        theirs = stage.gpu_of(pod).content()
        await stage.service.kill()
        await stage.service.start()
        await stage.are("in-use")
        assert stage.gpu_of(pod).content() == theirs
        assert stage.pod_processes(pod) != []
        await stage.delete(pod)
        assert await found_by(await stage.kubelet.run(stage.looking("global", "b", "team-b"))) == 0


async def test_certificate_from_before_a_sigkill_is_not_used_by_the_next_service() -> None:
    async with staged(gpus=1) as stage:
        before = await stage.certificate("0")
        await stage.service.kill()
        stage.machine.gpus[0].fill("written while no service ran")
        await stage.service.start()
        pod = await stage.kubelet.run(stage.looking("global", "b", "team-b"))
        assert await found_by(pod) == 0
        (grant,) = await history(stage, "handover.granted")
        assert grant["certificate"] != before["metadata"]["name"]


async def clearing(stage: NvidiaStage) -> None:
    """Wait until the scrub of the first device is in the pass that clears its memory; the scrub continues."""
    async with asyncio.timeout(SOON), AdminClient(stage.socket_dir) as admin:
        async for update in admin.scrub("0", "slow"):
            if update.progress.phase == "clear":
                return
    raise AssertionError("the scrub ended before it was seen to clear")


# --- MIG


async def test_gpu_partitioned_into_mig_instances_and_merged_again_is_followed() -> None:
    async with staged(mebibytes=98, plugin=("--mig-strategy", "mixed")) as stage:
        gpu = stage.machine.gpus[0]
        gpu.split("1g.18gb", "1g.18gb")
        await stage.offers(2, "nvidia.com/mig-1g.18gb")
        await stage.offers(1)
        await stage.are("clean", "clean", "clean")
        pod = await stage.kubelet.run(stage.looking("global", "a", "team-a", resource="nvidia.com/mig-1g.18gb"))
        assert await found_by(pod) == 0
        await stage.delete(pod)
        await stage.are("clean", "clean", "clean")
        gpu.merge()
        await stage.offers(0, "nvidia.com/mig-1g.18gb")
        await stage.offers(2)
        await stage.are("clean", "clean")


async def test_mig_instances_are_granted_and_cleared_separately() -> None:
    async with NvidiaStage(gpus=1, mebibytes=98, plugin=("--mig-strategy", "mixed")) as stage:
        small, large = stage.machine.gpus[0].split("1g.18gb", "3g.71gb")
        await stage.service.start()
        await stage.plugin.start()
        resources = ("nvidia.com/mig-1g.18gb", "nvidia.com/mig-3g.71gb")
        for resource in resources:
            await stage.offers(1, resource)
        a = await stage.settled(stage.leaving("global", "a", "team-a", resource=resources[0]))
        b = await stage.settled(stage.leaving("global", "b", "team-b", resource=resources[1]))
        assert (a.device_ids, b.device_ids) == ((small.uuid,), (large.uuid,))
        theirs = large.content()
        await stage.delete(a)
        assert (
            await found_by(await stage.kubelet.run(stage.looking("global", "c", "team-c", resource=resources[0]))) == 0
        )
        assert large.content() == theirs
        assert b.status.containers["main"].state is ContainerState.RUNNING
