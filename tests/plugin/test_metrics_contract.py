"""The plugin's metrics report what happened: read from its own page, with a kubelet, a service and a cluster."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.api import pluginregistration_pb2 as registration
from plugin.api import pluginregistration_pb2_grpc as registration_rpc
from plugin.cluster.errors import (
    ApiBusy,
    ApiConflict,
    ApiForbidden,
    ApiInvalidRequest,
    ApiNotFound,
    ApiUnavailable,
    ClusterError,
)
from plugin.cluster.metrics import MeteredClusterApi
from plugin.cluster.port import ClusterNode, EventContent, EventTarget
from plugin.cluster.reporter import ClusterReporter, ClusterReporterTimes
from plugin.cluster.view import SERVICE_AWAY_CONDITION
from plugin.instance_lock import WriterLock
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.kubelet.registration import KubeletPaths, Registrar, RegistrationMode, RegistrationTimes
from plugin.kubelet.server import DevicePlugin, ListAndWatchStreams, PluginServer
from plugin.logs import create_logger
from plugin.metrics import PluginMetrics
from scrubber.domain.errors import NotReady
from tests import forkserver
from tests.emulation import TinyPlugin
from tests.plugin_collaborators import DEADLINE, FakeKubelet, FakeService, allocation, device, snapshot, start

SIM = "scrubber.dev/gpu"
VENDORS = "vendor.example/gpu"
QUICK = RegistrationTimes(
    poll=0.01,
    idle_poll=0.01,
    watcher_fallback=0.1,
    watcher_call=0.02,
    stream=DEADLINE,
    retry=0.02,
    stable=60.0,
    back_off=0.01,
)


class Page:
    """The plugin's metrics page, at an address."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/metrics"

    def __call__(self, name: str, **labels: str) -> float | None:
        with urllib.request.urlopen(self._url, timeout=DEADLINE) as answer:
            page = answer.read().decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return None

    async def shows(self, expected: float, name: str, **labels: str) -> None:
        """Wait until the series has that value."""
        found: list[float | None] = []

        async def shown() -> bool:
            found.append(await asyncio.to_thread(self, name, **labels))
            return found[-1] == expected

        try:
            await until(shown)
        except TimeoutError:
            raise AssertionError(f"{name}{labels} is {found[-1]}, and not {expected}") from None


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Poll another process until a condition holds; it offers no notification."""
    async with asyncio.timeout(DEADLINE):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.01)


async def next_line(process: Process, event: str) -> dict[str, Any]:
    """Return the next log line with this event."""
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE):
        while line := await process.stderr.readline():
            fields: dict[str, Any] = json.loads(line)
            if fields["event"] == event:
                return fields
    raise AssertionError(f"the plugin ended without saying {event!r}")


@asynccontextmanager
async def plugin(directory: Path, *flags: str) -> AsyncIterator[Process]:
    process = await forkserver.start(
        *("scrubber.cli.main", "plugin", "--registration", "classic", "--log-format", "json"),
        *(
            "--kubelet-dir",
            str(directory),
            "--socket-dir",
            str(directory / "s"),
            "--metrics-address",
            "127.0.0.1:0",
            *flags,
        ),
        stderr=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def page_of(process: Process) -> Page:
    return Page((await next_line(process, "metrics.serving"))["address"])


async def test_registration_start_refusal_and_outage_appear_on_the_metrics_page(short_tmp: Path) -> None:
    async def scrubbing(request: object) -> None:
        raise NotReady("It is being scrubbed.", code="scrubbing")

    async def granted(request: object) -> None:
        return

    async with FakeKubelet(short_tmp) as kubelet, plugin(short_tmp) as process:
        shows = (await page_of(process)).shows
        await shows(0, "scrubber_plugin_service_up")
        service = FakeService(short_tmp / "s", snapshot(device(0), device(1, advertised=False)))
        async with service:
            first = await kubelet.new_registration()
            await shows(1, "scrubber_plugin_service_up")
            await shows(1, "scrubber_plugin_registered", resource=SIM)
            await shows(1, "scrubber_plugin_registrations_total", resource=SIM, mode="classic", outcome="ok")
            await shows(1, "scrubber_plugin_listandwatch_streams", resource=SIM)
            await shows(1, "scrubber_plugin_listandwatch_updates_total", resource=SIM)
            await shows(1, "scrubber_plugin_devices", resource=SIM, health="healthy")
            await shows(1, "scrubber_plugin_devices", resource=SIM, health="unhealthy")
            service.show(snapshot(device(0), device(1), version=2))
            await shows(2, "scrubber_plugin_listandwatch_updates_total", resource=SIM)
            await shows(2, "scrubber_plugin_devices", resource=SIM, health="healthy")

            series = "scrubber_plugin_rpc_duration_seconds_count"
            await first.plugin.Allocate(allocation("sim-0"), timeout=DEADLINE)
            await shows(1, series, method="Allocate", code="OK")
            service.on_hand_over = scrubbing
            with pytest.raises(grpc.aio.AioRpcError):
                await first.plugin.PreStartContainer(start("sim-0"), timeout=DEADLINE)
            await shows(1, series, method="PreStartContainer", code="UNAVAILABLE")
            await shows(1, "scrubber_plugin_handover_refusals_total", code="scrubbing")
            service.on_hand_over = granted
            await first.plugin.PreStartContainer(start("sim-0"), timeout=DEADLINE)
            await shows(1, series, method="PreStartContainer", code="OK")
            with pytest.raises(grpc.aio.AioRpcError):
                await first.plugin.Allocate(allocation("no-such"), timeout=DEADLINE)
            await shows(1, series, method="Allocate", code="INVALID_ARGUMENT")
            await shows(len(kubelet.registered), series, method="GetDevicePluginOptions", code="OK")

            await kubelet.drop(first)
            await kubelet.new_registration(after=1)
            await shows(1, "scrubber_plugin_registration_ends_total", resource=SIM, reason="stream-ended")
            await shows(2, "scrubber_plugin_registrations_total", resource=SIM, mode="classic", outcome="ok")
            await shows(1, "scrubber_plugin_listandwatch_streams", resource=SIM)
        await shows(0, "scrubber_plugin_service_up")
        await shows(1, "scrubber_plugin_service_outages_total")
        async with service:
            await shows(1, "scrubber_plugin_service_up")
            await shows(1, "scrubber_plugin_service_outages_total")


async def test_start_cancelled_by_the_kubelet_is_counted_as_cancelled_and_not_as_a_refusal(short_tmp: Path) -> None:
    async def forever(request: object) -> None:
        await asyncio.Event().wait()

    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", snapshot(device(0))) as service,
        plugin(short_tmp) as process,
    ):
        shows = (await page_of(process)).shows
        service.on_hand_over = forever
        registered = await kubelet.new_registration()
        call = registered.plugin.PreStartContainer(start("sim-0"), timeout=DEADLINE)
        await service.bell.until(lambda: bool(service.requests))
        call.cancel()
        await shows(1, "scrubber_plugin_rpc_duration_seconds_count", method="PreStartContainer", code="CANCELLED")
        await shows(0, "scrubber_plugin_handover_refusals_total", code="unavailable")


async def test_plugin_in_front_of_a_vendors_plugin_counts_the_vendors_resource(short_tmp: Path) -> None:
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", snapshot(device(0), device(1, advertised=False))),
        plugin(short_tmp, "--upstream-dir", str(short_tmp / "u")) as process,
    ):
        shows = (await page_of(process)).shows
        vendor = TinyPlugin(("sim-0", "sim-1"))
        await vendor.serve(short_tmp / "u" / "vendor.sock")
        try:
            request = api.RegisterRequest(version="v1beta1", endpoint="vendor.sock", resource_name=VENDORS)
            async with grpc.aio.insecure_channel(f"unix:{short_tmp / 'u' / 'kubelet.sock'}") as channel:
                await rpc.RegistrationStub(channel).Register(request, timeout=DEADLINE, wait_for_ready=True)
            await kubelet.new_registration()
            await shows(1, "scrubber_plugin_registered", resource=VENDORS)
            await shows(1, "scrubber_plugin_listandwatch_updates_total", resource=VENDORS)
            await shows(1, "scrubber_plugin_devices", resource=VENDORS, health="healthy")
            await shows(1, "scrubber_plugin_devices", resource=VENDORS, health="unhealthy")
        finally:
            await vendor.stop()


async def test_metrics_port_in_use_ends_the_plugin_with_an_error_message(short_tmp: Path) -> None:
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", snapshot(device(0))),
        plugin(short_tmp) as first,
    ):
        taken = (await next_line(first, "metrics.serving"))["address"]
        before = (await kubelet.new_registration()).socket
        async with plugin(short_tmp, "--metrics-address", taken) as second:
            _, stderr = await asyncio.wait_for(second.communicate(), DEADLINE)
        assert second.returncode == 2
        assert stderr.decode().splitlines()[-1] == (
            f"Error: Metrics cannot be served on {taken}: Address already in use. Choose another "
            "--metrics-address, or off."
        )
        assert [each.socket for each in kubelet.listed] == [before]


# --- the outcomes of a registration, without a process: their times are scaled ---------------------------------------


class OpenGate:
    async def reserve(self, device_ids: object, resource: str, span: object) -> None:
        return

    async def hand_over(self, device_ids: object, resource: str, deadline: object, span: object) -> None:
        return


class AwaitableMetrics:
    """Metrics whose values a test can wait for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = PluginMetrics(self.registry, dict)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    async def shows(self, holds: Callable[[float], bool], name: str, **labels: str) -> None:
        async def shown() -> bool:
            return holds(self(name, **labels) or 0.0)

        await until(shown)


