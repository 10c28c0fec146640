"""A device with several pods at a time: which may join, when it is cleared, and what the next tenant finds.

Service and plugin are the shipped daemons, the kubelet is emulated, and the shares are those of NVIDIA's configuration
file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from scrubber.emulator.playground import RESOURCE, Playground, fast_kubelet_timings, gpu_pod_spec, tenant_argv
from scrubber.emulator.pods import EmulatedPod, PodPhase
from tests.integration.acting import QUICK, SOON, found_by, history, reader, running, writer

SHARES = 3
BESIDE = "this pod may not share it"
FILE = f"""\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: {RESOURCE}
      replicas: {SHARES}
"""


@asynccontextmanager
async def shared(directory: Path, policy: str = QUICK) -> AsyncIterator[Playground]:
    """Provide one clean device that the kubelet counts as three."""
    config = directory / "config.yaml"
    config.write_text(FILE)
    timings = replace(
        fast_kubelet_timings(0.05), pre_start_deadline=1.0
    )  # a start that has to wait is refused after it
    async with Playground(directory=directory, devices=1, memory="2MiB", policy=policy, timings=timings) as stage:
        stage.plugin.arguments = [*stage.plugin.arguments, "--config-file", str(config)]
        await stage.service.start()
        await stage.plugin.start()
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == SHARES, SOON)
        await stage.wait_until_clean(SOON)
        yield stage


def bytes_of(stage: Playground) -> bytes:
    """Return the content of the device's memory, read directly."""
    (memory,) = (stage.sim_dir / "devices").glob("*/memory")
    return memory.read_bytes()


async def refused_beside(pod: EmulatedPod) -> str:
    """Return the message in the pod's status once its start was refused because of other users of the device.

    On a slow machine, a start may exceed the kubelet's deadline before the service has answered.
    """
    status = await pod.wait(lambda each: BESIDE in each.containers["main"].message, SOON)
    return status.containers["main"].message


async def refused_again(stage: Playground) -> None:
    """Wait until a start is refused that began after now."""

    def refused() -> int:
        return sum(each.name == "PreStartContainer" and each.outcome != "OK" for each in stage.kubelet.events)

    seen = refused()
    await stage.kubelet.wait_until(lambda _: refused() >= seen + 2, SOON)


async def scrubs(stage: Playground) -> int:
    return len(await history(stage, "scrub.finished"))


def of_device(*pods: EmulatedPod) -> set[str]:
    return {id_.partition("::")[0] for pod in pods for id_ in pod.device_ids}


async def test_pods_of_one_tenant_share_a_device_that_is_cleared_after_the_last_pod(
    short_tmp: Path,
) -> None:
    async with shared(short_tmp) as stage:
        first = await running(stage, writer("first", "team-a"))
        before, left = await scrubs(stage), bytes_of(stage)
        second = await running(stage, gpu_pod_spec("second", "team-a", tenant_argv("--read", "--hold", "forever")))
        assert len(of_device(first, second)) == 1
        assert set(first.device_ids).isdisjoint(second.device_ids)
        assert "team-a/first" in second.read_log("main"), "they share its memory too"

        other_pod = await stage.kubelet.run(reader("stranger", "team-b"))
        assert other_pod.admitted
        assert "team-a" not in await refused_beside(other_pod)

        await stage.kubelet.delete(first, grace=0)
        await refused_again(stage)
        assert stage.pod_processes(second) != []
        assert (await scrubs(stage), bytes_of(stage)) == (before, left), "another pod still uses it"

        await stage.kubelet.delete(second, grace=0)
        assert await found_by(other_pod) == ""
        residue = [row["residue_bytes"] for row in (await history(stage, "scrub.finished"))[before:]]
        assert residue == [2 * 2**20]


async def test_policy_without_sharing_makes_a_pod_wait_for_another_pod_of_its_tenant(short_tmp: Path) -> None:
    policy = short_tmp / "never.yaml"
    policy.write_text(Path(QUICK).read_text() + "sharing: never\n")
    async with shared(short_tmp, str(policy)) as stage:
        first = await running(stage, writer("first", "team-a"))
        second = await stage.kubelet.run(reader("second", "team-a"))
        await refused_beside(second)
        assert first.phase is PodPhase.RUNNING
        await stage.kubelet.delete(first, grace=0)
        assert await found_by(second) == ""
