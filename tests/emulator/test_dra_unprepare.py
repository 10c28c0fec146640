"""NodeUnprepareResources as the kubelet calls it: after which pods, in which order to their ends, and how often."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from plugin.api import dra_v1_pb2 as api
from scrubber.emulator import PodPhase
from scrubber.emulator.cluster.resources import CLAIM_TEMPLATES, CLAIMS, PODS
from tests.cluster.emulated import claim
from tests.dra_emulation import Claims, DraNode, TinyDriver, claiming, dra_node, driving
from tests.emulation import SOON, alive, ended


class PlainDriver(TinyDriver):
    """Answers without CDI devices."""

    def answer(self, of: api.Claim) -> list[api.Device]:
        return [api.Device(pool_name="node-a", device_name=name) for name in self.devices.get(of.name, ["gpu-0"])]


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[DraNode]:
    async with dra_node(short_tmp, published=("gpu-0", "gpu-1")) as running:
        yield running


async def refuse(claims: Claims) -> Mapping[str, api.NodeUnprepareResourceResponse]:
    return {each.uid: api.NodeUnprepareResourceResponse(error="scrub in progress") for each in claims}


def released(node: DraNode, name: str = "claim") -> bool:
    """Whether the claim is not allocated any more."""
    return not (node.api.get(CLAIMS, name, "default").get("status") or {}).get("allocation")


async def test_claim_is_released_after_the_containers_and_before_the_pods_phase(node: DraNode) -> None:
    node.claim()
    seen: list[tuple[PodPhase, int | None]] = []
    async with driving(node, PlainDriver()) as driver:
        pod = await node.kubelet.submit(claiming(command="exit 3"), SOON)

        async def observe(claims: Claims) -> Any:
            seen.append((pod.phase, pod.status.containers["main"].exit_code))
            return await driver.release(claims)

        driver.on_unprepare = observe
        await pod.wait(PodPhase.FAILED, SOON)
        ((phase, exit_code),) = seen
        assert (phase.terminal, exit_code) == (False, 3)
        assert driver.unprepares == [["claim"]]
        await node.until(lambda: released(node))


async def test_deleted_pod_stays_terminating_while_the_release_is_refused(short_tmp: Path) -> None:
    async with dra_node(short_tmp, unprepare_retry=(0.05, 0.1)) as node, driving(node, PlainDriver()) as driver:
        node.claim()
        driver.on_unprepare = refuse
        pod = await node.run(claiming())
        pid = pod.status.containers["main"].pid
        assert pid is not None
        deletion = asyncio.create_task(node.kubelet.delete(pod))
        await node.until(lambda: len(driver.unprepares) >= 3)
        assert not alive(pid)
        assert not pod.gone
        found = node.pod_object("a")
        assert found is not None
        assert "deletionTimestamp" in found["metadata"]
        assert not released(node)
        driver.on_unprepare = driver.release
        await deletion
        assert node.pod_object("a") is None
        await node.until(lambda: released(node))


async def test_next_tenant_is_pending_until_the_release_succeeds(short_tmp: Path) -> None:
    async with dra_node(short_tmp, unprepare_retry=(0.05, 0.1)) as node, driving(node, PlainDriver()) as driver:
        for name in ("one", "two"):
            node.claim(name)
        driver.on_unprepare = refuse
        first = await node.run(claiming("a", "one"))
        second = asyncio.create_task(node.kubelet.submit(claiming("b", "two"), SOON))
        deletion = asyncio.create_task(node.kubelet.delete(first))
        await node.until(lambda: driver.unprepares)
        assert not second.done()
        driver.on_unprepare = driver.release
        await deletion
        await (await second).wait(PodPhase.RUNNING, SOON)


async def test_slow_release_is_cancelled_at_its_deadline_and_called_again(short_tmp: Path) -> None:
    async def hang_once(claims: Claims) -> Any:
        if len(driver.unprepares) == 1:
            await asyncio.Event().wait()
        return await driver.release(claims)

    hasty = dra_node(short_tmp, dra_call=2.0, unprepare_retry=(0.05, 0.1))
    async with hasty as node, driving(node, PlainDriver()) as driver:
        node.claim()
        driver.on_unprepare = hang_once
        pod = await node.run(claiming())
        await node.kubelet.delete(pod)
        outcomes = [each.outcome for each in node.calls("NodeUnprepareResources")]
        assert (outcomes[0], outcomes[-1]) == ("DeadlineExceeded", "OK")


async def test_absent_driver_keeps_the_pod_terminating(short_tmp: Path) -> None:
    async with dra_node(short_tmp, unprepare_retry=(0.05, 0.1)) as node:
        node.claim()
        async with driving(node, PlainDriver()) as driver:
            pod = await node.run(claiming())
        await node.until(lambda: not node.kubelet.dra.plugins.instances(driver.name))
        deletion = asyncio.create_task(node.kubelet.delete(pod))
        await node.until(lambda: node.calls("FailedKillPod"))
        assert "is not registered" in node.calls("FailedKillPod")[0].detail
        assert not pod.gone
        async with driving(node, driver):
            await deletion
        assert driver.unprepares == [["claim"]]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({}, "NodeUnprepareResources skipped 1 ResourceClaims"),
        ({"other": api.NodeUnprepareResourceResponse()}, "returned result for unknown claim UID other"),
    ],
)
async def test_incomplete_or_foreign_answer_keeps_the_pod_terminating(
    short_tmp: Path, answer: Any, problem: str
) -> None:
    async def answer_wrongly(_claims: Claims) -> Any:
        return answer

    async with dra_node(short_tmp, unprepare_retry=(0.05, 0.1)) as node, driving(node, PlainDriver()) as driver:
        node.claim()
        driver.on_unprepare = answer_wrongly
        pod = await node.run(claiming())
        deletion = asyncio.create_task(node.kubelet.delete(pod))
        await node.until(lambda: node.calls("FailedKillPod"))
        assert problem in node.calls("FailedKillPod")[0].detail
        driver.on_unprepare = driver.release
        await deletion


async def test_shared_claim_is_released_with_its_last_pod_only(node: DraNode) -> None:
    node.claim()
    async with driving(node, PlainDriver()) as driver:
        first, second = await node.run(claiming("a")), await node.run(claiming("b"))
        await node.kubelet.delete(first)
        assert driver.unprepares == []
        await node.kubelet.delete(second)
        assert driver.unprepares == [["claim"]]


async def test_release_comes_even_when_the_preparation_was_refused(node: DraNode) -> None:
    async def refuse_all(claims: Claims) -> Mapping[str, api.NodePrepareResourceResponse]:
        return {each.uid: api.NodePrepareResourceResponse(error="quarantined") for each in claims}

    node.claim()
    async with driving(node, PlainDriver()) as driver:
        driver.on_prepare = refuse_all
        pod = await node.kubelet.submit(claiming(), SOON)
        await node.until(lambda: node.calls("FailedPrepareDynamicResources"))
        await node.kubelet.delete(pod)
        assert driver.unprepares == [["claim"]]


async def test_claim_of_a_template_is_released_and_deleted_with_its_pod(node: DraNode) -> None:
    template = {"metadata": {"name": "one", "namespace": "default"}, "spec": {"spec": claim()["spec"]}}
    node.api.create(CLAIM_TEMPLATES, template)
    async with driving(node, PlainDriver()) as driver:
        pod = await node.run(claiming(template="one"))
        await node.kubelet.delete(pod)
        assert driver.unprepares == driver.prepares
        await node.api.store.changes.wait_until(lambda: not node.api.list(CLAIMS), SOON)


# Forced deletions and orphans


async def test_next_tenant_is_prepared_before_the_force_deleted_one_is_released(node: DraNode) -> None:
    """kubernetes/kubernetes#141471: the claim is free while the tenant's processes live on."""
    for name in ("one", "two"):
        node.claim(name)
    async with driving(node, PlainDriver()) as driver:
        first = await node.run(claiming("a", "one"))
        pid = first.status.containers["main"].pid
        assert pid is not None
        await node.kubelet.delete(first, force=True, linger=3600.0)
        await node.run(claiming("b", "two"))
        devices = node.api.get(CLAIMS, "two", "default")["status"]["allocation"]["devices"]["results"]
        assert [each["device"] for each in devices] == ["gpu-0"]
        assert (driver.prepares, driver.unprepares) == ([["one"], ["two"]], [])
        assert alive(pid)


