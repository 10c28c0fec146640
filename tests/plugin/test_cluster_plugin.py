"""The plugin beside an API server: whether that is configured or responds has no effect on the kubelet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.condition import CONDITION_TYPE
from scrubber.emulator.cluster import Answer, HttpResponse, Silence
from tests import forkserver
from tests.cluster.plugin_server import PluginApiServer, kubeconfig
from tests.plugin_collaborators import DEADLINE, FakeKubelet, FakeService, allocation, device, snapshot, start

PROGRAM = """
import asyncio, sys
from pathlib import Path
from plugin.main import PluginSettings, run
directory, cluster, node, labels = Path(sys.argv[1]), *sys.argv[2:5]
settings = PluginSettings(
    kubelet_dir=directory, socket=directory / "s", registration="classic", log_format="json", cluster=cluster, node_name=node,
    yield_labels=tuple(labels.split()),
)
try:
    status = asyncio.run(run(settings))
finally:
    print(*sorted({"lightkube", "httpx2", "msgspec"} & sys.modules.keys()), flush=True)
sys.exit(status)
"""
"""Prints at its end which modules of the API server client it has loaded."""


class Running:
    """The plugin as a process, and what it logged."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def next_line(self, event: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE):
            while line := await self.process.stderr.readline():
                self.lines.append(json.loads(line))
                if self.lines[-1]["event"] == event:
                    return self.lines[-1]
        raise AssertionError(f"the plugin ended without logging {event!r}; it logged {self.lines}")

    async def stops(self) -> tuple[int, str]:
        """Stop it with SIGTERM; return its exit status and the modules that it had loaded."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE):
            out, err = await self.process.communicate()
        self.lines += [json.loads(line) for line in err.splitlines()]
        assert self.process.returncode is not None
        return self.process.returncode, out.decode().strip()


@asynccontextmanager
async def plugin(
    directory: Path, environment: dict[str, str], cluster: str = "auto", node: str = "node-1", labels: str = ""
) -> AsyncIterator[Running]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "HTTP", "http"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        str(directory),
        cluster,
        node,
        labels,
        env=kept | environment,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def command(directory: Path, environment: dict[str, str], *flags: str) -> AsyncIterator[Running]:
    """Run ``scrubber plugin`` with cluster reporting and these settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "HTTP", "http"))}
    words = ["--kubelet-dir", str(directory), "--socket-dir", str(directory / "s"), "--log-format", "json"]
    words += ["--metrics-address", "off", "--cluster-reporting", "auto", "--node-name", "node-1", *flags]
    process = await forkserver.start(
        *("scrubber.cli.main", "plugin", *words),
        env=kept | environment,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
async def server() -> AsyncIterator[PluginApiServer]:
    async with PluginApiServer() as running:
        running.add_node("node-1")
        yield running


@pytest.fixture
def credentials(server: PluginApiServer, short_tmp: Path) -> dict[str, str]:
    return {"KUBECONFIG": str(kubeconfig(short_tmp, server.url).path)}


def status(server: PluginApiServer) -> str:
    found = server.condition("node-1", CONDITION_TYPE)
    return "" if found is None else f"{found['status']} {found['reason']}"


async def test_plugin_with_credentials_writes_events_and_condition_until_it_stops(
    server: PluginApiServer, credentials: dict[str, str], short_tmp: Path
) -> None:
    out = device(1, advertised=False, state="quarantined", refusal="Device sim-1 is quarantined.")
    async with (
        FakeService(short_tmp / "s", snapshot(device(0))) as service,
        plugin(short_tmp, credentials) as running,
    ):
        assert (await running.next_line("cluster.updated"))["node"] == "node-1"
        await server.until(lambda: status(server) == "True AllInService")
        service.show(snapshot(device(0), out, version=2))
        await server.until(lambda: len(server.events) == 1)
        assert await running.stops() == (0, "httpx2 lightkube msgspec")
    assert status(server) == "Unknown PluginStopped"


async def test_environment_variables_choose_the_type_and_the_polarity_of_the_condition(
    server: PluginApiServer, credentials: dict[str, str], short_tmp: Path
) -> None:
    settings = {"SCRUBBER_CONDITION_TYPE": "GpusOutOfService", "SCRUBBER_CONDITION_POLARITY": "bad"}

    def written() -> str:
        found = server.condition("node-1", "GpusOutOfService")
        return "" if found is None else f"{found['status']} {found['reason']}"

    async with (
        FakeService(short_tmp / "s", snapshot(device(0))),
        command(short_tmp, credentials | settings) as running,
    ):
        await server.until(lambda: written() == "False AllInService")
        assert (await running.stops())[0] == 0
    assert written() == "Unknown PluginStopped"
    assert server.condition("node-1", CONDITION_TYPE) is None


async def test_node_has_the_taint_while_none_of_its_gpus_is_in_service(
    server: PluginApiServer, credentials: dict[str, str], short_tmp: Path
) -> None:
    taint = {"key": "scrubber.dev/no-gpu-in-service", "effect": "NoSchedule"}
    out = device(0, advertised=False, state="quarantined", refusal="Device sim-0 is quarantined.")
    settings = {"SCRUBBER_TAINT": f"{taint['key']}:NoSchedule"}
    async with FakeService(short_tmp / "s", snapshot(out)), command(short_tmp, credentials | settings) as running:
        await server.until(lambda: server.node("node-1").get("spec", {}).get("taints") == [taint])
        assert (await running.stops())[0] == 0
    assert server.node("node-1")["spec"]["taints"] == [taint]
    async with FakeService(short_tmp / "s", snapshot(device(0))), command(short_tmp, credentials | settings):
        await server.until(lambda: server.node("node-1")["spec"]["taints"] == [])


async def test_rolling_update_keeps_the_condition_known_and_its_transition_time(
    server: PluginApiServer, credentials: dict[str, str], short_tmp: Path
) -> None:
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", snapshot(device(0))),
        plugin(short_tmp, credentials) as old,
    ):
        await kubelet.new_registration()
        await server.until(lambda: status(server) == "True AllInService")
        before = server.condition("node-1", CONDITION_TYPE)
        async with plugin(short_tmp, credentials) as new:
            await new.next_line("cluster.standby")
            assert (await old.stops())[0] == 0
            await kubelet.new_registration(after=1)
            await server.until(lambda: len(server.log.of("patch nodes/status")) == 2)
            written = [each.body["status"]["conditions"][0] for each in server.log.of("patch nodes/status")]
            assert [each["reason"] for each in written] == ["AllInService"] * 2
            assert before is not None
            assert written[1]["lastTransitionTime"] == before["lastTransitionTime"]


