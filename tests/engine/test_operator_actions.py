"""Resets by an operator: what blocks one, what does not, what it changes, and what is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import pytest

from scrubber.domain.device import Device
from scrubber.domain.errors import (
    DeviceBusy,
    DriverTimeout,
    InvalidRequest,
    LedgerFailure,
    NotReady,
    Refused,
    ScrubberError,
    Unavailable,
    Unreadable,
)
from scrubber.domain.evidence import Outcome, ScrubTrigger, Step, Verdict
from scrubber.domain.policy import BreakerRule, Enforcement, HealthRule, RecoveryRule, ResetMode
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.states import Health, Hygiene, RecoveryMethod
from scrubber.engine.node import Node
from scrubber.engine.views import ScrubUpdate
from scrubber.ports.device import Resetter
from scrubber.ports.record import Event
from tests.world.asking import admitted, ask, started
from tests.world.kubelet import Gone
from tests.world.life import Killed
from tests.world.timeline import in_virtual_time
from tests.world.vault import CrashPoint
from tests.world.world import DEFAULT, World, a_world

WHY, WHO = "hangs, ticket 4711", "uid:1000"
SLOWLY = replace(DEFAULT, recovery=RecoveryRule(initial_backoff=7200.0, max_backoff=7200.0))
"""An automatic recovery starts only after two hours: any earlier effect is the operator's."""


async def reset(world: World, number: int = 0, reason: str = WHY) -> list[ScrubUpdate]:
    """Order a reset as an operator and return all its updates, to its end."""
    return [each async for each in world.node.actions.reset(str(number), reason, WHO)]


def ordering(world: World, number: int = 0) -> asyncio.Task[list[ScrubUpdate]]:
    """Order a reset as a task of the service, which ends with it."""
    assert world.service is not None
    return world.service.life.start(reset(world, number), "a person's reset")


def told(world: World, name: str = "operator.reset") -> list[Event]:
    """Return the audit events of that name."""
    return [event for event in world.vault.events if event.name == name]


async def struck(world: World, xid: int = 95, number: int = 0) -> None:
    """Make the device report an XID, and wait until it is withdrawn."""
    world.gpu(number).came(xid)
    world.signal(number)
    await world.until(lambda: not world.record(number).advertised, within=5.0)


async def under_way(world: World, number: int = 0) -> None:
    await world.until(lambda: world.controller(number).state.job is not None, within=5.0)


@asynccontextmanager
async def a_world_with_a_slow_scrub(devices: int = 1, number: int = 0) -> AsyncIterator[World]:
    """Provide a world in which a slow scrub of one device is in progress."""
    async with a_world(devices) as world:
        world.gpu(number).slow = 100.0
        assert world.service is not None
        scrubbing = asyncio.create_task(world.service.scrub(world.gpu(number).id))
        await under_way(world, number)
        yield world
        world.gpu(number).slow = 1.0
        await world.until(scrubbing.done)


# -- effects -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_operator_reset_resets_the_device_first_and_then_scrubs_and_certifies_it() -> None:
    async with a_world(devices=2) as world:
        before = world.record().certificate
        news = await reset(world)
        finished, certificate = news[-1].finished, news[-1].certificate
        assert finished is not None
        assert certificate is not None
        assert (finished.outcome, finished.trigger, finished.actor) == (Outcome.PASSED, ScrubTrigger.ON_DEMAND, WHO)
        steps = [step.step for step in finished.steps if step.verdict is Verdict.PASSED]
        assert steps.index(Step.HOLDERS) < steps.index(Step.RESET) < steps.index(Step.MEMORY)
        assert "reset: done" in certificate.covered
        assert world.gpu().resets == 1
        assert (world.record().hygiene, world.record().certificate) == (Hygiene.CLEAN, certificate)
        assert before is not None
        assert certificate.sequence > before.sequence
        assert world.gpu(1).resets == 0


@in_virtual_time
async def test_updates_of_an_operator_reset_belong_to_one_scrub_and_are_never_marked_as_joined() -> None:
    async with a_world(devices=1) as world:
        news = await reset(world)
        assert len({each.scrub for each in news}) == 1
        assert Step.RESET in [each.step for each in news]
        assert not any(each.joined for each in news)
        assert [each.finished is not None for each in news].count(True) == 1


