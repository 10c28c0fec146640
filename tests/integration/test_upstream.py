"""A vendor's plugin on a node with the real service: what it leaks alone, and that nothing leaks behind our plugin.

The vendor's plugin is a separate process without knowledge of ours; service and plugin are the shipped daemons; the
kubelet is emulated.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from scrubber.emulator import ContainerSpec, EmulatedPod, PodPhase, PodSpec
from scrubber.emulator.playground import Daemon, Playground, fast_kubelet_timings, tenant_argv
from tests import vendor_plugin
from tests.vendor_plugin import Control, Running

VENDORS = "vendor.example/gpu"
SECRET = "team-a's model weights"
SOON = 40.0
"""Seconds within which an expected event happens, on a busy machine too. It is a timeout; no test measures it."""


@dataclass
class Node:
    stage: Playground
    plugin: Daemon

    @property
    def kubelet(self) -> Path:
        """The kubelet directory that the vendor's plugin uses."""
        return self.stage.directory / "u"

    async def offers(self, count: int, resource: str = VENDORS) -> None:
        await self.stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(resource) == count, SOON)

    def worst(self) -> int:
        """Return the fewest healthy devices that the kubelet was ever sent, after the largest number."""
        lists = [each for each in self.stage.kubelet.events if each.name == "ListAndWatch"]
        counts = [int(each.detail.split()[0]) for each in lists]
        return min(counts[counts.index(max(counts)) :])

    async def running(self, spec: PodSpec) -> EmulatedPod:
        pod = await self.stage.kubelet.run(spec)
        assert pod.admitted, pod.describe()
        await pod.wait(lambda _: "ready" in pod.read_log("main"), SOON)
        return pod

    async def read_back(self, resource: str = VENDORS) -> str:
        """Return what a new tenant finds on the device that it is given."""
        pod = await self.stage.kubelet.run(gpu_pod("b", "team-b", "--read", resource=resource))
        assert pod.admitted, pod.describe()
        await pod.wait(PodPhase.SUCCEEDED, SOON)
        messages = [json.loads(line) for line in pod.read_log("main").splitlines() if line.startswith("{")]
        (read,) = [each for each in messages if "residue_bytes" in each]
        await self.stage.kubelet.delete(pod, grace=0)
        return str(read["found"]) if read["residue_bytes"] else ""

    async def secret_then_reader(self, resource: str = VENDORS) -> str:
        """Let tenant A fill its device with a secret and kill it; return what tenant B finds on the device."""
        pod = await self.running(gpu_pod("a", "team-a", "--write", SECRET, "--hold", "forever", resource=resource))
        await self.stage.kubelet.delete(pod, grace=0)
        return await self.read_back(resource)


@asynccontextmanager
async def node(directory: Path, devices: int = 1) -> AsyncIterator[Node]:
    async with Playground(
        directory=directory, devices=devices, memory="1MiB", timings=fast_kubelet_timings(0.05)
    ) as stage:
        words = ["plugin", "--kubelet-dir", str(stage.kubelet.root), "--socket-dir", str(stage.socket_dir)]
        words += ["--upstream-dir", str(directory / "u"), "--registration", "classic", "--log-format", "json"]
        words += ["--metrics-address", "off"]
        plugin = Daemon(words, directory / "plugin.log")
        try:
            yield Node(stage, plugin)
        finally:
            if plugin.process is not None:
                await plugin.stop()


@asynccontextmanager
async def behind_ours(directory: Path, devices: int = 1, naming: str = "uuid") -> AsyncIterator[tuple[Node, Running]]:
    """Run service, our plugin, and the vendor's behind it; yields when every device is offered."""
    async with node(directory, devices) as here:
        here.kubelet.mkdir(mode=0o700)
        async with vendor_plugin.running(here.kubelet, here.stage.sim_dir, naming=naming) as vendor:
            await here.stage.service.start()
            await here.plugin.start()
            await here.offers(len(vendor_plugin.device_ids(here.stage.sim_dir, naming)))
            yield here, vendor


def gpu_pod(
    name: str,
    namespace: str,
    *options: str,
    resource: str = VENDORS,
) -> PodSpec:
    main = ContainerSpec("main", tenant_argv(*options), {resource: 1})
    return PodSpec(name, namespace, [main])