@asynccontextmanager
async def registrar(
    directory: Path, mode: RegistrationMode, times: RegistrationTimes = QUICK
) -> AsyncIterator[AwaitableMetrics]:
    advertised, metrics, tokens = AdvertisedDevices(), AwaitableMetrics(), itertools.count()
    await advertised.update(
        (AdvertisedDevice(id="gpu-0", index="0", verdict=ServiceVerdict.ADVERTISED, healthy=True),), "one"
    )
    log = create_logger("json", "error")
    task = asyncio.create_task(
        Registrar(
            KubeletPaths(directory, SIM),
            mode,
            plugin=lambda streams: DevicePlugin(SIM, advertised, OpenGate(), streams=streams, log=log),
            advertised=advertised,
            times=times,
            token=lambda: f"a{next(tokens)}",
            log=log,
            clock=time.monotonic,
            observer=metrics.metrics,
        ).run()
    )
    yield metrics
    task.cancel()
    await asyncio.wait({task})


def some(value: float) -> bool:
    return value >= 1


async def test_refused_and_failed_registrations_are_counted_separately(short_tmp: Path) -> None:
    attempts = "scrubber_plugin_registrations_total"
    kubelet = FakeKubelet(short_tmp)
    kubelet.refuse_with = "no such version"
    async with kubelet, registrar(short_tmp, RegistrationMode.CLASSIC) as metrics:
        await metrics.shows(some, attempts, resource=SIM, mode="classic", outcome="refused")
        assert metrics(attempts, resource=SIM, mode="classic", outcome="failed") == 0
        assert metrics("scrubber_plugin_registered", resource=SIM) == 0
        kubelet.refuse_with = ""
        await metrics.shows(some, attempts, resource=SIM, mode="classic", outcome="ok")
    dead = short_tmp / "dead"
    (dead / "device-plugins").mkdir(parents=True)
    leave_a_dead_socket(dead / "device-plugins" / "kubelet.sock")
    async with registrar(dead, RegistrationMode.CLASSIC) as metrics:
        await metrics.shows(some, attempts, resource=SIM, mode="classic", outcome="failed")
        assert metrics(attempts, resource=SIM, mode="classic", outcome="refused") == 0


