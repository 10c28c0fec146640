"""Admission as the kubelet does it: which pod gets which device, in which order, and the effect of a refusal."""

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from plugin.api import deviceplugin_pb2 as api
from scrubber.emulator import EmulatedPod, Kubelet, PodPhase, RestartPolicy
from tests.emulation import (
    RESOURCE,
    SOON,
    Refusal,
    TinyPlugin,
    container,
    emulated,
    listed,
    pod,
    register,
    registered,
    serving,
)


@pytest.fixture
async def kubelet(short_tmp: Path) -> AsyncIterator[Kubelet]:
    async with emulated(short_tmp) as running:
        yield running


def device(name: str, health: str = "Healthy") -> api.Device:
    return api.Device(ID=name, health=health)


def names(kubelet: Kubelet, *expected: str) -> list[str]:
    return [event.name for event in kubelet.events if event.name in expected]


def refused(admitted: EmulatedPod) -> str:
    status = admitted.status
    assert (status.phase, status.reason, admitted.admitted) == (PodPhase.FAILED, "UnexpectedAdmissionError", False)
    return status.message


async def test_failed_waits_name_what_was_missing(kubelet: Kubelet) -> None:
    with pytest.raises(
        TimeoutError, match=f"^the kubelet has 0 instead of 2 allocatable devices of {RESOURCE} after 0 s$"
    ):
        await kubelet.wait_for_allocatable(RESOURCE, 2, 0)
    async with registered(kubelet, TinyPlugin(["a"])):
        admitted = await kubelet.run(pod("p", container("one")))
        with pytest.raises(TimeoutError, match="did not reach its second restart within 0 s: "):
            await admitted.wait(lambda _: False, 0, "its second restart")


