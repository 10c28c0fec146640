"""The kubelet's calls of the DRA driver, over real sockets, in both versions of the protocol."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from plugin.api import dra_health_pb2, dra_health_pb2_grpc, dra_v1_pb2, dra_v1beta1_pb2
from plugin.cluster.errors import ApiForbidden, ApiUnavailable
from plugin.dra.cdi import ClaimCdiSpecs
from plugin.dra.claim_driver import ClaimDriver, ClaimDriverTimes
from plugin.dra.claim_service import ClaimDeviceRequest, DeviceOutOfService, ReleaseProgress
from plugin.dra.claims import ClaimIdentity, ClaimPod
from plugin.dra.server import HealthStream, add_driver_services
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.logs import create_logger
from scrubber.domain.codes import ErrorCode
from scrubber.domain.device import Access, AccessKind
from scrubber.domain.errors import NotReady, Quarantined, Refused, Unavailable
from scrubber.ports.runtime import NOOP_TRACER, AttributeValue, Span, Tracer
from tests.ahead import advance_until
from tests.dra_collaborators import (
    STUBS,
    FakeClaimApi,
    FakeClaimService,
    FakeWithdrawal,
    allocated_claim,
    forever,
)
from tests.gpus import gpu
from tests.plugin_collaborators import DEADLINE

DRIVER, POOL = "gpu.scrubber.dev", "node-1"
ONE = ClaimIdentity("team-a", "gpus", "11111111-2222-3333-4444-555555555555")
TWO = ClaimIdentity("team-b", "gpus", "99999999-2222-3333-4444-555555555555")
ABSENT = ClaimIdentity("team-a", "gone", "77777777-2222-3333-4444-555555555555")
QUICK = ClaimDriverTimes(call=DEADLINE, margin=0.0, retry=0.01)
VERSIONS = {"v1.DRAPlugin": dra_v1_pb2, "v1beta1.DRAPlugin": dra_v1beta1_pb2}


def device(number: int, **facts: Any) -> AdvertisedDevice:
    mount = Access(AccessKind.MOUNT, f"/sim/{number}/memory", f"/dev/simgpu{number}")
    facts.setdefault("verdict", ServiceVerdict.ADVERTISED)
    facts.setdefault("healthy", True)
    return AdvertisedDevice(id=f"SIM-{number}", index=str(number), access=(mount,), **facts)


@dataclass
class Node:
    """The driver between its fakes, and a kubelet's connection to it."""

    directory: Path
    service: FakeClaimService
    api: FakeClaimApi
    devices: AdvertisedDevices
    withdrawal: FakeWithdrawal
    log: io.StringIO
    gpu_driver_located: asyncio.Event = field(default_factory=asyncio.Event)
    was_ready: bool = True
    driver: ClaimDriver = field(init=False)
    channel: grpc.aio.Channel | None = None
    version: str = "v1.DRAPlugin"
    calls: list[asyncio.Task[Any]] = field(default_factory=list)

    async def call(self, method: str, *claims: ClaimIdentity, timeout: float = DEADLINE) -> dict[str, Any]:
        messages = VERSIONS[self.version]
        request = getattr(messages, f"{method}Request")(
            claims=[messages.Claim(namespace=each.namespace, name=each.name, uid=each.uid) for each in claims]
        )
        response = await getattr(STUBS[self.version](self.channel), method)(request, timeout=timeout)
        return dict(response.claims)

    async def prepare(self, *claims: ClaimIdentity, timeout: float = DEADLINE) -> dict[str, Any]:
        return await self.call("NodePrepareResources", *claims, timeout=timeout)

    async def unprepare(self, *claims: ClaimIdentity, timeout: float = DEADLINE) -> dict[str, Any]:
        return await self.call("NodeUnprepareResources", *claims, timeout=timeout)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [each for each in lines if each["event"] == name]

    def specs(self) -> dict[str, Any]:
        """Return the content of every CDI specification, by the name of its file."""
        return {path.name: json.loads(path.read_text()) for path in self.directory.glob("cdi/*.json")}


class NvidiaFiles:
    """Builds specifications of NVIDIA GPUs without a driver."""

    def build(self, gpus: Sequence[AdvertisedDevice], epoch: str) -> tuple[dict[str, Any], str, str]:
        devices = [{"name": each.id, "containerEdits": {"env": [f"GPU={each.id}"]}} for each in gpus]
        return {"cdiVersion": "0.5.0", "devices": devices, "containerEdits": {}}, "", ""