def leave_a_dead_socket(path: Path) -> None:
    """Leave a socket file as a killed kubelet does."""
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


async def test_registration_through_the_plugin_watcher_is_counted_by_its_result(short_tmp: Path) -> None:
    attempts = "scrubber_plugin_registrations_total"
    kubelet = FakeKubelet(short_tmp)
    async with kubelet, registrar(short_tmp, RegistrationMode.WATCHER) as metrics:

        async def is_registered() -> bool:
            return any(kubelet.registry.glob("*.sock"))

        await until(is_registered)
        (own,) = kubelet.registry.glob("*.sock")
        async with grpc.aio.insecure_channel(f"unix:{own}") as channel:
            stub = registration_rpc.RegistrationStub(channel)
            no = registration.RegistrationStatus(plugin_registered=False, error="unknown type")
            await stub.NotifyRegistrationStatus(no, timeout=DEADLINE)
        await metrics.shows(some, attempts, resource=SIM, mode="watcher", outcome="refused")
        await kubelet.visit(own)
        await metrics.shows(some, attempts, resource=SIM, mode="watcher", outcome="ok")
        await metrics.shows(
            some, "scrubber_plugin_rpc_duration_seconds_count", method="NotifyRegistrationStatus", code="OK"
        )
        assert metrics("scrubber_plugin_registered", resource=SIM) == 1


