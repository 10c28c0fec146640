"""The plugin's process under the emulated kubelet: registration, admission, start, restarts, and rolling updates.

The scrub service is a small fake whose responses the test determines.
"""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import NotReady
from scrubber.emulator import (
    ContainerSpec,
    ContainerState,
    Kubelet,
    PodPhase,
    PodSpec,
    PodStatus,
    RestartPolicy,
)
from tests import forkserver
from tests.emulation import timings
from tests.plugin_collaborators import DEADLINE, FakeService, device, snapshot

RESOURCE = "scrubber.dev/gpu"
SOON = DEADLINE
TIMINGS = timings(dial_back=1.0)
"""A registration whose socket was just deleted by a kubelet restart is soon given up, and repeated."""
WAYS = ("classic", "watcher", "auto")


@dataclass
class Node:
    directory: Path
    kubelet: Kubelet
    way: str
    service: FakeService = field(init=False)

    @property
    def sim(self) -> Path:
        return self.directory / "sim"

    def device(self, number: int, **facts: Any) -> pb.SnapshotDevice:
        return device(number, self.sim, **facts)

    @asynccontextmanager
    async def plugin(self, *flags: str) -> AsyncIterator[Process]:
        process = await forkserver.start(
            *("scrubber.cli.main", "plugin"),
            *("--kubelet-dir", str(self.directory), "--socket-dir", str(self.directory / "s")),
            *("--registration", self.way, "--log-format", "json", "--metrics-address", "off", *flags),
            stderr=PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def until_standby(self, process: Process) -> None:
        """Wait until the instance serves, and waits for another one to end."""
        assert process.stderr is not None
        async with asyncio.timeout(SOON):
            while b'"plugin.standby"' not in (line := await process.stderr.readline()):
                assert line, "the plugin ended"

    async def offers(self, count: int) -> None:
        await self.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == count, SOON)

    def calls(self, name: str) -> int:
        return sum(event.name == name for event in self.kubelet.events)


@asynccontextmanager
async def node(directory: Path, way: str = "auto") -> AsyncIterator[Node]:
    here = Node(directory, Kubelet(directory, timings=TIMINGS), way)
    for number in (0, 1):
        (here.sim / str(number)).mkdir(parents=True)
        (here.sim / str(number) / "memory").write_bytes(bytes(4096))
    here.service = FakeService(directory / "s", snapshot(here.device(0), here.device(1)))
    async with here.service, here.kubelet:
        yield here


def pod(name: str, *argv: str, restart: RestartPolicy = RestartPolicy.NEVER) -> PodSpec:
    container = ContainerSpec("main", argv or ("sleep", "600"), resources={RESOURCE: 1}, restart=restart)
    return PodSpec(name, containers=[container])


def waits_for(words: str) -> object:
    def holds(status: PodStatus) -> bool:
        main = status.containers["main"]
        return (
            main.state is ContainerState.WAITING
            and main.reason == "CreateContainerConfigError"
            and words in main.message
        )

    return holds


@pytest.mark.parametrize("way", WAYS)
async def test_pod_gets_its_device_after_reserve_and_hand_over_at_the_service(short_tmp: Path, way: str) -> None:
    async with node(short_tmp, way) as here, here.plugin():
        await here.offers(2)
        tenant = await here.kubelet.run(
            pod("tenant", "sh", "-c", "echo $SCRUBBER_VISIBLE_DEVICES; readlink dev/simgpu*")
        )
        await tenant.wait(PodPhase.SUCCEEDED, SOON)
        (id_,) = tenant.device_ids
        number = id_.removeprefix("sim-")
        assert tenant.read_log("main").split() == [id_, str(here.sim / number / "memory")]
        assert here.service.reserved == [[id_]]
        assert [list(request.device_ids) for request in here.service.requests] == [[id_]]


async def test_service_is_called_before_every_container_start(short_tmp: Path) -> None:
    async with node(short_tmp) as here, here.plugin():
        await here.offers(2)
        await here.kubelet.run(pod("crashing", "false", restart=RestartPolicy.ALWAYS))
        await here.service.bell.until(lambda: len(here.service.requests) >= 3)
        assert len(here.service.reserved) == 1
        assert len({tuple(request.device_ids) for request in here.service.requests}) == 1


async def test_refused_start_is_shown_in_the_pod_status_and_retried_until_granted(short_tmp: Path) -> None:
    async def scrubbing(request: object) -> None:
        raise NotReady("s7", public_message="The device is being scrubbed (scrub s7).")

    async def granted(request: object) -> None:
        return

    async with node(short_tmp) as here, here.plugin():
        await here.offers(2)
        here.service.on_hand_over = scrubbing
        tenant = await here.kubelet.run(pod("tenant"))
        await tenant.wait(waits_for("being scrubbed (scrub s7)"), SOON)  # type: ignore[arg-type]
        here.service.on_hand_over = granted
        await tenant.wait(PodPhase.RUNNING, SOON)


async def test_start_without_a_service_waits_and_continues_when_the_service_is_back(short_tmp: Path) -> None:
    async with node(short_tmp) as here, here.plugin():
        await here.offers(2)
        await here.service.stop()
        tenant = await here.kubelet.run(pod("tenant"))
        assert tenant.admitted
        await tenant.wait(waits_for("does not respond. The start is retried"), SOON)  # type: ignore[arg-type]
        await here.service.start()
        await tenant.wait(PodPhase.RUNNING, SOON)
        assert list(here.service.requests[-1].unreserved_ids) == list(tenant.device_ids)
        assert here.kubelet.allocatable(RESOURCE) == 2