class RecordingTracer:
    """Records the name, the claim's UID and the tenant of each span."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, AttributeValue, AttributeValue]] = []

    @contextmanager
    def span(self, name: str, **attributes: AttributeValue) -> Iterator[Span]:
        self.spans.append((name, attributes["claim_uid"], attributes["tenant"]))
        with NOOP_TRACER.span(name) as span:
            yield span


@asynccontextmanager
async def node(
    directory: Path,
    *devices: AdvertisedDevice,
    times: ClaimDriverTimes = QUICK,
    interval: float = DEADLINE,
    tracer: Tracer = NOOP_TRACER,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Node]:
    log = io.StringIO()
    logger = create_logger("json", "info", log)
    advertised = AdvertisedDevices()
    if devices:
        await advertised.update(devices, "first")
    here = Node(directory, FakeClaimService(), FakeClaimApi(), advertised, FakeWithdrawal(), log)
    (directory / "cdi").mkdir()
    calls = ClaimDriver(
        DRIVER,
        POOL,
        service=here.service,
        api=here.api,
        devices=advertised,
        specs=ClaimCdiSpecs(directory / "cdi", DRIVER, log=logger, nvidia=NvidiaFiles()),
        withdrawal=here.withdrawal,
        gpu_driver_located=here.gpu_driver_located,
        was_ready=lambda: here.was_ready,
        times=times,
        log=logger,
        clock=clock,
        tracer=tracer,
    )
    here.driver = calls
    server = grpc.aio.server()
    add_driver_services(server, calls, HealthStream(POOL, advertised, interval=interval, wall_clock=lambda: 7.5))
    server.add_insecure_port(f"unix:{directory / 'dra.sock'}")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{directory / 'dra.sock'}") as channel:
        here.channel = channel
        yield here
    await server.stop(None)


@pytest.mark.parametrize("version", VERSIONS)
async def test_prepared_claim_names_its_devices_and_their_cdi_ids_in_every_version(
    short_tmp: Path, version: str
) -> None:
    async with node(short_tmp, device(0), device(1)) as here:
        here.version = version
        here.api.add(allocated_claim(ONE, "main/small:sim-0", "other:sim-1"))
        answer = (await here.prepare(ONE))[ONE.uid]
        assert answer.error == ""
        assert [(list(each.request_names), each.pool_name, each.device_name) for each in answer.devices] == [
            (["main"], POOL, "sim-0"),
            (["other"], POOL, "sim-1"),
        ]
        assert [list(each.cdi_device_ids) for each in answer.devices] == [
            [f"{DRIVER}/claim={ONE.uid}-{each.device_name}", f"{DRIVER}/claim={ONE.uid}.{each.request_names[0]}"]
            for each in answer.devices
        ]
        assert not answer.devices[0].HasField("share_id")


async def test_service_gets_the_devices_the_pods_and_admin_access_of_the_claim(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0", pods=["a", "b"], adminAccess=True))
        await here.prepare(ONE)
        assert here.service.requests == [
            (
                ONE.uid,
                (ClaimDeviceRequest("SIM-0", admin_access=True),),
                (ClaimPod("team-a", "a", "uid-of-a"), ClaimPod("team-a", "b", "uid-of-b")),
                DRIVER,
            )
        ]


async def test_device_of_two_requests_with_admin_access_is_answered_for_each_of_them(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "a:sim-0", "b:sim-0", adminAccess=True))
        answer = (await here.prepare(ONE))[ONE.uid]
        kind = f"{DRIVER}/claim={ONE.uid}"
        assert [(list(each.request_names), list(each.cdi_device_ids)) for each in answer.devices] == [
            (["a"], [f"{kind}-sim-0", f"{kind}.a"]),
            (["b"], [f"{kind}-sim-0", f"{kind}.b"]),
        ]


async def test_each_claim_of_a_call_has_a_span_in_traces(short_tmp: Path) -> None:
    tracer = RecordingTracer()
    async with node(short_tmp, device(0), tracer=tracer) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE, ABSENT)
        await here.unprepare(ONE)
        assert sorted(tracer.spans) == [
            ("NodePrepareResources", ONE.uid, "team-a"),
            ("NodePrepareResources", ABSENT.uid, "team-a"),
            ("NodeUnprepareResources", ONE.uid, "team-a"),
        ]


async def test_results_of_another_driver_are_ignored(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        claim = allocated_claim(ONE, "main:sim-0")
        other = {"request": "net", "driver": "net.example.com", "pool": "elsewhere", "device": "eth0"}
        claim["status"]["allocation"]["devices"]["results"].append(other)
        here.api.add(claim)
        assert [each.device_name for each in (await here.prepare(ONE))[ONE.uid].devices] == ["sim-0"]


async def test_share_of_a_device_is_answered_with_its_id(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0", shareID="s-1"))
        assert [each.share_id for each in (await here.prepare(ONE))[ONE.uid].devices] == ["s-1"]


async def test_repeated_call_is_answered_identically(short_tmp: Path) -> None:
    async with node(short_tmp, device(0), device(1)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0", "more:sim-1"))
        first, specs = await here.prepare(ONE), here.specs()
        assert await here.prepare(ONE) == first
        assert here.specs() == specs


async def test_empty_request_works(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        assert await here.prepare() == {}
        assert await here.unprepare() == {}


async def test_claims_of_one_call_are_independent_and_each_has_an_answer(short_tmp: Path) -> None:
    async def refuse_one(uid: str) -> None:
        if uid == ONE.uid:
            raise Quarantined("secret", public_message="Device SIM-0 is quarantined.")

    async with node(short_tmp, device(0), device(1)) as here:
        here.service.on_prepare = refuse_one
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        here.api.add(allocated_claim(TWO, "main:sim-1"))
        answers = await here.prepare(ONE, TWO, ABSENT)
        assert {uid: answer.error for uid, answer in answers.items()} == {
            ONE.uid: "Device SIM-0 is quarantined.",
            TWO.uid: "",
            ABSENT.uid: "Claim team-a/gone does not exist any more.",
        }
        assert set(here.service.prepared) == {TWO.uid}
        assert list(here.specs()) == [f"{DRIVER}-claim_{TWO.uid}.json"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda claim: claim["metadata"].update(uid="other"), "is another one by now"),
        (lambda claim: claim["metadata"].update(name="other"), "has another name at the API server: team-a/other"),
        (lambda claim: claim["metadata"].update(namespace="team-b"), "has another name at the API server: team-b/"),
        (lambda claim: claim["status"].pop("allocation"), "is not allocated"),
        (lambda claim: claim.pop("status"), "is not allocated"),
        (lambda claim: claim["status"]["allocation"]["devices"].update(results=[]), "has no device of"),
        (lambda claim: claim["status"]["allocation"]["devices"]["results"][0].update(pool="node-2"), "are in node-1"),
        (lambda claim: claim["status"]["allocation"]["devices"]["results"][0].update(device="x"), "is not on this node"),
        (lambda claim: claim["status"]["allocation"]["devices"]["results"][0].update(device=5), "cannot be read"),
        (lambda claim: claim["status"]["allocation"]["devices"]["results"].append(
            claim["status"]["allocation"]["devices"]["results"][0]), "has device sim-0 twice"),
        (lambda claim: claim["status"]["allocation"]["devices"].update(
            config=[{"source": "FromClass", "opaque": {"driver": DRIVER, "parameters": {"a": 1}}}]),
         "its device class has opaque parameters"),
    ],
)  # fmt: skip
async def test_claim_that_cannot_be_prepared_is_refused_with_the_reason(
    short_tmp: Path, change: Callable[[dict[str, Any]], object], error: str
) -> None:
    async with node(short_tmp, device(0)) as here:
        claim = allocated_claim(ONE, "main:sim-0")
        change(claim)
        here.api.claims[ONE.namespace, ONE.name] = claim
        assert error in (await here.prepare(ONE))[ONE.uid].error
        assert here.service.requests == []
        assert here.specs() == {}


async def test_parameters_for_another_driver_are_ignored(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        claim = allocated_claim(ONE, "main:sim-0")
        claim["status"]["allocation"]["devices"]["config"] = [
            {"source": "FromClaim", "opaque": {"driver": "net.example.com", "parameters": {"a": 1}}}
        ]
        here.api.add(claim)
        assert (await here.prepare(ONE))[ONE.uid].error == ""


async def test_call_waits_for_an_api_server_that_is_away(short_tmp: Path) -> None:
    async def away(what: str) -> None:
        if here.api.reads < 3:
            raise ApiUnavailable("connection refused")

    async with node(short_tmp, device(0)) as here:
        here.api.fault = away
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        assert (await here.prepare(ONE))[ONE.uid].error == ""


async def test_call_waits_for_a_service_that_restarts(short_tmp: Path) -> None:
    async def away(uid: str) -> None:
        if len(here.service.requests) < 3:
            raise Unavailable("no answer")

    async with node(short_tmp, device(0)) as here:
        here.service.on_prepare = away
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        assert (await here.prepare(ONE))[ONE.uid].error == ""


@pytest.mark.parametrize("seen", [[], [device(1)]])
async def test_call_waits_until_a_service_that_starts_has_listed_the_device(
    short_tmp: Path, seen: list[AdvertisedDevice]
) -> None:
    async with node(short_tmp, *seen) as here:
        here.was_ready = False
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        call = asyncio.ensure_future(here.prepare(ONE))
        await here.api.bell.until(lambda: here.api.reads == 1)
        await here.devices.update((), "first")  # not ready: it has inspected no device
        await asyncio.sleep(0)
        assert not call.done()
        await here.devices.update((device(0), device(1)), "first")
        assert (await call)[ONE.uid].error == ""


async def test_call_for_an_unknown_device_is_refused_for_good_only_by_a_ready_service(short_tmp: Path) -> None:
    async with node(short_tmp, device(1), times=ClaimDriverTimes(call=1.0, margin=0.0)) as here:
        here.was_ready = False
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        error = (await here.prepare(ONE))[ONE.uid].error
        assert "is not ready, and has not listed device sim-0 yet" in error
        assert "Delete the pod" not in error
        call = asyncio.ensure_future(here.prepare(ONE))
        await here.api.bell.until(lambda: here.api.reads == 2)
        here.was_ready = True
        await here.devices.notify()
        assert "Delete the pod" in (await call)[ONE.uid].error


GPU = gpu(0).id.lower()


async def test_nvidia_gpu_is_prepared_once_the_gpu_driver_is_located(short_tmp: Path) -> None:
    async with node(short_tmp, gpu(0), device(1)) as here:
        here.api.add(allocated_claim(ONE, f"main:{GPU}"))
        here.api.add(allocated_claim(TWO, "main:sim-1"))
        call = asyncio.ensure_future(here.prepare(ONE))
        assert (await here.prepare(TWO))[TWO.uid].error == ""  # a device of another vendor does not wait
        await here.api.bell.until(lambda: here.api.reads == 2)
        assert list(here.specs()) == [spec_of(here, TWO).name]
        here.gpu_driver_located.set()
        assert (await call)[ONE.uid].error == ""


async def test_missing_gpu_driver_is_named_at_the_end_of_the_call_and_keeps_no_claim_from_its_release(
    short_tmp: Path,
) -> None:
    async with node(short_tmp, gpu(0), times=ClaimDriverTimes(call=1.0, margin=0.0)) as here:
        here.api.add(allocated_claim(ONE, f"main:{GPU}"))
        assert "not known yet where the GPU driver is" in (await here.prepare(ONE))[ONE.uid].error
        assert here.service.requests == []
        assert here.events("claim.refused")[0]["code"] == "unavailable"
        assert (await here.unprepare(ONE))[ONE.uid].error == ""


async def test_api_server_that_stays_away_is_named_before_the_kubelet_gives_up(short_tmp: Path) -> None:
    async def away(what: str) -> None:
        raise ApiUnavailable("connection refused", retry_after=3600.0)

    async with node(short_tmp, device(0)) as here:
        here.api.fault = away
        assert "the API server does not answer" in (await here.prepare(ONE))[ONE.uid].error
        assert here.events("claim.refused")[0]["message"].endswith("connection refused")


async def test_missing_permission_to_read_claims_is_named(short_tmp: Path) -> None:
    async def forbidden(what: str) -> None:
        raise ApiForbidden("The API server returned 403: no")

    async with node(short_tmp, device(0)) as here:
        here.api.fault = forbidden
        assert "does not allow it to get resourceclaims" in (await here.prepare(ONE))[ONE.uid].error


async def test_service_is_given_the_kubelets_time_less_a_margin(short_tmp: Path) -> None:
    times = ClaimDriverTimes(call=1000.0, margin=400.0)
    async with node(short_tmp, device(0), times=times) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE, timeout=5000.0)
        assert 500.0 < here.service.waits[0] <= 600.0


async def test_defect_is_answered_without_its_text(short_tmp: Path) -> None:
    async def defect(uid: str) -> None:
        raise RuntimeError("tenant-x")

    async with node(short_tmp, device(0)) as here:
        here.service.on_prepare = defect
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        error = (await here.prepare(ONE))[ONE.uid].error
        assert error
        assert "tenant-x" not in error
        assert here.events("api.failed")[0]["method"] == "NodePrepareResources"


async def test_refused_claim_leaves_no_specification(short_tmp: Path) -> None:
    async def refuse(uid: str) -> None:
        raise NotReady("a scrub", public_message="Device SIM-0 is being scrubbed.")

    async with node(short_tmp, device(0)) as here:
        here.service.on_prepare = refuse
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        assert (await here.prepare(ONE))[ONE.uid].error == "Device SIM-0 is being scrubbed."
        assert list((short_tmp / "cdi").iterdir()) == []


async def test_specification_that_cannot_be_written_names_the_directory_and_grants_nothing(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        (short_tmp / "cdi").rmdir()
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        assert str(short_tmp / "cdi") in (await here.prepare(ONE))[ONE.uid].error
        assert here.service.requests == []


async def test_released_claim_has_no_specification_any_more(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        assert (await here.unprepare(ONE))[ONE.uid].error == ""
        assert here.specs() == {}
        assert here.service.released == [ONE.uid]


async def test_claim_that_the_service_released_for_another_one_loses_its_specification_before_the_next_try(
    short_tmp: Path,
) -> None:
    specs: list[set[str]] = []

    async def release_one(uid: str) -> None:
        specs.append(set(here.specs()))
        if len(specs) == 1:
            here.service.prepared.pop(ONE.uid)
            raise NotReady("It was released.", code=ErrorCode.CLAIM_ABANDONED)

    async with node(short_tmp, device(0)) as here:
        for each in (ONE, TWO):
            here.api.add(allocated_claim(each, "main:sim-0"))
        await here.prepare(ONE)
        before = set(here.specs())
        here.service.on_prepare = release_one
        assert (await here.prepare(TWO))[TWO.uid].error == ""
        assert specs == [before, set()]


async def test_claim_that_is_unknown_to_everyone_is_released(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        assert (await here.unprepare(ABSENT))[ABSENT.uid].error == ""


async def test_no_container_of_a_claim_can_start_while_its_release_lasts(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        here.service.progress = {ONE.uid: ReleaseProgress(done=False, waits_for="Device SIM-0 is being scrubbed.")}
        answers = await here.unprepare(ONE, TWO)
        assert answers[ONE.uid].error == "Device SIM-0 is being scrubbed. The kubelet tries again."
        assert answers[TWO.uid].error == ""
        assert here.specs() == {}


async def test_specification_is_removed_although_the_kubelet_ends_while_the_release_is_recorded(
    short_tmp: Path,
) -> None:
    async def end_kubelet(uid: str) -> None:
        here.service.releasing.add(uid)
        call.cancel()
        await asyncio.sleep(0)

    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        here.service.progress = {ONE.uid: ReleaseProgress(done=False, waits_for="Device SIM-0 is being scrubbed.")}
        here.service.on_release = end_kubelet
        call = asyncio.create_task(here.driver.unprepare([ONE], None))
        await asyncio.wait({call})
        assert call.cancelled()
        assert here.specs() == {}


async def test_restarted_driver_removes_the_specification_of_a_claim_that_is_being_released(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        here.service.releasing.add(ONE.uid)
        await here.driver.reconcile_specs()
        assert here.specs() == {}


async def test_no_container_of_a_released_claim_can_start_while_the_api_server_is_slow(short_tmp: Path) -> None:
    async def note(what: str) -> None:
        specs.append(here.specs())

    specs: list[dict[str, Any]] = []
    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        here.api.fault = note
        here.service.progress = {ONE.uid: ReleaseProgress(done=False)}
        await here.unprepare(ONE)
        assert specs == [{}]


async def test_release_that_a_busy_service_records_later_removes_the_specification_then(short_tmp: Path) -> None:
    async def not_at_once(uid: str) -> None:
        if len(here.service.released) < 3:
            here.service.releasing.discard(ONE.uid)

    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        here.service.on_list = not_at_once
        here.service.progress = {ONE.uid: ReleaseProgress(done=False, waits_for="Device SIM-0 is being scrubbed.")}
        await here.unprepare(ONE)
        assert here.service.waits[1:4] == [0.0, 0.0, 0.0]
        assert here.specs() == {}


async def test_release_that_is_not_recorded_keeps_the_claim_with_its_specification(short_tmp: Path) -> None:
    async def never(uid: str) -> None:
        here.service.releasing.discard(ONE.uid)

    times = ClaimDriverTimes(call=DEADLINE, margin=0.0, orphan=0.0)
    async with node(short_tmp, device(0), times=times) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        here.service.on_list = never
        here.service.progress = {ONE.uid: ReleaseProgress(done=False, waits_for="A device is being inspected.")}
        assert (await here.unprepare(ONE))[ONE.uid].error == "A device is being inspected. The kubelet tries again."
        assert here.service.released == [ONE.uid]
        assert spec_of(here).exists()


@pytest.mark.parametrize(("pods", "expected"), [(["pod-a"], 400.0), ([], 50.0)])
async def test_release_waits_long_only_while_a_pod_of_the_claim_exists(
    short_tmp: Path, pods: list[str], expected: float
) -> None:
    times = ClaimDriverTimes(call=1000.0, margin=0.0, release=400.0, orphan=50.0)
    async with node(short_tmp, device(0), times=times) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0", pods=pods))
        here.service.progress = {ONE.uid: ReleaseProgress(done=False)}
        await here.unprepare(ONE, timeout=5000.0)
        assert here.service.waits[0] == 0.0  # only then is the specification removed
        assert expected - 45.0 < here.service.waits[1] <= expected


@pytest.mark.parametrize("fault", ["away", "other-uid"])
async def test_release_waits_shortly_while_it_is_unknown_whether_a_pod_exists(short_tmp: Path, fault: str) -> None:
    async def away(what: str) -> None:
        raise ApiUnavailable("connection refused")

    times = ClaimDriverTimes(call=1000.0, margin=0.0, release=400.0, orphan=50.0)
    async with node(short_tmp, device(0), times=times) as here:
        here.api.add(allocated_claim(ClaimIdentity(ONE.namespace, ONE.name, "later"), "main:sim-0"))
        if fault == "away":
            here.api.fault = away
        here.service.progress = {ONE.uid: ReleaseProgress(done=False)}
        await here.unprepare(ONE, timeout=5000.0)
        assert here.service.waits[1] <= 50.0


@pytest.mark.parametrize("works", [True, False])
async def test_withheld_device_is_withdrawn_before_the_release_succeeds(short_tmp: Path, works: bool) -> None:
    async with node(short_tmp, device(0)) as here:
        here.withdrawal.works = works
        withheld = DeviceOutOfService("SIM-0", "scrub-failed")
        here.service.progress = {ONE.uid: ReleaseProgress(done=True, withheld=(withheld,))}
        assert (await here.unprepare(ONE))[ONE.uid].error == ""
        assert here.withdrawal.withdrawn == [("SIM-0",)]
        assert 4.0 < here.withdrawal.timeouts[0] <= 5.0
        assert here.events("claim.devices-withheld")[0]["withdrawn"] is works


async def test_withdrawal_of_a_device_ends_before_the_kubelet_gives_up(short_tmp: Path) -> None:
    async with node(short_tmp, device(0), times=ClaimDriverTimes(call=1.0, margin=0.0, withdrawal=3600.0)) as here:
        withheld = DeviceOutOfService("SIM-0", "scrub-failed")
        here.service.progress = {ONE.uid: ReleaseProgress(done=True, withheld=(withheld,))}
        await here.unprepare(ONE)
        assert here.withdrawal.timeouts[0] <= 1.0


async def test_service_that_is_away_keeps_the_claim(short_tmp: Path) -> None:
    async def away(uid: str) -> None:
        raise Unavailable("no answer", public_message="The scrub service on this node does not answer.")

    async with node(short_tmp, device(0)) as here:
        here.service.on_release = away
        assert (await here.unprepare(ONE))[ONE.uid].error == "The scrub service on this node does not answer."


async def test_repeated_call_waits_for_the_earlier_one_about_the_same_claim(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        waiting: list[Callable[[str], Awaitable[None]]] = [forever]

        async def once(uid: str) -> None:
            if waiting:
                await waiting.pop()(uid)

        here.service.on_prepare = once
        first = asyncio.ensure_future(here.prepare(ONE))
        await here.service.bell.until(lambda: len(here.service.requests) == 1)
        second = asyncio.ensure_future(here.prepare(ONE))
        third = asyncio.ensure_future(here.prepare(TWO))
        assert "does not exist" in (await third)[TWO.uid].error  # another claim does not wait
        assert len(here.service.requests) == 1
        first.cancel()  # as the kubelet does at its limit
        assert (await second)[ONE.uid].error == ""


async def test_specifications_of_claims_that_are_not_prepared_are_removed_after_a_start(short_tmp: Path) -> None:
    async def starting(uid: str) -> None:
        if here.service.lists < 2:
            raise NotReady("the service is starting")

    async with node(short_tmp, device(0), device(1)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        here.api.add(allocated_claim(TWO, "main:sim-1"))
        await here.prepare(ONE, TWO)
        del here.service.prepared[TWO.uid]
        here.service.on_list = starting
        await here.driver.reconcile_specs()
        assert list(here.specs()) == [f"{DRIVER}-claim_{ONE.uid}.json"]


async def test_specification_of_a_claim_that_is_being_prepared_stays(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        del here.service.prepared[ONE.uid]
        gate = asyncio.Event()

        async def wait(uid: str) -> None:
            await gate.wait()

        here.service.on_prepare = wait
        call = asyncio.ensure_future(here.prepare(ONE))
        await here.service.bell.until(lambda: len(here.service.requests) == 2)
        removal = asyncio.ensure_future(here.driver.reconcile_specs())
        await here.service.bell.until(lambda: here.service.lists == 1)
        gate.set()
        assert (await call)[ONE.uid].error == ""
        await removal
        assert len(here.specs()) == 1


def spec_of(here: Node, claim: ClaimIdentity = ONE) -> Path:
    return here.directory / "cdi" / f"{DRIVER}-claim_{claim.uid}.json"


async def test_specification_stays_if_another_instance_prepared_the_claim_again_while_its_release_ended(
    short_tmp: Path,
) -> None:
    async def again(uid: str) -> None:
        here.service.prepared[ONE.uid] = ("SIM-0",)

    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        here.service.on_list = again
        assert (await here.unprepare(ONE))[ONE.uid].error == ""
        assert spec_of(here).exists()


async def test_specification_of_a_released_claim_is_removed_although_a_device_of_it_was_withheld(
    short_tmp: Path,
) -> None:
    async def still_listed(uid: str) -> None:
        here.service.prepared[ONE.uid] = ("SIM-0",)
        here.service.releasing.add(ONE.uid)

    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        here.service.on_list = still_listed
        await here.unprepare(ONE)
        assert not spec_of(here).exists()


async def test_release_succeeds_and_keeps_the_specification_while_the_service_does_not_list_its_claims(
    short_tmp: Path,
) -> None:
    async def away(uid: str) -> None:
        raise Unavailable("no answer")

    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        here.service.on_list = away
        assert (await here.unprepare(ONE))[ONE.uid].error == ""
        assert spec_of(here).exists()


async def test_specification_that_another_instance_removed_during_a_prepare_is_written_again(short_tmp: Path) -> None:
    async def remove(uid: str) -> None:
        spec_of(here).unlink()

    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        content = spec_of(here).read_bytes()
        here.service.on_prepare = remove
        assert (await here.prepare(ONE))[ONE.uid].error == ""
        assert spec_of(here).read_bytes() == content


async def test_no_specification_is_removed_beside_another_instance_and_each_can_be_added(short_tmp: Path) -> None:
    times = ClaimDriverTimes(call=DEADLINE, margin=0.0, exclusive=0.01)
    async with node(short_tmp, device(0), device(1), times=times) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        here.api.add(allocated_claim(TWO, "main:sim-1"))
        await here.prepare(ONE)
        other = ClaimCdiSpecs(short_tmp / "cdi", DRIVER, log=create_logger("json", "info", io.StringIO()))
        async with other.exclusive(DEADLINE) as alone:
            assert alone
            assert (await here.unprepare(ONE))[ONE.uid].error == ""
            assert (await here.prepare(TWO))[TWO.uid].error == ""
        assert [spec_of(here, each).exists() for each in (ONE, TWO)] == [True, True]
        await here.driver.reconcile_specs()
        assert [spec_of(here, each).exists() for each in (ONE, TWO)] == [False, True]


async def test_specification_of_a_claim_that_another_instance_released_is_not_written_again(short_tmp: Path) -> None:
    async def released(uid: str) -> None:
        if here.service.lists == 3:
            del here.service.prepared[ONE.uid]  # after it was listed, and before its file gets a name

    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        spec_of(here).unlink()
        here.service.on_list = released
        await here.driver.reconcile_specs()
        assert here.specs() == {}


@asynccontextmanager
async def removing(here: Node) -> AsyncIterator[None]:
    task: asyncio.Task[Any] = asyncio.create_task(here.driver.remove_left_specs())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_specification_of_a_claim_that_a_new_run_of_the_service_does_not_list_is_removed(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here, removing(here):
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        del here.service.prepared[ONE.uid]
        await here.devices.update((device(0),), "")
        await here.devices.update((device(0),), "second")
        await advance_until(lambda: not spec_of(here).exists())
        assert [each["claim_uid"] for each in here.events("cdi.claim-removed")] == [ONE.uid]


@pytest.mark.parametrize("cause", ["service away", "another instance"])
async def test_skipped_removal_of_a_specification_is_repeated(short_tmp: Path, cause: str) -> None:
    async def away_once(uid: str) -> None:
        if here.service.lists == 1:
            raise Unavailable("no answer")

    times = ClaimDriverTimes(call=DEADLINE, margin=0.0, retry=0.01, exclusive=0.01)
    async with node(short_tmp, device(0), times=times) as here, removing(here):
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        if cause == "service away":
            here.service.on_list = away_once
            await here.unprepare(ONE)
        else:
            other = ClaimCdiSpecs(short_tmp / "cdi", DRIVER, log=create_logger("json", "info", io.StringIO()))
            async with other.exclusive(DEADLINE):
                await here.unprepare(ONE)
                assert spec_of(here).exists()
        await advance_until(lambda: not spec_of(here).exists())


async def test_service_that_refuses_the_drivers_version_is_named_and_waited_for(short_tmp: Path) -> None:
    async def refuse(uid: str) -> None:
        if here.service.lists < 3:
            raise Refused("The plugin has version 0.3.0.", code=ErrorCode.VERSION_UNSUPPORTED)

    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        spec_of(here).unlink()
        here.service.on_list = refuse
        await here.driver.reconcile_specs()
        assert spec_of(here).exists()
        assert [each["message"] for each in here.events("claims.not-listed")] == ["The plugin has version 0.3.0."]
        assert len(here.events("claims.listed")) == 1


async def test_missing_specification_of_a_prepared_claim_is_written_again_after_a_start(short_tmp: Path) -> None:
    async def away_once(what: str) -> None:
        if here.api.reads == 2:
            raise ApiUnavailable("connection refused")

    times = ClaimDriverTimes(call=DEADLINE, margin=0.0, rewrite=0.01)
    async with node(short_tmp, device(0), times=times) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        content = spec_of(here).read_bytes()
        spec_of(here).unlink()
        here.api.fault = away_once
        await here.driver.reconcile_specs()
        assert spec_of(here).read_bytes() == content
        assert [each["claim_uid"] for each in here.events("cdi.claim-restored")] == [ONE.uid]
        assert [each["message"] for each in here.events("cdi.claims-not-restored")] == ["connection refused"]
        await here.driver.reconcile_specs()
        assert len(here.events("cdi.claim-restored")) == 1


async def test_specification_of_an_nvidia_gpu_is_written_again_once_the_gpu_driver_is_located(short_tmp: Path) -> None:
    async def located(what: str) -> None:
        if here.api.reads == 3:
            here.gpu_driver_located.set()

    times = ClaimDriverTimes(call=DEADLINE, margin=0.0, rewrite=0.01)
    async with node(short_tmp, gpu(0), times=times) as here:
        here.gpu_driver_located.set()
        here.api.add(allocated_claim(ONE, f"main:{GPU}"))
        await here.prepare(ONE)
        spec_of(here).unlink()
        here.gpu_driver_located.clear()
        here.api.fault = located
        await here.driver.reconcile_specs()
        assert spec_of(here).exists()
        assert "where the GPU driver is" in here.events("cdi.claims-not-restored")[0]["message"]


async def test_specification_of_a_device_that_a_starting_service_has_not_listed_is_written_later(
    short_tmp: Path,
) -> None:
    async def inspected(what: str) -> None:
        if here.api.reads == 3:
            await here.devices.update((device(0),), "first")

    times = ClaimDriverTimes(call=DEADLINE, margin=0.0, rewrite=0.01)
    async with node(short_tmp, device(0), times=times) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        spec_of(here).unlink()
        here.was_ready = False
        await here.devices.update((), "first")
        here.api.fault = inspected
        await here.driver.reconcile_specs()
        assert spec_of(here).exists()


@pytest.mark.parametrize("gone", ["claim", "device"])
async def test_specification_that_cannot_be_written_again_is_named_and_not_tried_for_ever(
    short_tmp: Path, gone: str
) -> None:
    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        if gone == "claim":
            here.api.claims.clear()
        else:
            here.api.add(allocated_claim(ONE, "main:sim-7"))
        await here.driver.reconcile_specs()
        assert [each["claim_uid"] for each in here.events("cdi.claim-not-restored")] == [ONE.uid]


async def test_specification_of_a_claim_that_is_being_released_is_not_written_again(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0"))
        await here.prepare(ONE)
        spec_of(here).unlink()
        here.service.releasing.add(ONE.uid)
        await here.driver.reconcile_specs()
        assert here.specs() == {}


def claim_for_limits(*classes: str) -> dict[str, Any]:
    claim = allocated_claim(ONE, "container-0-request-0:sim-0")
    claim["metadata"]["annotations"] = {"resource.kubernetes.io/extended-resource-claim": "true"}
    requests = [
        {"name": f"container-0-request-{at}", "exactly": {"deviceClassName": name}} for at, name in enumerate(classes)
    ]
    claim["spec"] = {"devices": {"requests": requests}}
    return claim


async def test_service_gets_the_extended_resources_of_a_claim_that_the_scheduler_created(short_tmp: Path) -> None:
    async with node(short_tmp, device(0)) as here:
        here.api.classes = {
            "gpus": {"spec": {"extendedResourceName": "nvidia.com/gpu"}},
            "implicit": {"spec": {}},
        }
        here.api.add(claim_for_limits("gpus", "implicit", "gone", "gpus"))
        assert (await here.prepare(ONE))[ONE.uid].error == ""
        here.api.add(allocated_claim(ONE, "main:sim-0") | {"spec": claim_for_limits("gpus")["spec"]})
        assert (await here.prepare(ONE))[ONE.uid].error == ""
        assert here.service.extended_resources == [("nvidia.com/gpu",), ()]


async def test_missing_permission_to_read_device_classes_is_logged_and_keeps_no_pod_from_starting(
    short_tmp: Path,
) -> None:
    async def forbidden(what: str) -> None:
        if what == "get-class":
            raise ApiForbidden("cannot get deviceclasses")

    async with node(short_tmp, device(0)) as here:
        here.api.fault = forbidden
        here.api.add(claim_for_limits("gpus"))
        assert (await here.prepare(ONE))[ONE.uid].error == ""
        assert [each["message"] for each in here.events("claim.class-unreadable")] == ["cannot get deviceclasses"]


async def test_health_stream_sends_every_device_at_once_and_at_every_change(short_tmp: Path) -> None:
    refused = device(1, verdict=ServiceVerdict.WITHHELD, healthy=False, refusal="x" * 2000)
    unknown = device(2, verdict=ServiceVerdict.UNKNOWN, healthy=False)
    async with node(short_tmp, device(0), refused, unknown) as here:
        stub = dra_health_pb2_grpc.DRAResourceHealthStub(here.channel)
        stream = stub.NodeWatchResources(dra_health_pb2.NodeWatchResourcesRequest(), timeout=DEADLINE)
        first = await stream.read()
        assert [(each.device.pool_name, each.health, len(each.message)) for each in first.devices] == [
            (POOL, dra_health_pb2.HEALTHY, 0),
            (POOL, dra_health_pb2.UNHEALTHY, 1024),
            (POOL, dra_health_pb2.UNKNOWN, 0),
        ]
        assert {each.last_updated_time for each in first.devices} == {7}
        await here.devices.update((device(0, healthy=False, verdict=ServiceVerdict.WITHHELD),), "first")
        second = await stream.read()
        assert [each.health for each in second.devices] == [dra_health_pb2.UNHEALTHY]
        stream.cancel()


async def test_health_stream_repeats_itself_without_changes(short_tmp: Path) -> None:
    async with node(short_tmp, device(0), interval=0.01) as here:
        stub = dra_health_pb2_grpc.DRAResourceHealthStub(here.channel)
        stream = stub.NodeWatchResources(dra_health_pb2.NodeWatchResourcesRequest(), timeout=DEADLINE)
        assert await stream.read() == await stream.read()
        stream.cancel()
