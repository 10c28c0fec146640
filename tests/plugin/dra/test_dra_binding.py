"""Binding conditions: what the scheduler learns of a device that it waits for, over an emulated API server."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.client import ApiServerClient
from plugin.cluster.credentials import Kubeconfig
from plugin.cluster.reporter import BackoffTimes
from plugin.dra.binding import BindingConditions, decide_binding
from plugin.dra.claim_service import DeviceOutOfService
from plugin.dra.claims import AllocatedDevice
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.logs import create_logger
from scrubber.domain.states import BindingState, TaintReason
from scrubber.emulator.cluster import ApiFault, ApiServer, EmulatedApi, Silence, StatusError
from scrubber.emulator.cluster.faults import Answer
from scrubber.emulator.cluster.resources import CLAIMS, NODES
from tests.cluster.emulated import DRIVER, SOON, Json, allocation, claim, node
from tests.dra_collaborators import FakeWithdrawal
from tests.integration.test_dra_driver import ACCOUNT
from tests.plugin_collaborators import Bell

NODE = "node-a"
CLEAN, NOT_CLEAN = f"{DRIVER}/clean", f"{DRIVER}/not-clean"
READY = AdvertisedDevice(
    "GPU-0", "0", ServiceVerdict.ADVERTISED, healthy=True, certified=True, binding=BindingState.READY
)
DIRTY = replace(READY, certified=False, binding=BindingState.BEING_CLEANED)
SICK = replace(
    DIRTY,
    verdict=ServiceVerdict.WITHHELD,
    healthy=False,
    binding=BindingState.OUT_OF_SERVICE,
    refusal="Device GPU-0 is quarantined.",
    taints=(TaintReason("verification-failed"),),
)
ALLOCATED = AllocatedDevice(("main",), NODE, "gpu-0")


@pytest.mark.parametrize(
    ("device", "ready", "reason"),
    [
        (READY, True, "Clean"),
        (DIRTY, None, ""),
        (replace(DIRTY, healthy=False, verdict=ServiceVerdict.WITHHELD), None, ""),
        (replace(DIRTY, binding=BindingState.IN_USE), None, ""),
        (replace(DIRTY, binding=None), None, ""),
        (replace(READY, healthy=False), None, ""),
        (SICK, False, "OutOfService"),
        (replace(DIRTY, binding=None, healthy=False), False, "OutOfService"),
        (replace(SICK, gone=True), False, "DeviceGone"),
        (None, False, "DeviceGone"),
    ],
)
def test_scheduler_waits_only_for_a_device_that_can_become_clean(
    device: AdvertisedDevice | None, ready: bool | None, reason: str
) -> None:
    decision = decide_binding(ALLOCATED, device)
    assert (ready, reason) == (None, "") if decision is None else (decision.ready, decision.reason) == (ready, reason)


def test_device_that_fails_is_withdrawn_for_the_reason_of_its_taint_unless_it_is_not_published() -> None:
    for device, withdrawn in (
        (SICK, DeviceOutOfService("GPU-0", "verification-failed")),
        (replace(SICK, taints=()), DeviceOutOfService("GPU-0", "out-of-service")),
        (replace(DIRTY, binding=None, healthy=False), DeviceOutOfService("GPU-0", "service-away")),
        (None, None),
    ):
        decision = decide_binding(ALLOCATED, device)
        assert decision is not None
        assert decision.withdrawn == withdrawn


def test_claim_with_admin_access_waits_for_nothing() -> None:
    for device in (DIRTY, SICK):
        decision = decide_binding(replace(ALLOCATED, admin_access=True), device)
        assert decision is not None
        assert (decision.ready, decision.reason) == (True, "AdminAccess")


# -- over the API server


class RingingLog(io.StringIO):
    """A log that rings at every line."""

    def __init__(self) -> None:
        super().__init__()
        self.bell = Bell()

    def write(self, text: str) -> int:
        self.bell.ring()
        return super().write(text)


@dataclass
class Here:
    server: ApiServer
    conditions: BindingConditions
    devices: AdvertisedDevices
    log: RingingLog
    withdrawal: FakeWithdrawal
    probes: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    async def show(self, *devices: AdvertisedDevice) -> None:
        """Report the devices as the service does."""
        await self.devices.update(devices, "one")
        self.conditions.on_devices()

    def allocate(self, *devices: str, name: str = "claim", awaited: bool = True, **more: Any) -> Json:
        """Create a claim, and allocate devices to it as the scheduler does before it waits."""
        made = self.server.api.create(CLAIMS, claim(name))
        allocated = allocation(*devices, **more)
        if awaited:
            for each in allocated["devices"]["results"]:
                each.update(bindingConditions=[CLEAN], bindingFailureConditions=[NOT_CLEAN])
        made["status"] = {"allocation": allocated}
        return self.server.api.update(CLAIMS, made, subresource="status")

    def status(self, name: str = "claim") -> list[Json]:
        found = self.server.api.get(CLAIMS, name, "default")
        return list((found.get("status") or {}).get("devices") or [])

    def statuses(self, device: str = "gpu-0", name: str = "claim") -> dict[str, str]:
        """Return the conditions of a device with their status."""
        conditions = [one for each in self.status(name) if each["device"] == device for one in each["conditions"]]
        return {each["type"]: each["status"] for each in conditions}

    async def until(self, holds: Callable[[], Any]) -> None:
        assert await self.server.api.store.changes.wait_until(lambda: bool(holds()), SOON), "not in time"

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [each for each in lines if each["event"] == name]

    def add_fault(self, fault: ApiFault) -> None:
        self.server.inject(fault)

    def reads_of(self, *claims: str) -> int:
        """Return how often the driver read one of the claims alone."""
        return sum(each.name in claims for each in self.server.log.of("get resourceclaims"))

    async def seen(self, *devices: AdvertisedDevice) -> None:
        """Show the devices, and wait until every claim that was allocated before was decided about."""
        number = next(self.probes)
        probe = replace(READY, id=f"GPU-{number}", index=str(number))
        await self.show(*devices, probe)
        self.allocate(f"gpu-{number}", name=f"zz-probe-{number}")
        await self.until(lambda: self.statuses(f"gpu-{number}", f"zz-probe-{number}"))


@asynccontextmanager
async def following(
    root: Path,
    prepare: Callable[[Here], None] = lambda here: None,
    *,
    api: EmulatedApi | None = None,
    backoff: BackoffTimes | None = None,
) -> AsyncIterator[Here]:
    """Run the conditions of ``node-a`` with the driver's own role; ``prepare`` is called before it starts."""
    async with ApiServer(api) as server:
        server.api.create(NODES, node(NODE))
        credentials = Kubeconfig(server.write_kubeconfig(root / "kubeconfig", server.add_account(ACCOUNT)))
        clients = [ApiServerClient(credentials, NODE, deadline=SOON) for _ in range(2)]
        devices, log, withdrawal = AdvertisedDevices(), RingingLog(), FakeWithdrawal()
        conditions = BindingConditions(
            DRIVER,
            NODE,
            api=clients[0],
            watch=clients[1],
            devices=devices,
            withdrawal=withdrawal,
            log=create_logger("json", "info", log),
            clock=asyncio.get_running_loop().time,
            wall_clock=lambda: 100.0,
            jitter=lambda: 0.0,
            backoff=backoff or BackoffTimes(first=0.02, max=0.05, denied=0.05),
        )
        here = Here(server, conditions, devices, log, withdrawal)
        prepare(here)
        running = asyncio.create_task(conditions.run())
        try:
            yield here
        finally:
            running.cancel()
            (ended,) = await asyncio.gather(running, return_exceptions=True)
            for client in clients:
                await client.close()
            assert isinstance(ended, asyncio.CancelledError), ended


