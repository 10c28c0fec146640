"""One service, two backends, two resources: GPUs over stand-ins and a simulated node, with one kubelet and plugin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

from scrubber.adapters.sim import control
from scrubber.emulator.playground import RESOURCE as SIMULATED
from scrubber.emulator.playground import Daemon
from tests.integration.acting import SOON, found_by, reader, running, writer
from tests.integration.nvidia_stage import RESOURCE as GPUS
from tests.integration.nvidia_stage import NvidiaStage

PREFIXES = {GPUS: "GPU-", SIMULATED: "SIM-"}


class Both(NvidiaStage):
    """Two GPUs, and two simulated devices."""

    def __init__(self) -> None:
        super().__init__()
        words = [*self.service.arguments, "--sim-dir", str(self.sim_dir)]
        words[words.index("nvidia")] = "nvidia,sim"
        self.service = Daemon(words, self.service.log, program=("tests.nvidia.service", str(self.machine.root)))

    async def __aenter__(self) -> Self:
        created = await self.run_command(
            "sim", "create", "--dir", str(self.sim_dir), "--devices", "2", "--memory", "2MiB"
        )
        assert created.returncode == 0, created
        return await super().__aenter__()

    async def start_daemons(self, timeout: float = SOON) -> None:
        await super().start_daemons(timeout)
        await self.offers(2, SIMULATED, timeout=timeout)

    async def all_are(self, **expected: str) -> None:
        """Wait until all devices with these id prefixes are in the given states."""
        await self.wait_for_devices(
            lambda devices: all(
                {each.state for each in devices if each.id.startswith(f"{prefix}-")} == {state}
                for prefix, state in expected.items()
            ),
            SOON,
        )

    async def certificates(self, resource: str) -> Mapping[str, Any]:
        """Return the id of the current certificate by device."""
        found = [
            each
            for each in await self.command_json("devices")
            if each["metadata"]["name"].startswith(PREFIXES[resource])
        ]
        return {each["metadata"]["name"]: each["certificate"]["metadata"]["name"] for each in found}


@asynccontextmanager
async def staged() -> AsyncIterator[Both]:
    async with Both() as stage:
        await stage.start_daemons()
        await stage.all_are(GPU="clean", SIM="clean")
        yield stage


async def test_each_backend_has_its_own_resource_and_driver() -> None:
    async with staged() as stage:
        assert {each: stage.kubelet.allocatable(each) for each in (GPUS, SIMULATED)} == {GPUS: 2, SIMULATED: 2}
        devices = await stage.command_json("devices")
        drivers = {each["metadata"]["name"][:3]: each["certificate"]["driverVersion"] for each in devices}
        assert drivers == {"GPU": "580.65.06", "SIM": "sim-1"}


async def test_gpus_without_a_driver_leave_the_simulated_devices_in_service() -> None:
    async with staged() as stage:
        before = await stage.certificates(SIMULATED)
        stage.machine.remove_driver()
        await stage.all_are(GPU="quarantined", SIM="clean")
        await stage.offers(0, GPUS)
        assert await stage.certificates(SIMULATED) == before
        pod = await running(stage, writer("a", "team-a"))
        await stage.kubelet.delete(pod, grace=0)
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        assert stage.kubelet.allocatable(SIMULATED) == 2
        stage.machine.bring_driver_back()
        await stage.all_are(GPU="clean", SIM="clean")


async def test_simulated_devices_without_a_driver_leave_the_gpus_in_service() -> None:
    async with staged() as stage:
        before = await stage.certificates(GPUS)
        control.add_faults(stage.sim_dir, driver_absent=True)
        await stage.all_are(GPU="clean", SIM="quarantined")
        await stage.offers(0, SIMULATED)
        assert await stage.certificates(GPUS) == before
        gpu = min(before)
        result = await stage.command_json("scrub", gpu)
        assert (result["scrub"]["outcome"], result["device"]["state"]) == ("passed", "clean")
        control.clear_faults(stage.sim_dir)
        await stage.all_are(GPU="clean", SIM="clean")
