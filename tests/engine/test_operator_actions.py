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
from tests.simulation.cluster import DEFAULT, SimulatedCluster, leisurely_cluster, simulated_cluster
from tests.simulation.kubelet import Gone
from tests.simulation.ledger_store import CrashPoint
from tests.simulation.life import Killed
from tests.simulation.start_requests import admitted, request_start, started
from tests.simulation.timeline import in_virtual_time

WHY, WHO = "hangs, ticket 4711", "uid:1000"
SLOWLY = replace(DEFAULT, recovery=RecoveryRule(initial_backoff=7200.0, max_backoff=7200.0))
"""An automatic recovery starts only after two hours: any earlier effect is the operator's."""


async def reset(cluster: SimulatedCluster, number: int = 0, reason: str = WHY) -> list[ScrubUpdate]:
    """Order a reset as an operator and return all its updates, to its end."""
    return [each async for each in cluster.node.actions.reset(str(number), reason, WHO)]


def ordering(cluster: SimulatedCluster, number: int = 0) -> asyncio.Task[list[ScrubUpdate]]:
    """Order a reset as a task of the service, which ends with it."""
    assert cluster.service is not None
    return cluster.service.life.start(reset(cluster, number), "a person's reset")


def logged(cluster: SimulatedCluster, name: str = "operator.reset") -> list[Event]:
    """Return the audit events of that name."""
    return [event for event in cluster.ledger_store.events if event.name == name]


async def struck(cluster: SimulatedCluster, xid: int = 95, number: int = 0) -> None:
    """Make the device report an XID, and wait until it is withdrawn."""
    cluster.gpu(number).report_xid(xid)
    cluster.signal(number)
    await cluster.until(lambda: not cluster.record(number).advertised, within=5.0)


async def under_way(cluster: SimulatedCluster, number: int = 0) -> None:
    await cluster.until(lambda: cluster.controller(number).state.job is not None, within=5.0)


@asynccontextmanager
async def cluster_with_a_slow_scrub(devices: int = 1, number: int = 0) -> AsyncIterator[SimulatedCluster]:
    """Provide a simulated cluster in which a slow scrub of one device is in progress."""
    async with leisurely_cluster(devices) as cluster:
        cluster.gpu(number).slow = 100.0
        assert cluster.service is not None
        scrubbing = asyncio.create_task(cluster.service.scrub(cluster.gpu(number).id))
        await under_way(cluster, number)
        yield cluster
        cluster.gpu(number).slow = 1.0
        await cluster.until(scrubbing.done)


# -- effects -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_operator_reset_resets_the_device_first_and_then_scrubs_and_certifies_it() -> None:
    async with leisurely_cluster(devices=2) as cluster:
        before = cluster.record().certificate
        updates = await reset(cluster)
        finished, certificate = updates[-1].finished, updates[-1].certificate
        assert finished is not None
        assert certificate is not None
        assert (finished.outcome, finished.trigger, finished.actor) == (Outcome.PASSED, ScrubTrigger.ON_DEMAND, WHO)
        steps = [step.step for step in finished.steps if step.verdict is Verdict.PASSED]
        assert steps.index(Step.HOLDERS) < steps.index(Step.RESET) < steps.index(Step.MEMORY)
        assert "reset: done" in certificate.covered
        assert cluster.gpu().resets == 1
        assert (cluster.record().hygiene, cluster.record().certificate) == (Hygiene.CLEAN, certificate)
        assert before is not None
        assert certificate.sequence > before.sequence
        assert cluster.gpu(1).resets == 0


@in_virtual_time
async def test_updates_of_an_operator_reset_belong_to_one_scrub_and_are_never_marked_as_joined() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        updates = await reset(cluster)
        assert len({each.scrub for each in updates}) == 1
        assert Step.RESET in [each.step for each in updates]
        assert not any(each.joined for each in updates)
        assert [each.finished is not None for each in updates].count(True) == 1


@in_virtual_time
async def test_audit_log_names_operator_reason_and_scrub_of_a_reset() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        updates = await reset(cluster)
        (event,) = logged(cluster)
        assert (event.device, event.scrub, event.actor, dict(event.fields)) == (
            cluster.gpu().id,
            updates[0].scrub,
            WHO,
            {"reason": WHY},
        )
        names = [each.name for each in cluster.ledger_store.events if each.scrub == updates[0].scrub]
        assert names[:2] == ["operator.reset", "scrub.started"]