async def test_ends_of_registrations_are_counted_by_reason(short_tmp: Path) -> None:
    ends = "scrubber_plugin_registration_ends_total"
    kubelet = FakeKubelet(short_tmp)
    async with kubelet, registrar(short_tmp, RegistrationMode.CLASSIC) as metrics:
        first = await kubelet.new_registration()
        await metrics.shows(lambda value: value == 1, "scrubber_plugin_registered", resource=SIM)
        first.socket.unlink()
        await metrics.shows(some, ends, resource=SIM, reason="socket-removed")
        await kubelet.new_registration(after=1)
        kubelet.wipes = False
        (short_tmp / "device-plugins" / "kubelet.sock").unlink()
        leave_a_dead_socket(short_tmp / "device-plugins" / "kubelet.sock")
        await metrics.shows(some, ends, resource=SIM, reason="kubelet-restarted")
        await metrics.shows(lambda value: value == 0, "scrubber_plugin_registered", resource=SIM)


async def test_registration_without_a_stream_is_counted(short_tmp: Path) -> None:
    class Deaf(FakeKubelet):
        async def Register(self, request: api.RegisterRequest, context: Any) -> api.Empty:
            return api.Empty()

    ends = "scrubber_plugin_registration_ends_total"
    async with Deaf(short_tmp), registrar(short_tmp, RegistrationMode.CLASSIC, replace(QUICK, stream=0.02)) as metrics:
        await metrics.shows(some, ends, resource=SIM, reason="no-stream")
        assert metrics("scrubber_plugin_registered", resource=SIM) == 0


async def test_missing_watcher_visit_is_counted_before_the_classic_registration(short_tmp: Path) -> None:
    ends, attempts = "scrubber_plugin_registration_ends_total", "scrubber_plugin_registrations_total"
    (short_tmp / "plugins_registry").mkdir()
    async with registrar(short_tmp, RegistrationMode.AUTO, replace(QUICK, watcher_fallback=0.0)) as metrics:
        await until(lambda: _any_socket(short_tmp / "plugins_registry"))
        async with FakeKubelet(short_tmp):
            await metrics.shows(some, attempts, resource=SIM, mode="classic", outcome="ok")
            assert metrics(ends, resource=SIM, reason="watcher-did-not-call") == 1


async def _any_socket(directory: Path) -> bool:
    return any(directory.glob("*.sock"))


async def test_unimplemented_method_creates_no_series(short_tmp: Path) -> None:
    metrics, advertised = AwaitableMetrics(), AdvertisedDevices()
    streams = ListAndWatchStreams(advertised)
    log = create_logger("json", "error")
    servicer = DevicePlugin(SIM, advertised, OpenGate(), streams=streams, log=log)
    path = short_tmp / "own.sock"
    async with (
        PluginServer(path, plugin=servicer, streams=streams, observer=metrics.metrics),
        grpc.aio.insecure_channel(f"unix:{path}") as channel,
    ):
        for name in ("/v1beta1.DevicePlugin/Steal", "/elsewhere.Service/Allocate"):
            call: Any = channel.unary_unary(name)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"", timeout=DEADLINE)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not [
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "scrubber_plugin_rpc_duration_seconds_count"
    ]


# --- the cluster -----------------------------------------------------------------------------------------------------


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
NODE = ClusterNode(status=None, transition_time=None, labels={})
EVENT = EventContent(
    "one", EventTarget("Pod", "p", "uid", "team-a"), "GpuHandOverRefused", "It waits.", is_warning=True
)


