"""From the kubelet's admission to a container's first byte: which devices pods get, when, and with what content."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from scrubber.emulator import markers
from scrubber.emulator.playground import RESOURCE, gpu_pod_spec, tenant_argv
from scrubber.emulator.pods import ContainerSpec, ContainerState, PodPhase, PodSpec, RestartPolicy
from tests.integration.acting import (
    QUICK,
    SOON,
    end_first_process,
    found_by,
    history,
    reader,
    refusal,
    restarted,
    running,
    seen_to_run,
    staged,
    writer,
)


async def test_next_tenant_reads_nothing_of_the_last_tenant() -> None:
    async with staged(devices=1) as stage:
        pod = await running(stage, writer("a", "team-a"))
        await stage.kubelet.delete(pod, grace=0)
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        (scrub,) = [row for row in await history(stage, "scrub.finished") if row["residue_bytes"]]
        assert scrub["residue_bytes"] == 2 * 2**20


async def test_main_container_gets_the_device_of_its_init_container_cleared() -> None:
    async with staged() as stage:
        init = ContainerSpec("init", tenant_argv("--write", "left by init"), {RESOURCE: 1})
        main = ContainerSpec("main", tenant_argv("--read"), {RESOURCE: 1})
        pod = await stage.kubelet.run(PodSpec("p", "team-a", [main], [init]))
        assert await found_by(pod) == ""
        assert pod.records["init"].device_ids == pod.records["main"].device_ids
        kinds = [row["kind"] for row in await history(stage, "handover.granted")]
        assert "same-container" not in kinds


async def test_restarted_container_reads_its_own_data() -> None:
    async with staged() as stage:
        argv = tenant_argv("--read", "--write", "my own", "--hold", "forever")
        pod = await running(stage, gpu_pod_spec("p", "team-a", argv, restart=RestartPolicy.ALWAYS))
        for _ in range(2):
            await seen_to_run(stage)
            await restarted(pod)
        rows = await history(stage, "handover.granted")
        assert [row["exception"] for row in rows[:3]] == [None, "same-container", "same-container"]
        assert (
            pod.read_log("main", 1).splitlines()[0] == '{"residue_bytes": 2097152, "found": "' + "my own" * 13 + 'my"}'
        )


async def test_several_devices_are_granted_together_or_not_at_all() -> None:
    async with staged(devices=2) as stage:
        dying = await running(stage, writer("dying", "team-a"))
        await stage.kubelet.delete(dying, force=True, linger=3600.0)
        pod = await stage.kubelet.run(gpu_pod_spec("both", "team-b", tenant_argv("--read"), gpus=2))
        assert pod.admitted
        await stage.wait_for_devices(lambda devices: {each.state for each in devices} == {"clean", "in-use"}, SOON)
        assert len(await history(stage, "handover.granted")) == 1, "the clean device waits for its sibling"
        for pid in markers.marked_processes({dying.uid}):  # including its sandbox
            os.kill(pid, signal.SIGKILL)
        assert await found_by(pod) == ""
        first, *together = await history(stage, "handover.granted")
        assert first["pod"] == "dying"
        assert {row["device"] for row in together} == set(pod.device_ids)
        assert together[1]["sequence"] - together[0]["sequence"] == 1, "one transaction"


async def test_next_pod_starts_only_after_the_processes_of_a_terminating_pod_have_ended() -> None:
    async with staged(devices=1) as stage:
        first = await running(stage, writer("a", "team-a"))
        await stage.kubelet.delete(first, force=True, linger=1.0)
        second = await stage.kubelet.run(reader("b", "team-b"))
        await second.wait(lambda status: status.containers["main"].state is not ContainerState.WAITING, SOON)
        assert stage.pod_processes(first) == []
        assert await found_by(second) == ""


async def test_leftover_process_of_a_pod_is_killed_and_audited(tmp_path: Path) -> None:
    # A check between the end of the first process and that of the pod leaves only the grace period as proof, half a
    # minute by default.
    policy = tmp_path / "policy.yaml"
    policy.write_text(Path(QUICK).read_text().replace("limits:", "limits:\n  leftoverGracePeriod: 2s"))
    async with staged(devices=1, policy=str(policy)) as stage:
        argv = tenant_argv("--write", "a", "--leave-leftover", "--hold", "forever")
        pod = await running(stage, gpu_pod_spec("a", "team-a", argv, leave_children=True))
        await seen_to_run(stage)
        end_first_process(pod)
        await pod.wait(lambda status: status.phase.terminal, SOON)
        left = stage.pod_processes(pod)
        await stage.kubelet.delete(pod, grace=0)
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        assert [row["pid"] for row in await history(stage, "leftover.process.killed")] == left
        assert stage.pod_processes(pod) == []


async def test_container_that_crashed_by_a_device_fault_restarts_once_the_device_has_recovered() -> None:
    async with staged(devices=1) as stage:
        argv = tenant_argv("--write", "a", "--hold", "forever")
        pod = await running(stage, gpu_pod_spec("a", "team-a", argv, restart=RestartPolicy.ALWAYS))
        await stage.run_command("sim", "fault", "--dir", str(stage.sim_dir), "--device", "0", "--xid", "95")
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 0, SOON)
        (pid,) = stage.pod_processes(pod)
        os.kill(pid, signal.SIGKILL)
        assert "quarantined" in await refusal(pod)
        await pod.wait(lambda status: status.containers["main"].restarts == 1, SOON)
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 1, SOON)


async def test_operator_quarantines_and_releases_a_device() -> None:
    async with staged() as stage:
        out = await stage.run_command("quarantine", "0", "--reason", "a fan rattles", "-o", "json")
        assert out.returncode == 0, out.stderr
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 3, SOON)
        assert stage.kubelet.capacity(RESOURCE) == 4
        sick = next(each for each in (await stage.read_client.devices()).devices if each.index == "0")
        pods = [await running(stage, writer(f"p{number}", "team-a")) for number in range(3)]
        assert sick.id not in {device for pod in pods for device in pod.device_ids}
        back = await stage.run_command("unquarantine", "0", "--yes", "--reason", "new fan", "-o", "json")
        assert back.returncode == 0, back.stderr
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 4, SOON)


async def test_split_and_merged_device_is_followed_by_the_node() -> None:
    async with staged() as stage:
        split = await stage.run_command(
            "sim", "split", "--dir", str(stage.sim_dir), "--device", "3", "--instances", "2"
        )
        assert split.returncode == 0, split.stderr
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 5, SOON)
        devices = await stage.wait_for_devices(lambda all_of: all(each.state == "clean" for each in all_of), SOON)
        assert sorted(each.index for each in devices) == ["0", "1", "2", "3:0", "3:1"]
        pods = [await running(stage, writer(f"p{number}", "team-a")) for number in range(5)]
        assert len({device for pod in pods for device in pod.device_ids}) == 5
        for pod in pods:
            await stage.kubelet.delete(pod, grace=0)
        await stage.wait_for_devices(lambda all_of: all(each.state == "clean" for each in all_of), SOON)
        merged = await stage.run_command("sim", "merge", "--dir", str(stage.sim_dir), "--device", "3")
        assert merged.returncode == 0, merged.stderr
        whole = await stage.wait_for_devices(
            lambda all_of: sorted(each.index for each in all_of) == ["0", "1", "2", "3"], SOON
        )
        ids = {each.id for each in whole}  # their number is four in between, with an instance among them
        await stage.kubelet.wait_until(lambda kubelet: kubelet.healthy_devices(RESOURCE) == ids, SOON)
        pod = await stage.kubelet.run(gpu_pod_spec("all", "team-b", tenant_argv("--read"), gpus=4))
        await pod.wait(PodPhase.SUCCEEDED, SOON)


@pytest.mark.parametrize("way", ["classic", "watcher"])
async def test_pods_start_with_either_registration_and_after_a_kubelet_restart(way: str) -> None:
    async with staged(devices=2, registration=way) as stage:
        first = await running(stage, writer("a", "team-a"))
        await stage.kubelet.restart()
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 2, SOON)
        second = await running(stage, writer("b", "team-b"))
        assert set(first.device_ids).isdisjoint(second.device_ids)
        assert first.status.containers["main"].state is ContainerState.RUNNING
        await stage.kubelet.delete(first, grace=0)
        third = await stage.kubelet.run(reader("c", "team-c"))
        assert third.device_ids == first.device_ids
        assert await found_by(third) == ""
