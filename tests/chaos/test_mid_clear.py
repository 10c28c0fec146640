"""Death in the middle of clearing a device: of the service, of the eraser, or of neither but stopped forever.

Each time the next tenant, of another namespace, reads every byte of the device before it does anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scrubber.adapters.sim import control
from scrubber.adapters.sim.backend import SimBackend
from scrubber.api.client import AdminClient
from scrubber.domain.errors import DeviceFault
from scrubber.emulator.playground import RESOURCE, Playground
from scrubber.emulator.pods import ContainerSpec, ContainerState, EmulatedPod, PodPhase, PodSpec
from scrubber.ports.device import EraseRequest
from tests.chaos.children import ERASER, DaemonChild, children_of, state_of
from tests.chaos.staging import SOON, chaos_stage, until
from tests.chaos.storm import witness
from tests.chaos.verdict import read_reports


def tenant(report: Path, namespace: str, name: str, hold: str = "0.3") -> PodSpec:
    main = ContainerSpec("main", witness(report, f"{namespace}/{name}", hold), {RESOURCE: 1})
    return PodSpec(name, namespace, [main])


async def running(stage: Playground, spec: PodSpec) -> EmulatedPod:
    pod = await stage.kubelet.run(spec)
    await pod.wait(lambda _: "ready" in pod.read_log("main"), SOON)
    return pod


async def refused(pod: EmulatedPod) -> str:
    """Return the message in the pod's status once its start was refused."""
    status = await pod.wait(lambda each: each.containers["main"].reason == "CreateContainerConfigError", SOON)
    return status.containers["main"].message


async def found_only_zeros(stage: Playground, pod: EmulatedPod, report: Path, *, soon: float = SOON) -> None:
    """Wait for the pod's end and assert that its device was empty and stayed unchanged by others."""
    await pod.wait(PodPhase.SUCCEEDED, soon)
    came, left = (line for line in read_reports(report) if line.name == pod.full_name)
    assert (came.what, came.strange, came.found) == ("came", 0, "")
    assert (left.what, left.damaged) == ("left", 0)


@asynccontextmanager
async def in_mid_clear(tmp_path: Path, report: Path) -> AsyncIterator[tuple[Playground, DaemonChild]]:
    """Provide one device that team-a's pod has filled and released, with a slow eraser in the middle of it."""
    async with chaos_stage(tmp_path, devices=1, memory="8MiB", memory_floor="30s") as stage:
        pod = await running(stage, tenant(report, "team-a", "first", "forever"))
        control.add_faults(stage.sim_dir, "0", slow_clear=25)
        await stage.kubelet.delete(pod, grace=0)
        await stage.wait_for_devices(lambda devices: devices[0].state == "scrubbing", SOON)
        async with AdminClient(stage.socket_dir) as admin, contextlib.aclosing(admin.scrub("0", "slow")) as updates:
            async with asyncio.timeout(SOON):
                async for update in updates:
                    progress = update.progress
                    if progress.phase == "clear" and 0 < progress.done_bytes < progress.total_bytes:
                        break
        (eraser,) = [child for child in children_of(stage.service.pid) if child.module == ERASER]
        yield stage, eraser


def half_cleared(stage: Playground) -> bool:
    """Return whether the first bytes are zeros and the last ones still team-a's; requires an idle device."""
    memory = (stage.device_files()[0].parent / "memory").read_bytes()
    return not memory[:4096].strip(b"\0") and b"team-a/first" in memory[-4096:]


async def test_next_tenant_reads_zeros_after_the_service_was_killed_while_clearing(tmp_path: Path) -> None:
    report = tmp_path / "report"
    async with in_mid_clear(tmp_path, report) as (stage, eraser):
        await stage.service.kill()
        await until(lambda: state_of(eraser.pid) in "ZX", "the eraser's end")
        assert half_cleared(stage)
        waiting = await stage.kubelet.run(tenant(report, "team-b", "next"))
        assert "does not respond" in await refused(waiting)
        control.clear_faults(stage.sim_dir, "0")
        await stage.service.start()
        await found_only_zeros(stage, waiting, report)


