"""A node with AMD GPUs: the shipped service over a simulated machine, the shipped plugin, an emulated kubelet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest

from scrubber.emulator.playground import Daemon, Playground
from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodSpec
from tests import vendor_plugin
from tests.amd.machine import AmdMachine
from tests.integration.acting import QUICK, SOON

RESOURCE = "amd.com/gpu"
SECRET = b"team-a's model weights"


class AmdStage(Playground):
    """A temporary node with AMD GPUs; ``plugin``: additional arguments of ``scrubber plugin``."""

    def __init__(
        self,
        directory: Path,
        *,
        gpus: int = 2,
        partitions: int = 1,
        plugin: Sequence[str] = (),
        policy: str = QUICK,
    ) -> None:
        super().__init__(directory=directory, devices=gpus * partitions, policy=policy)
        self.machine = AmdMachine.create(self.directory / "m", gpus=gpus, partitions=partitions)
        words = list(self.service.arguments)
        words[words.index("sim")] = "amd"
        at = words.index("--sim-dir")
        words[at : at + 2] = ["--amd-root", str(self.machine.root)]
        self.service = Daemon(words, self.service.log)
        words = list(self.plugin.arguments)
        del words[(at := words.index("--resource-name")) : at + 2]
        self.plugin = Daemon([*words, *plugin], self.plugin.log)

    async def __aenter__(self) -> Self:
        await self.kubelet.start()
        return self

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self.machine.close()

    async def offers(self, count: int, resource: str = RESOURCE) -> None:
        await self.kubelet.wait_until(lambda kubelet: kubelet.allocatable(resource) == count, SOON)

    async def running(self, *argv: str, resource: str = RESOURCE) -> EmulatedPod:
        """Run a pod with one device until it has written "ready"."""
        pod = await self.kubelet.run(PodSpec("p", "team-a", [ContainerSpec("main", argv, {resource: 1})]))
        assert pod.admitted, pod.describe()
        await pod.wait(lambda _: "ready" in pod.read_log("main"), SOON)
        return pod

    async def in_state(self, device: str, state: str) -> None:
        await self.wait_for_devices(
            lambda devices: any(each.id == device and state in (each.hygiene, each.health) for each in devices), SOON
        )


@asynccontextmanager
async def started(
    directory: Path, *, gpus: int = 2, partitions: int = 1, plugin: Sequence[str] = ()
) -> AsyncIterator[AmdStage]:
    async with AmdStage(directory, gpus=gpus, partitions=partitions, plugin=plugin) as stage:
        await stage.service.start()
        await stage.plugin.start()
        yield stage


async def test_gpu_passes_from_one_pod_to_the_next_without_its_memory(short_tmp: Path) -> None:
    async with started(short_tmp) as stage:
        await stage.offers(2)
        pod = await stage.running("sh", "-c", "echo ready && exec sleep 600")
        (device,) = pod.device_ids
        memory = stage.machine.parts[device].memory
        size = memory.stat().st_size
        memory.write_bytes(SECRET.ljust(size, b"."))
        await stage.kubelet.delete(pod, grace=0)
        await stage.in_state(device, "clean")
        content = memory.read_bytes()
        assert SECRET not in content
        assert len(content) - content.count(0) < size // 16


async def test_gpu_with_an_uncorrected_error_returns_after_a_reset(short_tmp: Path) -> None:
    async with started(short_tmp) as stage:
        await stage.offers(2)
        (name, part), *_ = stage.machine.parts.items()
        stage.machine.add_errors(part, "gfx", 1)
        await stage.offers(1)
        await stage.offers(2)
        assert (part.gpu / "reset").read_text() == "1"
        log = stage.service.log.read_text()
        assert "Uncorrected RAS error in block 2 was reported: it requires a GPU reset" in log
        assert name in log


async def test_gpu_in_another_partition_mode_than_the_policys_is_reset_and_returns_in_it(short_tmp: Path) -> None:
    policy = short_tmp / "partitioned.yaml"
    policy.write_text(f"{Path(QUICK).read_text()}\nsettings: {{compute_partition: CPX}}\n")
    plugin = ("--amd-resource-naming", "mixed")
    async with AmdStage(short_tmp, gpus=1, plugin=plugin, policy=str(policy)) as stage:
        await stage.service.start()
        await stage.plugin.start()
        await stage.offers(1, "amd.com/cpx_nps1")
        (part,) = stage.machine.parts.values()
        assert (part.gpu / "current_compute_partition").read_text().strip() == "CPX"
        log = stage.service.log.read_text()
        assert "compute_partition could not be restored: it is SPX, not CPX." in log
        assert "from SPX to CPX, as the policy requires" in log
        await stage.in_state(part.name, "clean")


@pytest.mark.parametrize(("naming", "resource"), [("single", RESOURCE), ("mixed", "amd.com/dpx_nps1")])
async def test_partitions_are_advertised_and_cleared_each_on_its_own(
    short_tmp: Path, naming: str, resource: str
) -> None:
    async with started(short_tmp, gpus=1, partitions=2, plugin=("--amd-resource-naming", naming)) as stage:
        await stage.offers(2, resource)
        await stage.wait_until_clean(SOON)
        for part in stage.machine.parts.values():
            part.memory.write_bytes(SECRET.ljust(part.memory.stat().st_size, b"."))
        pod = await stage.running("sh", "-c", "echo ready && exec sleep 600", resource=resource)
        (device,) = pod.device_ids
        await stage.kubelet.delete(pod, grace=0)
        await stage.in_state(device, "clean")
        assert {name for name, part in stage.machine.parts.items() if SECRET not in part.memory.read_bytes()} == {
            device
        }


async def test_amds_plugin_behind_ours_passes_no_memory_to_the_next_tenant(short_tmp: Path) -> None:
    upstream = short_tmp / "u"
    upstream.mkdir(mode=0o700)
    async with (
        AmdStage(short_tmp, gpus=1, plugin=("--upstream-dir", str(upstream))) as stage,
        vendor_plugin.running(upstream, stage.machine.root / "standin", resource=RESOURCE, naming="directory"),
    ):
        await stage.service.start()
        await stage.plugin.start()
        await stage.offers(1)
        writes = f'printf "{SECRET.decode()}" 1<> "$1"; echo ready; exec sleep 600'
        (part,) = stage.machine.parts.values()
        pod = await stage.running("sh", "-c", writes, "sh", str(part.memory))
        assert part.memory.read_bytes().startswith(SECRET)
        await stage.kubelet.delete(pod, grace=0)
        await stage.in_state(part.name, "clean")
        assert SECRET not in part.memory.read_bytes()