async def test_quarantined_device_is_withdrawn_and_the_next_pod_gets_another(short_tmp: Path) -> None:
    async with node(short_tmp) as here, here.plugin():
        await here.offers(2)
        here.service.show(snapshot(here.device(0, advertised=False), here.device(1), version=2))
        await here.offers(1)
        assert here.kubelet.capacity(RESOURCE) == 2
        tenant = await here.kubelet.run(pod("tenant"))
        assert tenant.device_ids == ("sim-1",)
        here.service.show(snapshot(here.device(0), here.device(1), version=3))
        await here.offers(2)


async def test_clean_devices_are_allocated_first(short_tmp: Path) -> None:
    async with node(short_tmp) as here, here.plugin():
        await here.offers(2)
        # Once the kubelet has counted the third device, which is out of service, it has the current state of the
        # others.
        devices = here.device(0), here.device(1, certified=True, numa_node=0), here.device(2, advertised=False)
        here.service.show(snapshot(*devices, version=2))
        await here.kubelet.wait_until(lambda kubelet: kubelet.capacity(RESOURCE) == 3, SOON)
        first, second = [await here.kubelet.run(pod(name)) for name in ("first", "second")]
        assert (first.device_ids, second.device_ids) == (("sim-1",), ("sim-0",))


@pytest.mark.parametrize("way", WAYS)
async def test_container_starts_pass_the_gate_again_after_a_kubelet_restart(short_tmp: Path, way: str) -> None:
    async with node(short_tmp, way) as here, here.plugin():
        await here.offers(2)
        for lives in range(3):
            await here.kubelet.restart()
            await here.offers(2)
            tenant = await here.kubelet.run(pod(f"tenant-{lives}"))
            await tenant.wait(PodPhase.RUNNING, SOON)
            assert len(here.service.requests) == lives + 1
            await here.kubelet.delete(tenant)


@pytest.mark.parametrize("way", WAYS)
async def test_next_plugin_instance_takes_over_from_the_last_one(short_tmp: Path, way: str) -> None:
    async with node(short_tmp, way) as here, here.plugin() as old:
        await here.offers(2)
        before = here.calls("GetDevicePluginOptions")
        async with here.plugin() as new:
            await here.until_standby(new)
            assert here.calls("GetDevicePluginOptions") == before
            old.send_signal(signal.SIGTERM)
            assert await old.wait() == 0
            await here.kubelet.wait_until(lambda _: here.calls("GetDevicePluginOptions") > before, SOON)
            await here.offers(2)
            tenant = await here.kubelet.run(pod("tenant"))
            await tenant.wait(PodPhase.RUNNING, SOON)
            assert len(here.service.requests) == 1
            assert here.calls("GetDevicePluginOptions") == before + 1


@pytest.mark.parametrize("way", WAYS)
async def test_reload_interrupts_a_start_that_the_kubelet_repeats_and_keeps_the_nodes_devices(
    short_tmp: Path, way: str
) -> None:
    async def scrub(request: object) -> None:
        await asyncio.Event().wait()

    async def grant(request: object) -> None:
        return

    config = short_tmp / "config.yaml"
    config.write_text("flags: {plugin: {passDeviceSpecs: false}}")
    async with node(short_tmp, way) as here, here.plugin("--config-file", str(config)) as process:
        await here.offers(2)
        runs = await here.kubelet.run(pod("runs"))
        await runs.wait(PodPhase.RUNNING, SOON)
        here.service.on_hand_over = scrub
        starts = await here.kubelet.run(pod("starts"))
        await here.service.bell.until(lambda: len(here.service.requests) == 2)
        here.service.on_hand_over = grant
        config.write_text("flags: {plugin: {passDeviceSpecs: true}}")
        process.send_signal(signal.SIGHUP)
        await starts.wait(PodPhase.RUNNING, SOON)
        await here.offers(2)
        assert runs.status.phase is PodPhase.RUNNING
        assert here.calls("GetDevicePluginOptions") == 2
        assert process.returncode is None


async def test_standby_plugin_takes_over_from_a_killed_one(short_tmp: Path) -> None:
    async with node(short_tmp, "classic") as here, here.plugin() as killed:
        await here.offers(2)
        before = here.calls("GetDevicePluginOptions")
        async with here.plugin() as new:
            await here.until_standby(new)
            killed.kill()
            await here.kubelet.wait_until(lambda _: here.calls("GetDevicePluginOptions") > before, SOON)
            await here.offers(2)
            tenant = await here.kubelet.run(pod("tenant"))
            await tenant.wait(PodPhase.RUNNING, SOON)


async def test_killed_plugin_is_replaced_by_the_next_one(short_tmp: Path) -> None:
    async with node(short_tmp, "classic") as here:
        async with here.plugin() as killed:
            await here.offers(2)
            killed.kill()
            await here.offers(0)
        async with here.plugin():
            await here.offers(2)
            tenant = await here.kubelet.run(pod("tenant"))
            await tenant.wait(PodPhase.RUNNING, SOON)