async def test_loop_releases_the_claim_of_a_force_deleted_pod_that_still_runs(short_tmp: Path) -> None:
    async with dra_node(short_tmp, dra_reconcile=0.05) as node, driving(node, PlainDriver()) as driver:
        node.claim()
        pod = await node.run(claiming())
        pid = pod.status.containers["main"].pid
        assert pid is not None
        await node.kubelet.delete(pod, force=True, linger=3600.0)
        await node.until(lambda: not list(node.kubelet.dra.claims))
        assert driver.unprepares == [["claim"]]
        assert alive(pid)


async def test_release_of_a_force_deleted_pod_comes_once_its_containers_are_dead(node: DraNode) -> None:
    node.claim()
    async with driving(node, PlainDriver()) as driver:
        pod = await node.run(claiming())
        await node.kubelet.delete(pod, force=True)
        await node.until(lambda: driver.unprepares)
        assert driver.unprepares == [["claim"]]


async def test_no_second_release_comes_when_the_containers_are_dead(short_tmp: Path) -> None:
    async with dra_node(short_tmp, dra_reconcile=0.05) as node, driving(node, PlainDriver()) as driver:
        node.claim()
        pod = await node.run(claiming())
        pid = pod.status.containers["main"].pid
        assert pid is not None
        await node.kubelet.delete(pod, force=True, linger=1.0)
        await node.until(lambda: not list(node.kubelet.dra.claims))
        await ended(pid)
        # Until its worker is done, the first pod releases whatever claim has the name, also one prepared for the next pod.
        await node.until(lambda: pod.finished)
        other = await node.run(claiming("b"))
        await node.kubelet.delete(other)
        assert driver.unprepares == [["claim"], ["claim"]]


