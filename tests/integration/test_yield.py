"""A yielded node, with real processes: the driver is closed, devices are withheld, and what happens meanwhile is no fault."""

from __future__ import annotations

import asyncio
import json
import sys

from scrubber.adapters.locks import lock_path
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import PluginClient
from scrubber.cli.exit_codes import ExitCode
from scrubber.domain.errors import Unavailable
from scrubber.emulator.playground import RESOURCE, Playground
from scrubber.emulator.pods import ContainerState
from tests.integration.acting import QUICK, SOON, found_by, history, reader, running, staged, writer
from tests.integration.test_probes import address_of, get

HOLDS = """
import sys
from scrubber.adapters.locks import acquire_lock
print(acquire_lock(sys.argv[1]), flush=True)
sys.stdin.read()
"""
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


async def shown(address: str, *lines: str) -> None:
    """Wait for a metrics page with these lines; a page is reused for a second."""
    async with asyncio.timeout(SOON):
        while True:
            _, page = await get(address, "/metrics")
            if set(lines) <= set(page.splitlines()):
                return
            await asyncio.sleep(0.05)


async def simulate(stage: Playground, *change: str) -> None:
    done = await stage.run_command("sim", *change, "--dir", str(stage.sim_dir))
    assert done.returncode == 0, done.stderr


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


async def test_node_is_not_reported_as_free_of_the_driver_while_an_eraser_of_an_earlier_service_works() -> None:
    async with staged(devices=1) as stage:
        (device,) = (await stage.read_client.devices()).devices
        await yielded(stage)
        # As an eraser does; the service that started it is gone.
        lock = lock_path(stage.sim_dir / "locks", device.id)
        orphan = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HOLDS, str(lock)), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert orphan.stdin is not None
        assert orphan.stdout is not None
        assert await orphan.stdout.readline() == b"True\n"
        await stage.service.kill()
        await stage.service.start()
        info = await described(stage)
        assert (info.node_yield.driver_closed, list(info.node_yield.remaining_pids)) == (False, [orphan.pid])
        waiting = await stage.run_command("yield", "--reason", REASON, "--timeout", "1s")
        assert (waiting.returncode, f"PID {orphan.pid}." in waiting.stderr) == (ExitCode.TIMED_OUT, True)
        orphan.stdin.close()
        await orphan.wait()
        assert (await described(stage)).node_yield.driver_closed


async def test_service_that_waits_for_its_driver_can_be_yielded_and_a_crash_does_not_end_that() -> None:
    async with Playground(devices=1, memory="2MiB", policy=QUICK) as stage:
        await simulate(stage, "fault", "--driver-absent")
        arguments = list(stage.service.arguments)
        arguments[arguments.index("--metrics-address") + 1] = "127.0.0.1:0"
        stage.service.arguments = arguments
        await stage.service.start()
        async with asyncio.timeout(SOON):
            while True:
                listed = await stage.run_command("devices")
                if "waits for the driver: The driver is not loaded." in listed.stderr:
                    break
        address = await address_of(stage.service, "metrics.serving")
        await shown(address, "scrubber_waiting_for_driver 1.0", "scrubber_node_yielded 0.0", "scrubber_ledger_ok 1.0")
        info = await yielded(stage)
        assert [each.reason for each in info.node_yield.requests] == [REASON]
        await shown(address, "scrubber_waiting_for_driver 0.0", "scrubber_node_yielded 1.0")
        await stage.service.kill()
        await stage.service.start()
        assert (await described(stage)).node_yield.driver_closed
        assert stage.child_processes(stage.service) == {}
        await simulate(stage, "clear")
        await resumed(stage)
        await stage.wait_until_clean(SOON)
        assert len(await history(stage, "node.yielded")) == 2


async def test_devices_that_vanish_and_appear_while_the_node_is_yielded_are_never_quarantined() -> None:
    async with staged(devices=2) as stage:
        await yielded(stage)
        await simulate(stage, "fault", "--driver-absent")
        await simulate(stage, "split", "--device", "0", "--instances", "2")
        await simulate(stage, "fault", "--device", "1", "--lost")
        await simulate(stage, "clear")
        await resumed(stage)
        devices = await stage.wait_for_devices(lambda all_: len(all_) == 3, SOON)
        assert {each.health for each in devices} == {"healthy"}
        assert await history(stage, "health.quarantined") == []


async def test_plugin_s_request_outlives_the_operator_s_and_resume_says_so() -> None:
    async with staged(devices=1) as stage, PluginClient(stage.socket_dir) as plugin:
        await stage.plugin.stop(SOON)  # it follows no label, and would withdraw the request
        await plugin.set_yield(RESOURCE, "node label nvidia.com/gpu.deploy.client is false", timeout=SOON)
        await yielded(stage)
        done = await stage.run_command("resume", "--reason", "done")
        assert (done.returncode, "nvidia.com/gpu.deploy.client" in done.stdout) == (0, True)
        await stage.read_client.close()
        assert (await stage.read_client.service_info()).node_yield.driver_closed
        await plugin.close()
        await plugin.set_yield(RESOURCE, "", timeout=SOON)
        await stage.wait_until_clean(SOON)


async def test_reason_of_one_plugin_survives_another_plugin_and_a_crash_of_the_service() -> None:
    async with staged(devices=1) as stage, PluginClient(stage.socket_dir) as plugin:
        await plugin.set_yield("example.com/gpu", "node label example.com/deploy is false", timeout=SOON)
        async with asyncio.timeout(SOON):
            while not (await described(stage)).node_yield.driver_closed:
                await stage.read_client.close()
        await stage.service.kill()
        await stage.service.start()
        await described(stage)
        await plugin.close()
        await plugin.set_yield(RESOURCE, "", timeout=SOON)
        info = await described(stage)
        assert [each.actor for each in info.node_yield.requests] == ["plugin of example.com/gpu"]
        assert info.node_yield.driver_closed
        done = await stage.run_command("resume", "--reason", "that plugin is gone", "--all")
        assert done.returncode == 0, done.stderr
        await stage.read_client.close()
        await stage.wait_until_clean(SOON)
