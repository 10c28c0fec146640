"""From the kubelet's admission to a container's first byte: which devices pods get, when, and what they find on them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from scrubber.emulator import markers
from scrubber.emulator.pods import ContainerSpec, ContainerState, Phase, PodSpec, RestartPolicy
from scrubber.emulator.stage import RESOURCE, gpu_pod, tenant
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


async def test_the_next_tenant_finds_nothing_of_the_last() -> None:
    async with staged(devices=1) as stage:
        pod = await running(stage, writer("a", "team-a"))
        await stage.kubelet.delete(pod, grace=0)
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        (scrub,) = [row for row in await history(stage, "scrub.finished") if row["residue_bytes"]]
        assert scrub["residue_bytes"] == 2 * 2**20


async def test_a_container_after_an_init_container_gets_the_same_device_and_finds_it_clean() -> None:
    async with staged() as stage:
        init = ContainerSpec("init", tenant("--write", "left by init"), {RESOURCE: 1})
        main = ContainerSpec("main", tenant("--read"), {RESOURCE: 1})
        pod = await stage.kubelet.run(PodSpec("p", "team-a", [main], [init]))
        assert await found_by(pod) == ""
        assert pod.records["init"].device_ids == pod.records["main"].device_ids
        kinds = [row["kind"] for row in await history(stage, "handover.granted")]
        assert "same-container" not in kinds


async def test_the_same_container_restarts_on_its_own_bytes() -> None:
    async with staged() as stage:
        argv = tenant("--read", "--write", "my own", "--hold", "forever")
        pod = await running(stage, gpu_pod("p", "team-a", argv, restart=RestartPolicy.ALWAYS))
        for _ in range(2):
            await seen_to_run(stage)
            await restarted(pod)
        rows = await history(stage, "handover.granted")
        assert [row["exception"] for row in rows[:3]] == [None, "same-container", "same-container"]
        assert pod.log("main", 1).splitlines()[0] == '{"residue_bytes": 2097152, "found": "' + "my own" * 13 + 'my"}'


async def test_several_devices_are_granted_together_or_not_at_all() -> None:
    async with staged(devices=2) as stage:
        dying = await running(stage, writer("dying", "team-a"))
        await stage.kubelet.delete(dying, force=True, dying_for=3600.0)
        pod = await stage.kubelet.run(gpu_pod("both", "team-b", tenant("--read"), gpus=2))
        assert pod.admitted
        await stage.devices_are(lambda devices: {each.state for each in devices} == {"clean", "in-use"}, SOON)
        assert len(await history(stage, "handover.granted")) == 1, "the clean device waits for its sibling"
        for pid in markers.processes({dying.uid}):  # its sandbox, too
            os.kill(pid, signal.SIGKILL)
        assert await found_by(pod) == ""
        first, *together = await history(stage, "handover.granted")
        assert first["pod"] == "dying"
        assert {row["device"] for row in together} == set(pod.device_ids)
        assert together[1]["sequence"] - together[0]["sequence"] == 1, "one transaction"


async def test_a_pod_that_is_dying_keeps_its_device_to_itself() -> None:
    async with staged(devices=1) as stage:
        first = await running(stage, writer("a", "team-a"))
        await stage.kubelet.delete(first, force=True, dying_for=1.0)
        second = await stage.kubelet.run(reader("b", "team-b"))
        await second.wait(lambda status: status.containers["main"].state is not ContainerState.WAITING, SOON)
        assert stage.processes_of(first) == []
        assert await found_by(second) == ""


async def test_what_a_pod_left_behind_is_ended_and_named_in_the_audit(tmp_path: Path) -> None:
    # A look between the end of the first process and that of the pod leaves only the grace as a proof: half a minute else.
    policy = tmp_path / "policy.yaml"
    policy.write_text(Path(QUICK).read_text().replace("limits:", "limits:\n  dying-grace: 2s"))
    async with staged(devices=1, policy=str(policy)) as stage:
        argv = tenant("--write", "a", "--leave-child", "--hold", "forever")
        pod = await running(stage, gpu_pod("a", "team-a", argv, leave_children=True))
        await seen_to_run(stage)
        end_first_process(pod)
        await pod.wait(lambda status: status.phase.terminal, SOON)
        left = stage.processes_of(pod)
        await stage.kubelet.delete(pod, grace=0)
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        assert [row["pid"] for row in await history(stage, "leftover.ended")] == left
        assert stage.processes_of(pod) == []


async def test_a_crash_by_a_fault_of_the_device_is_followed_by_a_restart_once_the_device_has_healed() -> None:
    async with staged(devices=1) as stage:
        argv = tenant("--write", "a", "--hold", "forever")
        pod = await running(stage, gpu_pod("a", "team-a", argv, restart=RestartPolicy.ALWAYS))
        await stage.command("sim", "fault", "--dir", str(stage.sim), "--device", "0", "--xid", "95")
        await stage.kubelet.changed(lambda kubelet: kubelet.allocatable(RESOURCE) == 0, SOON)
        (pid,) = stage.processes_of(pod)
        os.kill(pid, signal.SIGKILL)
        assert "quarantined" in await refusal(pod)
        await pod.wait(lambda status: status.containers["main"].restarts == 1, SOON)
        await stage.kubelet.changed(lambda kubelet: kubelet.allocatable(RESOURCE) == 1, SOON)


async def test_a_person_takes_a_device_out_and_puts_it_back() -> None:
    async with staged() as stage:
        out = await stage.command("quarantine", "0", "--reason", "a fan rattles", "-o", "json")
        assert out.status == 0, out.err
        await stage.kubelet.changed(lambda kubelet: kubelet.allocatable(RESOURCE) == 3, SOON)
        assert stage.kubelet.capacity(RESOURCE) == 4
        sick = next(each for each in (await stage.read.devices()).devices if each.index == "0")
        pods = [await running(stage, writer(f"p{number}", "team-a")) for number in range(3)]
        assert sick.id not in {device for pod in pods for device in pod.device_ids}
        back = await stage.command("unquarantine", "0", "--yes", "--reason", "new fan", "-o", "json")
        assert back.status == 0, back.err
        await stage.kubelet.changed(lambda kubelet: kubelet.allocatable(RESOURCE) == 4, SOON)


async def test_a_device_that_is_split_and_made_whole_again_is_followed() -> None:
    async with staged() as stage:
        split = await stage.command("sim", "split", "--dir", str(stage.sim), "--device", "3", "--instances", "2")
        assert split.status == 0, split.err
        await stage.kubelet.changed(lambda kubelet: kubelet.allocatable(RESOURCE) == 5, SOON)
        devices = await stage.devices_are(lambda all_of: all(each.state == "clean" for each in all_of), SOON)
        assert sorted(each.index for each in devices) == ["0", "1", "2", "3:0", "3:1"]
        pods = [await running(stage, writer(f"p{number}", "team-a")) for number in range(5)]
        assert len({device for pod in pods for device in pod.device_ids}) == 5
        for pod in pods:
            await stage.kubelet.delete(pod, grace=0)
        await stage.devices_are(lambda all_of: all(each.state == "clean" for each in all_of), SOON)
        merged = await stage.command("sim", "merge", "--dir", str(stage.sim), "--device", "3")
        assert merged.status == 0, merged.err
        whole = await stage.devices_are(
            lambda all_of: sorted(each.index for each in all_of) == ["0", "1", "2", "3"], SOON
        )
        ids = {each.id for each in whole}  # their number passes by four on the way, with an instance among them
        await stage.kubelet.changed(lambda kubelet: kubelet.healthy_devices(RESOURCE) == ids, SOON)
        pod = await stage.kubelet.run(gpu_pod("all", "team-b", tenant("--read"), gpus=4))
        await pod.wait(Phase.SUCCEEDED, SOON)


@pytest.mark.parametrize("way", ["classic", "watcher"])
async def test_pods_start_by_either_way_of_registration_also_after_a_restart_of_the_kubelet(way: str) -> None:
    async with staged(devices=2, registration=way) as stage:
        first = await running(stage, writer("a", "team-a"))
        await stage.kubelet.restart()
        await stage.kubelet.changed(lambda kubelet: kubelet.allocatable(RESOURCE) == 2, SOON)
        second = await running(stage, writer("b", "team-b"))
        assert set(first.device_ids).isdisjoint(second.device_ids)
        assert first.status.containers["main"].state is ContainerState.RUNNING
        await stage.kubelet.delete(first, grace=0)
        third = await stage.kubelet.run(reader("c", "team-c"))
        assert third.device_ids == first.device_ids
        assert await found_by(third) == ""
