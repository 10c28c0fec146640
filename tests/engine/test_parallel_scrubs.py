"""Scrubs run beside each other: only what their devices share, and the policy, make one wait for another."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.device import SharedResource
from scrubber.domain.diagnostics import DiagnosticLevel
from scrubber.domain.evidence import ScrubTrigger
from scrubber.domain.policy import DiagnosticsRule, Limits, Policy
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.process_table import Gpu, gpu, instance
from tests.simulation.start_requests import admitted, request_start, started
from tests.simulation.timeline import in_virtual_time

MIN_RATES = {"Labelled*": {"matrix-product": 5e9}}


def limited(slots: int) -> Policy:
    return replace(DEFAULT, limits=replace(Limits(), eraser_slots=slots))


def sharing(memory: Gpu, resource: SharedResource) -> Gpu:
    memory.device = replace(memory.device, shared_resource=resource)
    return memory


def erased(cluster: SimulatedCluster) -> list[int]:
    """The numbers of the devices at whose memory an eraser is working."""
    return [
        number for number in range(len(cluster.process_table.gpus)) if cluster.gpu(number).id in cluster.erasers.running
    ]


async def seconds_of_take_over(cluster: SimulatedCluster, devices: int) -> float:
    """Seconds from the end of a pod with ``devices`` devices until they are granted to the next one."""
    numbers = range(devices)
    first = await started(cluster, "acme", f"first-{devices}", *numbers)
    cluster.kubelet.delete(first)
    second = await admitted(cluster, "umbrella", f"second-{devices}", *numbers)
    began = cluster.clock.monotonic()
    await request_start(cluster, second)
    return cluster.clock.monotonic() - began


@in_virtual_time
async def test_eight_devices_of_one_hand_over_take_as_long_as_one() -> None:
    async with simulated_cluster(devices=1) as cluster:
        one = await seconds_of_take_over(cluster, 1)
    async with simulated_cluster(devices=8) as cluster:
        assert await seconds_of_take_over(cluster, 8) == pytest.approx(one, rel=0.1)


@in_virtual_time
async def test_instances_of_one_gpu_are_cleared_at_the_same_time() -> None:
    gpus = [instance(number, "0") for number in range(7)]
    async with simulated_cluster(gpus=gpus, settled=False) as cluster:
        await cluster.start_service()
        await cluster.until(lambda: erased(cluster) == list(range(7)), within=5.0)


@in_virtual_time
async def test_devices_of_another_backend_do_not_wait_for_memory_that_they_do_not_share() -> None:
    first, second = SharedResource("host memory", 1), SharedResource("other memory", 2)
    gpus = [sharing(gpu(number), first if number < 3 else second) for number in range(6)]
    async with simulated_cluster(gpus=gpus, settled=False) as cluster:
        await cluster.start_service()
        await cluster.until(lambda: bool(erased(cluster)), within=5.0)
        await cluster.run(0.1)
        assert erased(cluster) == [0, 3, 4]
        assert cluster.node.devices.free_eraser_slots == 0


@in_virtual_time
async def test_device_reserved_by_allocate_is_cleared_before_one_that_no_pod_has_reserved() -> None:
    """After a start of the service, when any device may have been allocated before."""
    async with simulated_cluster(devices=4, policy=limited(1), settled=False) as cluster:
        await cluster.start_service()
        await cluster.until(lambda: erased(cluster) == [0])
        await cluster.node.reserve([cluster.gpu(3).id])
        await cluster.until(lambda: erased(cluster) not in ([0], []))
        assert erased(cluster) == [3]


@in_virtual_time
async def test_device_whose_start_waits_is_cleared_before_one_that_is_only_reserved() -> None:
    async with simulated_cluster(devices=4, policy=limited(1), settled=False) as cluster:
        await cluster.start_service()
        await cluster.until(lambda: erased(cluster) == [0])
        await cluster.node.reserve([cluster.gpu(2).id])
        second = await admitted(cluster, "umbrella", "serve-0", 3)
        call = request_start(cluster, second)
        await cluster.until(lambda: erased(cluster) not in ([0], []))
        assert erased(cluster) == [3]
        await call


@pytest.mark.parametrize(("rates", "waiting"), [(MIN_RATES, 3), ({}, 0)])
def test_devices_are_diagnosed_one_at_a_time_where_their_rates_are_compared_with_a_minimum(
    rates: dict[str, dict[str, float]], waiting: int
) -> None:
    policy = replace(DEFAULT, diagnostics=DiagnosticsRule(slow_path=DiagnosticLevel.EXTENDED, min_rates=rates))

    @in_virtual_time
    async def most_waiting() -> int:
        async with simulated_cluster(devices=4, policy=policy) as cluster:
            for number in range(4):
                await cluster.controller(number).scrubs.start(ScrubTrigger.ON_DEMAND)
            pool = cluster.node.devices.eraser_pool
            await cluster.until(lambda: pool.busy > 0)
            await asyncio.sleep(1.0)
            return pool.waiting

    assert most_waiting() == waiting


@in_virtual_time
async def test_changed_eraser_slots_take_effect_at_once_and_trigger_no_scrub() -> None:
    async with simulated_cluster(devices=4, policy=limited(1), settled=False) as cluster:
        await cluster.start_service()
        await cluster.until(lambda: erased(cluster) == [0])
        cluster.policy = DEFAULT
        cluster.node.on_policy_change()
        await cluster.until(lambda: erased(cluster) == [0, 1, 2, 3], within=0.5)
        await cluster.until(cluster.settled)
        assert cluster.erasers.started == 4