@pytest.mark.parametrize(
    ("cluster", "node", "reason"),
    [("off", "node-1", "--cluster-reporting is off"), ("auto", "", "--node-name")],
)
async def test_plugin_without_cluster_writes_sends_no_request_and_imports_no_client(
    server: PluginApiServer, credentials: dict[str, str], short_tmp: Path, cluster: str, node: str, reason: str
) -> None:
    async with FakeService(short_tmp / "s", snapshot(device(0))), plugin(short_tmp, credentials, cluster, node) as it:
        assert reason in (await it.next_line("cluster.not-updated"))["message"]
        await it.next_line("service.instance-changed")
        assert await it.stops() == (0, "")
    assert server.log.requests == []


async def test_credentials_in_the_environment_alone_enable_no_cluster_writes(
    server: PluginApiServer, credentials: dict[str, str], short_tmp: Path
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "SCRUBBER_"))}
    words = ["--kubelet-dir", str(short_tmp), "--socket-dir", str(short_tmp / "s"), "--node-name", "node-1"]
    words += ["--log-format", "json", "--metrics-address", "off"]
    process = await forkserver.start(
        *("scrubber.cli.main", "plugin", *words), env=kept | credentials, stdout=PIPE, stderr=PIPE
    )
    running = Running(process)
    try:
        async with FakeService(short_tmp / "s", snapshot(device(0))):
            assert (await running.next_line("cluster.not-updated"))["message"] == "--cluster-reporting is off"
            await running.next_line("service.instance-changed")
            assert await running.stops() == (0, "")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert server.log.requests == []