@in_virtual_time
async def test_operator_reset_voids_the_certificate_and_starts_are_refused_meanwhile() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        going = ordering(cluster)
        await under_way(cluster)
        assert cluster.record().certificate is None
        assert cluster.record().hygiene is Hygiene.SCRUBBING
        tenant = await admitted(cluster)
        assert isinstance(await refusal_now(cluster, tenant), NotReady)
        await cluster.until(going.done)


async def refusal_now(cluster: SimulatedCluster, tenant: object) -> ScrubberError:
    with pytest.raises(ScrubberError) as refused:
        await request_start(cluster, tenant, wait=0.0)  # type: ignore[arg-type]
    return refused.value


@in_virtual_time
async def test_start_during_an_operator_reset_joins_its_scrub_and_gets_the_device_once_certified() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        going = ordering(cluster)
        await under_way(cluster)
        (granted,) = await request_start(cluster, await admitted(cluster))
        assert going.done()
        assert cluster.gpu().resets == 1
        certificate = going.result()[-1].certificate
        assert certificate is not None
        assert granted.certificate is not None
        assert cluster.ledger_store.certificates[granted.certificate].rests_on == certificate.id


@in_virtual_time
async def test_device_reset_together_with_another_is_certified_again() -> None:
    async with leisurely_cluster(devices=2) as cluster:
        cluster.gpu(0).together = (cluster.gpu(1).id,)
        before = cluster.record(1).certificate
        await reset(cluster)
        assert cluster.gpu(1).resets == 1
        await cluster.until(cluster.settled)
        after = cluster.record(1).certificate
        assert before is not None
        assert after is not None
        assert after.sequence > before.sequence


@in_virtual_time
async def test_operator_reset_is_carried_out_under_an_observing_policy() -> None:
    async with leisurely_cluster(devices=1, policy=replace(DEFAULT, enforcement=Enforcement.OBSERVE)) as cluster:
        await reset(cluster)
        assert cluster.gpu().resets == 1


@in_virtual_time
async def test_failed_operator_reset_quarantines_the_device_with_the_cause() -> None:
    async with leisurely_cluster(devices=1, policy=SLOWLY) as cluster:
        cluster.gpu().reset_fails = "it did not come back"
        finished = (await reset(cluster))[-1].finished
        assert finished is not None
        assert finished.outcome is Outcome.FAILED
        cause = cluster.record().cause
        assert cause is not None
        assert (cluster.record().health, cause.code) == (Health.QUARANTINED, "reset-failed")
        assert "it did not come back" in cause.message


# -- blockers ----------------------------------------------------------------------------------------------------------


def nothing_was_done(cluster: SimulatedCluster) -> bool:
    return not logged(cluster) and all(gpu.resets == 0 for gpu in cluster.process_table.gpus.values())


@in_virtual_time
async def test_operator_reset_of_a_device_in_use_is_refused_with_the_pod_and_leaves_the_tenant_running() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        tenant = await started(cluster, "acme", "train-0")
        before = cluster.record()
        with pytest.raises(DeviceBusy, match=r"in use by acme/train-0, held by PID \d+ \(python train.py\)"):
            await reset(cluster)
        assert tenant.first is not None
        assert tenant.first.alive
        assert cluster.record() == before
        assert nothing_was_done(cluster)


@in_virtual_time
async def test_operator_reset_that_includes_a_device_in_use_is_refused() -> None:
    async with leisurely_cluster(devices=2) as cluster:
        cluster.gpu(0).together = (cluster.gpu(1).id,)
        tenant = await started(cluster, "acme", "train-0", 1)
        before = cluster.record(0), cluster.record(1)
        with pytest.raises(DeviceBusy, match=rf"Device 1 \({cluster.gpu(1).id}\) is in use by acme/train-0: wait"):
            await reset(cluster, 0)
        assert tenant.first is not None
        assert tenant.first.alive
        assert (cluster.record(0), cluster.record(1)) == before
        assert nothing_was_done(cluster)


@pytest.mark.parametrize("scrubbed", [0, 1])
@in_virtual_time
async def test_operator_reset_is_refused_while_a_device_of_the_reset_group_is_being_scrubbed(scrubbed: int) -> None:
    async with cluster_with_a_slow_scrub(devices=2, number=scrubbed) as cluster:
        cluster.gpu(0).together = (cluster.gpu(1).id,)
        job = cluster.controller(scrubbed).state.job
        assert job is not None
        with pytest.raises(
            DeviceBusy, match=rf"Device {scrubbed} .* is being scrubbed \({job.id}\): wait until that has ended"
        ):
            await reset(cluster, 0)
        assert nothing_was_done(cluster)
        cluster.gpu(0).together = ()