async def test_every_container_is_allocated_at_admission_before_any_container_runs(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a", "b", "c"])) as plugin:
        spec = pod("p", container("one"), container("two"), init=[container("init", "true")])
        admitted = await kubelet.run(spec)
        assert len(plugin.allocate_requests) == 3
        assert "ContainerStarted" not in names(kubelet, "ContainerStarted")
        await admitted.wait(PodPhase.RUNNING, SOON)
        assert len(plugin.allocate_requests) == 3
        assert all(len(request.container_requests) == 1 for request in plugin.allocate_requests)


async def test_only_the_first_container_response_is_read(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()):
        started = await kubelet.run(pod("p", container("main", "echo got=$SECOND_RESPONSE.")))
        await started.wait(PodPhase.SUCCEEDED, SOON)
        assert started.read_log("main") == "got=.\n"


async def test_init_containers_device_is_reused_and_allocated_again_without_a_preference_request(
    kubelet: Kubelet,
) -> None:
    plugin = TinyPlugin(options=api.DevicePluginOptions(get_preferred_allocation_available=True))
    plugin.preferred = ["gpu-1"]
    async with registered(kubelet, plugin):
        admitted = await kubelet.run(pod("p", container("main"), init=[container("init", "true")]))
        calls = [event.name for event in kubelet.events if event.name in ("Allocate", "GetPreferredAllocation")]
        assert calls == ["GetPreferredAllocation", "Allocate", "Allocate"]
        assert [list(each.container_requests[0].devices_ids) for each in plugin.allocate_requests] == [["gpu-1"]] * 2
        assert admitted.device_ids == ("gpu-1",)


async def test_sidecar_keeps_its_own_device(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()):
        sidecar = container("sidecar", restart=RestartPolicy.ALWAYS)
        admitted = await kubelet.run(pod("p", container("main"), init=[sidecar]))
        assert admitted.device_ids == ("gpu-0", "gpu-1")
        status = await admitted.wait(PodPhase.RUNNING, SOON)
        assert not set(status.containers["main"].device_ids) & set(status.containers["sidecar"].device_ids)


async def test_refused_allocate_fails_the_pod_permanently(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()) as plugin:

        async def refuse(_devices: list[str]) -> None:
            raise Refusal("not this one")

        plugin.on_allocate = refuse
        message = refused(await kubelet.run(pod("p")))
        expected = (
            "Allocate failed due to rpc error: code = FailedPrecondition desc = not this one, which is unexpected"
        )
        assert message == expected
        assert len(plugin.allocate_requests) == 1


async def test_slow_allocate_delays_every_admission_on_the_node(short_tmp: Path) -> None:
    async with emulated(short_tmp, sync_loop_health=0.001) as kubelet, registered(kubelet, TinyPlugin()) as plugin:
        requested, answer = asyncio.Event(), asyncio.Event()

        async def hold(_devices: list[str]) -> None:
            requested.set()
            await answer.wait()

        plugin.on_allocate = hold
        slow = kubelet.create(pod("slow"))
        await asyncio.wait_for(requested.wait(), SOON)
        without_gpu = kubelet.create(pod("no-gpu", container(gpus=0)))
        await kubelet.wait_until(lambda node: not node.healthy, SOON)
        assert without_gpu.admitted is None
        answer.set()
        await without_gpu.wait(PodPhase.RUNNING, SOON)
        assert slow.admitted is True


async def test_too_few_devices_fail_the_admission(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()):
        first = await kubelet.run(pod("first", container(gpus=2)))
        message = refused(await kubelet.run(pod("second")))
        assert "requested number of devices unavailable" in message
        await kubelet.delete(first)
        assert (await kubelet.run(pod("third"))).admitted is True


async def test_unregistered_resource_is_refused(kubelet: Kubelet) -> None:
    assert "cannot allocate unregistered device" in refused(await kubelet.run(pod("p")))


async def test_preferred_device_is_allocated_and_the_request_names_size_and_candidates(kubelet: Kubelet) -> None:
    plugin = TinyPlugin(["a", "b", "c"], options=api.DevicePluginOptions(get_preferred_allocation_available=True))
    plugin.preferred = ["b", "c"]
    async with registered(kubelet, plugin):
        assert (await kubelet.run(pod("p", container(gpus=2)))).device_ids == ("b", "c")
        request = plugin.preferred_requests[0]
        assert (sorted(request.available_deviceIDs), list(request.must_include_deviceIDs)) == (["a", "b", "c"], [])
        assert request.allocation_size == 2


async def test_preference_request_includes_devices_already_chosen(kubelet: Kubelet) -> None:
    plugin = TinyPlugin(["a", "b"], options=api.DevicePluginOptions(get_preferred_allocation_available=True))
    plugin.preferred = ["a"]
    async with registered(kubelet, plugin):
        await kubelet.run(pod("p", container(gpus=2), init=[container("init", "true")]))
        second = plugin.preferred_requests[1]
        assert (list(second.must_include_deviceIDs), second.allocation_size) == (["a"], 2)


async def test_incomplete_preference_falls_back_to_the_kubelets_own_order(kubelet: Kubelet) -> None:
    plugin = TinyPlugin(["a", "b"], options=api.DevicePluginOptions(get_preferred_allocation_available=True))
    plugin.preferred = []
    async with registered(kubelet, plugin):
        assert (await kubelet.run(pod("p", container(gpus=2)))).device_ids == ("a", "b")


async def test_failed_preference_fails_the_admission(kubelet: Kubelet) -> None:
    plugin = TinyPlugin(options=api.DevicePluginOptions(get_preferred_allocation_available=True))
    async with registered(kubelet, plugin):
        assert "GetPreferredAllocation rpc failed" in refused(await kubelet.run(pod("p")))


@pytest.mark.parametrize("health", ["Unhealthy", "healthy", "HEALTHY", "", "Unknown"])
async def test_any_health_value_other_than_healthy_is_unhealthy(kubelet: Kubelet, health: str) -> None:
    async with registered(kubelet, TinyPlugin(["a", "b"])) as plugin:
        await plugin.report(device("a"), device("b", health))
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 1, SOON)
        assert kubelet.capacity(RESOURCE) == 2
        assert (await kubelet.run(pod("p"))).device_ids == ("a",)