async def test_loop_serves_one_orphan_after_the_other(short_tmp: Path) -> None:
    async with dra_node(short_tmp, published=("gpu-0", "gpu-1"), dra_reconcile=0.05) as node:
        driver = PlainDriver()
        running = most = 0
        go_on = asyncio.Event()

        async def wait(claims: Claims) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await go_on.wait()
            running -= 1
            return await driver.release(claims)

        driver.on_unprepare = wait
        async with driving(node, driver):
            pods = []
            for name in ("one", "two"):
                node.claim(name)
                pods.append(await node.run(claiming(name, name)))
            for pod in pods:
                await node.kubelet.delete(pod, force=True, linger=3600.0)
            await node.until(lambda: driver.unprepares)
            go_on.set()
            await node.until(lambda: len(driver.unprepares) == 2)
            await node.until(lambda: not list(node.kubelet.dra.claims))
            assert most == 1


async def test_refused_orphan_is_called_again_with_the_next_round(short_tmp: Path) -> None:
    async with dra_node(short_tmp, dra_reconcile=0.05) as node, driving(node, PlainDriver()) as driver:
        node.claim()
        driver.on_unprepare = refuse
        pod = await node.run(claiming())
        await node.kubelet.delete(pod, force=True, linger=3600.0)
        await node.until(lambda: len(node.calls("OrphanNotUnprepared")) >= 2)
        driver.on_unprepare = driver.release
        await node.until(lambda: not list(node.kubelet.dra.claims))


async def test_pod_that_was_deleted_while_the_kubelet_was_down_is_an_orphan(short_tmp: Path) -> None:
    async with dra_node(short_tmp, dra_reconcile=0.05) as node, driving(node, PlainDriver()) as driver:
        node.claim()
        pod = await node.run(claiming())
        pid = pod.status.containers["main"].pid
        assert pid is not None
        await node.kubelet.stop()
        node.api.delete(PODS, "a", "default", options={"gracePeriodSeconds": 0})
        await node.until(lambda: pod.gone)
        await node.api.store.changes.wait_until(lambda: released(node), SOON)
        assert alive(pid), "without a kubelet, nothing ends the containers"
        await node.kubelet.start()
        await node.until(lambda: driver.unprepares)
        await ended(pid)
        await node.until(lambda: not list(node.kubelet.dra.claims))
        assert driver.unprepares == [["claim"]]