@in_virtual_time
async def test_second_of_two_simultaneous_operator_resets_is_refused() -> None:
    """Both callers checked before either began: the controller decides under its lock."""
    async with leisurely_cluster(devices=1) as cluster:
        orders = [ordering(cluster), ordering(cluster)]
        await cluster.until(lambda: all(order.done() for order in orders))
        refused = [order.exception() for order in orders if order.exception() is not None]
        assert [type(each) for each in refused] == [DeviceBusy]
        assert "being scrubbed" in str(refused[0])
        assert cluster.gpu().resets == 1
        assert len(logged(cluster)) == 1


@in_virtual_time
async def test_operator_reset_during_the_commit_of_a_grant_is_refused_because_the_device_is_in_use() -> None:
    """The grant is durable and not applied yet: a reader still sees a clean, unassigned device."""
    async with leisurely_cluster(devices=1) as cluster:
        orders: list[asyncio.Task[list[ScrubUpdate]]] = []
        cluster.ledger_store.granting = lambda: orders.append(ordering(cluster))
        await request_start(cluster, await admitted(cluster))
        await cluster.until(lambda: bool(orders) and orders[0].done())
        assert isinstance(orders[0].exception(), DeviceBusy | NotReady)
        assert cluster.record().hygiene is Hygiene.IN_USE
        assert nothing_was_done(cluster)


@in_virtual_time
async def test_operator_reset_is_refused_by_a_policy_that_never_resets() -> None:
    async with leisurely_cluster(devices=1, policy=replace(DEFAULT, reset=ResetMode.NEVER)) as cluster:
        before = cluster.record()
        with pytest.raises(Refused, match="does not allow resets"):
            await reset(cluster)
        assert cluster.record() == before
        assert nothing_was_done(cluster)


@pytest.mark.parametrize("use", [ResetMode.BEST_EFFORT, ResetMode.REQUIRED])
@in_virtual_time
async def test_operator_reset_without_a_reset_mechanism_is_refused_with_the_reason_and_leaves_the_device_in_service(
    use: ResetMode,
) -> None:
    async with leisurely_cluster(devices=1, policy=replace(DEFAULT, reset=use)) as cluster:
        cluster.gpu().reset_missing = "the node is a virtual machine"
        resets, before = cluster.gpu().resets, cluster.record()
        with pytest.raises(Refused, match="cannot be reset on this node: the node is a virtual machine"):
            await reset(cluster)
        assert cluster.record() == before
        assert (cluster.gpu().resets, logged(cluster)) == (resets, [])


@dataclass
class Planning:
    """:class:`scrubber.ports.Resetter` that only plans, or refuses to."""

    answer: ScrubberError

    async def plan(self, device: Device) -> ResetPlan:
        raise self.answer

    async def reset(self, device: Device, deadline: float) -> None:
        raise AssertionError("reset without a plan")


def node_with(cluster: SimulatedCluster, resetter: Resetter) -> Node:
    """Return a node with the controllers of ``cluster``, whose resets are planned by ``resetter``."""
    assert cluster.service is not None
    node = Node(
        dependencies=replace(cluster.service.dependencies, resetter=resetter),
        service_view=cluster.node.service_view,
        epoch="epoch-1",
        yields=cluster.node.yields,
    )
    for controller in cluster.node.devices.controllers.values():
        node.devices.add(controller)
    return node


@pytest.mark.parametrize("answer", [DriverTimeout("no answer"), Unreadable("no sense"), Unavailable("no driver")])
@in_virtual_time
async def test_operator_reset_is_refused_when_no_reset_plan_can_be_made(answer: ScrubberError) -> None:
    async with leisurely_cluster(devices=1) as cluster:
        before = cluster.record()
        with pytest.raises(type(answer)):
            await anext(node_with(cluster, Planning(answer)).actions.reset("0", WHY, WHO))
        assert cluster.record() == before
        assert nothing_was_done(cluster)