@in_virtual_time
async def test_audit_log_names_operator_reason_and_scrub_of_a_reset() -> None:
    async with a_world(devices=1) as world:
        news = await reset(world)
        (event,) = told(world)
        assert (event.device, event.scrub, event.actor, dict(event.fields)) == (
            world.gpu().id,
            news[0].scrub,
            WHO,
            {"reason": WHY},
        )
        names = [each.name for each in world.vault.events if each.scrub == news[0].scrub]
        assert names[:2] == ["operator.reset", "scrub.started"]


@in_virtual_time
async def test_operator_reset_voids_the_certificate_and_starts_are_refused_meanwhile() -> None:
    async with a_world(devices=1) as world:
        going = ordering(world)
        await under_way(world)
        assert world.record().certificate is None
        assert world.record().hygiene is Hygiene.SCRUBBING
        tenant = await admitted(world)
        assert isinstance(await ask_now(world, tenant), NotReady)
        await world.until(going.done)


async def ask_now(world: World, tenant: object) -> ScrubberError:
    with pytest.raises(ScrubberError) as refused:
        await ask(world, tenant, wait=0.0)  # type: ignore[arg-type]
    return refused.value


@in_virtual_time
async def test_start_during_an_operator_reset_joins_its_scrub_and_gets_the_device_once_certified() -> None:
    async with a_world(devices=1) as world:
        going = ordering(world)
        await under_way(world)
        (granted,) = await ask(world, await admitted(world))
        assert going.done()
        assert world.gpu().resets == 1
        certificate = going.result()[-1].certificate
        assert certificate is not None
        assert granted.certificate is not None
        assert world.vault.certificates[granted.certificate].rests_on == certificate.id


@in_virtual_time
async def test_device_reset_together_with_another_is_certified_again() -> None:
    async with a_world(devices=2) as world:
        world.gpu(0).together = (world.gpu(1).id,)
        before = world.record(1).certificate
        await reset(world)
        assert world.gpu(1).resets == 1
        await world.until(world.settled)
        after = world.record(1).certificate
        assert before is not None
        assert after is not None
        assert after.sequence > before.sequence


@in_virtual_time
async def test_operator_reset_is_carried_out_under_an_observing_policy() -> None:
    async with a_world(devices=1, policy=replace(DEFAULT, enforcement=Enforcement.OBSERVE)) as world:
        await reset(world)
        assert world.gpu().resets == 1


@in_virtual_time
async def test_failed_operator_reset_quarantines_the_device_with_the_cause() -> None:
    async with a_world(devices=1, policy=SLOWLY) as world:
        world.gpu().reset_fails = "it did not come back"
        finished = (await reset(world))[-1].finished
        assert finished is not None
        assert finished.outcome is Outcome.FAILED
        cause = world.record().cause
        assert cause is not None
        assert (world.record().health, cause.code) == (Health.QUARANTINED, "reset-failed")
        assert "it did not come back" in cause.message


# -- blockers ----------------------------------------------------------------------------------------------------------


def nothing_was_done(world: World) -> bool:
    return not told(world) and all(gpu.resets == 0 for gpu in world.matter.gpus.values())


@in_virtual_time
async def test_operator_reset_of_a_device_in_use_is_refused_with_the_pod_and_leaves_the_tenant_running() -> None:
    async with a_world(devices=1) as world:
        tenant = await started(world, "acme", "train-0")
        before = world.record()
        with pytest.raises(DeviceBusy, match=r"in use by acme/train-0, held by PID \d+ \(python train.py\)"):
            await reset(world)
        assert tenant.first is not None
        assert tenant.first.alive
        assert world.record() == before
        assert nothing_was_done(world)


@in_virtual_time
async def test_operator_reset_that_includes_a_device_in_use_is_refused() -> None:
    async with a_world(devices=2) as world:
        world.gpu(0).together = (world.gpu(1).id,)
        tenant = await started(world, "acme", "train-0", 1)
        before = world.record(0), world.record(1)
        with pytest.raises(DeviceBusy, match=rf"Device 1 \({world.gpu(1).id}\) is in use by acme/train-0: wait"):
            await reset(world, 0)
        assert tenant.first is not None
        assert tenant.first.alive
        assert (world.record(0), world.record(1)) == before
        assert nothing_was_done(world)


