"""A service that dies between two containers of one pod."""

from __future__ import annotations

from pathlib import Path

from scrubber.emulator.playground import RESOURCE
from scrubber.emulator.pods import ContainerSpec, ContainerState, PodSpec, RestartPolicy
from tests.chaos.staging import SOON, chaos_stage
from tests.chaos.storm import witness


async def test_container_starts_beside_a_sidecar_although_the_service_died_between_the_two_starts(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report"
    async with chaos_stage(tmp_path, devices=2) as stage:
        side = ContainerSpec(
            "side",
            witness(report, "team-a/both/side", "forever"),
            {RESOURCE: 1},
            restart=RestartPolicy.ALWAYS,
        )
        main = ContainerSpec("main", witness(report, "team-a/both/main", "0.1"), {RESOURCE: 1})
        pod = await stage.kubelet.run(PodSpec("both", "team-a", [main], [side]))
        await pod.wait(lambda status: status.containers["side"].state is ContainerState.RUNNING, SOON)
        await stage.service.kill()
        await pod.wait(lambda status: status.containers["main"].reason == "CreateContainerConfigError", SOON)
        await stage.service.start()
        await pod.wait(lambda status: status.containers["main"].exit_code == 0, SOON)
