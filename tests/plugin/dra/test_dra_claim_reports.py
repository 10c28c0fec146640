"""What is written to a claim: the status of its devices with their certificates, and refused parameters."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from plugin.cluster.errors import ApiForbidden, ApiInvalidRequest, ApiUnavailable
from plugin.dra.claim_reports import MAX_DATA_BYTES, ClaimReports, certificate_data
from plugin.dra.claim_service import CertificateExtract, ClaimGrant
from plugin.dra.claims import ClaimIdentity, InvalidParameters, read_claim
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.logs import create_logger
from scrubber.domain.errors import NotReady
from tests.ahead import advance_until
from tests.dra_collaborators import FakeClaimApi, allocated_claim
from tests.dra_slices import settled

DRIVER, POOL = "gpu.scrubber.dev", "node-1"
REF = ClaimIdentity("team-a", "gpus", "claim-uid")
CERTIFICATE = CertificateExtract("c-1", "sha256:ab", 7.0, ("memory",), ("shared-memory",))
DEVICE = AdvertisedDevice(id="SIM-0", index="0", verdict=ServiceVerdict.ADVERTISED)


@asynccontextmanager
async def reports(api: FakeClaimApi, log: io.StringIO | None = None) -> AsyncIterator[ClaimReports]:
    loop = asyncio.get_running_loop()

    def clock() -> float:
        return loop.time()  # looked up on every call: a test may advance it

    made = ClaimReports(
        DRIVER,
        api,
        log=create_logger("json", "info", log or io.StringIO()),
        clock=clock,
        wall_clock=lambda: 100.0,
        jitter=lambda: 1.0,
    )
    task: asyncio.Task[Any] = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def claim(**facts: Any) -> dict[str, Any]:
    return allocated_claim(REF, "main:sim-0", **facts)


def prepared(made: ClaimReports, found: dict[str, Any], certificate: CertificateExtract | None = CERTIFICATE) -> None:
    grants = [] if found["status"]["allocation"]["devices"]["results"][0].get("adminAccess") else [
        ClaimGrant("SIM-0", certificate)
    ]  # fmt: skip
    made.on_prepared(read_claim(REF, found, DRIVER, POOL), {"sim-0": DEVICE}, grants)


async def test_status_has_the_devices_condition_and_its_certificate() -> None:
    api = FakeClaimApi()
    api.add(claim())
    async with reports(api) as made:
        prepared(made, claim())
        await api.bell.until(lambda: bool(api.patches))
    assert api.claims["team-a", "gpus"]["status"]["devices"] == [
        {
            "driver": DRIVER,
            "pool": POOL,
            "device": "sim-0",
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "Certified",
                    "message": "The device was proved clean before it was granted to the claim.",
                    "lastTransitionTime": "1970-01-01T00:01:40Z",
                }
            ],
            "data": {
                "certificate": {
                    "id": "c-1",
                    "digest": "sha256:ab",
                    "device": "SIM-0",
                    "issuedAt": "1970-01-01T00:00:07Z",
                    "covered": ["memory"],
                    "notCovered": ["shared-memory"],
                }
            },
        }
    ]


@pytest.mark.parametrize(("admin", "reason"), [(True, "AdminAccess"), (False, "Granted")])
async def test_device_without_a_certificate_has_the_reason(admin: bool, reason: str) -> None:
    api = FakeClaimApi()
    api.add(claim(adminAccess=admin))
    async with reports(api) as made:
        prepared(made, claim(adminAccess=admin), None)
        await api.bell.until(lambda: bool(api.patches))
    (entry,) = api.claims["team-a", "gpus"]["status"]["devices"]
    assert entry["conditions"][0]["reason"] == reason
    assert "data" not in entry


async def test_entries_of_other_drivers_stay_and_a_repeated_report_writes_nothing() -> None:
    api = FakeClaimApi()
    other = {"driver": "net.example.com", "pool": "p", "device": "d"}
    mine = {
        "driver": DRIVER,
        "pool": POOL,
        "device": "sim-0",
        "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "earlier"},
            {"type": "Other", "status": "False"},
        ],
    }
    found = claim()
    found["status"]["devices"] = [mine, other]
    api.add(found)
    async with reports(api) as made:
        prepared(made, claim())
        await api.bell.until(lambda: len(api.patches) == 1)
        first, second = api.claims["team-a", "gpus"]["status"]["devices"]
        assert first == other
        assert [each["type"] for each in second["conditions"]] == ["Ready", "Other"]
        assert second["conditions"][0]["lastTransitionTime"] == "earlier"
        prepared(made, claim())
        await api.bell.until(lambda: api.reads == 2)
        await settled()
        assert len(api.patches) == 1


@pytest.mark.parametrize("change", ["gone", "other", "deallocated"])
async def test_claim_that_has_changed_meanwhile_is_left_alone(change: str) -> None:
    api = FakeClaimApi()
    if change == "other":
        api.add(allocated_claim(ClaimIdentity("team-a", "gpus", "later"), "main:sim-0"))
    elif change == "deallocated":
        api.add(claim() | {"status": {}})
    async with reports(api) as made:
        prepared(made, claim())
        await api.bell.until(lambda: api.reads == 1)
        await settled()
        assert (api.patches, api.reads) == ([], 1)


async def test_status_is_written_once_the_api_server_is_back() -> None:
    async def away(what: str) -> None:
        if api.reads < 4:
            raise ApiUnavailable("connection refused")

    api, log = FakeClaimApi(fault=away), io.StringIO()
    api.add(claim())
    async with reports(api, log) as made:
        prepared(made, claim())
        await advance_until(lambda: bool(api.patches))
    events = [json.loads(line)["event"] for line in log.getvalue().splitlines()]
    assert events == ["claim.report-failed", "claim.reported-again"]


@pytest.mark.parametrize(
    "error",
    [ApiForbidden("The API server returned 403: no"), ApiInvalidRequest("The API server returned 422: Forbidden")],
)
async def test_missing_permission_is_named_and_the_report_dropped(error: Exception) -> None:
    async def refused(what: str) -> None:
        if what == "patch":
            raise error

    api, log = FakeClaimApi(fault=refused), io.StringIO()
    api.add(claim())
    async with reports(api, log) as made:
        prepared(made, claim())
        await api.bell.until(lambda: api.reads == 1)
        await settled()
        assert api.reads == 1
    (line,) = [json.loads(each) for each in log.getvalue().splitlines()]
    assert "associated-node:patch" in line["message"]


async def test_concurrent_change_of_the_claim_is_kept() -> None:
    async def changed(what: str) -> None:
        if what == "patch" and api.reads == 1:
            api.claims["team-a", "gpus"]["metadata"]["resourceVersion"] = "9"
            api.claims["team-a", "gpus"]["status"]["devices"] = [{"driver": "net", "pool": "p", "device": "d"}]

    api = FakeClaimApi(fault=changed)
    api.add(claim())
    async with reports(api) as made:
        prepared(made, claim())
        await advance_until(lambda: bool(api.patches))
    assert [each["driver"] for each in api.claims["team-a", "gpus"]["status"]["devices"]] == ["net", DRIVER]


async def test_refused_parameters_are_an_event_on_the_claim_and_other_refusals_are_not() -> None:
    api = FakeClaimApi()
    async with reports(api) as made:
        made.on_refused(REF, NotReady("a scrub"))
        made.on_refused(REF, InvalidParameters("Claim team-a/gpus has parameters."))
        await api.bell.until(lambda: bool(api.events))
        made.on_refused(REF, InvalidParameters("Claim team-a/gpus has parameters."))
        await settled()
    ((namespace, _), event), = api.events.items()  # fmt: skip
    assert (namespace, event.reason, event.is_warning) == ("team-a", "ParametersRefused", True)
    assert (event.target.kind, event.target.uid, event.target.api_version) == (
        "ResourceClaim",
        "claim-uid",
        "resource.k8s.io/v1",
    )


async def test_status_of_a_claim_that_was_released_is_not_written() -> None:
    api = FakeClaimApi()
    api.add(claim())
    async with reports(api) as made:
        prepared(made, claim())
        made.on_released(REF)
        await settled()
        assert api.reads == 0


def test_certificate_that_is_too_long_is_cut_and_says_so() -> None:
    many = tuple(f"step-{number}: {'x' * 100}" for number in range(200))
    data = certificate_data(CertificateExtract("c-1", "sha256:ab", 7.0, many, many), "SIM-0")
    assert len(json.dumps(data).encode()) <= MAX_DATA_BYTES
    assert data["certificate"]["truncated"] is True
    assert data["certificate"]["covered"]
    assert data["certificate"]["notCovered"]
