"""The driver's view of the scrub service, over the service's own socket."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from plugin.dra.claim_service import (
    ClaimDeviceRequest,
    ClaimToRestore,
    DeviceOutOfService,
    RecordedClaim,
    ReleaseProgress,
)
from plugin.dra.claims import ClaimIdentity, ClaimPod
from plugin.dra.service import ScrubServiceClaims
from scrubber.api.client import PluginClient
from scrubber.api.server import serve
from scrubber.api.sockets import Sockets
from scrubber.domain.assignment import Claim, Pod
from scrubber.domain.errors import InvalidRequest, Unavailable
from scrubber.domain.statement import statement
from scrubber.engine import views
from scrubber.engine.views import ClaimRelease, PrepareClaimCall, PreparedClaim, WithheldDevice
from tests.api.service import CERTIFICATE, FakeNode

REF = ClaimIdentity("team-a", "gpus", "claim-uid")
POD = ClaimPod("team-a", "train-0", "uid-0")
CLAIM = Claim("claim-uid", "team-a", "gpus", "gpu.scrubber.dev", (Pod("team-a", "train-0", "uid-0"),))


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode()
    async with serve(node, Sockets(short_tmp / "s")):
        yield node


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[ScrubServiceClaims]:
    async with PluginClient(short_tmp / "s") as client:
        yield ScrubServiceClaims(client)


@pytest.mark.parametrize(("wait", "expected"), [(44.0, 44.0), (0.0, 0.001)])
async def test_claim_is_prepared_with_its_devices_and_pods(
    node: FakeNode, service: ScrubServiceClaims, wait: float, expected: float
) -> None:
    devices = [ClaimDeviceRequest("GPU-a0"), ClaimDeviceRequest("GPU-a1", admin_access=True)]
    granted = await service.prepare_claim(
        REF, devices, [POD], driver=CLAIM.driver, wait_seconds=wait, extended_resources=["nvidia.com/gpu"]
    )
    assert [each.device_id for each in granted] == ["GPU-a0"]
    resources = frozenset({"nvidia.com/gpu"})
    assert node.requests[0] == PrepareClaimCall(CLAIM, ("GPU-a0",), ("GPU-a1",), expected, resources)
    certificate = granted[0].certificate
    assert certificate is not None
    assert (certificate.id, certificate.issued_at) == (CERTIFICATE.id, CERTIFICATE.issued_at)
    assert (certificate.covered, certificate.not_covered) == (CERTIFICATE.covered, CERTIFICATE.not_covered)
    assert certificate.digest == f"sha256:{hashlib.sha256(statement(CERTIFICATE)).hexdigest()}"


async def test_grant_whose_certificate_cannot_be_read_is_a_grant(
    node: FakeNode, service: ScrubServiceClaims, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(id: str) -> None:
        raise InvalidRequest("There is no such certificate.")

    monkeypatch.setattr(node, "certificate", missing)
    granted = await service.prepare_claim(
        REF, [ClaimDeviceRequest("GPU-a0")], [POD], driver=CLAIM.driver, wait_seconds=5.0
    )
    assert [(each.device_id, each.certificate) for each in granted] == [("GPU-a0", None)]


async def test_release_reports_what_it_waits_for_and_what_is_out_of_service(
    node: FakeNode, service: ScrubServiceClaims
) -> None:
    node.claims.release = ClaimRelease(done=False, waits_for="Device GPU-a0 is being scrubbed.")
    assert await service.unprepare_claim("claim-uid", wait_seconds=5.0) == ReleaseProgress(
        done=False, waits_for="Device GPU-a0 is being scrubbed."
    )
    node.claims.release = ClaimRelease(done=True, withheld=(WithheldDevice("GPU-a0", "verification-failed"),))
    assert await service.unprepare_claim("claim-uid", wait_seconds=5.0) == ReleaseProgress(
        done=True, withheld=(DeviceOutOfService("GPU-a0", "verification-failed"),)
    )


async def test_pods_of_a_claim_are_reported(node: FakeNode, service: ScrubServiceClaims) -> None:
    await service.set_claim_pods("claim-uid", [POD])
    assert node.requests == [("set-pods", "claim-uid", CLAIM.pods)]


async def test_recorded_claims_are_listed_with_their_driver(node: FakeNode, service: ScrubServiceClaims) -> None:
    node.claims.prepared = (PreparedClaim(CLAIM, ("GPU-a0",), ("GPU-a1",)),)
    assert await service.list_claims() == [RecordedClaim(REF, "gpu.scrubber.dev", ("GPU-a0", "GPU-a1"))]
    node.claims.prepared = (PreparedClaim(replace(CLAIM, released_at=1.0), ("GPU-a0",)),)
    assert [each.releasing for each in await service.list_claims()] == [True]


async def test_claims_that_only_the_kubelet_takes_for_prepared_are_listed_and_restored(
    node: FakeNode, service: ScrubServiceClaims
) -> None:
    node.claims.only_listed = (views.UnpreparedClaim(CLAIM.driver, "team-a", "gpus"),)
    assert await service.list_unprepared_claims() == [ClaimToRestore(CLAIM.driver, "team-a", "gpus")]
    device = ClaimDeviceRequest("GPU-a0")
    await service.prepare_claim(REF, [device], [POD], driver=CLAIM.driver, wait_seconds=5.0, restores=True)
    call = node.requests[0]
    assert isinstance(call, views.PrepareClaimCall)
    assert (call.restores, call.withdrawn) == (True, False)


async def test_service_learns_that_a_claim_has_no_specification(node: FakeNode, service: ScrubServiceClaims) -> None:
    device = ClaimDeviceRequest("GPU-a0")
    await service.prepare_claim(REF, [device], [POD], driver=CLAIM.driver, wait_seconds=5.0, withdrawn=True)
    await service.unprepare_claim(REF.uid, wait_seconds=5.0, withdrawn=True)
    call, release = node.requests[0], node.requests[-1]
    assert isinstance(call, views.PrepareClaimCall)
    assert (call.restores, call.withdrawn) == (False, True)
    assert release == ("unprepare", REF.uid, 5.0, "withdrawn")


async def test_service_that_is_away_is_unavailable(short_tmp: Path) -> None:
    async with PluginClient(short_tmp / "nothing") as client:
        with pytest.raises(Unavailable):
            await ScrubServiceClaims(client).unprepare_claim("claim-uid", wait_seconds=0.0)