async def test_omitted_device_lowers_capacity_and_still_reads_healthy_in_the_pod_status(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        running = await kubelet.run(pod("p"))
        await plugin.report(device("b"))
        await kubelet.wait_until(lambda node: ("b",) in [each.devices for each in node.events], SOON)
        await kubelet.wait_until(lambda node: (node.capacity(RESOURCE), node.allocatable(RESOURCE)) == (1, 1), SOON)
        status = await running.wait(lambda now: now.containers["main"].device_health == {"a": "Healthy"}, SOON)
        assert status.phase is not PodPhase.FAILED


async def test_unhealthy_device_appears_in_the_status_of_its_running_pod_and_does_not_end_the_pod(
    kubelet: Kubelet,
) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        running = await kubelet.run(pod("p"))
        before = await running.wait(PodPhase.RUNNING, SOON)
        await plugin.report(device("a", "Unhealthy"))
        after = await running.wait(lambda now: now.containers["main"].device_health == {"a": "Unhealthy"}, SOON)
        assert after.phase is PodPhase.RUNNING
        assert after.containers["main"].pid == before.containers["main"].pid


async def test_unhealthy_device_in_use_is_subtracted_twice_for_the_scheduler(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a", "b"])) as plugin:
        running = await kubelet.run(pod("p"))
        await kubelet.wait_until(lambda node: node.schedulable(RESOURCE) == 1, SOON)
        taken, idle = running.device_ids[0], ({"a", "b"} - set(running.device_ids)).pop()
        await plugin.report(device(taken, "Unhealthy"), device(idle))
        await kubelet.wait_until(lambda node: node.node_status.allocatable[RESOURCE] == 1, SOON)
        assert kubelet.schedulable(RESOURCE) == 0


async def test_restarted_container_keeps_an_unhealthy_device_and_is_not_allocated_again(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        again = container("main", "while [ ! -e die ]; do sleep 0.01; done; rm die", restart=RestartPolicy.ALWAYS)
        running = await kubelet.run(pod("p", again))
        await running.wait(PodPhase.RUNNING, SOON)
        await plugin.report(device("a", "Unhealthy"))
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 0, SOON)
        (running.container_root("main") / "die").touch()
        await running.wait(lambda now: now.containers["main"].restarts == 1, SOON)
        assert len(plugin.allocate_requests) == 1
        assert plugin.pre_starts == [["a"], ["a"]]


async def test_checkpoint_names_pod_container_resource_devices_and_response(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        plugin.answer = api.ContainerAllocateResponse(envs={"KEY": "value"})
        plugin.devices = {"a": api.Device(ID="a", health="Healthy")}
        admitted = await kubelet.run(pod("p", container("main"), init=[container("init", "true")]))
        document = json.loads((kubelet.device_plugins / "kubelet_internal_checkpoint").read_text())
        assert document["Data"]["RegisteredDevices"] == {RESOURCE: ["a"]}
        entries = {entry.pop("ContainerName"): entry for entry in document["Data"]["PodDeviceEntries"]}
        assert sorted(entries) == ["init", "main"]
        assert base64.b64decode(entries["main"].pop("AllocResp")) == plugin.answer.SerializeToString()
        assert entries["main"] == {"PodUID": admitted.uid, "ResourceName": RESOURCE, "DeviceIDs": {"-1": ["a"]}}


async def test_allocate_response_is_replayed_at_every_start_after_kubelet_and_plugin_restart(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"]), "one.sock") as plugin:
        plugin.answer = api.ContainerAllocateResponse(envs={"KEY": "first answer"})
        again = "echo $KEY; while [ ! -e die ]; do sleep 0.01; done; rm die"
        running = await kubelet.run(pod("p", container("main", again, restart=RestartPolicy.ALWAYS)))
        await running.wait(PodPhase.RUNNING, SOON)
        await kubelet.restart()
        await plugin.stop()
        plugin.answer = api.ContainerAllocateResponse(envs={"KEY": "second answer"})
        await plugin.serve(kubelet.device_plugins / "two.sock")
        await register(kubelet, "two.sock")
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 1 and running.active, SOON)
        (running.container_root("main") / "die").touch()
        await running.wait(lambda now: now.containers["main"].restarts == 1, SOON)
        await running.wait(lambda _now: bool(running.read_log("main")), SOON)
        (running.container_root("main") / "die").touch()
        await running.wait(lambda now: now.containers["main"].restarts == 2, SOON)
        assert running.read_log("main", 1) == "first answer\n"
        assert len(plugin.allocate_requests) == 1


@pytest.mark.parametrize("damage", ["not json", '{"Data": {}, "Checksum": 0}', "{}"])
async def test_damaged_checkpoint_is_ignored_and_a_held_device_allocated_again(kubelet: Kubelet, damage: str) -> None:
    async with registered(kubelet, TinyPlugin(["a"]), "one.sock") as plugin:
        holder = await kubelet.run(pod("holder"))
        before = await holder.wait(PodPhase.RUNNING, SOON)
        await kubelet.stop()
        (kubelet.device_plugins / "kubelet_internal_checkpoint").write_text(damage)
        await kubelet.start()
        await plugin.stop()
        await plugin.serve(kubelet.device_plugins / "two.sock")
        await register(kubelet, "two.sock")
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 1 and holder.active, SOON)
        assert (await kubelet.run(pod("next"))).device_ids == ("a",)
        assert holder.status.containers["main"].pid == before.containers["main"].pid


async def test_container_that_is_not_in_the_checkpoint_gets_a_device_when_it_is_admitted_again(
    kubelet: Kubelet,
) -> None:
    async with registered(kubelet, TinyPlugin(["a"]), "one.sock") as plugin:
        crashing = await kubelet.run(pod("p", container("main", "exit 1", restart=RestartPolicy.ALWAYS)))
        await crashing.wait(lambda now: now.containers["main"].reason == "CrashLoopBackOff", SOON)
        await kubelet.stop()
        (kubelet.device_plugins / "kubelet_internal_checkpoint").write_text("{}")
        kubelet.api_server.clear()  # otherwise it may be admitted, and refused, before its plugin is registered
        await kubelet.start()
        await plugin.stop()
        await plugin.serve(kubelet.device_plugins / "two.sock")
        await register(kubelet, "two.sock")
        await kubelet.wait_for_allocatable(RESOURCE, 1, SOON)
        before = crashing.status.containers["main"].restarts
        kubelet.api_server.set()
        await crashing.wait(lambda now: now.containers["main"].restarts > before, SOON)
        assert (await listed(kubelet))["p"] == {"main": ["a"]}


async def test_crash_looping_pod_admitted_before_its_plugin_returns_fails_permanently(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])):
        crashing = await kubelet.run(pod("p", container("main", "exit 1", restart=RestartPolicy.ALWAYS)))
        await crashing.wait(lambda now: now.containers["main"].reason == "CrashLoopBackOff", SOON)
        await kubelet.restart()
        await crashing.wait(PodPhase.FAILED, SOON)
        assert "no healthy devices present" in crashing.status.message
        assert crashing.status.reason == "UnexpectedAdmissionError"