async def test_condition_is_set_once_the_device_is_clean(tmp_path: Path) -> None:
    async with following(tmp_path) as here:
        here.allocate("gpu-0")
        await here.seen(DIRTY)
        assert here.status() == []
        await here.show(READY)
        await here.until(here.statuses)
        (entry,) = here.status()
        assert (entry["driver"], entry["pool"], entry["device"]) == (DRIVER, NODE, "gpu-0")
        (condition,) = entry["conditions"]
        assert (condition["type"], condition["status"], condition["reason"]) == (CLEAN, "True", "Clean")
        assert condition["lastTransitionTime"] == "1970-01-01T00:01:40Z"
        await here.seen(SICK)
        assert here.statuses() == {CLEAN: "True"}
        (event,) = [each for each in here.events("claim.binding-allowed") if each["claim"] == "default/claim"]
        assert event["device"] == "gpu-0"


async def test_claim_fails_with_a_reason_after_its_device_has_its_taint(tmp_path: Path) -> None:
    async with following(tmp_path) as here:
        here.allocate("gpu-0")
        await here.seen(DIRTY)
        await here.show(SICK)
        await here.until(here.statuses)
        assert here.statuses() == {CLEAN: "False", NOT_CLEAN: "True"}
        assert {each["message"] for each in here.status()[0]["conditions"]} == {"Device GPU-0 is quarantined."}
        assert here.withdrawal.withdrawn == [("GPU-0",)]
        await here.seen(SICK)
        (event,) = here.events("claim.binding-refused")
        assert (event["reason"], event["withdrawn"]) == ("OutOfService", True)