async def test_missing_credentials_are_logged_once(server: PluginApiServer, short_tmp: Path) -> None:
    async with FakeService(short_tmp / "s", snapshot(device(0))), plugin(short_tmp, {}) as running:
        assert (await running.next_line("cluster.not-updated"))["level"] == "info"
        await running.next_line("service.instance-changed")
        assert await running.stops() == (0, "")
    assert [each["event"] for each in running.lines if each["event"].startswith("cluster.")] == ["cluster.not-updated"]


@pytest.mark.parametrize(
    "response",
    [Silence.HANG, HttpResponse(500, b"null"), HttpResponse(200, b"<html>"), b"\x00\xff" * 100, None],
    ids=["hangs", "500", "garbage", "no HTTP", "away"],
)
async def test_failing_api_server_delays_no_kubelet_call(
    server: PluginApiServer, credentials: dict[str, str], short_tmp: Path, response: Answer | None
) -> None:
    if response is None:
        await server.stop()
    server.intercept = lambda request: response
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", snapshot(device(0))) as service,
        plugin(short_tmp, credentials) as running,
    ):
        registered = await kubelet.new_registration()
        if response is None:
            await running.next_line("cluster.write-failed")
        else:
            await server.until(lambda: bool(server.log.requests))
        await registered.plugin.Allocate(allocation("sim-0"), timeout=30)
        await registered.plugin.PreStartContainer(start("sim-0"), timeout=30)
        service.show(snapshot(device(0, advertised=False, refusal="Device sim-0 is quarantined."), version=2))
        await kubelet.until(lambda: registered.healthy == set())
        ended, _ = await running.stops()
        assert ended == 0
        await kubelet.until(lambda: registered.ended)
        assert registered.error is None


async def test_label_of_the_node_yields_it_and_every_restart_of_the_service_gets_the_request_again(
    server: PluginApiServer, credentials: dict[str, str], short_tmp: Path
) -> None:
    server.role = {"watch nodes"}
    server.set_labels("node-1", {"nvidia.com/gpu.deploy.client": "true"})
    async with (
        FakeService(short_tmp / "s", snapshot(device(0))) as service,
        plugin(short_tmp, credentials, "off", labels="nvidia.com/gpu.deploy.client") as running,
    ):
        await service.bell.until(lambda: service.yields == [""])
        server.set_labels("node-1", {"nvidia.com/gpu.deploy.client": "paused-for-driver-upgrade"})
        reason = "node label nvidia.com/gpu.deploy.client is 'paused-for-driver-upgrade'"
        await service.bell.until(lambda: reason in service.yields)
        service.show(snapshot(device(0), epoch="second"))
        await service.bell.until(lambda: service.yields.count(reason) > 1)
        server.set_labels("node-1", {"nvidia.com/gpu.deploy.client": "true"})
        await service.bell.until(lambda: service.yields[-1] == "")
        assert set(service.yields) == {reason, ""}
        assert service.yield_requesters == {"nvidia.com/gpu"}, "one name, and not that of another plugin"
        assert {each.operation for each in server.log.requests} == {"watch nodes"}
        assert (await running.stops())[0] == 0


async def test_labels_that_cannot_be_read_for_lack_of_credentials_stop_the_plugin(short_tmp: Path) -> None:
    async with (
        FakeService(short_tmp / "s", snapshot(device(0))),
        plugin(short_tmp, {}, "off", labels="nvidia.com/gpu.deploy.client") as running,
    ):
        assert running.process.stderr is not None
        async with asyncio.timeout(DEADLINE):
            errors = (await running.process.stderr.read()).decode()
        assert "--yield-labels needs access to the API server: no credentials were found." in errors