@pytest.mark.parametrize(("device", "reason"), [("7", WHY), ("GPU-", WHY), ("0", ""), ("0", " \n")])
@in_virtual_time
async def test_operator_reset_without_a_device_or_a_reason_is_refused(device: str, reason: str) -> None:
    async with leisurely_cluster(devices=2) as cluster:
        with pytest.raises(InvalidRequest):
            await anext(cluster.node.actions.reset(device, reason, WHO))
        assert nothing_was_done(cluster)


@in_virtual_time
async def test_operator_reset_that_cannot_be_stored_is_not_carried_out() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        cluster.ledger_store.refuses = "The disk is full."
        with pytest.raises(LedgerFailure):
            await reset(cluster)
        await cluster.run(30.0)
        cluster.ledger_store.refuses = None
        await cluster.until(cluster.settled)
        assert nothing_was_done(cluster)


# -- what does not block it --------------------------------------------------------------------------------------------


USED_UP = {
    "the breaker": replace(SLOWLY, breaker=BreakerRule(max_resets=0, window=900.0)),
    "a pause": SLOWLY,
}


@pytest.mark.parametrize("limit", USED_UP)
@in_virtual_time
async def test_operator_reset_ignores_the_breaker_and_the_recovery_backoff(limit: str) -> None:
    async with leisurely_cluster(devices=1, policy=USED_UP[limit]) as cluster:
        await struck(cluster)
        await cluster.run(60.0)
        assert (cluster.record().advertised, cluster.gpu().resets) == (False, 0)
        finished = (await reset(cluster))[-1].finished
        assert finished is not None
        assert finished.outcome is Outcome.PASSED
        assert cluster.gpu().resets == 1


@pytest.mark.parametrize("day", [{"max_resets_per_day": 1}, {"max_attempts_per_day": 1}], ids=str)
@in_virtual_time
async def test_operator_reset_ignores_the_daily_limits_of_recovery(day: dict[str, int]) -> None:
    """All faults came under one tenant, so automatic recovery waits for the next day: an operator need not wait."""
    policy = replace(DEFAULT, recovery=RecoveryRule(**day))
    async with leisurely_cluster(devices=1, policy=policy) as cluster:
        for number in range(2):
            tenant = await started(cluster, "acme", f"train-{number}")
            await struck(cluster)
            cluster.kubelet.delete(tenant)
            await cluster.run(120.0)
        assert cluster.record().health is Health.QUARANTINED
        cause = cluster.record().cause
        assert cause is not None
        assert "recovery resumes 24 hours after the first of them" in cause.message
        assert cluster.gpu().resets == 1
        await reset(cluster)
        assert cluster.gpu().resets == 2
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)


@in_virtual_time
async def test_number_of_operator_resets_is_unlimited() -> None:
    few = replace(DEFAULT, breaker=BreakerRule(max_resets=1, window=900.0), recovery=RecoveryRule(max_resets_per_day=1))
    async with leisurely_cluster(devices=1, policy=few) as cluster:
        for _ in range(4):
            finished = (await reset(cluster))[-1].finished
            assert finished is not None
            assert finished.outcome is Outcome.PASSED
        assert cluster.gpu().resets == 4
        assert cluster.record().health is Health.HEALTHY


@in_virtual_time
async def test_operator_reset_does_not_count_towards_the_automatic_resets() -> None:
    """An operator's successful reset is recorded as an attempt, and does not use up the service's one reset."""
    one = replace(DEFAULT, breaker=BreakerRule(max_resets=1, window=900.0), recovery=SLOWLY.recovery)
    async with leisurely_cluster(devices=1, policy=one) as cluster:
        await struck(cluster)
        await reset(cluster)
        (attempt,) = cluster.record().recovery_attempts
        assert (attempt.reset, attempt.operator_ordered) == (True, True)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        await struck(cluster)
        await cluster.until(lambda: cluster.gpu().resets == 2, within=4 * 7200.0)
        assert [each.operator_ordered for each in cluster.record().recovery_attempts] == [True, False]


# -- health ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_operator_reset_puts_a_device_that_owes_a_reset_on_probation() -> None:
    async with leisurely_cluster(devices=1, policy=SLOWLY) as cluster:
        await struck(cluster)
        assert cluster.record().must_reset
        await reset(cluster)
        assert cluster.record().health is Health.PROBATION
        assert not cluster.record().must_reset
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        assert cluster.gpu().resets == 1


