"""Resets on a node whose agents have every device open for good: real processes, and labels of the node that pause them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import Unavailable
from scrubber.emulator.cluster import Answer, ApiRequest, Silence
from scrubber.emulator.playground import RESOURCE, Playground
from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodSpec
from tests.cluster.operands import Operand, OperandsStandIn
from tests.cluster.plugin_server import PAUSES_AGENTS, PluginApiServer, kubeconfig
from tests.integration import log_lines
from tests.integration.acting import QUICK, SOON, found_by, history, reader, running, writer
from tests.integration.test_infrastructure import holding, nodes
from tests.nvidia.dcgmi import HOST_ENGINE, DcgmStandIn

NODE = "node-1"
EXPORTER, DCGM = "nvidia.com/gpu.deploy.dcgm-exporter", "nvidia.com/gpu.deploy.dcgm"
CORDON = "k8saas.nvidia.com/ManagedByNVSentinel"
PAUSE_LABELS = f"{CORDON}=false,{EXPORTER}=false,{DCGM}=false"
LABELS = {EXPORTER: "true", DCGM: "true"}
LONG = 4 * SOON


class OperatedNode:
    """A stage whose agents run as an operator's DaemonSets do, and are paused by labels.

    Attributes:
        on_stop, on_start: called when an agent is about to be stopped, or has been started.
    """

    def __init__(self, stage: Playground, cluster: PluginApiServer) -> None:
        self.stage = stage
        self.cluster = cluster
        self.on_stop: Callable[[], object] = lambda: None
        self.on_start: Callable[[], object] = lambda: None
        numbers = count(1)

        def operand(key: str) -> Operand:
            async def start() -> EmulatedPod:
                name = f"nvidia-{key.rpartition('.')[2]}-{next(numbers)}"
                pod = await running(stage, holding(name, "gpu-operator", nodes(stage)))
                self.on_start()
                return pod

            async def stop(pod: EmulatedPod) -> None:
                self.on_stop()
                await stage.kubelet.delete(pod, grace=0)

            return Operand(key, start, stop)

        self.operands = OperandsStandIn(cluster, NODE, operand(EXPORTER), operand(DCGM))

    async def is_as_before(self) -> None:
        """Wait until the agents run, the labels are as at first, and no pause is on record."""
        async with asyncio.timeout(LONG):
            await self.operands.until(EXPORTER, DCGM)
            await self.cluster.until(lambda: self.cluster.labels(NODE) == LABELS)
        await no_pause(self.stage)


async def no_pause(stage: Playground) -> None:
    """Wait until no pause is on record."""
    async with asyncio.timeout(LONG):
        while True:
            with suppress(Unavailable):
                if not (await stage.read_client.service_info()).HasField("agent_pause"):
                    return
            await asyncio.sleep(0.05)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while True:
            if condition():
                return
            await asyncio.sleep(0.05)


def strict_policy(directory: Path) -> str:
    """Return a file with the policy ``strict`` and the times of ``quick.yaml``."""
    policy = directory / "strict.yaml"
    strict = (Path(__file__).parents[2] / "policies" / "strict.yaml").read_text()
    quick = Path(QUICK).read_text().replace("name: quick\n", "").replace("diagnostics:\n  recovery: none\n", "")
    policy.write_text(strict + quick)
    return str(policy)


@asynccontextmanager
async def operated(tmp_path: Path, devices: int = 1) -> AsyncIterator[OperatedNode]:
    """An operator's node under the policy ``strict``, with every device clean after its first reset."""
    async with (
        PluginApiServer() as cluster,
        Playground(devices=devices, memory="2MiB", policy=strict_policy(tmp_path)) as stage,
    ):
        cluster.add_node(NODE)
        cluster.set_labels(NODE, LABELS)
        cluster.role |= PAUSES_AGENTS
        node = OperatedNode(stage, cluster)
        stage.plugin.arguments = [*stage.plugin.arguments, "--pause-labels", PAUSE_LABELS, "--node-name", NODE]
        stage.plugin.environment = {"KUBECONFIG": str(kubeconfig(tmp_path, cluster.url).path)}
        async with node.operands:
            await stage.start_daemons(SOON)
            await stage.wait_until_clean(LONG)
            await node.is_as_before()
            yield node
        log_lines.check(stage)


async def certified_after(stage: Playground, tenant: EmulatedPod) -> pb.Device:
    """Wait until the device of a tenant that ended is clean; return it with its certificate."""
    (used,) = tenant.device_ids
    devices = await stage.wait_for_devices(
        lambda found: any(each.id == used and each.state == "clean" and each.grant_count for each in found), LONG
    )
    return next(each for each in devices if each.id == used)