async def test_next_tenant_reads_zeros_after_the_eraser_was_killed_while_clearing(tmp_path: Path) -> None:
    report = tmp_path / "report"
    async with in_mid_clear(tmp_path, report) as (stage, eraser):
        waiting = await stage.kubelet.run(tenant(report, "team-b", "next"))
        assert eraser.signal(signal.SIGKILL)  # before it can finish
        control.clear_faults(stage.sim_dir, "0")
        await found_only_zeros(stage, waiting, report)


async def test_stopped_eraser_dies_with_its_service(tmp_path: Path) -> None:
    report = tmp_path / "report"
    async with in_mid_clear(tmp_path, report) as (stage, eraser):
        assert eraser.signal(signal.SIGSTOP)
        await stage.service.kill()
        await until(lambda: state_of(eraser.pid) in "ZX", "the stopped eraser's end")
        waiting = await stage.kubelet.run(tenant(report, "team-b", "next"))
        control.clear_faults(stage.sim_dir, "0")
        await stage.service.start()
        await found_only_zeros(stage, waiting, report)


async def test_orphaned_eraser_is_killed_before_its_device_is_scrubbed_again(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report"
    async with in_mid_clear(tmp_path, report) as (stage, eraser):
        await stage.service.kill()
        await until(lambda: state_of(eraser.pid) in "ZX", "the eraser's end")
        # An eraser whose parent lives on, and that is stopped: it neither exits nor releases its lock.
        elsewhere = SimBackend(stage.sim_dir)
        (device,) = await elsewhere.inventory.devices()
        begun = asyncio.Event()
        request = EraseRequest("scrub-of-an-earlier-life", audit=True, pattern=False, deadline=2 * SOON)
        work = asyncio.create_task(elsewhere.eraser.erase(device, request, lambda _: begun.set()))
        try:
            async with asyncio.timeout(SOON):
                await begun.wait()
            (orphan,) = [child for child in children_of(os.getpid()) if child.module == ERASER]
            assert orphan.signal(signal.SIGSTOP)
            await until(lambda: state_of(orphan.pid) == "T", "the orphan's standstill")
            control.clear_faults(stage.sim_dir, "0")
            waiting = await stage.kubelet.run(tenant(report, "team-b", "next"))
            await stage.service.start()
            await found_only_zeros(stage, waiting, report)
            with pytest.raises(DeviceFault):
                await work
        finally:
            work.cancel()
            await elsewhere.close()
        ended = [row for row in (await stage.read_client.history()).entries if row.event == "eraser.orphan.found"]
        assert [json.loads(row.fields_json) for row in ended] == [{"pid": orphan.pid, "killed": True}]


async def test_stopped_eraser_is_killed_at_its_deadline_and_the_waiting_pod_starts(tmp_path: Path) -> None:
    report = tmp_path / "report"
    async with chaos_stage(tmp_path, devices=1) as stage:
        pod = await running(stage, tenant(report, "team-a", "first", "forever"))
        control.add_faults(stage.sim_dir, "0", slow_clear=1)
        await stage.kubelet.delete(pod, grace=0)
        erasers = await until(
            lambda: [child for child in children_of(stage.service.pid) if child.module == ERASER], "a scrub"
        )
        assert erasers[0].signal(signal.SIGSTOP)
        waiting = await stage.kubelet.run(tenant(report, "team-b", "next"))
        control.clear_faults(stage.sim_dir, "0")
        await found_only_zeros(stage, waiting, report, soon=3 * SOON)  # this takes twenty seconds on an idle machine


async def test_pod_whose_device_faults_between_two_containers_starts_once_the_device_has_recovered(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report"
    async with chaos_stage(tmp_path, devices=1) as stage:
        control.add_faults(stage.sim_dir, "0", slow_clear=1)
        init = ContainerSpec("init", witness(report, "team-a/both/init", "0.1"), {RESOURCE: 1})
        main = ContainerSpec("main", witness(report, "team-a/both", "0.1"), {RESOURCE: 1})
        pod = await stage.kubelet.run(PodSpec("both", "team-a", [main], [init]))
        await pod.wait(lambda status: status.containers["init"].state is ContainerState.TERMINATED, SOON)
        control.add_faults(stage.sim_dir, "0", xid=95)
        assert "quarantined" in await refused(pod)
        await found_only_zeros(stage, pod, report)
