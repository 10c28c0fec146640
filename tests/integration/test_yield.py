"""A yielded node, with real processes: the driver is closed, devices are withheld, and what happens meanwhile is no fault."""

from __future__ import annotations

import asyncio
import json

from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import PluginClient
from scrubber.domain.errors import Unavailable
from scrubber.emulator.playground import RESOURCE, Playground
from scrubber.emulator.pods import ContainerState
from tests.integration.acting import SOON, found_by, history, reader, running, staged, writer

REASON = "driver upgrade, ticket 4711"


async def yielded(stage: Playground) -> pb.ServiceInfo:
    """Yield the node as an operator, and return the service's description of itself."""
    done = await stage.run_command("yield", "--reason", REASON, "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["driver"] == "closed"
    await stage.read_client.close()
    return await described(stage)


async def described(stage: Playground) -> pb.ServiceInfo:
    """Return the service's description of itself, as soon as it answers."""
    async with asyncio.timeout(SOON):
        while True:
            try:
                return await stage.read_client.service_info()
            except Unavailable:
                await stage.read_client.close()
                await asyncio.sleep(0.05)


async def resumed(stage: Playground) -> None:
    done = await stage.run_command("resume", "--reason", "done")
    assert done.returncode == 0, done.stderr
    await stage.read_client.close()


async def test_no_child_process_is_left_on_a_yielded_node_and_a_scrub_in_progress_is_abandoned() -> None:
    async with staged(devices=1, memory="512MiB") as stage:
        scrub = await stage.run_command("scrub", "0", "--no-wait")
        assert scrub.returncode == 0, scrub.stderr
        children = stage.child_processes(stage.service)
        assert children
        info = await yielded(stage)
        assert info.node_yield.driver_closed
        assert [each.reason for each in info.node_yield.requests] == [REASON]
        assert stage.running_processes(children) == []
        assert stage.child_processes(stage.service) == {}
        await resumed(stage)
        await stage.wait_until_clean(SOON)


async def test_yielded_node_withholds_its_devices_at_once_and_a_waiting_start_goes_on_when_it_is_resumed() -> None:
    async with staged(devices=2) as stage:
        tenant = await running(stage, writer("a", "team-a"))
        await yielded(stage)
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 0, SOON)
        assert stage.kubelet.capacity(RESOURCE) == 2
        assert tenant.status.containers["main"].state is ContainerState.RUNNING
        await resumed(stage)
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 2, SOON)
        states = sorted(each.state for each in await stage.wait_until_clean(SOON))
        assert states == ["clean", "in-use"]
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        (requested,), (entered,), (ended,) = [
            await history(stage, name) for name in ("node.yield-requested", "node.yielded", "node.yield-ended")
        ]
        assert requested["reason"] == REASON
        assert requested["sequence"] < entered["sequence"] < ended["sequence"]


async def test_service_killed_on_a_yielded_node_does_not_open_the_driver_until_it_is_resumed() -> None:
    async with staged(devices=2) as stage:
        before = {each.id: each.certificate.id for each in (await stage.read_client.devices()).devices}
        await yielded(stage)
        await stage.service.kill()
        await stage.service.start()
        info = await described(stage)
        assert info.node_yield.driver_closed
        assert stage.child_processes(stage.service) == {}
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 0, SOON)
        await resumed(stage)
        after = {each.id: each.certificate.id for each in await stage.wait_until_clean(SOON)}
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values())


async def test_devices_that_vanish_and_appear_while_the_node_is_yielded_are_never_quarantined() -> None:
    async with staged(devices=2) as stage:
        await yielded(stage)
        for change in (
            ("fault", "--driver-absent"),
            ("split", "--device", "0", "--instances", "2"),
            ("fault", "--device", "1", "--lost"),
            ("clear",),
        ):
            done = await stage.run_command("sim", *change, "--dir", str(stage.sim_dir))
            assert done.returncode == 0, done.stderr
        await resumed(stage)
        devices = await stage.wait_for_devices(lambda all_: len(all_) == 3, SOON)
        assert {each.health for each in devices} == {"healthy"}
        assert await history(stage, "health.quarantined") == []


async def test_plugin_s_request_outlives_the_operator_s_and_resume_says_so() -> None:
    async with staged(devices=1) as stage, PluginClient(stage.socket_dir) as plugin:
        await stage.plugin.stop(SOON)  # it follows no label, and would withdraw the request
        await plugin.set_yield("node label nvidia.com/gpu.deploy.client is false", timeout=SOON)
        await yielded(stage)
        done = await stage.run_command("resume", "--reason", "done")
        assert (done.returncode, "nvidia.com/gpu.deploy.client" in done.stdout) == (0, True)
        await stage.read_client.close()
        assert (await stage.read_client.service_info()).node_yield.driver_closed
        await plugin.close()
        await plugin.set_yield("", timeout=SOON)
        await stage.wait_until_clean(SOON)
