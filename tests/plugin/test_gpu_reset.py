"""Resets by NVSentinel: what its status means, when they are offered, and that no request stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.agent_pause import AgentPauser
from plugin.cluster.client import ApiServerClient
from plugin.cluster.gpu_reset import GpuReset, ResetResult
from plugin.instance_lock import InstanceLock
from plugin.main import PluginSettings, run
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import PluginClient
from scrubber.domain.errors import InvalidConfiguration
from tests.cluster.gpu_resets import FINALIZER, GPU_RESETS
from tests.cluster.plugin_server import RESETS_GPUS, PluginApiServer, failure, kubeconfig
from tests.plugin.test_agent_pause import QUICK
from tests.plugin.test_cluster_reporter import Diary
from tests.plugin_collaborators import FakeService, device, snapshot

PAUSE = pb.AgentPause(id="pause-1", way="gpu-reset", device_ids=["GPU-a", "GPU-b"], driver_closed=True)
OWN = {"app.kubernetes.io/managed-by": "scrubber-plugin"}
DONE = {"completionTime": "2026-01-01T00:01:00Z"}


def complete(reason: str, message: str = "", status: str = "True") -> dict[str, Any]:
    return {"conditions": [{"type": "Complete", "status": status, "reason": reason, "message": message}]}


@pytest.mark.parametrize(
    ("reset", "result"),
    [
        (GpuReset("r", "n"), ResetResult.PENDING),
        (GpuReset("r", "n", completed=True, reason="GPUResetSucceeded"), ResetResult.PENDING),
        (GpuReset("r", "n", complete=True, reason="GPUResetSucceeded"), ResetResult.PENDING),
        (GpuReset("r", "n", completed=True, complete=True, reason="GPUResetSucceeded"), ResetResult.SUCCEEDED),
        (GpuReset("r", "n", completed=True, complete=True, reason="ServiceRestoreTimeout"), ResetResult.FAILED),
        (GpuReset("r", "n", completed=True, complete=True), ResetResult.FAILED),
    ],
)
def test_reset_succeeded_only_if_every_field_of_its_status_says_so(reset: GpuReset, result: ResetResult) -> None:
    assert reset.result is result


async def test_gpu_reset_without_access_to_the_api_server_is_refused_at_start(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    settings = PluginSettings(kubelet_dir=short_tmp, node_name="node-1", gpu_reset=True)
    with pytest.raises(InvalidConfiguration, match="--gpu-reset needs access to the API server"):
        await run(settings)


class Stage:
    """An API server with NVSentinel's kind of object, a service, and instances of the component."""

    def __init__(self, server: PluginApiServer, service: FakeService, directory: Path) -> None:
        self.server = server
        self.service = service
        self.diary = Diary()
        self._directory = directory

    @property
    def known(self) -> dict[str, Any]:
        return {each["metadata"]["name"]: each for each in self.server.api.store.items(GPU_RESETS)}

    def add(self, name: str, node: str, labels: dict[str, str]) -> None:
        """Add an object for a reset of a node."""
        self.server.api.create(GPU_RESETS, {"metadata": {"name": name, "labels": labels}, "spec": {"nodeName": node}})

    def report(self, status: dict[str, Any]) -> None:
        """Write the status of the pause's request."""
        self.server.api.patch(GPU_RESETS, "pause-1", {"status": status}, subresource="status")

    @asynccontextmanager
    async def instance(self, *, gpu_reset: bool = True) -> AsyncIterator[None]:
        login, loop = kubeconfig(self._directory, self.server.url), asyncio.get_running_loop()
        async with PluginClient(self._directory / "s") as client:
            pauses = AgentPauser(
                client,
                lambda: ApiServerClient(login, "node-1", deadline=20),
                "node-1",
                labels=(),
                lease=None,
                gpu_reset=gpu_reset,
                times=replace(QUICK, reset_poll=0.01, reset_discovery=0.05),
                lock=InstanceLock(self._directory, "agent-pause"),
                log=self.diary,
                clock=loop.time,
                wall_clock=lambda: 1_900_000_000.0,
                jitter=lambda: 0.5,
            )

            async def follow() -> None:
                async for shown in client.watch_snapshots():
                    pauses.on_snapshot(shown)

            tasks = [asyncio.create_task(work) for work in (pauses.run(), follow())]
            try:
                yield
            finally:
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def created(self) -> dict[str, Any]:
        """Wait for the request of the pause, and return it."""
        await self.server.until(lambda: "pause-1" in self.known)
        found: dict[str, Any] = self.known["pause-1"]
        return found

    async def reported(self, state: str) -> pb.AgentPauseReport:
        await self.service.bell.until(lambda: state in self.service.pause_states())
        return next(each for each in self.service.pause_reports if each.state == state)

    def offers(self) -> list[str]:
        return [each.way for each in self.service.pause_reports[-1].offers]


@pytest.fixture
async def stage(short_tmp: Path) -> AsyncIterator[Stage]:
    async with PluginApiServer() as server, FakeService(short_tmp / "s", snapshot(device(0))) as service:
        server.add_node("node-1")
        server.role |= RESETS_GPUS
        server.api.install(GPU_RESETS)
        yield Stage(server, service, short_tmp)


