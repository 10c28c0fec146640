"""NodePrepareResources as the kubelet calls it: when, with which claims, what it requires, and what containers get."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from plugin.api import dra_v1_pb2 as api
from scrubber.emulator import ContainerSpec, PodClaim, PodPhase, PodSpec, RestartPolicy
from scrubber.emulator.cluster.resources import CLAIM_TEMPLATES, CLAIMS, DEVICE_CLASSES, EVENTS, PODS
from scrubber.wire import podresources_pb2 as lister
from tests.cluster.emulated import claim
from tests.dra_emulation import CDI_KIND, Claims, DraNode, TinyDriver, claiming, dra_node, driving
from tests.emulation import SOON, pod_resources

UNTIL_DIE_FILE = "while [ ! -e die ]; do sleep 0.01; done; rm die; exit 1"


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[DraNode]:
    async with dra_node(short_tmp, published=("gpu-0", "gpu-1")) as running:
        yield running


class WritingDriver(TinyDriver):
    """Writes a CDI specification for each device before it answers."""

    def __init__(self, node: DraNode) -> None:
        super().__init__()
        self._node = node
        self.on_prepare = self.write

    async def write(self, claims: Claims) -> Mapping[str, api.NodePrepareResourceResponse]:
        for each in claims:
            for name in self.devices.get(each.name, ["gpu-0"]):
                self._node.cdi(each.uid, name)
        return await self.accept(claims)


async def refuse(claims: Claims) -> Mapping[str, api.NodePrepareResourceResponse]:
    return {each.uid: api.NodePrepareResourceResponse(error="gpu-0 is being scrubbed") for each in claims}


async def test_claim_is_prepared_before_the_pods_first_container(node: DraNode) -> None:
    made = node.claim()
    async with driving(node, WritingDriver(node)) as driver:
        await node.run(claiming())
        names = [each.name for each in node.kubelet.events if each.name in ("NodePrepareResources", "ContainerStarted")]
        assert names == ["NodePrepareResources", "ContainerStarted"]
        assert (driver.prepares, driver.uids) == ([["claim"]], {made["metadata"]["uid"]})


async def test_all_claims_of_a_pod_come_in_one_call(node: DraNode) -> None:
    for name in ("one", "two"):
        node.claim(name)
    async with driving(node, WritingDriver(node)) as driver:
        await node.run(claiming("a", "one", "two"))
        assert driver.prepares == [["one", "two"]]


async def test_each_driver_of_a_pod_gets_its_own_call(node: DraNode) -> None:
    spec = {"metadata": {"name": "nic"}, "spec": {"selectors": [{"cel": {"expression": 'device.driver == "nic.dev"'}}]}}
    node.api.create(DEVICE_CLASSES, spec)
    node.publish("nic-0", driver="nic.dev", name="nics")
    node.claim("one")
    node.claim("two", device_class="nic")
    nic = TinyDriver("nic.dev")
    nic.devices["two"] = []
    async with driving(node, WritingDriver(node)) as gpu, driving(node, nic, "nic"):
        await node.run(claiming("a", "one", "two"))
        assert (gpu.prepares, nic.prepares) == ([["one"]], [["two"]])


async def test_restarted_container_is_not_prepared_again(node: DraNode) -> None:
    node.claim()
    async with driving(node, WritingDriver(node)) as driver:
        pod = await node.run(claiming(command=UNTIL_DIE_FILE, restart=RestartPolicy.ALWAYS))
        (pod.container_root("main") / "die").touch()
        await pod.wait(lambda status: status.containers["main"].restarts == 1, SOON)
        assert driver.prepares == [["claim"]]


async def test_new_sandbox_is_not_prepared_again(node: DraNode) -> None:
    node.claim()
    async with driving(node, WritingDriver(node)) as driver:
        pod = await node.run(claiming(restart=RestartPolicy.ALWAYS))
        node.kubelet.kill_sandbox(pod)
        await node.until(lambda: node.calls("SandboxChanged"))
        await node.until(lambda: len(node.calls("ContainerStarted")) == 2)
        assert driver.prepares == [["claim"]]


async def test_second_pod_of_a_prepared_claim_is_not_announced(node: DraNode) -> None:
    node.claim()
    async with driving(node, WritingDriver(node)) as driver:
        await node.run(claiming("a"))
        await node.run(claiming("b"))
        assert driver.prepares == [["claim"]]


async def test_call_has_a_deadline_of_45_seconds(short_tmp: Path) -> None:
    async with dra_node(short_tmp, dra_call=45.0) as node, driving(node, WritingDriver(node)) as driver:
        node.claim()
        await node.run(claiming())
        (left,) = driver.seconds_left
        assert left is not None
        assert 30 < left < 46


async def test_refused_pod_waits_with_an_event_that_contains_the_reason(node: DraNode) -> None:
    node.claim()
    async with driving(node) as driver:
        driver.on_prepare = refuse
        pod = await node.kubelet.submit(claiming(), SOON)
        await node.until(lambda: node.calls("FailedPrepareDynamicResources"))
        (event,) = [each for each in node.api.list(EVENTS) if each["reason"] == "FailedPrepareDynamicResources"]
        assert event["message"] == (
            "prepare dynamic resources: NodePrepareResources failed for ResourceClaim claim: gpu-0 is being scrubbed"
        )
        assert event["involvedObject"]["uid"] == pod.uid
        assert pod.phase is PodPhase.PENDING
        assert driver.prepares == [["claim"]]


async def test_refused_preparation_is_retried_after_the_resync_period(short_tmp: Path) -> None:
    async with dra_node(short_tmp, pod_resync=(0.05, 0.1)) as node, driving(node, WritingDriver(node)) as driver:
        accept, driver.on_prepare = driver.on_prepare, refuse
        node.claim()
        pod = await node.kubelet.submit(claiming(), SOON)
        await node.until(lambda: len(driver.prepares) >= 3)
        driver.on_prepare = accept
        await pod.wait(PodPhase.RUNNING, SOON)


@pytest.mark.parametrize("field", ["labels", "annotations"])
async def test_changed_labels_or_annotations_retry_a_refused_preparation_at_once(node: DraNode, field: str) -> None:
    node.claim()
    async with driving(node, WritingDriver(node)) as driver:
        accept, driver.on_prepare = driver.on_prepare, refuse
        pod = await node.kubelet.submit(claiming(), SOON)
        await node.until(lambda: node.calls("FailedPrepareDynamicResources"))
        driver.on_prepare = accept
        node.api.patch(PODS, "a", {"metadata": {field: {"retry": "now"}}}, "default")
        await pod.wait(PodPhase.RUNNING, SOON)


async def test_whole_batch_is_called_again_after_a_refusal_of_one_claim(short_tmp: Path) -> None:
    async with dra_node(short_tmp, published=("gpu-0", "gpu-1"), pod_resync=(0.05, 0.1)) as node:
        driver = WritingDriver(node)

        async def refuse_two_once(claims: Claims) -> Mapping[str, api.NodePrepareResourceResponse]:
            answers = dict(await driver.write(claims))
            for each in claims:
                if each.name == "two" and len(driver.prepares) == 1:
                    answers[each.uid] = api.NodePrepareResourceResponse(error="not yet")
            return answers

        driver.on_prepare = refuse_two_once
        for name in ("one", "two"):
            node.claim(name)
        async with driving(node, driver):
            await node.run(claiming("a", "one", "two"))
            assert driver.prepares == [["one", "two"], ["one", "two"]]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({}, "NodePrepareResources skipped 1 ResourceClaims"),
        ({"other": api.NodePrepareResourceResponse()}, "returned result for unknown claim UID other"),
    ],
)
async def test_incomplete_or_foreign_answer_fails_the_pod(node: DraNode, answer: Any, problem: str) -> None:
    async def answer_wrongly(_claims: Claims) -> Any:
        return answer

    node.claim()
    async with driving(node) as driver:
        driver.on_prepare = answer_wrongly
        await node.kubelet.submit(claiming(), SOON)
        await node.until(lambda: node.calls("FailedPrepareDynamicResources"))
        assert problem in node.calls("FailedPrepareDynamicResources")[0].detail


async def test_absent_driver_fails_the_preparation_and_leaves_nothing_to_release(node: DraNode) -> None:
    node.claim()
    pod = await node.kubelet.submit(claiming(), SOON)
    await node.until(lambda: node.calls("FailedPrepareDynamicResources"))
    assert "DRA driver gpu.scrubber.dev is not registered" in node.calls("FailedPrepareDynamicResources")[0].detail
    assert list(node.kubelet.dra.claims) == []
    await node.kubelet.delete(pod)
    assert node.pod_object("a") is None


async def test_pod_that_the_claim_is_not_reserved_for_is_refused(node: DraNode) -> None:
    node.claim()
    async with driving(node, WritingDriver(node)) as driver:
        await node.run(claiming("a"))
        node.kubelet.create(claiming("b"))
        await node.until(lambda: node.calls("FailedPrepareDynamicResources"))
        assert "is not allowed to use ResourceClaim claim" in node.calls("FailedPrepareDynamicResources")[0].detail
        assert driver.prepares == [["claim"]]


async def test_claim_of_a_template_must_be_the_pods_own(node: DraNode) -> None:
    template = {"metadata": {"name": "one", "namespace": "default"}, "spec": {"spec": claim()["spec"]}}
    node.api.create(CLAIM_TEMPLATES, template)
    async with driving(node, WritingDriver(node)) as driver:
        await node.run(claiming(template="one"))
        ((name,),) = driver.prepares
        assert name.startswith("a-gpu-")
        thief = node.kubelet.create(claiming("b", template="one"))
        status = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": name}]}
        node.api.patch(PODS, "b", {"status": status}, "default", subresource="status")
        node.api.patch(PODS, "b", {"metadata": {"labels": {"retry": "now"}}}, "default")
        await node.until(
            lambda: any("was not created for" in each.detail for each in node.calls("FailedPrepareDynamicResources"))
        )
        assert thief.phase is PodPhase.PENDING


async def test_new_claim_under_the_name_of_a_remembered_one_is_refused(node: DraNode) -> None:
    """After a forced deletion the kubelet still has the old claim, until it could be released."""
    node.claim()
    released = asyncio.Event()
    async with driving(node, WritingDriver(node)) as driver:

        async def wait(claims: Claims) -> Any:
            await released.wait()
            return await driver.release(claims)

        driver.on_unprepare = wait
        pod = await node.run(claiming("a"))
        await node.kubelet.delete(pod, force=True)
        await node.until(lambda: driver.unprepares)
        node.delete_claim()
        await node.api.store.changes.wait_until(lambda: node.api.find(CLAIMS, "claim", "default") is None, SOON)
        node.claim()
        second = await node.kubelet.submit(claiming("b"), SOON)
        await node.until(lambda: node.calls("FailedPrepareDynamicResources"))
        assert "previous pod force-deleted?!" in node.calls("FailedPrepareDynamicResources")[0].detail
        released.set()
        await node.until(lambda: not list(node.kubelet.dra.claims))
        node.api.patch(PODS, "b", {"metadata": {"labels": {"retry": "now"}}}, "default")
        await second.wait(PodPhase.RUNNING, SOON)


async def test_deletion_interrupts_a_call_and_releases_the_claim(node: DraNode) -> None:
    cancelled = asyncio.Event()

    async def hang(_claims: Claims) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    node.claim()
    async with driving(node) as driver:
        driver.on_prepare = hang
        pod = await node.kubelet.submit(claiming(), SOON)
        await node.until(lambda: driver.prepares)
        await node.kubelet.delete(pod)
        await asyncio.wait_for(cancelled.wait(), SOON)
        assert driver.unprepares == [["claim"]]


async def test_restarted_kubelet_prepares_no_pod_until_the_api_server_is_back(short_tmp: Path) -> None:
    async with dra_node(short_tmp, pod_resync=(0.05, 0.1)) as node, driving(node, WritingDriver(node)) as driver:
        accept, driver.on_prepare = driver.on_prepare, refuse
        node.claim()
        pod = await node.kubelet.submit(claiming(), SOON)
        await node.until(lambda: driver.prepares)
        await node.kubelet.stop()
        driver.on_prepare = accept
        node.api.available = False
        calls = len(driver.prepares)
        await node.kubelet.start()
        await node.until(lambda: node.kubelet.dra.plugins.connected(driver.name))
        assert len(driver.prepares) == calls
        node.api.available = True
        await pod.wait(PodPhase.RUNNING, SOON)


async def test_call_that_a_restart_of_the_kubelet_interrupted_is_made_again(short_tmp: Path) -> None:
    async with dra_node(short_tmp, pod_resync=(0.05, 0.1)) as node, driving(node, WritingDriver(node)) as driver:
        cancelled = asyncio.Event()
        accept = driver.on_prepare

        async def hang(_claims: Claims) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        driver.on_prepare = hang
        node.claim()
        pod = await node.kubelet.submit(claiming(), SOON)
        await node.until(lambda: driver.prepares)
        driver.on_prepare = accept
        await node.kubelet.restart()
        await asyncio.wait_for(cancelled.wait(), SOON)
        await pod.wait(PodPhase.RUNNING, SOON)
        assert (driver.prepares, driver.unprepares) == ([["claim"], ["claim"]], [])


# What containers get


async def test_container_gets_the_cdi_devices_of_its_claims(node: DraNode) -> None:
    made = node.claim()
    (node.kubelet.root / "memory").write_text("device memory")
    async with driving(node) as driver:

        async def write(claims: Claims) -> Mapping[str, api.NodePrepareResourceResponse]:
            nodes = [{"path": "/dev/simgpu0", "hostPath": str(node.kubelet.root / "memory")}]
            mounts = [{"hostPath": str(node.kubelet.root), "containerPath": "/opt/root", "options": ["ro"]}]
            hooks = [{"hookName": "poststop", "path": "/bin/true"}]
            node.cdi(claims[0].uid, "gpu-0", env=["VISIBLE=gpu-0"], deviceNodes=nodes, mounts=mounts, hooks=hooks)
            return await driver.accept(claims)

        driver.on_prepare = write
        pod = await node.run(claiming(command="echo $VISIBLE; cat dev/simgpu0; exec sleep 60"))
        await node.until(lambda: "device memory" in pod.read_log("main"))
        assert pod.read_log("main").startswith("gpu-0\n")
        assert (pod.container_root("main") / "opt/root").is_symlink()
        assert driver.uids == {made["metadata"]["uid"]}


async def test_container_with_one_request_of_a_claim_gets_the_devices_of_that_request(node: DraNode) -> None:
    body = claim()
    exactly = {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1}
    body["spec"]["devices"]["requests"] = [{"name": each, "exactly": exactly} for each in ("left", "right")]
    node.api.create(CLAIMS, body)
    async with driving(node) as driver:

        async def write(claims: Claims) -> Mapping[str, api.NodePrepareResourceResponse]:
            uid = claims[0].uid
            for name in ("gpu-0", "gpu-1"):
                node.cdi(uid, name, env=[f"{name.replace('-', '_')}=here"])
            devices = [
                api.Device(
                    request_names=[request],
                    pool_name="p",
                    device_name=name,
                    cdi_device_ids=[f"{CDI_KIND}={uid}-{name}"],
                )
                for request, name in (("left", "gpu-0"), ("right", "gpu-1"))
            ]
            return {uid: api.NodePrepareResourceResponse(devices=devices)}

        driver.on_prepare = write
        pod = await node.run(claiming(requests=["claim/right"], command="env; exec sleep 60"))
        await node.until(lambda: "gpu_1=here" in pod.read_log("main"))
        assert "gpu_0" not in pod.read_log("main")


async def test_device_without_a_specification_stops_the_container_until_there_is_one(short_tmp: Path) -> None:
    async with dra_node(short_tmp, pre_start_retry=(0.05, 0.1)) as node, driving(node):
        made = node.claim()
        pod = await node.kubelet.submit(claiming(), SOON)
        status = await pod.wait(lambda now: now.containers["main"].reason == "CreateContainerError", SOON)
        uid = made["metadata"]["uid"]
        assert f"unresolvable CDI devices {CDI_KIND}={uid}-gpu-0" in status.containers["main"].message
        node.cdi(uid, "gpu-0")
        await pod.wait(PodPhase.RUNNING, SOON)


async def test_pod_resources_lists_every_device_of_the_claim_with_accumulated_cdi_ids(node: DraNode) -> None:
    made = node.claim(count=2)
    async with driving(node, WritingDriver(node)) as driver:
        driver.devices["claim"] = ["gpu-0", "gpu-1"]
        init = ContainerSpec("init", ["true"], claims=["claim"])
        main = ContainerSpec("main", ["sleep", "60"], claims=["claim"])
        plain = ContainerSpec("plain", ["sleep", "60"])
        spec = PodSpec("a", containers=[main, plain], init_containers=[init], claims=[PodClaim("claim", claim="claim")])
        await node.run(spec)
        async with pod_resources(node.kubelet) as client:
            answer = await client.List(lister.ListPodResourcesRequest(), timeout=SOON)
        ((pod),) = answer.pod_resources
        assert {each.name: len(each.dynamic_resources) for each in pod.containers} == {"main": 1, "plain": 0}
        (found,) = pod.containers[0].dynamic_resources
        assert (found.claim_name, found.claim_namespace) == ("claim", "default")
        ids = [f"{CDI_KIND}={made['metadata']['uid']}-gpu-{number}" for number in (0, 1)]
        assert [
            (each.driver_name, each.pool_name, each.device_name, [cdi.name for cdi in each.cdi_devices])
            for each in found.claim_resources
        ] == [("gpu.scrubber.dev", "node-a", "gpu-0", ids[:1]), ("gpu.scrubber.dev", "node-a", "gpu-1", ids)]


async def test_share_id_of_an_answer_reaches_pod_resources(node: DraNode) -> None:
    node.claim()
    async with driving(node) as driver:

        async def share(claims: Claims) -> Mapping[str, api.NodePrepareResourceResponse]:
            devices = [api.Device(pool_name="node-a", device_name="gpu-0", share_id="share-1")]
            return {each.uid: api.NodePrepareResourceResponse(devices=devices) for each in claims}

        driver.on_prepare = share
        await node.run(claiming())
        async with pod_resources(node.kubelet) as client:
            answer = await client.List(lister.ListPodResourcesRequest(), timeout=SOON)
        assert answer.pod_resources[0].containers[0].dynamic_resources[0].claim_resources[0].share_id == "share-1"


async def test_extended_resource_is_an_ordinary_claim_for_the_driver(node: DraNode) -> None:
    node.api.patch(DEVICE_CLASSES, "gpu", {"spec": {"extendedResourceName": "nvidia.com/gpu"}})
    async with driving(node) as driver:

        async def write(claims: Claims) -> Mapping[str, api.NodePrepareResourceResponse]:
            node.cdi(claims[0].uid, "gpu-0")
            ids = [f"{CDI_KIND}={claims[0].uid}-gpu-0"]
            answer = api.Device(
                request_names=["container-0-request-0"], pool_name="node-a", device_name="gpu-0", cdi_device_ids=ids
            )
            return {claims[0].uid: api.NodePrepareResourceResponse(devices=[answer])}

        driver.on_prepare = write
        main = ContainerSpec("main", ["sh", "-c", "echo $DEVICE; exec sleep 60"], {"nvidia.com/gpu": 1})
        pod = await node.run(PodSpec("a", containers=[main]))
        ((name,),) = driver.prepares
        assert name.startswith("a-extended-resources-")
        await node.until(lambda: pod.read_log("main") == "gpu-0\n")
        await node.kubelet.delete(pod)
        assert driver.unprepares == [[name]]