@pytest.mark.parametrize("scrubbed", [0, 1])
@in_virtual_time
async def test_operator_reset_is_refused_while_a_device_of_the_reset_group_is_being_scrubbed(scrubbed: int) -> None:
    async with a_world_with_a_slow_scrub(devices=2, number=scrubbed) as world:
        world.gpu(0).together = (world.gpu(1).id,)
        job = world.controller(scrubbed).state.job
        assert job is not None
        with pytest.raises(
            DeviceBusy, match=rf"Device {scrubbed} .* is being scrubbed \({job.id}\): wait until that is over"
        ):
            await reset(world, 0)
        assert nothing_was_done(world)
        world.gpu(0).together = ()


@in_virtual_time
async def test_second_of_two_simultaneous_operator_resets_is_refused() -> None:
    """Both callers checked before either began: the controller decides under its lock."""
    async with a_world(devices=1) as world:
        orders = [ordering(world), ordering(world)]
        await world.until(lambda: all(order.done() for order in orders))
        refused = [order.exception() for order in orders if order.exception() is not None]
        assert [type(each) for each in refused] == [DeviceBusy]
        assert "being scrubbed" in str(refused[0])
        assert world.gpu().resets == 1
        assert len(told(world)) == 1


@in_virtual_time
async def test_operator_reset_during_the_commit_of_a_grant_is_refused_because_the_device_is_in_use() -> None:
    """The grant is durable and not applied yet: a reader still sees a clean, unassigned device."""
    async with a_world(devices=1) as world:
        orders: list[asyncio.Task[list[ScrubUpdate]]] = []
        world.vault.granting = lambda: orders.append(ordering(world))
        await ask(world, await admitted(world))
        await world.until(lambda: bool(orders) and orders[0].done())
        assert isinstance(orders[0].exception(), DeviceBusy | NotReady)
        assert world.record().hygiene is Hygiene.IN_USE
        assert nothing_was_done(world)


@in_virtual_time
async def test_operator_reset_is_refused_by_a_policy_that_never_resets() -> None:
    async with a_world(devices=1, policy=replace(DEFAULT, reset=ResetMode.NEVER)) as world:
        before = world.record()
        with pytest.raises(Refused, match="never reset"):
            await reset(world)
        assert world.record() == before
        assert nothing_was_done(world)


@pytest.mark.parametrize("use", [ResetMode.BEST_EFFORT, ResetMode.REQUIRED])
@in_virtual_time
async def test_operator_reset_without_a_reset_mechanism_is_refused_with_the_reason_and_leaves_the_device_in_service(
    use: ResetMode,
) -> None:
    async with a_world(devices=1, policy=replace(DEFAULT, reset=use)) as world:
        world.gpu().reset_missing = "the node is a virtual machine"
        resets, before = world.gpu().resets, world.record()
        with pytest.raises(Refused, match="cannot be reset here: the node is a virtual machine"):
            await reset(world)
        assert world.record() == before
        assert (world.gpu().resets, told(world)) == (resets, [])


@dataclass
class Planning:
    """:class:`scrubber.ports.Resetter` that only plans, or refuses to."""

    answer: ScrubberError

    async def plan(self, device: Device) -> ResetPlan:
        raise self.answer

    async def reset(self, device: Device, deadline: float) -> None:
        raise AssertionError("nobody could say what it would do")


def node_with(world: World, resetter: Resetter) -> Node:
    """Return a node with the controllers of ``world``, whose resets are planned by ``resetter``."""
    assert world.service is not None
    node = Node(
        dependencies=replace(world.service.dependencies, resetter=resetter),
        service_view=world.node.service_view,
        epoch="epoch-1",
    )
    for controller in world.node.devices.controllers.values():
        node.devices.add(controller)
    return node


@pytest.mark.parametrize("answer", [DriverTimeout("no answer"), Unreadable("no sense"), Unavailable("nobody there")])
@in_virtual_time
async def test_operator_reset_is_refused_when_no_reset_plan_can_be_made(answer: ScrubberError) -> None:
    async with a_world(devices=1) as world:
        before = world.record()
        with pytest.raises(type(answer)):
            await anext(node_with(world, Planning(answer)).actions.reset("0", WHY, WHO))
        assert world.record() == before
        assert nothing_was_done(world)