async def test_required_resets_succeed_at_every_hand_over_beside_agents_that_hold_every_device(
    tmp_path: Path,
) -> None:
    async with operated(tmp_path, devices=2) as node:
        stage = node.stage
        for name in ("a", "b"):
            tenant = await running(stage, writer(name, f"team-{name}"))
            await stage.kubelet.delete(tenant, grace=0)
            device = await certified_after(stage, tenant)
            entries = (await stage.read_client.history(limit=1000)).entries
            steps = next(each.scrub.steps for each in entries if each.scrub.certificate_id == device.certificate.id)
            (reset,) = [each for each in steps if each.step == "reset"]
            assert (reset.verdict, [each.code for each in reset.findings]) == ("passed", ["agents-paused"])
        assert await found_by(await stage.kubelet.run(reader("c", "team-c"))) == ""
        await node.is_as_before()
        assert {each.health for each in (await stage.read_client.devices()).devices} == {"healthy"}
        scrubs = await history(stage, "scrub.finished")
        assert {each["outcome"] for each in scrubs if each["path"] == "slow"} <= {"passed", "blocked"}
        planned = await history(stage, "agents.pause-planned")
        assert planned[0]["changes"] == (
            f"{CORDON}: no label to false; {EXPORTER}: true to false; {DCGM}: true to false"
        )
        assert await history(stage, "health.quarantined") == []


async def test_reset_plan_says_how_agents_are_paused(tmp_path: Path) -> None:
    async with operated(tmp_path) as node:
        done = await node.stage.run_command("reset-plan", "0", "-o", "json")
        plan = json.loads(done.stdout)
        assert (done.returncode, plan["possible"], plan["blockers"]) == (0, True, [])
        assert len(plan["agents"]) == 2
        assert plan["pauseWays"][0]["way"] == "labels"
        assert any(EXPORTER in action for action in plan["pauseWays"][0]["actions"])


def is_change(request: ApiRequest, value: str) -> bool:
    """Whether a request gives the exporter's label ``value``."""
    return request.operation == "patch nodes" and request.body["metadata"].get("labels", {}).get(EXPORTER) == value


class Killing:
    """Kills a daemon once, at a step of a pause.

    Attributes:
        done: set when that has happened.
    """

    def __init__(self, node: OperatedNode, party: str, step: str) -> None:
        self._node = node
        self.daemon = node.stage.service if party == "service" else node.stage.plugin
        self._answers = party == "service"
        self.done = asyncio.Event()
        match step:
            case "recorded":
                node.cluster.intercept = lambda request: self._at(request.operation.endswith(" leases"))
            case "changing":
                node.cluster.intercept = lambda request: self._at(is_change(request, "false"))
            case "agents-ending":
                node.on_stop = lambda: self._at(True)
            case "restoring":
                node.cluster.intercept = lambda request: self._at(is_change(request, "true"))
            case "agents-starting":
                node.on_start = lambda: self._at(True)

    def _at(self, here: bool) -> Answer | None:
        """Kill the daemon if ``here``; the request of a killed plugin has no effect, and no answer."""
        if not here or self.done.is_set():
            return None
        os.kill(self.daemon.pid, signal.SIGKILL)
        self.done.set()
        return None if self._answers else Silence.DROP


@pytest.mark.parametrize("party", ["service", "plugin"])
@pytest.mark.parametrize("step", ["recorded", "changing", "agents-ending", "restoring", "agents-starting"])
async def test_killed_at_each_step_of_a_reset_everything_is_restored_and_the_device_is_certified(
    tmp_path: Path, step: str, party: str
) -> None:
    async with operated(tmp_path) as node:
        stage = node.stage
        tenant = await running(stage, writer("a", "team-a"))
        killing = Killing(node, party, step)
        await stage.kubelet.delete(tenant, grace=0)
        async with asyncio.timeout(LONG):
            await killing.done.wait()
        await killing.daemon.kill()
        await stage.read_client.close()
        await killing.daemon.start()
        device = await certified_after(stage, tenant)
        await node.is_as_before()
        assert (device.health, device.certificate.previous_grant) == ("healthy", 1)
        await stage.kubelet.wait_for_allocatable(RESOURCE, 1, LONG)  # the kubelet fails a pod without a device for good
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        assert await history(stage, "health.quarantined") == []
        if party == "service" and step != "agents-starting":
            assert len(await history(stage, "agents.pause-interrupted")) == 1


async def test_service_killed_while_dcgm_is_detached_attaches_it_at_its_next_start(tmp_path: Path) -> None:
    dcgm = DcgmStandIn(tmp_path)
    async with Playground(devices=1, memory="2MiB", policy=strict_policy(tmp_path)) as stage:
        argv = (sys.executable, "-c", HOST_ENGINE, str(dcgm.state), *nodes(stage))
        await running(stage, PodSpec("nvidia-dcgm-1", "gpu-operator", [ContainerSpec("main", argv)]))
        stage.service.arguments = [*stage.service.arguments, "--dcgmi", str(dcgm.path)]
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(LONG)
        await until(lambda: dcgm.is_attached)
        dcgm.set_mode("hang-attach")
        tenant = await running(stage, writer("a", "team-a"))
        await stage.kubelet.delete(tenant, grace=0)
        await certified_after(stage, tenant)
        assert not dcgm.is_attached
        await stage.service.kill()
        dcgm.set_mode("works")
        await stage.read_client.close()
        await stage.service.start()
        await until(lambda: dcgm.is_attached)
        await no_pause(stage)
        await stage.wait_until_clean(LONG)
        assert len(await history(stage, "agents.pause-interrupted")) == 1
        log_lines.check(stage)