async def test_pod_that_runs_through_a_kubelet_restart_keeps_its_device(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a", "b"]), "one.sock") as plugin:
        running = await kubelet.run(pod("p"))
        before = await running.wait(PodPhase.RUNNING, SOON)
        await kubelet.restart()
        await plugin.stop()
        await plugin.serve(kubelet.device_plugins / "two.sock")
        await register(kubelet, "two.sock")
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 2 and running.active, SOON)
        other = await kubelet.run(pod("q"))
        assert not set(other.device_ids) & set(running.device_ids)
        assert running.status.containers["main"].pid == before.containers["main"].pid
        assert (await listed(kubelet))["p"] == {"main": list(running.device_ids)}


async def test_admission_interrupted_by_a_restart_is_repeated(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"]), "one.sock") as plugin:
        requested = asyncio.Event()

        async def hang(_devices: list[str]) -> None:
            requested.set()
            await asyncio.Event().wait()

        plugin.on_allocate = hang
        undecided = kubelet.create(pod("p"))
        await asyncio.wait_for(requested.wait(), SOON)
        await kubelet.stop()
        assert undecided.admitted is None
        await plugin.stop()
        async with serving(TinyPlugin(["a"]), kubelet.plugins_registry / "two.sock"):
            kubelet.api_server.clear()  # otherwise it may be admitted, and refused, before its plugin is registered
            await kubelet.start()
            await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 1, SOON)
            assert undecided.admitted is None
            kubelet.api_server.set()
            await undecided.wait(PodPhase.RUNNING, SOON)


async def test_device_ids_are_shuffled_in_every_message(short_tmp: Path) -> None:
    kubelet = Kubelet(short_tmp, rng=random.Random(1))
    plugin = TinyPlugin(
        [f"gpu-{number}" for number in range(8)],
        options=api.DevicePluginOptions(get_preferred_allocation_available=True, pre_start_required=True),
    )
    plugin.preferred = []
    async with kubelet, registered(kubelet, plugin):
        running = await kubelet.run(pod("p", container(gpus=8)))
        await running.wait(PodPhase.RUNNING, SOON)
        orders = {
            tuple(plugin.preferred_requests[0].available_deviceIDs),
            tuple(plugin.allocate_requests[0].container_requests[0].devices_ids),
            tuple(plugin.pre_starts[0]),
        }
        assert len(orders) == 3


async def test_pod_deleted_before_its_admission_is_never_allocated(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()) as plugin:
        await kubelet.stop()
        waiting = kubelet.create(pod("p"))
        deletion = asyncio.create_task(kubelet.delete(waiting))
        await waiting.wait(lambda now: now.deleting, SOON)
        await kubelet.start()
        await asyncio.wait_for(deletion, SOON)
        assert plugin.allocate_requests == []