async def test_way_is_offered_while_the_cluster_has_that_kind_of_object_and_withdrawn_when_it_is_gone(
    stage: Stage,
) -> None:
    stage.server.api.uninstall(GPU_RESETS)
    async with stage.instance():
        unknown = "get /apis/janitor.dgxc.nvidia.com/v1alpha1/gpuresets"
        await stage.server.until(lambda: len(stage.server.log.of(unknown)) > 1)
        assert stage.offers() == []
        stage.server.api.install(GPU_RESETS)
        await stage.service.bell.until(lambda: stage.offers() == ["gpu-reset"])
        stage.server.api.uninstall(GPU_RESETS)
        await stage.service.bell.until(lambda: stage.offers() == [])
    assert len(stage.service.pause_reports) == 3


async def test_role_that_does_not_allow_it_withdraws_the_offer(stage: Stage) -> None:
    async with stage.instance():
        await stage.service.bell.until(lambda: bool(stage.service.pause_reports) and stage.offers() == ["gpu-reset"])
        stage.server.role -= RESETS_GPUS
        await stage.service.bell.until(lambda: stage.offers() == [])


async def test_nothing_is_requested_before_the_service_has_closed_the_driver(stage: Stage) -> None:
    async with stage.instance():
        waiting = pb.AgentPause()
        waiting.CopyFrom(PAUSE)
        waiting.driver_closed = False
        stage.service.show_pause(waiting)
        await stage.service.bell.until(lambda: stage.service.pause is not None)
        assert stage.known == {}
        stage.service.show_pause(PAUSE)
        wish = await stage.created()
    assert wish["spec"] == {"nodeName": "node-1", "selector": {"uuids": ["GPU-a", "GPU-b"]}}
    assert wish["metadata"]["labels"] == OWN
    assert [each.body["metadata"]["name"] for each in stage.server.log.of("create gpuresets")] == ["pause-1"]


async def test_result_is_reported_and_the_object_deleted_before_the_pause_is_over(stage: Stage) -> None:
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.created()
        stage.server.api.patch(GPU_RESETS, "pause-1", {"metadata": {"finalizers": [FINALIZER]}})
        stage.report(DONE | complete("GPUResetSucceeded", "one\nline"))
        assert (await stage.reported("reset")).message == "NVSentinel: GPUResetSucceeded: one line"
        stage.service.show_pause(None)
        await stage.server.until(lambda: len(stage.server.log.of("delete gpuresets")) > 1)
        assert "restored" not in stage.service.pause_states()
        stage.server.api.patch(GPU_RESETS, "pause-1", {"metadata": {"finalizers": []}})
        await stage.reported("restored")
        assert stage.known == {}


async def test_instance_that_follows_one_that_died_does_not_request_the_reset_again(stage: Stage) -> None:
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.created()
    async with stage.instance():
        stage.report(DONE | complete("GPUResetSucceeded"))
        await stage.reported("reset")
    assert len(stage.server.log.of("create gpuresets")) == 1


async def test_status_of_another_client_that_is_malformed_is_no_success(stage: Stage) -> None:
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.created()
        stage.report({"conditions": "nonsense", **DONE})
        await stage.service.bell.until(lambda: any("invalid" in each.message for each in stage.service.pause_reports))
        assert {"reset", "failed"}.isdisjoint(stage.service.pause_states())
        stage.service.show_pause(None)
        await stage.reported("restored")


async def test_request_of_this_node_that_no_pause_exists_for_is_deleted_and_those_of_others_are_left(
    stage: Stage,
) -> None:
    stage.add("late", "node-1", OWN)
    stage.add("other-node", "node-2", OWN)
    stage.add("other-client", "node-1", {})
    async with stage.instance():
        await stage.server.until(lambda: "late" not in stage.known)
        await stage.server.until(lambda: len(stage.server.log.of("list gpuresets")) > 2)
    assert sorted(stage.known) == ["other-client", "other-node"]
    assert len(stage.diary.logged("gpu-reset.left-over")) == 1


async def test_object_that_may_not_be_deleted_is_named_and_does_not_keep_the_node(stage: Stage) -> None:
    stage.server.intercept = lambda request: (
        failure(403, "Forbidden", "gpuresets is forbidden") if request.operation == "delete gpuresets" else None
    )
    async with stage.instance():
        stage.service.show_pause(PAUSE)
        await stage.created()
        stage.service.show_pause(None)
        assert "The object GPUReset pause-1 could not be deleted" in (await stage.reported("restored")).message


async def test_plugin_without_the_setting_refuses_a_reset_and_removes_what_an_earlier_one_requested(
    stage: Stage,
) -> None:
    stage.add("pause-1", "node-1", OWN)
    async with stage.instance(gpu_reset=False):
        stage.service.show_pause(PAUSE)
        assert "does not offer the way 'gpu-reset'" in (await stage.reported("failed")).message
        await stage.reported("restored")
    assert stage.known == {}
