"""Pods that join a prepared claim are reported to the service."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from plugin.cluster.errors import ApiForbidden, ApiUnavailable, ClusterError
from plugin.dra.claim_pods import ClaimPodsFollower
from plugin.dra.claims import ClaimIdentity, ClaimPod, read_claim
from plugin.kubelet.devices import AdvertisedDevices
from plugin.logs import create_logger
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import LedgerFailure, NotReady, Refused, Unavailable
from tests.ahead import advance_until
from tests.dra_collaborators import FakeClaimService, allocated_claim
from tests.dra_slices import settled
from tests.plugin_collaborators import Bell

DRIVER, POOL = "gpu.scrubber.dev", "node-1"
REF = ClaimIdentity("team-a", "gpus", "claim-uid")


def pod(name: str) -> ClaimPod:
    return ClaimPod("team-a", name, f"uid-of-{name}")


@dataclass
class FakeWatches:
    """Watches of claims; ``claims``: the present objects by name, None after a deletion."""

    claims: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)
    errors: list[ClusterError] = field(default_factory=list)
    bell: Bell = field(default_factory=Bell)
    opened: int = 0
    open: int = 0
    closed: int = 0

    def show(self, claim: Mapping[str, Any] | None, name: str = "gpus") -> None:
        self.claims[name] = claim
        self.bell.ring()

    async def watch_claim(self, namespace: str, name: str) -> AsyncGenerator[tuple[str, Mapping[str, Any]], None]:
        self.opened += 1
        if self.errors:
            raise self.errors.pop(0)
        self.open += 1
        last: Mapping[str, Any] | None = None
        try:
            while True:
                found = self.claims.get(name)
                if found is None and last is not None:
                    yield "DELETED", last
                elif found is not None and found is not last:
                    last = found
                    yield "MODIFIED", found
                await self.bell.rung()
        finally:
            self.open -= 1

    async def close(self) -> None:
        self.closed += 1
        self.bell.ring()


@dataclass
class Here:
    follower: ClaimPodsFollower
    service: FakeClaimService
    watches: FakeWatches
    log: io.StringIO
    devices: AdvertisedDevices

    def prepared(self, *pods: str) -> None:
        claim = allocated_claim(REF, "main:sim-0", pods=pods)
        self.watches.claims["gpus"] = claim
        self.service.refs[REF.uid] = REF
        self.service.prepared[REF.uid] = ("SIM-0",)
        self.follower.on_prepared(read_claim(REF, claim, DRIVER, POOL), {}, ())


@asynccontextmanager
async def following(*recorded: str) -> AsyncIterator[Here]:
    service, watches, log = FakeClaimService(), FakeWatches(), io.StringIO()
    service.prepared = dict.fromkeys(recorded, ())
    loop = asyncio.get_running_loop()

    def clock() -> float:
        return loop.time()  # looked up on every call: a test may advance it

    follower = ClaimPodsFollower(
        DRIVER,
        service,
        lambda: watches,
        devices=(devices := AdvertisedDevices()),
        log=create_logger("json", "info", log),
        clock=clock,
        jitter=lambda: 1.0,
    )
    task: asyncio.Task[Any] = asyncio.create_task(follower.run())
    try:
        yield Here(follower, service, watches, log, devices)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pod_that_joins_a_prepared_claim_is_reported() -> None:
    async with following() as here:
        here.prepared("a")
        await here.service.bell.until(lambda: here.service.pods == [(REF.uid, (pod("a"),))])
        here.watches.show(allocated_claim(REF, "main:sim-0", pods=("a", "b")))
        await here.service.bell.until(lambda: len(here.service.pods) == 2)
        assert here.service.pods[-1] == (REF.uid, (pod("a"), pod("b")))


async def test_change_of_a_claim_that_concerns_no_pod_is_not_reported() -> None:
    async with following() as here:
        here.prepared("a")
        await here.service.bell.until(lambda: len(here.service.pods) == 1)
        here.watches.show(allocated_claim(REF, "main:sim-0", pods=("a",)) | {"spec": {}})
        await settled()
        assert len(here.service.pods) == 1


async def test_released_claim_is_not_watched_any_more() -> None:
    async with following() as here:
        here.prepared("a")
        await here.service.bell.until(lambda: len(here.service.pods) == 1)
        here.follower.on_released(REF)
        await here.watches.bell.until(lambda: (here.watches.open, here.watches.closed) == (0, 1))


@pytest.mark.parametrize("other", [None, allocated_claim(ClaimIdentity("team-a", "gpus", "later"), "main:sim-0")])
async def test_watch_ends_with_the_claim(other: Mapping[str, Any] | None) -> None:
    async with following() as here:
        here.prepared("a")
        await here.service.bell.until(lambda: len(here.service.pods) == 1)
        here.watches.show(other)
        await here.watches.bell.until(lambda: here.watches.closed == 1)
        assert len(here.service.pods) == 1


async def test_claims_that_were_prepared_before_the_start_are_watched_once_the_service_is_ready() -> None:
    async def starting(uid: str) -> None:
        if here.service.lists == 1:
            raise NotReady("the service is starting")

    async with following("claim-uid") as here:
        here.service.on_list = starting
        await advance_until(lambda: here.watches.open == 1)


async def test_service_that_refuses_the_drivers_version_is_named_and_waited_for() -> None:
    async def refuse(uid: str) -> None:
        if here.service.lists < 3:
            raise Refused("The plugin has version 0.3.0.", code=ErrorCode.VERSION_UNSUPPORTED)

    async with following("claim-uid") as here:
        here.service.on_list = refuse
        await advance_until(lambda: here.watches.open == 1)
        events = [json.loads(line) for line in here.log.getvalue().splitlines()]
        assert [each["event"] for each in events] == ["claims.not-listed", "claims.listed"]
        assert events[0]["message"] == "The plugin has version 0.3.0."


async def test_claims_of_another_instance_are_followed_from_the_next_list_until_they_are_released() -> None:
    async with following() as here:
        await here.service.bell.until(lambda: here.service.lists == 1)
        await settled()
        here.watches.claims["gpus"] = allocated_claim(REF, "main:sim-0", pods=("a",))
        here.service.refs[REF.uid] = REF
        here.service.prepared[REF.uid] = ("SIM-0",)
        await advance_until(lambda: here.service.pods == [(REF.uid, (pod("a"),))])
        del here.service.prepared[REF.uid]
        await advance_until(lambda: here.watches.closed == 1)


async def test_claims_are_listed_again_when_the_service_has_restarted() -> None:
    async with following() as here:
        await here.service.bell.until(lambda: here.service.lists == 1)
        await settled()
        here.watches.claims["gpus"] = allocated_claim(REF, "main:sim-0", pods=("a",))
        here.service.refs[REF.uid] = REF
        here.service.prepared[REF.uid] = ("SIM-0",)
        await here.devices.update((), "second")
        await here.service.bell.until(lambda: here.service.pods == [(REF.uid, (pod("a"),))])


@pytest.mark.parametrize("called", ["prepared", "released"])
async def test_call_that_ends_while_the_claims_are_listed_counts_more_than_the_list(called: str) -> None:
    async def call(uid: str) -> None:
        if here.service.lists == 2 and called == "prepared":
            here.prepared("a")
            here.service.prepared.clear()  # the list was made before
        elif here.service.lists == 2:
            here.follower.on_released(REF)

    async with following() as here:
        if called == "released":
            here.prepared("a")
            await here.service.bell.until(lambda: len(here.service.pods) == 1)
        await here.service.bell.until(lambda: here.service.lists == 1)
        await settled()
        here.service.on_list = call
        await here.devices.update((), "second")
        await here.service.bell.until(lambda: here.service.lists == 2)
        await settled()
        assert here.watches.open == (1 if called == "prepared" else 0)


async def test_watch_that_fails_is_opened_again_and_named() -> None:
    async with following() as here:
        here.watches.errors = [ApiForbidden("cannot watch resourceclaims"), ApiUnavailable("connection refused")]
        here.prepared("a")
        await advance_until(lambda: here.watches.open == 1)
        events = [json.loads(line) for line in here.log.getvalue().splitlines()]
        assert [each["event"] for each in events][:2] == ["claim.watch-failed", "claim.watch-failed"]
        assert events[0]["message"] == "cannot watch resourceclaims"


async def test_report_is_repeated_until_the_ledger_can_be_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following() as here:
        attempts: list[str] = []
        report = here.service.set_claim_pods

        async def full(uid: str, pods: Any) -> None:
            attempts.append(uid)
            if len(attempts) < 3:
                raise LedgerFailure("the disk is full")
            await report(uid, pods)

        monkeypatch.setattr(here.service, "set_claim_pods", full)
        here.prepared("a")
        await advance_until(lambda: len(here.service.pods) == 1)
        assert "the disk is full" in here.log.getvalue()


async def test_claim_is_followed_on_after_a_change_that_cannot_be_reported() -> None:
    async with following() as here:
        here.prepared("a")
        await here.service.bell.until(lambda: len(here.service.pods) == 1)
        unreadable = allocated_claim(REF, "main:sim-0", pods=("a", "b"))
        unreadable["status"]["reservedFor"] = "b"
        here.watches.show(unreadable)
        await settled()
        here.watches.show(allocated_claim(REF, "main:sim-0", pods=("a", "c")))
        await here.service.bell.until(lambda: here.service.pods[-1] == (REF.uid, (pod("a"), pod("c"))))
        assert "cannot be read" in here.log.getvalue()


async def test_report_waits_for_a_service_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following() as here:
        attempts: list[str] = []
        report = here.service.set_claim_pods

        async def away(uid: str, pods: Any) -> None:
            attempts.append(uid)
            if len(attempts) < 3:
                raise Unavailable("no answer")
            await report(uid, pods)

        monkeypatch.setattr(here.service, "set_claim_pods", away)
        here.prepared("a")
        await advance_until(lambda: len(here.service.pods) == 1)
