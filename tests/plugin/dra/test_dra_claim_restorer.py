"""A claim that only the kubelet takes for prepared is handed over again, and never while the kubelet may still call for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from plugin.cluster.errors import ApiUnavailable
from plugin.dra.claim_driver import ClaimDriverTimes
from plugin.dra.claim_restorer import ClaimRestorer, RestorerTimes
from plugin.dra.claim_service import ClaimToRestore, ReleaseProgress
from plugin.logs import create_logger
from scrubber.domain.errors import InvalidRequest, NotReady, Quarantined
from tests.dra_collaborators import allocated_claim
from tests.plugin.dra.test_dra_calls import DRIVER, ONE, TWO, Node, device, node
from tests.plugin_collaborators import DEADLINE

QUIET = 100.0
TIMES = ClaimDriverTimes(call=DEADLINE, margin=0.0, retry=0.01, quiet=QUIET)
LISTED = ClaimToRestore(DRIVER, ONE.namespace, ONE.name)


class Clock:
    """Monotonic seconds of the driver, which the test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def joined_claim(short_tmp: Path, clock: Clock) -> AsyncIterator[Node]:
    """Provide a driver whose claim has been released, while the kubelet lists it for a pod that joined it."""
    async with node(short_tmp, device(0), times=TIMES, clock=clock) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0", pods=("joined",)))
        await here.prepare(ONE)
        here.service.progress = {ONE.uid: ReleaseProgress(done=False, waits_for="Device SIM-0 is being scrubbed.")}
        assert (await here.unprepare(ONE))[ONE.uid].error
        here.service.prepared.clear()  # the scrub has ended, and the kubelet makes no further call
        here.service.unprepared = [LISTED]
        assert here.specs() == {}
        yield here


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def rounds(here: Node, clock: Clock, *registered: bool) -> None:
    """Let the restorer look after each 52 seconds of its clock, while this instance is registered or not."""
    looks = iter(registered)

    class Enough(Exception):
        """No look is left."""

    def is_registered() -> bool:
        clock.now += RestorerTimes().relist
        for each in looks:
            return each
        raise Enough

    restorer = ClaimRestorer(
        DRIVER,
        here.service,
        here.driver,
        is_registered=is_registered,
        times=RestorerTimes(relist=0.0),
        log=create_logger("json", "info", here.log),
        clock=clock,
    )
    with pytest.raises(Enough):
        await restorer.run()


async def test_claim_that_a_pod_joined_between_two_releases_is_handed_over_again(short_tmp: Path, clock: Clock) -> None:
    async with joined_claim(short_tmp, clock) as here:
        await rounds(here, clock, True, True)
        assert here.service.restores == [False]  # not registered for long enough
        await rounds(here, clock, True, True, True)
        assert here.service.restores == [False, True]
        assert [each.name for each in here.service.requests[-1][2]] == ["joined"]
        (spec,) = here.specs().values()
        assert spec["devices"]
        (event,) = here.events("claim.restored")
        assert (event["claim"], event["claim_uid"]) == (str(ONE), ONE.uid)


async def test_service_learns_that_a_claim_has_no_specification_only_when_it_has_none(
    short_tmp: Path, clock: Clock
) -> None:
    async with joined_claim(short_tmp, clock) as here:
        assert here.service.withdrawn == [
            True,
            False,
            True,
        ]  # prepared; recorded as released; then without specification
        await here.prepare(ONE)
        await here.prepare(ONE)
        assert here.service.withdrawn[3:] == [True, False]


async def test_claim_is_left_alone_while_the_kubelet_may_repeat_its_call(short_tmp: Path, clock: Clock) -> None:
    async with joined_claim(short_tmp, clock) as here:
        clock.now += QUIET - 1.0
        await here.driver.restore(ONE.namespace, ONE.name)
        await here.unprepare(ONE)
        clock.now += QUIET - 1.0
        await here.driver.restore(ONE.namespace, ONE.name)
        assert here.service.restores == [False]


async def test_claim_is_quiet_neither_during_a_call_nor_right_after_a_long_one(short_tmp: Path, clock: Clock) -> None:
    quiet: list[bool] = []

    async def take_long(uid: str) -> None:
        quiet.append(here.driver.is_quiet(ONE.namespace, ONE.name))
        clock.now += QUIET

    async with joined_claim(short_tmp, clock) as here:
        clock.now += QUIET
        assert here.driver.is_quiet(ONE.namespace, ONE.name)
        here.service.on_release = take_long
        await here.unprepare(ONE)
        assert quiet[0] is False
        assert not here.driver.is_quiet(ONE.namespace, ONE.name)