@pytest.mark.parametrize(("device", "reason"), [("7", WHY), ("GPU-", WHY), ("0", ""), ("0", " \n")])
@in_virtual_time
async def test_operator_reset_without_a_device_or_a_reason_is_refused(device: str, reason: str) -> None:
    async with a_world(devices=2) as world:
        with pytest.raises(InvalidRequest):
            await anext(world.node.actions.reset(device, reason, WHO))
        assert nothing_was_done(world)


@in_virtual_time
async def test_operator_reset_that_cannot_be_stored_is_not_carried_out() -> None:
    async with a_world(devices=1) as world:
        world.vault.refuses = "The disk is full."
        with pytest.raises(LedgerFailure):
            await reset(world)
        await world.run(30.0)
        world.vault.refuses = None
        await world.until(world.settled)
        assert nothing_was_done(world)


# -- what does not block it --------------------------------------------------------------------------------------------


USED_UP = {
    "the breaker": replace(SLOWLY, breaker=BreakerRule(max_resets=0, window=900.0)),
    "a pause": SLOWLY,
}


@pytest.mark.parametrize("limit", USED_UP)
@in_virtual_time
async def test_operator_reset_ignores_the_breaker_and_the_recovery_backoff(limit: str) -> None:
    async with a_world(devices=1, policy=USED_UP[limit]) as world:
        await struck(world)
        await world.run(60.0)
        assert (world.record().advertised, world.gpu().resets) == (False, 0)
        finished = (await reset(world))[-1].finished
        assert finished is not None
        assert finished.outcome is Outcome.PASSED
        assert world.gpu().resets == 1


@pytest.mark.parametrize("day", [{"max_resets_per_day": 1}, {"max_attempts_per_day": 1}], ids=str)
@in_virtual_time
async def test_operator_reset_ignores_the_daily_limits_of_recovery(day: dict[str, int]) -> None:
    """All faults came under one tenant, so automatic recovery waits for the next day: an operator need not wait."""
    policy = replace(DEFAULT, recovery=RecoveryRule(**day))
    async with a_world(devices=1, policy=policy) as world:
        for number in range(2):
            tenant = await started(world, "acme", f"train-{number}")
            await struck(world)
            world.kubelet.delete(tenant)
            await world.run(120.0)
        assert world.record().health is Health.QUARANTINED
        cause = world.record().cause
        assert cause is not None
        assert "rests until a day has passed" in cause.message
        assert world.gpu().resets == 1
        await reset(world)
        assert world.gpu().resets == 2
        await world.until(lambda: world.record().health is Health.HEALTHY)


@in_virtual_time
async def test_number_of_operator_resets_is_unlimited() -> None:
    few = replace(DEFAULT, breaker=BreakerRule(max_resets=1, window=900.0), recovery=RecoveryRule(max_resets_per_day=1))
    async with a_world(devices=1, policy=few) as world:
        for _ in range(4):
            finished = (await reset(world))[-1].finished
            assert finished is not None
            assert finished.outcome is Outcome.PASSED
        assert world.gpu().resets == 4
        assert world.record().health is Health.HEALTHY


@in_virtual_time
async def test_operator_reset_does_not_count_towards_the_automatic_resets() -> None:
    """An operator's successful reset is recorded as an attempt, and does not use up the service's one reset."""
    one = replace(DEFAULT, breaker=BreakerRule(max_resets=1, window=900.0), recovery=SLOWLY.recovery)
    async with a_world(devices=1, policy=one) as world:
        await struck(world)
        await reset(world)
        (attempt,) = world.record().recovery_attempts
        assert (attempt.reset, attempt.operator_ordered) == (True, True)
        await world.until(lambda: world.record().health is Health.HEALTHY)
        await struck(world)
        await world.until(lambda: world.gpu().resets == 2, within=4 * 7200.0)
        assert [each.operator_ordered for each in world.record().recovery_attempts] == [True, False]


# -- health ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_operator_reset_puts_a_device_that_owes_a_reset_on_probation() -> None:
    async with a_world(devices=1, policy=SLOWLY) as world:
        await struck(world)
        assert world.record().must_reset
        await reset(world)
        assert world.record().health is Health.PROBATION
        assert not world.record().must_reset
        await world.until(lambda: world.record().health is Health.HEALTHY)
        assert world.gpu().resets == 1