@in_virtual_time
async def test_operator_reset_puts_a_device_quarantined_for_a_scrub_on_probation() -> None:
    async with leisurely_cluster(devices=1, policy=SLOWLY) as cluster:
        cluster.gpu().slow = 1e6
        assert cluster.service is not None
        await cluster.service.scrub(cluster.gpu().id)
        cause = cluster.record().cause
        assert cause is not None
        assert cause.recovery_method is RecoveryMethod.SCRUB
        cluster.gpu().slow = 1.0
        await reset(cluster)
        assert cluster.record().health is Health.PROBATION
        assert cluster.gpu().resets == 1


@pytest.mark.parametrize("over", [True, False])
@in_virtual_time
async def test_operator_reset_puts_a_device_with_a_transient_condition_on_probation_once_the_condition_has_passed(
    over: bool,
) -> None:
    hot = replace(SLOWLY, health=HealthRule(quarantine_after={"too-hot": 1.0}))
    async with leisurely_cluster(devices=1, policy=hot) as cluster:
        cluster.gpu().celsius = 120
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        if over:
            cluster.gpu().celsius = 40
        await reset(cluster)
        assert cluster.gpu().resets == 1
        assert cluster.record().health is (Health.PROBATION if over else Health.QUARANTINED)


@pytest.mark.parametrize("faulted", [False, True])
@in_virtual_time
async def test_device_quarantined_by_an_operator_stays_quarantined_after_a_reset_and_owes_no_reset(
    faulted: bool,
) -> None:
    async with leisurely_cluster(devices=1, policy=SLOWLY) as cluster:
        await cluster.node.actions.quarantine("0", "looks odd", "uid:7")
        if faulted:
            cluster.gpu().report_xid(95)
            cluster.signal(0)
            await cluster.until(lambda: cluster.record().must_reset)
        cause = cluster.record().cause
        finished = (await reset(cluster))[-1].finished
        assert finished is not None
        assert finished.outcome is Outcome.PASSED
        record = cluster.record()
        assert (record.health, record.cause, record.must_reset) == (Health.QUARANTINED, cause, False)
        await cluster.run(7200.0)
        assert cluster.record().health is Health.QUARANTINED
        await cluster.node.actions.unquarantine("0", "was reset", WHO)
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY)
        assert cluster.gpu().resets == 1


@in_virtual_time
async def test_condemned_device_stays_condemned_after_an_operator_reset_and_owes_no_reset() -> None:
    hopeless = replace(DEFAULT, recovery=RecoveryRule(max_attempts=2))
    async with leisurely_cluster(devices=1, policy=hopeless) as cluster:
        cluster.gpu().reset_fails = "it did not come back"
        await struck(cluster)
        await cluster.until(lambda: cluster.record().health is Health.CONDEMNED)
        assert cluster.record().must_reset
        cluster.gpu().reset_fails = None
        await reset(cluster)
        assert (cluster.record().health, cluster.record().must_reset) == (Health.CONDEMNED, False)
        await cluster.run(7200.0)
        assert cluster.record().health is Health.CONDEMNED
        assert cluster.gpu().resets == 1


@in_virtual_time
async def test_device_that_needs_a_reboot_stays_quarantined_after_an_operator_reset() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        await struck(cluster, xid=79)
        await reset(cluster)
        cause = cluster.record().cause
        assert cause is not None
        assert (cluster.record().health, cause.recovery_method) == (Health.QUARANTINED, RecoveryMethod.REBOOT)


@in_virtual_time
async def test_failed_operator_reset_of_a_quarantined_device_costs_a_recovery_attempt() -> None:
    async with leisurely_cluster(devices=1, policy=SLOWLY) as cluster:
        await struck(cluster)
        cluster.gpu().reset_fails = "it did not come back"
        await reset(cluster)
        assert cluster.record().health is Health.QUARANTINED
        assert cluster.record().failures == 1
        assert cluster.record().must_reset


@in_virtual_time
async def test_operator_reset_on_probation_clears_the_owed_reset() -> None:
    """An operator released the device before it was reset."""
    quiet = replace(DEFAULT, recovery=replace(SLOWLY.recovery, probation_interval=600.0))
    async with leisurely_cluster(devices=1, policy=quiet) as cluster:
        await cluster.node.actions.quarantine("0", "looks odd", "uid:7")
        cluster.gpu().report_xid(95)
        cluster.signal(0)
        await cluster.until(lambda: cluster.record().must_reset)
        await cluster.node.actions.unquarantine("0", "try it", "uid:7")
        await reset(cluster)
        assert not cluster.record().must_reset
        assert cluster.record().health is Health.PROBATION