async def test_kubelet_that_calls_while_the_claim_is_read_is_left_to_it(short_tmp: Path, clock: Clock) -> None:
    async def call(what: str) -> None:
        here.api.fault = _nothing
        await here.unprepare(ONE)

    async with joined_claim(short_tmp, clock) as here:
        clock.now += QUIET
        here.api.fault = call
        await here.driver.restore(ONE.namespace, ONE.name)
        assert here.service.restores == [False]


async def _nothing(what: str) -> None:
    return


async def test_instance_that_is_not_registered_and_claims_of_others_are_left_alone(
    short_tmp: Path, clock: Clock
) -> None:
    async with joined_claim(short_tmp, clock) as here:
        await rounds(here, clock, True, True, False, True, True, False)
        here.service.unprepared = [ClaimToRestore("other.example.com", ONE.namespace, ONE.name)]
        await rounds(here, clock, True, True, True)
        assert here.service.restores == [False]


async def test_claim_that_another_instance_has_prepared_keeps_its_specification_and_gets_no_second_hand_over(
    short_tmp: Path, clock: Clock
) -> None:
    async with joined_claim(short_tmp, clock) as here:
        clock.now += QUIET
        here.service.releasing.clear()
        here.service.prepared[ONE.uid] = ("SIM-0",)
        await here.driver.restore(ONE.namespace, ONE.name)
        assert here.service.restores == [False]


async def test_claim_with_admin_access_that_has_its_specification_is_left_alone(short_tmp: Path, clock: Clock) -> None:
    """The service remembers a limited number of them for a device: the one forgotten would take the place of the next."""
    async with node(short_tmp, device(0), times=TIMES, clock=clock) as here:
        here.api.add(allocated_claim(ONE, "main:sim-0", adminAccess=True))
        await here.prepare(ONE)
        here.service.prepared.clear()
        clock.now += QUIET
        await here.driver.restore(ONE.namespace, ONE.name)
        assert here.service.restores == [False]
        assert len(here.specs()) == 1
        await here.unprepare(ONE)
        assert here.specs() == {}
        clock.now += QUIET
        await here.driver.restore(ONE.namespace, ONE.name)
        assert here.service.restores == [False, True]


@pytest.mark.parametrize(
    "refusal", [NotReady("Wait.", public_message="Wait."), Quarantined("Broken.", public_message="Broken.")]
)
async def test_refused_claim_is_reported_and_tried_again(
    short_tmp: Path, clock: Clock, refusal: NotReady | Quarantined
) -> None:
    async def refuse(uid: str) -> None:
        if len(here.service.restores) < 3:
            raise refusal

    async with joined_claim(short_tmp, clock) as here:
        here.service.on_prepare = refuse
        await rounds(here, clock, True, True, True, True)
        assert here.service.restores == [False, True, True]
        assert [each["public_message"] for each in here.events("claim.refused")] == [refusal.public_message]
        assert len(here.events("claim.restored")) == 1


@pytest.mark.parametrize("gone", ["claim", "api-server", "uid", "service"])
async def test_what_cannot_be_read_is_tried_again_by_the_next_round(short_tmp: Path, clock: Clock, gone: str) -> None:
    async def away(what: str) -> None:
        raise ApiUnavailable("no answer")

    async def refuses(what: str) -> None:
        raise InvalidRequest("Another version.")

    async with joined_claim(short_tmp, clock) as here:
        known, list_claims = dict(here.api.claims), here.service.on_list
        match gone:
            case "claim":
                here.api.claims.clear()
            case "api-server":
                here.api.fault = away
            case "uid":
                here.api.claims = {key: each | {"metadata": {}} for key, each in known.items()}
            case _:
                here.service.on_list = refuses
        await rounds(here, clock, True, True, True)
        assert here.service.restores == [False]
        here.api.claims, here.api.fault, here.service.on_list = known, _nothing, list_claims
        await rounds(here, clock, True, True, True)
        assert here.service.restores == [False, True]


async def test_claims_are_restored_beside_each_other(short_tmp: Path, clock: Clock) -> None:
    both = asyncio.Barrier(2)

    async def meet(uid: str) -> None:
        await both.wait()

    async with joined_claim(short_tmp, clock) as here:
        here.api.add(allocated_claim(TWO, "main:sim-0"))
        here.service.unprepared = [LISTED, ClaimToRestore(DRIVER, TWO.namespace, TWO.name)]
        here.service.on_prepare = meet
        async with asyncio.timeout(DEADLINE):
            await rounds(here, clock, True, True, True)
        assert sorted(here.service.prepared) == sorted([ONE.uid, TWO.uid])