async def test_each_device_of_a_claim_is_decided_by_itself_and_entries_of_others_stay(tmp_path: Path) -> None:
    async with following(tmp_path) as here:
        other = replace(DIRTY, id="GPU-1", index="1")
        await here.show(DIRTY, other)
        ready = {"type": "Ready", "status": "True", "reason": "Certified", "lastTransitionTime": "2031-05-06T07:08:09Z"}
        made = here.allocate("gpu-0", "gpu-1")
        mine = {"driver": DRIVER, "pool": NODE, "device": "gpu-0", "conditions": [ready], "data": {"kept": True}}
        made["status"]["devices"] = [mine]
        here.server.api.update(CLAIMS, made, subresource="status")
        await here.show(READY, other)
        await here.until(lambda: CLEAN in here.statuses())
        (entry,) = here.status()
        assert here.statuses() == {"Ready": "True", CLEAN: "True"}
        assert entry["data"] == {"kept": True}
        await here.show(READY, replace(READY, id="GPU-1", index="1"))
        await here.until(lambda: CLEAN in here.statuses("gpu-1"))
        assert here.statuses() == {"Ready": "True", CLEAN: "True"}


async def test_claims_from_before_the_start_are_found_and_those_of_no_concern_left_alone(tmp_path: Path) -> None:
    def prepare(here: Here) -> None:
        here.allocate("gpu-0", name="mine")
        here.allocate("gpu-0", name="not-waiting", awaited=False)
        here.allocate("gpu-0", name="elsewhere", node="node-b", pool="node-b")
        here.server.api.create(CLAIMS, claim("not-allocated"))

    async with following(tmp_path, prepare) as here:
        await here.show(READY)
        await here.until(lambda: here.statuses(name="mine"))
        await here.seen(READY)
        assert {name: here.status(name) for name in ("not-waiting", "elsewhere", "not-allocated")} == {
            "not-waiting": [],
            "elsewhere": [],
            "not-allocated": [],
        }


async def test_claim_that_the_scheduler_gave_up_is_forgotten(tmp_path: Path) -> None:
    async with following(tmp_path) as here:
        await here.seen(DIRTY)
        made = here.allocate("gpu-0", name="given-up")
        await here.seen(DIRTY)
        made["status"] = {"allocation": None}
        here.server.api.update(CLAIMS, made, subresource="status")
        here.allocate("gpu-0", name="deleted")
        await here.seen(DIRTY)
        here.server.api.delete(CLAIMS, "deleted", "default")
        await here.seen(DIRTY)
        here.allocate("gpu-0")
        await here.seen(READY)
        assert here.statuses() == {CLEAN: "True"}
        assert here.status("given-up") == []
        assert here.reads_of("given-up", "deleted") == 0


@pytest.mark.parametrize(
    ("verb", "resource", "answer"),
    [
        ("list", "resourceclaims", StatusError(403, "Forbidden", "no such permission")),
        ("watch", "resourceclaims", StatusError(410, "Expired", "too old")),
        ("watch", "resourceclaims", Silence.DROP),
        ("get", "resourceclaims", StatusError(503, "ServiceUnavailable", "not now")),
        ("patch", "resourceclaims/status", StatusError(409, "Conflict", "modified")),
    ],
)
async def test_condition_is_set_after_requests_that_failed(
    tmp_path: Path, verb: str, resource: str, answer: Answer
) -> None:
    fault = ApiFault(answer, verb=verb, resource=resource, times=2)
    async with following(tmp_path, lambda here: here.add_fault(fault)) as here:
        await here.show(READY)
        here.allocate("gpu-0")
        await here.until(here.statuses)
        assert here.statuses() == {CLEAN: "True"}
        await here.until(lambda: fault.times == 0)


async def test_refused_status_of_a_claim_names_the_permissions_and_delays_no_other_claim(tmp_path: Path) -> None:
    refusal = StatusError(422, "Invalid", "status.devices: Forbidden")
    fault = ApiFault(refusal, verb="patch", resource="resourceclaims/status", name="refused")
    async with following(tmp_path, lambda here: here.add_fault(fault)) as here:
        here.allocate("gpu-0", name="refused")
        await here.seen(READY)
        (event,) = here.events("claim.binding-delayed")
        assert "default/refused" in event["message"]
        assert "associated-node:patch on resourceclaims/driver" in event["message"]
        assert here.status("refused") == []


async def test_status_that_the_api_server_does_not_keep_is_not_written_without_a_pause(tmp_path: Path) -> None:
    api = EmulatedApi(gates={"DRAResourceClaimDeviceStatus": False})
    slow = BackoffTimes(first=3600.0, max=3600.0, denied=3600.0)
    async with following(tmp_path, api=api, backoff=slow) as here:
        await here.show(READY)
        here.allocate("gpu-0")
        await here.log.bell.until(lambda: bool(here.events("claim.binding-delayed")))
        (event,) = here.events("claim.binding-delayed")
        assert "DRAResourceClaimDeviceStatus" in event["message"]
        assert len(here.server.log.of("patch resourceclaims/status")) == 1


async def test_claim_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    async with following(tmp_path) as here:
        made = here.allocate("gpu-0", name="strange")
        made["status"]["allocation"]["devices"]["results"][0]["bindingConditions"] = CLEAN
        here.server.api.store.put(CLAIMS, made)
        await here.seen(READY)
        assert here.status("strange") == []
