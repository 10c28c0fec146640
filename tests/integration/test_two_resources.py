"""One service, two backends, two resources: GPUs over stand-ins, and devices that a program manages, which breaks."""

from __future__ import annotations

import asyncio
import shutil
from typing import Self

from scrubber.emulator.playground import RESOURCE as MANAGED
from scrubber.emulator.playground import Daemon
from tests.adapters.command_rig import SAMPLE, write_program
from tests.integration.acting import SOON, found_by, history, reader, running, writer
from tests.integration.nvidia_stage import POLICY, NvidiaStage
from tests.integration.nvidia_stage import RESOURCE as GPUS

CODE = 13
"""An error code that the policy takes for a fault of a managed device; as an XID it is an error of the application."""


class Both(NvidiaStage):
    """Two GPUs, and two devices of the sample program."""

    def __init__(self) -> None:
        super().__init__()
        config, policy = self.directory / "command.yaml", self.directory / "policy.yaml"
        self.managing = self.directory / "managing"
        shutil.copy(SAMPLE, self.managing)
        config.write_text(
            f"program: {self.managing}\nenvironment: {{SIMULATED_NODE: {self.sim_dir}}}\npollInterval: 2s\n"
        )
        with open(POLICY) as quick:
            policy.write_text(f"{quick.read()}memory:\n  acceptClaims: true\nerrors:\n  reset: [{CODE}]\n")
        words = [*self.service.arguments, "--policy", str(policy), "--config", str(config)]
        words[words.index("nvidia")] = "nvidia,command"
        self.service = Daemon(words, self.service.log, program=("tests.nvidia.service", str(self.machine.root)))

    async def __aenter__(self) -> Self:
        created = await self.run_command(
            "sim", "create", "--dir", str(self.sim_dir), "--devices", "2", "--memory", "2MiB"
        )
        assert created.returncode == 0, created
        return await super().__aenter__()

    async def all_are(self, gpus: str, managed: str) -> None:
        """Wait until all GPUs, and all devices of the program, are in these states."""
        expected = {"GPU": {gpus}, "SIM": {managed}}
        await self.wait_for_devices(
            lambda devices: all(
                {each.state for each in devices if each.id.startswith(f"{prefix}-")} == states
                for prefix, states in expected.items()
            ),
            SOON,
        )


async def test_gpus_and_devices_of_a_program_are_two_resources_and_a_broken_program_does_not_disturb_the_gpus() -> None:
    async with Both() as stage:
        await stage.start_daemons()
        await stage.offers(2, MANAGED, timeout=SOON)
        await stage.all_are(gpus="clean", managed="clean")
        pod = await running(stage, writer("a", "team-a"))
        await stage.kubelet.delete(pod, grace=0)
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        await stage.all_are(gpus="clean", managed="clean")
        certificates = {
            each["metadata"]["name"]: each["certificate"]["covered"] for each in await stage.command_json("devices")
        }
        for name, covered in certificates.items():
            assert any("(claimed by command sha256:" in line for line in covered) is name.startswith("SIM-")

        works = stage.managing.read_text()
        write_program(stage.managing, "#!/bin/sh\nexit 1\n")
        await stage.wait_for_devices(
            lambda devices: {each.cause.code for each in devices if each.id.startswith("SIM-")} == {"command-broken"},
            SOON,
        )
        devices = {each["metadata"]["name"]: each for each in await stage.command_json("devices")}
        assert {each["health"] for name, each in devices.items() if name.startswith("SIM-")} == {"suspect"}
        gpu = min(name for name in devices if name.startswith("GPU-"))
        result = await stage.command_json("scrub", gpu)
        assert (result["scrub"]["outcome"], result["device"]["state"]) == ("passed", "clean")
        assert stage.kubelet.allocatable(GPUS) == stage.kubelet.allocatable(MANAGED) == 2
        write_program(stage.managing, works)
        await stage.all_are(gpus="clean", managed="clean")


async def test_error_code_has_the_class_of_its_own_backend_and_the_device_recovers_by_the_reset_of_its_program() -> (
    None
):
    async with Both() as stage:
        await stage.start_daemons()
        await stage.offers(2, MANAGED, timeout=SOON)
        await stage.all_are(gpus="clean", managed="clean")
        stage.machine.gpus[0].raise_xid(CODE)
        faults = stage.sim_dir / "devices" / "0" / "faults.json"
        faults.with_suffix(".new").write_text(f'{{"errors": {{"{CODE}": 1}}}}')
        faults.with_suffix(".new").replace(faults)
        quarantines, classes = await until_both_reported(stage)
        assert quarantines == [("SIM-", f"error-{CODE}")]
        assert classes == {f"xid-{CODE}": "application", f"error-{CODE}": "reset"}
        await stage.all_are(gpus="clean", managed="clean")
        assert faults.read_text() == "{}", "the program has reset the device"


async def until_both_reported(stage: Both) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Wait for the errors of both backends; return the quarantines, and the class of each error."""
    async with asyncio.timeout(SOON):
        while True:
            classes = {row["code"]: row["class"] for row in await history(stage, "health.errors-reported")}
            quarantines = [(row["device"][:4], row["cause"]) for row in await history(stage, "health.quarantined")]
            if len(classes) == 2 and quarantines:
                return quarantines, classes
            await asyncio.sleep(0.05)