class Answering:
    """A cluster that answers everything with one error, or accepts it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.closed = False

    async def get_node(self) -> ClusterNode:
        return NODE

    async def patch_condition(self, condition: object, *, since: datetime, now: datetime) -> ClusterNode:
        return self._answer(NODE)

    async def patch_labels(self, labels: object) -> None:
        self._answer(NODE)

    async def replace_taints(self, taints: object, resource_version: str) -> None:
        self._answer(NODE)

    async def create_event(self, event: object, now: datetime) -> None:
        self._answer(NODE)

    async def repeat_event(self, event: object, now: datetime, count: int | None) -> int:
        self._answer(NODE)
        return 3

    async def evict_pod(self, namespace: str, pod: str, uid: str) -> None:
        self._answer(NODE)

    async def close(self) -> None:
        self.closed = True

    def _answer(self, answer: ClusterNode) -> ClusterNode:
        if self.error is not None:
            raise self.error
        return answer


WRITES: dict[str, Callable[[MeteredClusterApi], Any]] = {
    "condition": lambda cluster: cluster.patch_condition(SERVICE_AWAY_CONDITION, since=NOON, now=NOON),
    "label": lambda cluster: cluster.patch_labels({"a": "b"}),
    "taint": lambda cluster: cluster.replace_taints([], "7"),
    "event": lambda cluster: cluster.create_event(EVENT, NOON),
    "event again": lambda cluster: cluster.repeat_event(EVENT, NOON, 2),
    "eviction": lambda cluster: cluster.evict_pod("team-a", "p", "uid"),
}


def written(metrics: AwaitableMetrics, what: str) -> tuple[float | None, float | None]:
    """Return the number of writes, as (accepted, failed)."""
    name = "scrubber_plugin_cluster_writes_total"
    return metrics(name, kind=what, outcome="ok"), metrics(name, kind=what, outcome="failed")


@pytest.mark.parametrize("what", WRITES)
async def test_successful_cluster_write_is_counted_by_kind(what: str) -> None:
    metrics, cluster = AwaitableMetrics(), Answering()
    await WRITES[what](MeteredClusterApi(cluster, metrics.metrics))
    assert written(metrics, what.partition(" ")[0]) == (1, 0)


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize(
    "error", [ApiUnavailable("away"), ApiBusy("later"), ApiForbidden("no"), ApiInvalidRequest("what")], ids=repr
)
async def test_failed_cluster_write_is_counted_and_raised(what: str, error: ClusterError) -> None:
    metrics = AwaitableMetrics()
    with pytest.raises(type(error)):
        await WRITES[what](MeteredClusterApi(Answering(error), metrics.metrics))
    assert written(metrics, what.partition(" ")[0]) == (0, 1)


@pytest.mark.parametrize(
    ("what", "error", "failed"),
    [
        ("event", ApiConflict("there"), 0),
        ("event", ApiNotFound("no namespace"), 1),
        ("event again", ApiNotFound("gone"), 0),
        ("eviction", ApiNotFound("gone"), 0),
        ("eviction", ApiConflict("another pod"), 0),
        ("condition", ApiNotFound("no node"), 1),
        ("taint", ApiNotFound("no node"), 1),
        ("taint", ApiConflict("the node was changed meanwhile"), 0),
        ("label", ApiNotFound("no node"), 1),
        ("eviction", asyncio.CancelledError(), 0),
    ],
)
async def test_conflict_or_missing_object_is_never_counted_as_a_success_and_not_always_as_a_failure(
    what: str, error: BaseException, failed: int
) -> None:
    metrics = AwaitableMetrics()
    with pytest.raises(type(error)):
        await WRITES[what](MeteredClusterApi(Answering(error), metrics.metrics))
    assert written(metrics, what.partition(" ")[0]) == (0, failed)


async def test_writes_of_the_cluster_reporter_are_counted(tmp_path: Path) -> None:
    metrics = AwaitableMetrics()
    reporter = ClusterReporter(
        Answering,
        "node-1",
        times=ClusterReporterTimes(first_snapshot=DEADLINE),
        lock=WriterLock(tmp_path),
        log=create_logger("json", "error"),
        clock=time.monotonic,
        wall_clock=time.time,
        jitter=lambda: 0.5,
        observer=metrics.metrics,
    )
    reporter.start()
    try:
        reporter.on_snapshot(snapshot(device(0)))
        for what in ("condition", "label"):
            await metrics.shows(some, "scrubber_plugin_cluster_writes_total", kind=what, outcome="ok")
    finally:
        await reporter.stop()


async def test_cluster_read_is_not_counted_and_close_is_passed_on() -> None:
    metrics, cluster = AwaitableMetrics(), Answering()
    counted = MeteredClusterApi(cluster, metrics.metrics)
    assert await counted.get_node() is NODE
    await counted.close()
    assert cluster.closed
    assert all(written(metrics, what) == (0, 0) for what in ("event", "condition", "label", "taint", "eviction"))
