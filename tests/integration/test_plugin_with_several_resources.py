"""One plugin, several resources: a node of whole GPUs and of MIG instances, under the emulated kubelet.

Each resource has a separate socket, registration and stream; an event of one does not affect the others. The scrub
service is a small fake whose responses the test determines.
"""

from __future__ import annotations

import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from plugin.kubelet.devices import AdvertisedDevice
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import NotReady
from scrubber.emulator import ContainerSpec, EmulatedPod, Kubelet, PodPhase, PodSpec, RestartPolicy
from tests import forkserver
from tests.emulation import timings
from tests.gpus import gpu, instance, seen
from tests.plugin_collaborators import DEADLINE, FakeService, snapshot

WHOLE, SMALL, LARGE = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb.me"
RESOURCES = (WHOLE, SMALL, LARGE)
DEVICES = {
    WHOLE: (gpu(0), gpu(1)),
    SMALL: (instance(2, 0), instance(2, 1)),
    LARGE: (instance(3, 0, "3g.40gb+me"),),
}
COUNTS = {resource: len(devices) for resource, devices in DEVICES.items()}
EVERYTHING = tuple(device for devices in DEVICES.values() for device in devices)
WAYS = ("classic", "watcher", "auto")


def snapshot_of(
    *offers: AdvertisedDevice, ready: bool = True, version: int = 1, envvar_refused: bool = False
) -> pb.Snapshot:
    found = snapshot(*map(seen, offers), ready=ready, version=version)
    found.envvar_refused = envvar_refused
    return found


