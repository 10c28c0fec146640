"""Some of the pod shapes from the matrix, with real processes: the emulated node agrees with the runs in virtual time.

The whole matrix is in :mod:`tests.simulation.shapes`; here are the shapes whose starts depend on the attribution of
processes.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from scrubber.emulator.playground import RESOURCE, Playground, tenant_argv
from scrubber.emulator.pods import ContainerSpec, ContainerState, EmulatedPod, PodPhase, PodSpec, RestartPolicy
from tests.integration.acting import FOREVER, SOON, found_by, reader, seen_to_run, staged
from tests.simulation.shapes.shape import Box, Kind, Script

IDLE = ("sleep", "infinity")
PATIENT = 2 * SOON
"""A refused start is repeated when its call has waited for the maximum time."""
LINES = (
    "mG m- | Always deleted steady | service@7",
    "m- mG | Always deleted steady | service@8",
    "s- mG | Always deleted steady | service@8",
    "sG mG | Always deleted steady | service@12",
    "iG s- mG | Always deleted steady | no restart",
    "iG s- m- mG | Always forced steady | no restart",
    "m- mG | Always deleted steady | service-away@0",
    "s- mG | Always forced steady | service-away@0",
)


def spec(script: Script) -> PodSpec:
    """Return the pod of a script: containers with a device fill it; all but ordinary init containers stay."""
    restart = RestartPolicy(script.life.policy)

    def container(number: int, box: Box) -> ContainerSpec:
        name, requests = f"c{number}", {} if box.device == "-" else {RESOURCE: 1}
        if box.kind is Kind.INIT:
            argv = tenant_argv("--write", f"team-a/{name}") if requests else ("true",)
            return ContainerSpec(name, argv, requests)
        argv = tenant_argv("--write", f"team-a/{name}", *FOREVER) if requests else IDLE
        return ContainerSpec(
            name, argv, requests, restart=RestartPolicy.ALWAYS if box.kind is Kind.SIDECAR else restart
        )

    made = [container(number, box) for number, box in enumerate(script.shape)]
    mains = [each for each, box in zip(made, script.shape, strict=True) if box.kind is Kind.MAIN]
    return PodSpec("train-0", "team-a", mains, [each for each in made if each not in mains])


async def all_run(pod: EmulatedPod, script: Script) -> None:
    """Wait until every container runs and, with a device, has filled it; ordinary init containers have ended."""

    def ready(name: str, box: Box) -> bool:
        status = pod.status.containers[name]
        if box.kind is Kind.INIT:
            return status.exit_code == 0
        return status.state is ContainerState.RUNNING and (box.device == "-" or "ready" in pod.read_log(name))

    names = [f"c{number}" for number in range(len(script.shape))]
    await pod.wait(lambda _: all(map(ready, names, script.shape)), PATIENT)


async def ended(pod: EmulatedPod, name: str) -> None:
    """End the first process of a container; returns when the container has started again."""
    before = pod.status.containers[name]
    messages = [json.loads(line) for line in pod.read_log(name).splitlines()]
    (pid,) = [line["pid"] for line in messages if "ready" in line]
    os.kill(pid, signal.SIGTERM)
    await pod.wait(lambda status: status.containers[name].restarts > before.restarts, PATIENT)


async def restart_service(stage: Playground) -> None:
    """Kill the service, and wait until the next one has checked everything."""
    await stage.service.kill()
    await stage.service.start()
    await stage.wait_until_clean(SOON)
    await seen_to_run(stage)


@pytest.mark.parametrize("line", LINES)
async def test_pod_with_several_containers_starts_restarts_and_leaves_no_data(line: str) -> None:
    script = Script.read(line)
    devices = sum(box.device != "-" and box.kind is not Kind.INIT for box in script.shape)
    async with staged(devices=devices) as stage:
        away = script.restart is not None and script.restart.component == "service-away"
        if away:
            await stage.service.kill()
        pod = await stage.kubelet.run(spec(script))
        assert pod.admitted, pod.describe()
        if away:
            plain = next(f"c{number}" for number, box in enumerate(script.shape) if box.device == "-")
            await pod.wait(lambda status: status.containers[plain].state is ContainerState.RUNNING, SOON)
            await stage.service.start()
        await all_run(pod, script)
        await seen_to_run(stage)
        if script.restart is not None and not away:
            await restart_service(stage)
        for number, box in enumerate(script.shape):
            if box.device != "-" and box.kind is not Kind.INIT:
                await ended(pod, f"c{number}")
                await all_run(pod, script)
                await seen_to_run(stage)
        if script.life.ending == "forced":
            await stage.kubelet.delete(pod, force=True, linger=1.0)
        else:
            await stage.kubelet.delete(pod, grace=0.0)
        others = [await stage.kubelet.run(reader(f"other-{number}", "team-b")) for number in range(devices)]
        assert [await found_by(each) for each in others] == [""] * devices
        assert all(each.status.phase is PodPhase.SUCCEEDED for each in others)