@in_virtual_time
async def test_operator_reset_puts_a_device_quarantined_for_a_scrub_on_probation() -> None:
    async with a_world(devices=1, policy=SLOWLY) as world:
        world.gpu().slow = 1e6
        assert world.service is not None
        await world.service.scrub(world.gpu().id)
        cause = world.record().cause
        assert cause is not None
        assert cause.recovery_method is RecoveryMethod.SCRUB
        world.gpu().slow = 1.0
        await reset(world)
        assert world.record().health is Health.PROBATION
        assert world.gpu().resets == 1


@pytest.mark.parametrize("over", [True, False])
@in_virtual_time
async def test_operator_reset_puts_a_device_with_a_transient_condition_on_probation_once_the_condition_has_passed(
    over: bool,
) -> None:
    hot = replace(SLOWLY, health=HealthRule(quarantine_after={"too-hot": 1.0}))
    async with a_world(devices=1, policy=hot) as world:
        world.gpu().celsius = 120
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        if over:
            world.gpu().celsius = 40
        await reset(world)
        assert world.gpu().resets == 1
        assert world.record().health is (Health.PROBATION if over else Health.QUARANTINED)


@pytest.mark.parametrize("faulted", [False, True])
@in_virtual_time
async def test_device_quarantined_by_an_operator_stays_quarantined_after_a_reset_and_owes_no_reset(
    faulted: bool,
) -> None:
    async with a_world(devices=1, policy=SLOWLY) as world:
        await world.node.actions.quarantine("0", "looks odd", "uid:7")
        if faulted:
            world.gpu().came(95)
            world.signal(0)
            await world.until(lambda: world.record().must_reset)
        cause = world.record().cause
        finished = (await reset(world))[-1].finished
        assert finished is not None
        assert finished.outcome is Outcome.PASSED
        record = world.record()
        assert (record.health, record.cause, record.must_reset) == (Health.QUARANTINED, cause, False)
        await world.run(7200.0)
        assert world.record().health is Health.QUARANTINED
        await world.node.actions.unquarantine("0", "was reset", WHO)
        await world.until(lambda: world.record().health is Health.HEALTHY)
        assert world.gpu().resets == 1


@in_virtual_time
async def test_condemned_device_stays_condemned_after_an_operator_reset_and_owes_no_reset() -> None:
    hopeless = replace(DEFAULT, recovery=RecoveryRule(max_attempts=2))
    async with a_world(devices=1, policy=hopeless) as world:
        world.gpu().reset_fails = "it did not come back"
        await struck(world)
        await world.until(lambda: world.record().health is Health.CONDEMNED)
        assert world.record().must_reset
        world.gpu().reset_fails = None
        await reset(world)
        assert (world.record().health, world.record().must_reset) == (Health.CONDEMNED, False)
        await world.run(7200.0)
        assert world.record().health is Health.CONDEMNED
        assert world.gpu().resets == 1


@in_virtual_time
async def test_device_that_needs_a_reboot_stays_quarantined_after_an_operator_reset() -> None:
    async with a_world(devices=1) as world:
        await struck(world, xid=79)
        await reset(world)
        cause = world.record().cause
        assert cause is not None
        assert (world.record().health, cause.recovery_method) == (Health.QUARANTINED, RecoveryMethod.REBOOT)


@in_virtual_time
async def test_failed_operator_reset_of_a_quarantined_device_costs_a_recovery_attempt() -> None:
    async with a_world(devices=1, policy=SLOWLY) as world:
        await struck(world)
        world.gpu().reset_fails = "it did not come back"
        await reset(world)
        assert world.record().health is Health.QUARANTINED
        assert world.record().failures == 1
        assert world.record().must_reset


@in_virtual_time
async def test_operator_reset_on_probation_clears_the_owed_reset() -> None:
    """An operator released the device before it was reset."""
    quiet = replace(DEFAULT, recovery=replace(SLOWLY.recovery, probation_interval=600.0))
    async with a_world(devices=1, policy=quiet) as world:
        await world.node.actions.quarantine("0", "looks odd", "uid:7")
        world.gpu().came(95)
        world.signal(0)
        await world.until(lambda: world.record().must_reset)
        await world.node.actions.unquarantine("0", "try it", "uid:7")
        await reset(world)
        assert not world.record().must_reset
        assert world.record().health is Health.PROBATION


