"""Resets that NVSentinel makes, with real processes: agents hold the device for good, and nothing of ours has it open."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.sim import control
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import ScrubberError
from scrubber.emulator.cluster import Answer, Silence
from scrubber.emulator.playground import RESOURCE, Playground
from tests.cluster.gpu_resets import GPU_RESETS, JanitorStandIn
from tests.cluster.plugin_server import RESETS_GPUS, PluginApiServer, kubeconfig
from tests.integration import log_lines
from tests.integration.acting import QUICK, SOON, found_by, history, reader, running, writer
from tests.integration.test_agent_pause import LABELS, LONG, NODE, OperatedNode


class ResettableNode(OperatedNode):
    """An operated node whose GPUs NVSentinel resets.

    Attributes:
        children: of the service, at each reset.
        failure: why a reset fails; empty if it succeeds.
    """

    def __init__(self, stage: Playground, cluster: PluginApiServer) -> None:
        super().__init__(stage, cluster)
        self.children: list[int] = []
        self.failure = ""
        self.janitor = JanitorStandIn(cluster, NODE, list(LABELS), stopped=self.operands.until, reset=self._reset)

    async def _reset(self, uuids: Sequence[str]) -> str:
        self.children.append(len(self.stage.child_processes(self.stage.service)))
        if not self.failure:
            for each in uuids:
                control.clear_faults(self.stage.sim_dir, each)
        return self.failure

    async def certified(self) -> pb.Device:
        """Wait until device 0 has recovered and is certified, and everything is as before."""
        await self.until_event("external-reset.ended")
        device = await self.first_is(lambda each: each.health == "healthy" and each.state == "clean")
        await self.is_as_before()
        assert list(self.cluster.api.store.items(GPU_RESETS)) == []
        return device

    async def first_is(self, condition: Callable[[pb.Device], bool], device: str = "") -> pb.Device:
        """Wait until ``condition`` holds of the device, or of the first one, and return it."""
        async with asyncio.timeout(LONG):
            while True:
                with suppress(ScrubberError):
                    for each in (await self.stage.read_client.devices()).devices:
                        if (each.id == device if device else each.index == "0") and condition(each):
                            return each
                await asyncio.sleep(0.05)

    async def until_event(self, name: str) -> list[dict[str, Any]]:
        async with asyncio.timeout(LONG):
            while True:
                with suppress(ScrubberError):
                    if rows := await history(self.stage, name):
                        return rows
                await asyncio.sleep(0.05)


@asynccontextmanager
async def resettable(
    tmp_path: Path, devices: int = 1, *, agent_pause: str = "60s", reset: str = "best-effort", clean: bool = True
) -> AsyncIterator[ResettableNode]:
    """An operated node without --pause-labels; with ``clean``, every device is clean at first."""
    policy = tmp_path / "policy.yaml"
    quick = Path(QUICK).read_text().replace("limits:", f"reset: {reset}\nlimits:\n  agentPause: {agent_pause}")
    policy.write_text(quick + "  maxResetsPerDay: 20\nbreaker:\n  maxResets: 100\n")
    async with (
        PluginApiServer() as cluster,
        Playground(devices=devices, memory="2MiB", policy=str(policy)) as stage,
    ):
        cluster.add_node(NODE)
        cluster.set_labels(NODE, LABELS)
        cluster.role |= RESETS_GPUS
        node = ResettableNode(stage, cluster)
        stage.plugin.arguments = [*stage.plugin.arguments, "--gpu-reset", "--node-name", NODE]
        stage.plugin.environment = {"KUBECONFIG": str(kubeconfig(tmp_path, cluster.url).path)}
        async with node.operands, node.janitor:
            await stage.start_daemons(SOON)
            if clean:
                await stage.wait_until_clean(LONG)
            await until_offered(stage)
            yield node
        log_lines.check(stage)


async def until_offered(stage: Playground, *, offered: bool = True) -> None:
    """Wait until agents block a reset of device 0, and a way to pause them is ``offered``, or none."""
    async with asyncio.timeout(LONG):
        while True:
            with suppress(ScrubberError):
                plan = await stage.read_client.reset_plan("0")
                if plan.agents and bool(plan.pause_ways) is offered:
                    return
            await asyncio.sleep(0.05)


async def scrubs_of(stage: Playground, device: str) -> list[pb.Scrub]:
    """Return the finished slow paths of a device, oldest first."""
    entries = (await stage.read_client.history(limit=1000)).entries
    found = [each.scrub for each in entries if each.event == "scrub.finished" and each.device_id == device]
    return [each for each in reversed(found) if each.path == "slow"]


def break_device(node: ResettableNode) -> None:
    """Give device 0 a fault that lasts until it is reset."""
    control.add_faults(node.stage.sim_dir, "0", xid=95)


async def test_recovery_beside_agents_ends_by_a_reset_of_nvsentinel_that_the_certificate_does_not_claim(
    tmp_path: Path,
) -> None:
    async with resettable(tmp_path, devices=2) as node:
        stage = node.stage
        tenant = await running(stage, writer("a", "team-a"))
        (used,) = tenant.device_ids
        broken = next(each for each in (await stage.read_client.devices()).devices if each.id != used)
        control.add_faults(stage.sim_dir, broken.id, xid=95)
        await node.until_event("external-reset.ended")
        await node.first_is(lambda each: (each.health, each.state) == ("healthy", "clean"), broken.id)
        assert [each["selector"]["uuids"] for each in node.janitor.seen] == [[broken.id]]
        assert node.children == [0], "no process of the service has the driver open during the reset"
        assert not tenant.status.phase.terminal
        await node.is_as_before()
        (succeeded,) = await history(stage, "external-reset.succeeded")
        assert succeeded["device"] == broken.id
        assert succeeded["message"] == "NVSentinel: GPUResetSucceeded: the GPU was reset"
        scrubs = await scrubs_of(stage, broken.id)
        left, recovery = scrubs[1:3]
        assert (left.outcome, [each.code for each in left.steps[-1].findings]) == ("blocked", ["reset-left-to-others"])
        assert (recovery.trigger, recovery.outcome) == ("recovery", "passed")
        certificate = (await stage.read_client.certificate(recovery.certificate_id)).certificate
        assert "reset: by another service, as that service says; not observed by this one" in certificate.not_covered
        assert await history(stage, "node.yield-ended") != []
        await stage.kubelet.wait_for_allocatable(RESOURCE, 2, LONG)  # the kubelet fails a pod without a device for good
        found = await stage.kubelet.run(reader("b", "team-b"))
        assert await found_by(found) == ""


async def test_operators_reset_beside_agents_is_left_to_nvsentinel_and_the_plan_lists_each_action(
    tmp_path: Path,
) -> None:
    async with resettable(tmp_path) as node:
        done = await node.stage.run_command("reset-plan", "0", "-o", "json")
        plan = json.loads(done.stdout)
        assert (done.returncode, plan["possible"], plan["blockers"]) == (0, True, [])
        assert plan["pauseWays"][0]["way"] == "gpu-reset"
        assert "GPUReset" in plan["pauseWays"][0]["actions"][1]
        done = await node.stage.run_command("reset", "0", "--reason", "hangs", "--yes")
        assert (done.returncode, "another service of the cluster is asked to reset it" in done.stdout) == (3, True)
        await node.until_event("external-reset.ended")
        await node.certified()
        assert len(node.janitor.seen) == 1
        assert await history(node.stage, "health.quarantined") == []


async def test_reset_that_a_policy_requires_at_hand_overs_is_never_left_to_nvsentinel(tmp_path: Path) -> None:
    async with resettable(tmp_path, reset="required", clean=False) as node:
        await node.until_event("scrub.finished")
        await node.first_is(lambda each: each.state == "dirty")
        assert node.janitor.seen == []
        assert await history(node.stage, "external-reset.started") == []


async def test_reset_that_fails_leaves_its_message_and_ends_the_yield(tmp_path: Path) -> None:
    async with resettable(tmp_path) as node:
        node.failure = "nvidia-smi: in use by another client"
        break_device(node)
        (failed, *_) = await node.until_event("external-reset.failed")
        assert failed["message"] == (
            "NVSentinel did not reset the GPU: ResetJobFailed: nvidia-smi: in use by another client"
        )
        await node.until_event("external-reset.ended")
        node.failure = ""
        device = await node.certified()
        assert device.health == "healthy", "a later attempt succeeds"


async def test_reset_that_hangs_is_given_up_after_the_limit_and_the_node_is_resumed(tmp_path: Path) -> None:
    async with resettable(tmp_path, agent_pause="3s") as node:
        node.janitor.hangs = True
        break_device(node)
        (failed, *_) = await node.until_event("external-reset.failed")
        assert failed["message"] == "The devices were not reset within 3 s."
        await node.until_event("external-reset.ended")
        node.janitor.hangs = False
        await node.certified()


async def test_kind_that_vanishes_during_a_reset_ends_it_and_withdraws_the_offer(tmp_path: Path) -> None:
    async with resettable(tmp_path) as node:

        def uninstall(step: str) -> None:
            node.cluster.api.uninstall(GPU_RESETS)
            node.cluster.set_labels(NODE, LABELS)  # before any agent ends: nothing but the offer would help the device

        node.janitor.on_step = uninstall
        break_device(node)
        (failed, *_) = await node.until_event("external-reset.failed")
        assert "404" in failed["message"]
        await node.until_event("external-reset.ended")
        await node.first_is(lambda each: each.state == "quarantined")
        await until_offered(node.stage, offered=False)


async def test_operator_who_resumes_the_node_ends_the_reset(tmp_path: Path) -> None:
    async with resettable(tmp_path) as node:
        node.janitor.hangs = True
        break_device(node)
        async with asyncio.timeout(LONG):
            await node.cluster.until(lambda: bool(node.janitor.seen))
        done = await node.stage.run_command("resume", "--all", "--reason", "needed now")
        assert done.returncode == 0, done.stderr
        (failed, *_) = await node.until_event("external-reset.failed")
        assert "An operator has ended the yield" in failed["message"]
        await node.until_event("external-reset.ended")
        node.janitor.hangs = False
        await node.certified()


class Killing:
    """Kills a daemon once, at a step of a reset; the request of a killed plugin has no effect, and no answer.

    Attributes:
        done: set when that has happened.
    """

    def __init__(self, node: ResettableNode, party: str, step: str) -> None:
        self.daemon = node.stage.service if party == "service" else node.stage.plugin
        self._answers = party == "service"
        self.done = asyncio.Event()
        requests = {"asking": "get gpuresets", "creating": "create gpuresets", "deleting": "delete gpuresets"}
        if step in requests:
            node.cluster.intercept = lambda request: self._kill(request.operation == requests[step])
        else:
            node.janitor.on_step = lambda now: self._kill(now == step)

    def _kill(self, here: bool) -> Answer | None:
        if not here or self.done.is_set():
            return None
        os.kill(self.daemon.pid, signal.SIGKILL)
        self.done.set()
        return None if self._answers else Silence.DROP


@pytest.mark.parametrize("party", ["service", "plugin"])
@pytest.mark.parametrize("step", ["asking", "creating", "labels", "reset", "restore", "done", "deleting"])
async def test_killed_at_each_step_the_object_goes_the_node_is_resumed_and_the_device_recovers(
    tmp_path: Path, step: str, party: str
) -> None:
    async with resettable(tmp_path) as node:
        killing = Killing(node, party, step)
        break_device(node)
        async with asyncio.timeout(LONG):
            await killing.done.wait()
        await killing.daemon.kill()
        await node.stage.read_client.close()
        await killing.daemon.start()
        device = await node.certified()
        assert device.certificate.id
        assert len(node.janitor.seen) == 1, "one reset, whatever dies"
        assert set(node.children) == {0}
        info = await node.stage.read_client.service_info()
        assert list(info.node_yield.requests) == []
        assert len(await history(node.stage, "external-reset.succeeded")) == 1


async def test_service_killed_before_it_has_yielded_the_node_goes_on_with_the_recorded_reset(tmp_path: Path) -> None:
    async with resettable(tmp_path) as node:
        break_device(node)
        await node.until_event("external-reset.started")
        await node.stage.service.kill()
        await node.stage.read_client.close()
        await node.stage.service.start()
        await node.certified()
        assert len(node.janitor.seen) == 1
