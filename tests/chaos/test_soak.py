"""The soak, small enough for every run, and the proof that its reader would report breaches.

``python -m tests.chaos.soak`` is the same with 2,000 pods over 16 devices (``make soak``).
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from scrubber.emulator.playground import RESOURCE
from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodPhase, PodSpec
from scrubber.emulator.ungated_plugin import UngatedPlugin, read_sim_devices
from tests.chaos.lives import Lives, tenant
from tests.chaos.soak import report, soak
from tests.chaos.staging import SOON
from tests.chaos.watched_node import FOR_EVER, PATIENT, WatchedNode, watched_node
from tests.emulation import deregistered

SEED = 20261120
SHORTAGES = {
    *("disk full", "disk read-only", "disk with I/O errors", "page torn in the log", "page torn in the database"),
    *("clock set by hours", "clock corrected", "suspended", "killed with all its children, for memory"),
    *("no memory", "no descriptors", "inotify exhausted"),
}


@pytest.fixture(autouse=True)
def forked() -> None:
    """Disable forking: as in ``make soak`` each daemon is a separate interpreter, and the soak's child."""


@pytest.mark.timeout(900)  # thirty pods, one after the other in few lanes, take minutes on a busy machine
async def test_no_pod_reads_foreign_bytes_and_no_tenant_is_disturbed_while_components_are_killed(
    tmp_path: Path,
) -> None:
    acts = {"service killed", "service terminated", "plugin killed", "kubelet restarted"}
    outcome = await soak(tmp_path, pods=30, devices=6, seed=SEED, pace=(1, 3), acts=acts)
    print(report(outcome))
    assert outcome.verdict.breaches == []
    counts = outcome.verdict.counts
    assert counts["pods started"] >= 30
    assert counts["processes with reports"] > 30
    assert counts["processes ended by others"] > 0
    assert counts["lives of the service"] > 1
    assert counts["leftovers ended"] > 0
    assert acts <= outcome.weather.keys()


@pytest.mark.timeout(900)  # as above
async def test_every_pod_starts_clean_through_each_shortage_of_the_node(tmp_path: Path) -> None:
    outcome = await soak(
        tmp_path,
        pods=8,
        devices=3,
        seed=SEED,
        pace=(1, 1),
        lull=FOR_EVER,  # pods come between any two shortages
        acts=SHORTAGES,
        only=SHORTAGES,
    )
    print(report(outcome))
    assert outcome.verdict.breaches == []
    assert outcome.verdict.counts["pods started"] >= 8
    assert outcome.weather.keys() == SHORTAGES


def test_the_same_seed_makes_the_same_pods() -> None:
    one, same, other = (Lives(Path("/r"), seed, devices=4) for seed in (1, 1, 2))
    assert [one.life(number) for number in range(1, 50)] == [same.life(number) for number in range(1, 50)]
    assert [one.life(number) for number in range(1, 50)] != [other.life(number) for number in range(1, 50)]
    assert {one.life(number).kind for number in range(1, 2000)} == set(one.kinds())


async def test_soak_reports_killed_overwritten_and_signalled_tenants(tmp_path: Path) -> None:
    async with watched_node(tmp_path, devices=3, policy=PATIENT) as node:
        killed, scribbled, signalled = [await lodging(node, name) for name in ("killed", "scribbled", "signalled")]
        os.kill(pid_of(killed), signal.SIGKILL)
        await killed.wait(PodPhase.FAILED, SOON)
        memory = os.open(node.stage.device_files()[index_of(scribbled)].parent / "memory", os.O_WRONLY)
        os.pwrite(memory, b"another tenant's", 4096)
        os.close(memory)
        await another_process_sends_sigterm(pid_of(signalled))
        await signalled.wait(PodPhase.SUCCEEDED, SOON)
        # The next check reports it, and the end waits for a last one.
        await node.delete(scribbled, grace=SOON)
        for pod in (killed, signalled):
            await node.delete(pod, grace=0.0)
        await node.settle()
        breaches = (await node.judge()).breaches
    assert [each.partition(":")[0] for each in breaches] == ["touched memory", "ended", "signalled"]
    assert "team-a/scribbled/main" in breaches[0]
    assert "another tenant's" in breaches[0]
    assert "team-a/killed/main" in breaches[1]
    assert "team-a/signalled/main" in breaches[2]


async def test_soak_reports_an_ungated_start_on_a_dirty_device(
    tmp_path: Path,
) -> None:
    async with watched_node(tmp_path, devices=1, policy=PATIENT) as node:
        first = await lodging(node, "first")
        await node.stage.service.kill()  # its data is not cleared
        watched = {path.name for path in node.stage.kubelet.plugins_registry.glob("*.sock")}
        await node.stage.plugin.stop()
        await node.delete(first, grace=SOON)
        # When the kubelet notices that a watched socket is gone, it deregisters any plugin registered at that moment.
        await node.stage.kubelet.wait_until(
            lambda kubelet: kubelet.allocatable(RESOURCE) == 0 and watched <= deregistered(kubelet), SOON
        )
        async with UngatedPlugin(node.stage.kubelet.root, read_sim_devices(node.stage.sim_dir), resource_name=RESOURCE):
            await node.stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 1, SOON)
            second = await lodging(node, "second")
            await node.delete(second, grace=SOON)
        breaches = (await node.judge()).breaches
    kinds = [each.partition(":")[0] for each in breaches]
    assert kinds[:2] == ["foreign bytes", "no gate"]
    assert "team-a/second/main" in breaches[0]
    assert "team-a/first/main" in breaches[0]  # its bytes
    assert "leak" in kinds  # the ledger has the first one's grant open


async def lodging(node: WatchedNode, name: str) -> EmulatedPod:
    """Return a pod that has its device, and has filled it with its text."""
    command = tenant(node.socket, f"team-a/{name}/main", "forever")
    pod = node.create(PodSpec(name, "team-a", [ContainerSpec("main", command, {RESOURCE: 1})]))
    await pod.wait(PodPhase.RUNNING, SOON)
    await pod.wait(lambda _: "ready" in pod.read_log("main"), SOON)
    return pod


def pid_of(pod: EmulatedPod) -> int:
    pid = pod.status.containers["main"].pid
    assert pid is not None
    return pid


def index_of(pod: EmulatedPod) -> int:
    (link,) = (pod.container_root("main") / "dev").iterdir()
    return int(link.name.removeprefix("simgpu"))


async def another_process_sends_sigterm(pid: int) -> None:
    process = await asyncio.create_subprocess_exec("kill", "-TERM", str(pid))
    assert await process.wait() == 0