@in_virtual_time
async def test_quarantine_returns_why_the_device_was_out_of_service_already() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        quarantine = cluster.node.actions.quarantine
        assert (await quarantine("0", "looks odd", "uid:7"))[1] is None
        began = cluster.record().cause
        view, previous = await quarantine("0", "smells", "uid:8")
        assert previous is not None
        assert previous is began
        assert (previous.actor, previous.message) == ("uid:7", "looks odd")
        assert view.record.cause is not None
        assert view.record.cause.actor == "uid:8"


@in_virtual_time
async def test_release_does_not_return_a_device_whose_cause_of_quarantine_persists() -> None:
    """Otherwise the device, being the only one out, would use up the breaker's share and so keep itself in service."""
    narrow = replace(SLOWLY, health=HealthRule(quarantine_after={"power-brake": 1.0}))
    async with simulated_cluster(devices=1, policy=narrow) as cluster:
        cluster.gpu().conditions["power-brake"] = "0x80"
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        so_far = len(cluster.laws.health.past)
        await cluster.node.actions.unquarantine("0", WHY, WHO)
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        assert not any(record.advertised for _, record in cluster.laws.health.past[so_far:])


# -- callers that disconnect, and services that die --------------------------------------------------------------------


@in_virtual_time
async def test_operator_reset_continues_after_its_caller_disconnects() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        order = asyncio.create_task(reset(cluster))
        await under_way(cluster)
        order.cancel()
        await asyncio.wait({order})
        assert cluster.controller().state.job is not None
        await cluster.until(cluster.settled)
        assert cluster.gpu().resets == 1
        assert logged(cluster, "scrub.finished")[-1].fields["outcome"] == "passed"


@pytest.mark.parametrize("turns", range(16))
@in_virtual_time
async def test_operator_reset_whose_caller_is_cancelled_is_stored_and_carried_out_or_never_started(turns: int) -> None:
    async with leisurely_cluster(devices=1) as cluster:
        order = asyncio.create_task(reset(cluster))
        for _ in range(turns):
            await asyncio.sleep(0)
        order.cancel()
        with suppress(asyncio.CancelledError):
            await order
        await cluster.run(60.0)
        assert cluster.settled()
        assert cluster.gpu().resets == len(logged(cluster))


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
    async with leisurely_cluster(devices=1, policy=SLOWLY) as cluster:
        cluster.ledger_store.point = CrashPoint(write, durable)
        assert await killed(ordering(cluster))  # at its start or at its end: nothing else is written
        finished = [each for each in logged(cluster, "scrub.finished") if each.actor == WHO]
        assert (cluster.record().hygiene is Hygiene.CLEAN) is (not logged(cluster) or bool(finished))
        resets = cluster.gpu().resets
        await cluster.start_service()
        since = [record for _, record in cluster.laws.health.past if record.version >= cluster.record().version]
        assert since[0].hygiene is Hygiene.DIRTY
        await cluster.until(cluster.settled)
        assert cluster.record().health is Health.HEALTHY
        assert cluster.gpu().resets == resets  # an operator's order does not carry over to the next service


@pytest.mark.parametrize("seconds", [0.001, 0.5, 1.9, 2.1, 2.5])
@in_virtual_time
async def test_sigkill_during_an_operator_reset_keeps_the_device_quarantined_and_its_reset_owed(seconds: float) -> None:
    async with leisurely_cluster(devices=1, policy=SLOWLY) as cluster:
        await struck(cluster)
        order = ordering(cluster)
        await cluster.run(seconds)
        assert not order.done()
        cluster.kill()
        await asyncio.wait({order})
        assert cluster.record().hygiene is not Hygiene.CLEAN
        await cluster.start_service()
        assert cluster.record().health is Health.QUARANTINED
        assert cluster.record().must_reset
        assert cluster.record().hygiene is Hygiene.DIRTY


@in_virtual_time
async def test_stopped_service_abandons_an_operator_reset_and_leaves_the_device_dirty() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        order = ordering(cluster)
        await under_way(cluster)
        assert cluster.service is not None
        await cluster.service.stop()
        await asyncio.wait({order})
        assert cluster.record().hygiene is Hygiene.DIRTY
        assert logged(cluster, "scrub.finished")[-1].fields["outcome"] == "abandoned"