@dataclass
class Node:
    directory: Path
    way: str
    kubelet: Kubelet = field(init=False)
    service: FakeService = field(init=False)

    def __post_init__(self) -> None:
        self.kubelet = Kubelet(self.directory, timings=timings(dial_back=1.0))
        self.service = FakeService(self.directory / "s", snapshot_of(*EVERYTHING))

    @asynccontextmanager
    async def plugin(self, *flags: str) -> AsyncIterator[Process]:
        process = await forkserver.start(
            *("scrubber.cli.main", "plugin", "--mig-strategy", "mixed"),
            *("--kubelet-dir", str(self.directory), "--socket-dir", str(self.directory / "s")),
            *("--registration", self.way, "--log-level", "error", "--metrics-address", "off", *flags),
            stderr=DEVNULL,
            env={key: value for key, value in os.environ.items() if not key.startswith("SCRUBBER_")},
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def counts(self, **counts: int) -> None:
        """Wait until the resources have so many allocatable devices; unnamed ones keep their usual count."""
        expected = COUNTS | {{"whole": WHOLE, "small": SMALL, "large": LARGE}[name]: n for name, n in counts.items()}
        await self.kubelet.wait_until(
            lambda kubelet: {each: kubelet.allocatable(each) for each in RESOURCES} == expected, DEADLINE
        )

    async def running(self, name: str, *resources: str) -> EmulatedPod:
        pod = await self.kubelet.run(pod_of(name, *resources))
        await pod.wait(PodPhase.RUNNING, DEADLINE)
        return pod

    def sockets(self, resource: str) -> list[Path]:
        prefix = f"scrubber-{resource.partition('/')[2]}-*.sock"
        return [*self.kubelet.device_plugins.glob(prefix), *self.kubelet.plugins_registry.glob(prefix)]

    def opened(self, resource: str) -> int:
        """Return how often the kubelet has connected to the plugin of ``resource``."""
        calls = [each for each in self.kubelet.events if each.name == "GetDevicePluginOptions"]
        return sum(each.resource == resource for each in calls)


@asynccontextmanager
async def node(directory: Path, way: str = "auto") -> AsyncIterator[Node]:
    here = Node(directory, way)
    async with here.service, here.kubelet:
        yield here


STAY = "exec sleep 600"


def pod_of(name: str, *resources: str, then: str = STAY) -> PodSpec:
    """Return a pod that prints NVIDIA's variable."""
    argv = ("sh", "-c", f"echo $NVIDIA_VISIBLE_DEVICES; {then}")
    main = ContainerSpec("main", argv, dict.fromkeys(resources, 1), restart=RestartPolicy.ON_FAILURE)
    return PodSpec(name, containers=[main])


@pytest.mark.parametrize("way", WAYS)
async def test_pod_of_each_resource_starts_on_a_device_of_that_resource(short_tmp: Path, way: str) -> None:
    async with node(short_tmp, way) as here, here.plugin():
        await here.counts()
        for number, resource in enumerate(RESOURCES):
            pod = await here.kubelet.run(pod_of(f"pod-{number}", resource, then="true"))
            await pod.wait(PodPhase.SUCCEEDED, DEADLINE)
            (id_,) = pod.device_ids
            assert id_ in {each.id for each in DEVICES[resource]}
            assert pod.read_log("main") == f"{id_}\n"
            assert (here.service.reserved[-1], list(here.service.requests[-1].device_ids)) == ([id_], [id_])


@pytest.mark.parametrize("way", WAYS)
async def test_every_resource_is_registered_and_gated_again_after_a_kubelet_restart(short_tmp: Path, way: str) -> None:
    async with node(short_tmp, way) as here, here.plugin():
        await here.counts()
        for life in range(2):
            await here.kubelet.restart()
            await here.counts()
            for number, resource in enumerate(RESOURCES):
                pod = await here.running(f"pod-{life}-{number}", resource)
                assert len(here.service.requests) == len(RESOURCES) * life + number + 1
                await here.kubelet.delete(pod, grace=0)


async def test_container_with_devices_of_two_resources_passes_the_gate_for_both(short_tmp: Path) -> None:
    async with node(short_tmp) as here, here.plugin("--device-list-strategy", "volume-mounts"):
        await here.counts()
        pod = await here.running("both", WHOLE, SMALL)
        assert sorted(id_ for each in here.service.requests for id_ in each.device_ids) == list(pod.device_ids)
        given = pod.container_root("main") / "var/run/nvidia-container-devices"
        assert sorted(each.name for each in given.iterdir()) == list(pod.device_ids)


async def test_resource_that_registers_again_does_not_affect_the_others(short_tmp: Path) -> None:
    async with node(short_tmp) as here, here.plugin():
        await here.counts()
        before = {resource: here.opened(resource) for resource in RESOURCES}
        (socket,) = here.sockets(SMALL)
        socket.unlink()
        await here.kubelet.wait_until(lambda _: here.opened(SMALL) > before[SMALL], DEADLINE)
        await here.counts()
        assert [here.opened(each) for each in (WHOLE, LARGE)] == [before[each] for each in (WHOLE, LARGE)]
        await here.running("pod", SMALL)


async def test_repartitioned_gpu_moves_between_resources_beside_running_pods(short_tmp: Path) -> None:
    async with node(short_tmp) as here, here.plugin():
        await here.counts()
        pod = await here.running("pod", LARGE)
        opened = here.opened(LARGE)
        halves = instance(1, 0, "3g.40gb+me"), instance(1, 1, "3g.40gb+me")
        here.service.show(snapshot_of(gpu(0), *DEVICES[SMALL], *DEVICES[LARGE], *halves, version=2))
        await here.counts(whole=1, large=3)
        assert here.kubelet.capacity(WHOLE) == 2
        assert {(await here.running(f"half-{each}", LARGE)).device_ids for each in range(2)} == {
            (half.id,) for half in halves
        }
        assert (await here.running("whole", WHOLE)).device_ids == (gpu(0).id,)
        here.service.show(snapshot_of(*EVERYTHING, version=3))
        await here.counts()
        assert (here.opened(LARGE), pod.phase) == (opened, PodPhase.RUNNING)


async def test_mig_instance_that_returns_under_its_old_id_with_another_profile_is_allocated_as_that_profile_only(
    short_tmp: Path,
) -> None:
    async with node(short_tmp) as here, here.plugin():
        await here.counts()
        grown = instance(2, 1, "3g.40gb+me")
        here.service.show(snapshot_of(*DEVICES[WHOLE], instance(2, 0), grown, *DEVICES[LARGE], version=2))
        await here.counts(small=1, large=2)
        pods = [await here.running(f"pod-{each}", LARGE) for each in range(2)]
        assert {pod.device_ids for pod in pods} == {(grown.id,), (DEVICES[LARGE][0].id,)}
        assert (await here.running("small", SMALL)).device_ids == (instance(2, 0).id,)
        refused = await here.kubelet.run(pod_of("one-too-many", SMALL))
        assert not refused.admitted


async def test_no_resource_is_advertised_without_a_service_and_none_is_healthy_with_an_unready_service(
    short_tmp: Path,
) -> None:
    async with node(short_tmp) as here:
        await here.service.stop()
        async with here.plugin():
            await here.service.start(snapshot_of(*EVERYTHING, ready=False))
            await here.kubelet.wait_until(
                lambda kubelet: {each: kubelet.capacity(each) for each in RESOURCES} == COUNTS, DEADLINE
            )
            assert {here.kubelet.allocatable(each) for each in RESOURCES} == {0}
            here.service.show(snapshot_of(*EVERYTHING, version=2))
            await here.counts()
            for number, resource in enumerate(RESOURCES):
                await here.running(f"pod-{number}", resource)


async def test_start_that_waits_on_one_resource_does_not_block_starts_of_another(short_tmp: Path) -> None:
    async def busy(request: pb.HandOverRequest) -> None:
        if not {each.id for each in DEVICES[SMALL]}.isdisjoint(request.device_ids):
            raise NotReady("s7", public_message="The device is being scrubbed (scrub s7).")

    async with node(short_tmp) as here, here.plugin():
        await here.counts()
        here.service.on_hand_over = busy
        waiting = await here.kubelet.run(pod_of("waiting", SMALL))
        await waiting.wait(lambda status: "(scrub s7)" in status.containers["main"].message, DEADLINE)
        await here.running("whole", WHOLE)
        await here.running("large", LARGE)


async def test_policy_that_forbids_envvar_withdraws_every_resource_and_stops_no_running_pod(short_tmp: Path) -> None:
    async with node(short_tmp) as here, here.plugin():
        await here.counts()
        pods = [await here.running(f"pod-{number}", resource) for number, resource in enumerate(RESOURCES)]
        here.service.show(snapshot_of(*EVERYTHING, version=2, envvar_refused=True))
        await here.counts(whole=0, small=0, large=0)
        assert {here.kubelet.capacity(each) for each in RESOURCES} == set(COUNTS.values())
        here.service.show(snapshot_of(*EVERYTHING, version=3))
        await here.counts()
        assert {pod.phase for pod in pods} == {PodPhase.RUNNING}
        assert len(here.service.requests) == len(pods)


async def test_container_restart_after_a_change_of_the_plugins_flags_keeps_its_allocation_and_passes_the_gate(
    short_tmp: Path,
) -> None:
    async with node(short_tmp) as here:
        async with here.plugin() as first:
            await here.counts()
            pod = await here.kubelet.run(pod_of("again", SMALL, then=f"test -e enough || {STAY}"))
            await pod.wait(PodPhase.RUNNING, DEADLINE)
            first.terminate()
            await first.wait()
        async with here.plugin("--device-list-strategy", "volume-mounts", "--device-id-strategy", "index"):
            await here.counts()
            pid = pod.status.containers["main"].pid
            assert pid is not None
            (pod.container_root("main") / "enough").touch()
            os.kill(pid, signal.SIGKILL)
            await pod.wait(PodPhase.SUCCEEDED, DEADLINE)
            assert pod.read_log("main").split() == [*pod.device_ids]
            assert list(here.service.requests[1].device_ids) == list(pod.device_ids)
            assert here.service.reserved == [list(pod.device_ids)]