@in_virtual_time
async def test_release_does_not_return_a_device_whose_cause_of_quarantine_persists() -> None:
    """Otherwise the device, being the only one out, would use up the breaker's share and so keep itself in service."""
    narrow = replace(SLOWLY, health=HealthRule(quarantine_after={"power-brake": 1.0}))
    async with a_world(devices=1, policy=narrow) as world:
        world.gpu().conditions["power-brake"] = "0x80"
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        so_far = len(world.laws.health.past)
        await world.node.actions.unquarantine("0", WHY, WHO)
        await world.until(lambda: world.record().health is Health.QUARANTINED)
        assert not any(record.advertised for _, record in world.laws.health.past[so_far:])


# -- callers that disconnect, and services that die --------------------------------------------------------------------


@in_virtual_time
async def test_operator_reset_continues_after_its_caller_disconnects() -> None:
    async with a_world(devices=1) as world:
        order = asyncio.create_task(reset(world))
        await under_way(world)
        order.cancel()
        await asyncio.wait({order})
        assert world.controller().state.job is not None
        await world.until(world.settled)
        assert world.gpu().resets == 1
        assert told(world, "scrub.finished")[-1].fields["outcome"] == "passed"


@pytest.mark.parametrize("turns", range(16))
@in_virtual_time
async def test_operator_reset_whose_caller_is_cancelled_is_stored_and_carried_out_or_never_started(turns: int) -> None:
    async with a_world(devices=1) as world:
        order = asyncio.create_task(reset(world))
        for _ in range(turns):
            await asyncio.sleep(0)
        order.cancel()
        with suppress(asyncio.CancelledError):
            await order
        await world.run(60.0)
        assert world.settled()
        assert world.gpu().resets == len(told(world))


async def killed(order: asyncio.Task[list[ScrubUpdate]]) -> bool:
    """Return whether the service died while it executed ``order``."""
    with suppress(Gone, Killed, asyncio.CancelledError):
        await order
        return False
    return True


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("write", [1, 2])
@in_virtual_time
async def test_sigkill_at_any_write_of_an_operator_reset_leaves_a_dirty_device_that_the_next_service_scrubs(
    write: int, durable: bool
) -> None:
    async with a_world(devices=1, policy=SLOWLY) as world:
        world.vault.point = CrashPoint(write, durable)
        assert await killed(ordering(world))  # at its start or at its end: nothing else is written
        finished = [each for each in told(world, "scrub.finished") if each.actor == WHO]
        assert (world.record().hygiene is Hygiene.CLEAN) is (not told(world) or bool(finished))
        resets = world.gpu().resets
        await world.start_service()
        since = [record for _, record in world.laws.health.past if record.version >= world.record().version]
        assert since[0].hygiene is Hygiene.DIRTY
        await world.until(world.settled)
        assert world.record().health is Health.HEALTHY
        assert world.gpu().resets == resets  # an operator's order does not carry over to the next service


@pytest.mark.parametrize("seconds", [0.001, 0.5, 1.9, 2.1, 2.5])
@in_virtual_time
async def test_sigkill_during_an_operator_reset_keeps_the_device_quarantined_and_its_reset_owed(seconds: float) -> None:
    async with a_world(devices=1, policy=SLOWLY) as world:
        await struck(world)
        order = ordering(world)
        await world.run(seconds)
        assert not order.done()
        world.kill()
        await asyncio.wait({order})
        assert world.record().hygiene is not Hygiene.CLEAN
        await world.start_service()
        assert world.record().health is Health.QUARANTINED
        assert world.record().must_reset
        assert world.record().hygiene is Hygiene.DIRTY


@in_virtual_time
async def test_stopped_service_abandons_an_operator_reset_and_leaves_the_device_dirty() -> None:
    async with a_world(devices=1) as world:
        order = ordering(world)
        await under_way(world)
        assert world.service is not None
        await world.service.stop()
        await asyncio.wait({order})
        assert world.record().hygiene is Hygiene.DIRTY
        assert told(world, "scrub.finished")[-1].fields["outcome"] == "abandoned"
