"""The calls of a DRA driver over a real socket: what reaches the engine, what comes back, and what is refused before."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import PluginClient
from scrubber.api.messages import device_message
from scrubber.api.server import serve
from scrubber.api.sockets import Sockets
from scrubber.domain.assignment import Claim, Pod
from scrubber.domain.errors import InvalidRequest, NotReady, Refused, ScrubberError
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Hygiene
from scrubber.engine.views import (
    ClaimRelease,
    DeviceView,
    PrepareClaimCall,
    PreparedClaim,
    UnpreparedClaim,
    WithheldDevice,
)
from tests.api.service import FakeNode, device

DEADLINE = 30.0
PODS = (Pod("team-a", "train-0", "uid-0"), Pod("team-a", "train-1", "uid-1"))
CLAIM = Claim("claim-uid", "team-a", "gpus", "gpu.scrubber.dev", PODS)
POD_MESSAGES = [pb.ClaimPod(uid=each.uid or "", namespace=each.namespace, name=each.name) for each in PODS]


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode()
    async with serve(node, Sockets(short_tmp / "s")):
        yield node


@pytest.fixture
async def driver(node: FakeNode, short_tmp: Path) -> AsyncIterator[PluginClient]:
    async with PluginClient(short_tmp / "s") as client:
        yield client


async def prepare(driver: PluginClient, change: Callable[[pb.PrepareClaimRequest], object] = bool) -> object:
    request = pb.PrepareClaimRequest(
        claim=pb.Claim(uid=CLAIM.uid, namespace=CLAIM.namespace, name=CLAIM.name),
        devices=[pb.ClaimDevice(device_id="GPU-a0"), pb.ClaimDevice(device_id="GPU-a1", admin_access=True)],
        pods=POD_MESSAGES,
        deadline_seconds=44.0,
        driver=CLAIM.driver,
    )
    change(request)
    return await driver.prepare_claim(
        request.claim,
        request.devices,
        request.pods,
        driver=request.driver,
        deadline_seconds=request.deadline_seconds,
        timeout=DEADLINE,
        extended_resources=request.extended_resources,
        restores=request.restores,
        withdrawn=request.withdrawn,
    )


async def test_prepare_reaches_the_engine_and_returns_its_grants(node: FakeNode, driver: PluginClient) -> None:
    answer = await prepare(driver)
    assert node.requests[0] == PrepareClaimCall(CLAIM, ("GPU-a0",), ("GPU-a1",), 44.0)
    assert isinstance(answer, pb.PrepareClaimResponse)
    assert [(each.id, each.grant, each.path, each.hand_over_kind) for each in answer.devices] == [
        ("GPU-a0", 1, "fast", "same-tenant")
    ]
    assert answer.duration_seconds >= 0


@pytest.mark.parametrize(
    "change",
    [
        lambda request: setattr(request.claim, "uid", ""),
        lambda request: setattr(request.claim, "namespace", " "),
        lambda request: setattr(request.claim, "name", "x" * 254),
        lambda request: setattr(request, "driver", "gpu\nscrubber"),
        lambda request: setattr(request, "deadline_seconds", math.nan),
        lambda request: setattr(request, "deadline_seconds", -1.0),
        lambda request: request.extended_resources.append(""),
        lambda request: request.extended_resources.extend(f"example.com/gpu-{n}" for n in range(129)),
        lambda request: request.ClearField("pods"),
        lambda request: setattr(request.pods[0], "uid", ""),
        lambda request: setattr(request.pods[0], "namespace", "team-b"),
        lambda request: request.pods.extend(pb.ClaimPod(uid=f"u{n}", namespace="team-a", name="x") for n in range(256)),
        lambda request: request.devices.extend(pb.ClaimDevice(device_id=f"GPU-{n}") for n in range(1024)),
    ],
)
async def test_invalid_claim_is_refused_before_the_engine_is_called(
    node: FakeNode, driver: PluginClient, change: Callable[[pb.PrepareClaimRequest], object]
) -> None:
    with pytest.raises(InvalidRequest):
        await prepare(driver, change)
    assert node.requests == []


async def test_engine_learns_that_the_kubelet_has_not_called(node: FakeNode, driver: PluginClient) -> None:
    await prepare(driver, lambda request: setattr(request, "restores", True))
    call = node.requests[0]
    assert isinstance(call, PrepareClaimCall)
    assert call.restores


async def test_engine_learns_that_a_claim_has_no_specification(node: FakeNode, driver: PluginClient) -> None:
    await prepare(driver)
    await prepare(driver, lambda request: setattr(request, "withdrawn", True))
    assert [each.withdrawn for each in node.requests if isinstance(each, PrepareClaimCall)] == [False, True]


async def test_pod_that_is_named_twice_counts_once(node: FakeNode, driver: PluginClient) -> None:
    await prepare(driver, lambda request: request.pods.append(POD_MESSAGES[0]))
    call = node.requests[0]
    assert isinstance(call, PrepareClaimCall)
    assert call.claim.pods == PODS


async def test_refusal_of_a_claim_keeps_its_class_code_and_public_message(node: FakeNode, driver: PluginClient) -> None:
    node.failure = Refused("team-a says so", public_message="Not now.", code="advertised-by-plugin")
    with pytest.raises(ScrubberError) as refused:
        await prepare(driver)
    assert (type(refused.value), refused.value.code) == (Refused, "advertised-by-plugin")
    assert refused.value.public_message == "Not now."
    assert "team-a" not in str(refused.value)


async def test_unprepare_returns_its_progress_and_the_withheld_devices(node: FakeNode, driver: PluginClient) -> None:
    node.claims.release = ClaimRelease(done=False, waits_for="Device GPU-a0 is scrubbing (scrub-1).")
    answer = await driver.unprepare_claim("claim-uid", deadline_seconds=40.0, timeout=DEADLINE)
    assert (answer.done, answer.waits_for, list(answer.withheld)) == (
        False,
        "Device GPU-a0 is scrubbing (scrub-1).",
        [],
    )
    node.claims.release = ClaimRelease(done=True, withheld=(WithheldDevice("GPU-a1", "xid-95"),))
    answer = await driver.unprepare_claim("claim-uid", deadline_seconds=0.0, timeout=DEADLINE, withdrawn=True)
    assert answer.done
    assert [(each.device_id, each.cause_code) for each in answer.withheld] == [("GPU-a1", "xid-95")]
    assert node.requests == [("unprepare", "claim-uid", 40.0), ("unprepare", "claim-uid", 0.0, "withdrawn")]


@pytest.mark.parametrize(("uid", "seconds"), [("", 1.0), ("claim-uid", math.inf)])
async def test_invalid_unprepare_is_refused(node: FakeNode, driver: PluginClient, uid: str, seconds: float) -> None:
    with pytest.raises(InvalidRequest):
        await driver.unprepare_claim(uid, deadline_seconds=seconds, timeout=DEADLINE)
    assert node.requests == []


async def test_pods_of_a_claim_reach_the_engine(node: FakeNode, driver: PluginClient) -> None:
    await driver.set_claim_pods("claim-uid", POD_MESSAGES, DEADLINE)
    await driver.set_claim_pods("claim-uid", [], DEADLINE)
    assert node.requests == [("set-pods", "claim-uid", PODS), ("set-pods", "claim-uid", ())]


async def test_prepared_claims_are_listed_with_devices_and_pods(node: FakeNode, driver: PluginClient) -> None:
    node.claims.prepared = (PreparedClaim(CLAIM, ("GPU-a0",), ("GPU-a1",)),)
    (listed,) = (await driver.list_claims(DEADLINE)).claims
    assert (listed.claim.uid, listed.claim.namespace, listed.claim.name) == ("claim-uid", "team-a", "gpus")
    assert [(each.device_id, each.admin_access) for each in listed.devices] == [("GPU-a0", False), ("GPU-a1", True)]
    assert list(listed.pods) == POD_MESSAGES
    assert (listed.driver, listed.releasing) == (CLAIM.driver, False)


async def test_claims_that_only_the_kubelet_lists_are_listed_by_name(node: FakeNode, driver: PluginClient) -> None:
    node.claims.only_listed = (UnpreparedClaim(CLAIM.driver, "team-a", "gpus"),)
    (listed,) = (await driver.list_claims(DEADLINE)).unprepared
    assert (listed.driver, listed.namespace, listed.name) == (CLAIM.driver, "team-a", "gpus")


async def test_claims_are_not_listed_before_the_service_knows_its_devices(node: FakeNode, driver: PluginClient) -> None:
    await node.show(ready=False)
    with pytest.raises(NotReady):
        await driver.list_claims(DEADLINE)


def test_device_names_its_claim_and_the_pod_only_if_there_is_one() -> None:
    def message(pods: tuple[Pod, ...]) -> pb.Device:
        claim = Claim(CLAIM.uid, CLAIM.namespace, CLAIM.name, CLAIM.driver, pods)
        grant = Grant(1, None, HandOverKind.UNKNOWN, 1000.0, "boot-1", claim=claim)
        record = DeviceRecord("GPU-a0", hygiene=Hygiene.IN_USE, last_grant=grant, open_grants=(grant,))
        return device_message(DeviceView(device(0), record))

    one, two = message(PODS[:1]), message(PODS)
    assert (one.tenant, one.pod, one.container, one.claim.name) == ("team-a", "train-0", "", "gpus")
    assert (two.tenant, two.pod, two.claim.name) == ("team-a", "", "gpus")
    (grant,) = two.open_grants
    assert (grant.tenant, grant.pod, grant.claim.uid, grant.claim_releasing) == ("team-a", "", "claim-uid", False)
    assert list(grant.claim_pods) == POD_MESSAGES


def test_device_of_a_container_names_no_claim() -> None:
    assert not device_message(DeviceView(device(0), DeviceRecord("GPU-a0"))).HasField("claim")