async def test_vendors_plugin_alone_passes_one_tenants_memory_to_the_next(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        kubelet = here.stage.kubelet.device_plugins
        async with vendor_plugin.running(kubelet, here.stage.sim_dir):
            await here.offers(1)
            assert SECRET in await here.secret_then_reader()


async def test_vendors_plugin_behind_ours_passes_no_memory_to_the_next_tenant(short_tmp: Path) -> None:
    async with behind_ours(short_tmp) as (here, vendor):
        assert await here.secret_then_reader() == ""
        assert len(vendor.calls("Allocate")) == 2
        assert vendor.calls("PreStartContainer") == []


@pytest.mark.parametrize("naming", ["replicas", "index"])
async def test_vendors_plugin_with_other_device_ids_passes_no_memory_to_the_next_tenant(
    short_tmp: Path, naming: str
) -> None:
    async with behind_ours(short_tmp, naming=naming) as (here, vendor):
        assert await here.secret_then_reader() == ""
        named = vendor_plugin.device_ids(here.stage.sim_dir, naming).keys()
        assert {id_ for ids in vendor.calls("Allocate") for id_ in ids} <= named


async def test_pod_on_a_vendor_defined_id_survives_a_restart_of_service_and_plugin(
    short_tmp: Path,
) -> None:
    async with behind_ours(short_tmp, naming="index") as (here, _):
        pod = await here.running(gpu_pod("a", "team-a", "--write", SECRET, "--hold", "forever"))
        for daemon in (here.stage.service, here.plugin):
            await daemon.kill()
        await here.offers(0)
        for daemon in (here.stage.service, here.plugin):
            await daemon.start()
        await here.offers(1)
        await here.stage.wait_for_devices(lambda devices: [each.state for each in devices] == ["in-use"], SOON)
        assert here.stage.pod_processes(pod) != []
        await here.stage.kubelet.delete(pod, grace=0)
        assert await here.read_back() == ""


async def test_device_quarantined_by_the_service_is_unhealthy_whatever_the_vendor_reports(short_tmp: Path) -> None:
    async with behind_ours(short_tmp, devices=2) as (here, _):
        done = await here.stage.run_command("quarantine", "0", "--reason", "a look at its fan")
        assert done.returncode == 0, done.stderr
        await here.offers(1)
        assert here.stage.kubelet.capacity(VENDORS) == 2
        done = await here.stage.run_command("unquarantine", "0", "--yes", "--reason", "the fan is fine")
        assert done.returncode == 0, done.stderr
        await here.offers(2)


async def test_device_reported_unhealthy_by_the_vendor_is_unhealthy(short_tmp: Path) -> None:
    async with behind_ours(short_tmp, devices=2) as (here, vendor):
        first = next(iter(vendor_plugin.device_ids(here.stage.sim_dir, "uuid")))
        vendor.set_control(Control(unhealthy=(first,)))
        await here.offers(1)
        vendor.set_control(Control())
        await here.offers(2)


async def test_quick_restart_of_the_vendors_plugin_does_not_change_the_nodes_capacity(short_tmp: Path) -> None:
    async with behind_ours(short_tmp) as (here, vendor):
        await vendor.kill()
        before = len(vendor.calls("Registered"))
        async with vendor_plugin.running(here.kubelet, here.stage.sim_dir) as again:
            await again.has_called("Registered", before + 1)
            assert await here.read_back() == ""
            assert here.worst() == 1


async def test_vendors_plugin_that_does_not_answer_has_no_healthy_device_until_it_answers(short_tmp: Path) -> None:
    async with behind_ours(short_tmp) as (here, vendor):
        os.kill(vendor.process.pid, signal.SIGSTOP)
        await here.offers(0)
        os.kill(vendor.process.pid, signal.SIGCONT)
        await here.offers(1)


async def test_vendors_plugin_whose_socket_was_removed_registers_again(short_tmp: Path) -> None:
    async with behind_ours(short_tmp) as (here, vendor):
        before = len(vendor.calls("Registered"))
        (here.kubelet / "vendor-gpu.sock").unlink()
        await vendor.has_called("Registered", before + 1)
        assert await here.read_back() == ""


async def test_restart_of_our_plugin_makes_the_vendors_plugin_register_again(short_tmp: Path) -> None:
    async with behind_ours(short_tmp) as (here, _):
        for stop in (here.plugin.stop, here.plugin.kill):
            await stop()
            await here.offers(0)
            await here.plugin.start()
            await here.offers(1)
        assert await here.secret_then_reader() == ""


async def test_kubelet_restart_does_not_make_the_vendors_plugin_register_again(short_tmp: Path) -> None:
    async with behind_ours(short_tmp) as (here, _):
        before = (here.kubelet / "kubelet.sock").stat()
        await here.stage.kubelet.restart()
        await here.offers(1)
        after = (here.kubelet / "kubelet.sock").stat()
        assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns), "it was made to register again"
        assert await here.secret_then_reader() == ""


async def test_vendor_ids_unknown_to_the_service_are_never_allocated(short_tmp: Path) -> None:
    async with node(short_tmp, devices=2) as here:
        here.kubelet.mkdir(mode=0o700)
        async with vendor_plugin.running(here.kubelet, here.stage.sim_dir, naming="serial") as vendor:
            await here.stage.service.start()
            await here.plugin.start()
            await here.stage.kubelet.wait_until(lambda kubelet: kubelet.capacity(VENDORS) == 2, SOON)
            assert here.stage.kubelet.allocatable(VENDORS) == 0
            pod = await here.stage.kubelet.run(gpu_pod("a", "team-a", "--read"))
            assert pod.phase is PodPhase.FAILED
            assert vendor.calls("Allocate") == []
            assert "knows no device with this id" in here.plugin.log.read_text()
