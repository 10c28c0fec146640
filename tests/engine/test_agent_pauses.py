"""Agents that hold a device for good are paused for its reset, and restored afterwards, also after a crash of any party."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import pytest

from scrubber.domain.agent_pause import AgentPause, LabelChange, PauseOffer, PauseReport, PauseState, PauseWay
from scrubber.domain.errors import InvalidRequest, NotReady, Refused, Unavailable
from scrubber.domain.evidence import FindingCode, Outcome, PathKind, ScrubRecord, ScrubTrigger, Step
from scrubber.domain.node_record import YieldRequester
from scrubber.domain.policy import Limits, ResetMode
from scrubber.domain.states import Hygiene
from scrubber.domain.telemetry import HolderKind
from scrubber.engine import refusals
from scrubber.engine.yielding import DriverlessNode
from tests.simulation.cluster import DEFAULT, LEISURELY, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Gone
from tests.simulation.ledger_store import CrashPoint
from tests.simulation.life import Killed
from tests.simulation.process_table import Proc
from tests.simulation.service import Pace
from tests.simulation.start_requests import admitted, request_start
from tests.simulation.timeline import in_virtual_time

STRICT = replace(DEFAULT, reset=ResetMode.REQUIRED)
OFFERS = (PauseOffer(PauseWay.LABELS, ("set the node label monitoring to false",)),)
MONITORING = LabelChange("monitoring", "true", "false")
CORDON = LabelChange("cordon", None, "false")


class Operands:
    """Agents of the node that end while a label of the node says so, and the plugin that changes the label.

    Attributes:
        labels: of the node.
        stubborn: whether the agents ignore the label.
        deaf: whether the plugin does nothing.
        refusal: why the plugin cannot change labels; empty if it can.
    """

    def __init__(self, cluster: SimulatedCluster, devices: int) -> None:
        self.cluster = cluster
        self.devices = devices
        self.labels: dict[str, str] = {"monitoring": "true"}
        self.agents: list[Proc] = []
        self.stubborn = False
        self.deaf = False
        self.refusal = ""
        self.history: list[dict[str, str]] = []

    def start(self) -> None:
        for number in range(self.devices):
            gpu = self.cluster.gpu(number).id
            name = f"exporter-{number}"
            proc = self.cluster.process_table.start(
                name, f"{name}/main#1", "", mounted=frozenset({gpu}), agent=HolderKind.INFRASTRUCTURE
            )
            self.cluster.process_table.open(proc, gpu)
            self.agents.append(proc)

    def stop(self) -> None:
        for each in self.agents:
            each.killable = True
            self.cluster.process_table.end(each)
        self.agents.clear()

    async def control(self) -> None:
        """Start and end the agents by the label, as a DaemonSet with a node selector does."""
        while True:
            deployed = self.labels.get("monitoring") == "true" or self.stubborn
            if deployed and not self.agents:
                self.start()
            elif not deployed and self.agents:
                self.stop()
            await asyncio.sleep(3)

    async def plugin(self) -> None:
        """Act on the service's snapshots, as the plugin does; a service that is away is asked again."""
        while True:
            await asyncio.sleep(1)
            if not self.cluster.serving or self.deaf:
                continue
            try:
                await self._act(self.cluster.node.view().agent_pause)
            except (Gone, InvalidRequest):  # the service was killed, or the pause has ended meanwhile
                continue

    async def _act(self, pause: AgentPause | None) -> None:
        assert self.cluster.service is not None
        report_pause = self.cluster.service.report_pause
        if pause is None:
            await report_pause(PauseReport(OFFERS))
            return
        report = PauseReport(OFFERS, pause.id)
        if pause.ending:
            for each in reversed(pause.changes):
                self._set(each.key, each.before)
            await report_pause(replace(report, state=PauseState.RESTORED))
        elif self.refusal:
            await report_pause(replace(report, state=PauseState.FAILED, message=self.refusal))
        elif not pause.changes:
            await report_pause(replace(report, state=PauseState.PLANNED, changes=(CORDON, MONITORING)))
        else:
            for each in pause.changes:
                self._set(each.key, each.during)
            await report_pause(replace(report, state=PauseState.PAUSED))

    def _set(self, key: str, value: str | None) -> None:
        self.labels.pop(key, None)
        if value is not None:
            self.labels[key] = value
        self.history.append(dict(self.labels))


@asynccontextmanager
async def monitored(devices: int = 1, *, paused: bool = True, pace: Pace | None = None) -> AsyncIterator[Operands]:
    """Provide a cluster whose agents hold every device, and a plugin that offers to pause them."""
    async with simulated_cluster(devices, STRICT, pace=pace) as cluster:
        operands = Operands(cluster, devices)
        operands.start()
        tasks = [asyncio.ensure_future(operands.control())]
        if paused:
            tasks.append(asyncio.ensure_future(operands.plugin()))
            await cluster.until(lambda: bool(cluster.node.pauses.offers))
        yield operands
        for each in tasks:
            each.cancel()


async def scrubbed(cluster: SimulatedCluster, number: int = 0) -> ScrubRecord:
    job = await cluster.controller(number).scrubs.start(ScrubTrigger.ON_DEMAND)
    return await job.wait()


def events(cluster: SimulatedCluster) -> list[str]:
    return [event.name for event in cluster.ledger_store.events if event.name.startswith("agents.")]


def of_reset(record: ScrubRecord) -> list[str]:
    return [finding.code for step in record.steps if step.step is Step.RESET for finding in step.findings]


def is_restored(operands: Operands) -> bool:
    return operands.labels == {"monitoring": "true"} and bool(operands.agents)


@in_virtual_time
async def test_agents_are_paused_for_a_reset_and_restored_afterwards() -> None:
    async with monitored() as operands:
        cluster = operands.cluster
        finished = await scrubbed(cluster)
        assert finished.outcome is Outcome.PASSED
        assert of_reset(finished) == [FindingCode.AGENTS_PAUSED]
        assert {"monitoring": "false", "cordon": "false"} in operands.history
        await cluster.until(lambda: cluster.node.pauses.pause is None and is_restored(operands))
        assert cluster.ledger_store.agent_pause.pause is None
        assert events(cluster) == ["agents.pause-started", "agents.pause-planned", "agents.restored"]
        (planned,) = [each for each in cluster.ledger_store.events if each.name == "agents.pause-planned"]
        assert planned.fields["changes"] == "cordon: no label to false; monitoring: true to false"


@in_virtual_time
async def test_required_reset_succeeds_at_each_hand_over_beside_agents() -> None:
    async with monitored(2) as operands:
        cluster = operands.cluster
        for number in range(3):
            tenant = await cluster.admit("acme", f"train-{number}", devices=(0, 1))
            assert tenant is not None
            await cluster.until(partial(getattr, tenant, "running"), within=300)
            cluster.kubelet.delete(tenant)
            await cluster.until(
                lambda: all(cluster.record(each).hygiene is Hygiene.CLEAN for each in (0, 1)), within=300
            )
        await cluster.until(lambda: cluster.node.pauses.pause is None and is_restored(operands))


@in_virtual_time
async def test_pause_is_in_the_ledger_before_the_plugin_sees_it_and_changes_are_before_they_are_made() -> None:
    async with monitored() as operands:
        cluster = operands.cluster
        operands.deaf = True
        scrub = asyncio.ensure_future(scrubbed(cluster))
        seen: list[tuple[bool, bool]] = []

        def stored() -> bool:
            shown, kept = cluster.node.view().agent_pause, cluster.ledger_store.agent_pause.pause
            seen.append((shown is not None, kept is not None))
            return shown is not None

        await cluster.until(stored)
        assert (True, False) not in seen
        operands.deaf = False
        await cluster.until(lambda: operands.labels.get("monitoring") == "false")
        kept = cluster.ledger_store.agent_pause.pause
        assert kept is not None
        assert kept.changes == (CORDON, MONITORING)
        assert (await scrub).outcome is Outcome.PASSED


@in_virtual_time
async def test_wait_for_agents_is_not_part_of_the_scrub_s_deadline_and_has_a_limit_of_its_own() -> None:
    async with monitored() as operands:
        cluster = operands.cluster
        operands.stubborn = True
        cluster.policy = replace(STRICT, limits=Limits(slow_path=40, reset=30, agent_pause=200))
        began = cluster.clock.monotonic()
        finished = await scrubbed(cluster)
        assert finished.outcome is Outcome.BLOCKED
        assert 200 <= cluster.clock.monotonic() - began < 220
        assert of_reset(finished) == [FindingCode.AGENT_PAUSE_FAILED]
        message = finished.findings[-1].message
        assert "Agents were not gone in time (labels)." in message
        assert "is an agent." in message, "it names who still holds the device"
        assert cluster.record().hygiene is Hygiene.DIRTY
        assert events(cluster)[-1] == "agents.pause-failed"
        await cluster.until(lambda: is_restored(operands))
        operands.stubborn = False
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN, within=600)


@in_virtual_time
async def test_reset_that_only_agents_block_names_the_remedy_where_nothing_can_pause_them() -> None:
    async with monitored(paused=False) as operands:
        finished = await scrubbed(operands.cluster)
        assert finished.outcome is Outcome.BLOCKED
        assert of_reset(finished) == [FindingCode.DEVICE_BUSY]
        assert "--pause-labels" in finished.findings[-1].message
        plan = await operands.cluster.node.actions.reset_plan(operands.cluster.gpu().id)
        assert plan.pause_ways == ()
        assert "--pause-labels" in plan.blockers[-1]


@in_virtual_time
async def test_reset_plan_names_the_agents_and_the_ways_to_pause_them() -> None:
    async with monitored() as operands:
        plan = await operands.cluster.node.actions.reset_plan(operands.cluster.gpu().id)
        assert plan.pause_ways == OFFERS
        assert plan.agents == (f"PID {operands.agents[0].pid} is an agent.",)
        assert plan.blockers == (), "a pause removes them"


@in_virtual_time
async def test_start_that_waits_for_paused_agents_is_refused_with_that_reason() -> None:
    async with monitored() as operands:
        cluster = operands.cluster
        operands.stubborn = True
        scrub = asyncio.ensure_future(scrubbed(cluster))
        await cluster.until(lambda: cluster.node.pauses.pause is not None)
        pod = await admitted(cluster)
        with pytest.raises(NotReady) as refusal:
            await request_start(cluster, pod)
        assert refusal.value.public_message.count(refusals.AGENTS_ARE_PAUSED) == 1
        operands.stubborn = False
        assert (await scrub).outcome is Outcome.PASSED


@in_virtual_time
async def test_devices_that_need_a_reset_join_one_pause_that_ends_with_the_last() -> None:
    async with monitored(3) as operands:
        cluster = operands.cluster
        scrubs = [asyncio.ensure_future(scrubbed(cluster, number)) for number in range(3)]
        assert {each.outcome for each in await asyncio.gather(*scrubs)} == {Outcome.PASSED}
        await cluster.until(lambda: cluster.node.pauses.pause is None and is_restored(operands))
        assert events(cluster).count("agents.pause-started") == 1


@in_virtual_time
async def test_plugin_that_cannot_pause_agents_blocks_the_scrub_with_its_message() -> None:
    async with monitored() as operands:
        cluster = operands.cluster
        operands.refusal = "The API server refused it (403): add the component."
        finished = await scrubbed(cluster)
        assert finished.outcome is Outcome.BLOCKED
        assert operands.refusal in finished.findings[-1].message
        assert cluster.node.pauses.pause is None, "nothing was changed, so nothing is to be restored"
        assert events(cluster)[:2] == ["agents.pause-started", "agents.pause-failed"]


@in_virtual_time
async def test_changes_planned_for_a_pause_that_is_over_are_refused() -> None:
    async with monitored() as operands:
        cluster = operands.cluster
        plan = PauseReport(OFFERS, "pause-0", PauseState.PLANNED, (MONITORING,))
        with pytest.raises(InvalidRequest, match="no pause pause-0"):
            await cluster.node.pauses.report(plan)
        operands.deaf = True
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        await cluster.until(lambda: cluster.node.pauses.pause is not None)
        pause = cluster.node.pauses.pause
        assert pause is not None
        await cluster.node.pauses.report(replace(plan, pause=pause.id))
        await cluster.controller().scrubs.abandon()
        assert (await job.wait()).outcome is Outcome.ABANDONED
        with pytest.raises(InvalidRequest, match="is ending"):
            await cluster.node.pauses.report(replace(plan, pause=pause.id, changes=(CORDON,)))
        kept = cluster.ledger_store.agent_pause.pause
        assert kept is not None
        assert kept.ending
        assert kept.changes == (MONITORING,)
        operands.deaf = False
        await cluster.until(lambda: cluster.node.pauses.pause is None)


@in_virtual_time
async def test_recorded_change_keeps_its_earlier_value_when_the_plugin_plans_again() -> None:
    async with monitored() as operands:
        cluster = operands.cluster
        operands.deaf = True
        scrub = asyncio.ensure_future(scrubbed(cluster))
        await cluster.until(lambda: cluster.node.pauses.pause is not None)
        pause = cluster.node.pauses.pause
        assert pause is not None
        for changes in ((MONITORING,), (replace(MONITORING, before="false"), CORDON)):
            await cluster.node.pauses.report(PauseReport(OFFERS, pause.id, PauseState.PLANNED, changes))
        kept = cluster.ledger_store.agent_pause.pause
        assert kept is not None
        assert kept.changes == (MONITORING, CORDON)
        operands.deaf = False
        assert (await scrub).outcome is Outcome.PASSED


@in_virtual_time
async def test_several_reports_plan_no_more_changes_for_a_pause_than_one_may() -> None:
    async with monitored() as operands:
        cluster = operands.cluster
        operands.deaf = True
        scrub = asyncio.ensure_future(scrubbed(cluster))
        await cluster.until(lambda: cluster.node.pauses.pause is not None)
        pause = cluster.node.pauses.pause
        assert pause is not None
        first, second = (tuple(replace(MONITORING, key=f"{part}-{n}") for n in range(40)) for part in ("a", "b"))
        await cluster.node.pauses.report(PauseReport(OFFERS, pause.id, PauseState.PLANNED, first))
        with pytest.raises(InvalidRequest, match="at most 64 labels"):
            await cluster.node.pauses.report(PauseReport(OFFERS, pause.id, PauseState.PLANNED, second))
        kept = cluster.ledger_store.agent_pause.pause
        assert kept is not None
        assert kept.changes == first
        scrub.cancel()
        await asyncio.gather(scrub, return_exceptions=True)


@in_virtual_time
async def test_yield_ends_a_pause_which_the_plugin_restores_while_the_driver_is_closed() -> None:
    async with monitored() as operands:
        cluster = operands.cluster
        operands.stubborn = True
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        await cluster.until(lambda: operands.labels["monitoring"] == "false")
        operands.deaf = True
        await cluster.node.yields.request(YieldRequester.OPERATOR, "driver upgrade", "uid:0")
        await cluster.node.devices.drain()
        assert (await job.wait()).outcome is Outcome.ABANDONED
        assert cluster.service is not None
        tools = cluster.service.dependencies
        node = DriverlessNode(
            devices=cluster.node.view().devices,
            yields=cluster.node.yields,
            pauses=cluster.node.pauses,
            service_view=cluster.node.service_view,
            epoch="yielded",
            ledger=tools.ledger,
            journal=tools.journal,
            clock=tools.clock,
            audit_log=tools.audit_log,
            certificates=tools.certificates,
        )
        shown = node.view().agent_pause
        assert shown is not None
        assert shown.ending
        assert shown.changes == (CORDON, MONITORING)
        await node.pauses.report(PauseReport(OFFERS, shown.id, PauseState.RESTORED))
        node.publish()
        assert node.view().agent_pause is None
        await cluster.node.yields.withdraw(YieldRequester.OPERATOR, "done", "uid:0")


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("writes", range(1, 12))
def test_agents_are_restored_after_a_crash_at_any_write_of_a_reset(writes: int, durable: bool) -> None:
    @in_virtual_time
    async def run() -> None:
        async with monitored() as operands:
            cluster = operands.cluster
            cluster.ledger_store.point = CrashPoint(writes, durable)
            with suppress(Killed):
                await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
            await cluster.until(lambda: not cluster.serving or cluster.settled(), within=300)
            cluster.ledger_store.point = None
            if not cluster.serving:
                await cluster.run(30)
                await cluster.start_service()
            await cluster.until(lambda: cluster.settled() and is_restored(operands), within=600)
            await cluster.until(lambda: cluster.node.pauses.pause is None)
            assert cluster.ledger_store.agent_pause.pause is None

    run()


class Detaching:
    """:class:`scrubber.ports.device.AgentControl` whose agents are those of ``operands``, as far as it can pause them."""

    actions = ("ask the monitoring service to let go of the driver",)

    def __init__(self) -> None:
        self.operands: Operands | None = None
        self.failure: Exception | None = None
        self.restore_failure: Exception | None = None
        self.lets_go = True
        self.calls: list[str] = []

    async def pause(self) -> None:
        self.calls.append("pause")
        if self.failure is not None:
            raise self.failure
        if self.operands is not None and self.lets_go:
            self.operands.stop()

    async def restore(self) -> None:
        self.calls.append("restore")
        if self.restore_failure is not None:
            raise self.restore_failure


@asynccontextmanager
async def with_backend(detaching: Detaching, *, labels: bool = False) -> AsyncIterator[Operands]:
    """Provide a cluster whose agents the backend can pause, and the plugin too (``labels``)."""
    async with simulated_cluster(1, STRICT, settled=False) as cluster:
        cluster.agent_control = detaching
        await cluster.start_service()
        await cluster.until(cluster.settled)
        operands = detaching.operands = Operands(cluster, 1)
        operands.start()
        tasks = [asyncio.ensure_future(work()) for work in (operands.plugin, operands.control) if labels]
        await cluster.until(lambda: len(cluster.node.pauses.offers) == 1 + labels)
        yield operands
        for each in tasks:
            each.cancel()


@in_virtual_time
async def test_backend_is_tried_first_and_restores_what_it_paused() -> None:
    detaching = Detaching()
    async with with_backend(detaching) as operands:
        finished = await scrubbed(operands.cluster)
        assert finished.outcome is Outcome.PASSED
        await operands.cluster.until(lambda: operands.cluster.node.pauses.pause is None)
        assert detaching.calls == ["pause", "restore"]
        assert operands.cluster.node.view().agent_pause is None


@in_virtual_time
async def test_labels_are_tried_where_agents_do_not_let_go_on_request() -> None:
    detaching = Detaching()
    detaching.lets_go = False
    async with with_backend(detaching, labels=True) as operands:
        finished = await scrubbed(operands.cluster)
        assert finished.outcome is Outcome.PASSED
        await operands.cluster.until(lambda: operands.cluster.node.pauses.pause is None and is_restored(operands))
        ways = [e.fields["way"] for e in operands.cluster.ledger_store.events if e.name == "agents.pause-started"]
        assert ways == ["backend", "labels"]


@in_virtual_time
async def test_way_that_can_never_work_is_not_tried_again_and_nothing_is_restored() -> None:
    detaching = Detaching()
    detaching.failure = Refused("dcgmi is too old.")
    async with with_backend(detaching) as operands:
        finished = await scrubbed(operands.cluster)
        assert finished.outcome is Outcome.BLOCKED
        assert "dcgmi is too old." in finished.findings[-1].message
        assert operands.cluster.node.pauses.offers == ()
        assert detaching.calls == ["pause"]


@in_virtual_time
async def test_agents_that_cannot_be_restored_are_tried_again_until_they_are() -> None:
    detaching = Detaching()
    detaching.restore_failure = Unavailable("The monitoring service does not answer.")
    async with with_backend(detaching) as operands:
        cluster = operands.cluster
        assert (await scrubbed(cluster)).outcome is Outcome.PASSED
        await cluster.run(60)
        pause = cluster.node.service_view().agent_pause
        assert pause is not None
        assert pause.ending
        assert cluster.node.service_view().agent_pause_message == "The monitoring service does not answer."
        assert cluster.journal is not None
        assert [each.name for each in cluster.journal.events].count("agents.restore-failed") == 1
        detaching.restore_failure = None
        await cluster.until(lambda: cluster.node.pauses.pause is None)


@in_virtual_time
async def test_service_killed_between_pause_and_restore_of_the_backend_restores_at_its_next_start() -> None:
    detaching = Detaching()
    async with with_backend(detaching) as operands:
        cluster = operands.cluster
        detaching.restore_failure = Unavailable("It does not answer.")
        assert (await scrubbed(cluster)).outcome is Outcome.PASSED
        cluster.kill()
        detaching.restore_failure = None
        detaching.calls.clear()
        await cluster.start_service()
        await cluster.until(lambda: cluster.node.pauses.pause is None)
        assert detaching.calls == ["restore"]
        assert events(cluster)[-2:] == ["agents.pause-interrupted", "agents.restored"]


@in_virtual_time
async def test_agents_that_two_devices_wait_for_in_vain_by_turns_are_restored_between_pauses() -> None:
    async with monitored(2, pace=LEISURELY) as operands:
        cluster = operands.cluster
        operands.stubborn = True
        paused, longest = [0.0, 0.0], 0.0
        await cluster.controller(0).scrubs.start(ScrubTrigger.ON_DEMAND)
        await asyncio.sleep(150)
        await cluster.controller(1).scrubs.start(ScrubTrigger.ON_DEMAND)
        for _ in range(3600):
            await asyncio.sleep(1)
            running = operands.labels.get("monitoring") == "false"
            paused = [paused[0] + running, paused[1] + 1 if running else 0.0]
            longest = max(longest, paused[1])
        assert longest <= 2 * cluster.policy.limits.agent_pause + 10
        assert paused[0] < 0.6 * 3600
        messages = [each.message for record in cluster.ledger_store.scrubs.values() for each in record.findings]
        assert any("No agent is paused for it again for 600 s" in each for each in messages)
        operands.stubborn = False
        await cluster.until(lambda: all(cluster.record(each).hygiene is Hygiene.CLEAN for each in (0, 1)), within=900)


@in_virtual_time
async def test_operator_who_requests_a_scrub_does_not_wait_for_the_rest_after_a_pause_that_failed() -> None:
    async with monitored() as operands:
        cluster = operands.cluster
        operands.stubborn = True
        assert (await scrubbed(cluster)).outcome is Outcome.BLOCKED
        operands.stubborn = False
        await cluster.until(lambda: cluster.node.pauses.pause is None and is_restored(operands))
        await cluster.controller().scrubs.abandon()
        updates = [each async for each in cluster.node.actions.scrub(cluster.gpu().id, PathKind.SLOW, "uid:0")]
        assert updates[-1].finished is not None
        assert updates[-1].finished.outcome is Outcome.PASSED


@in_virtual_time
async def test_reset_that_something_else_blocks_pauses_no_agents_and_keeps_no_pause_from_ending() -> None:
    async with monitored(2) as operands:
        pauses, other = operands.cluster.node.pauses, operands.cluster.gpu(1).id
        plan = await operands.cluster.node.actions.reset_plan(other)
        agents = tuple(plan.agents)
        blocked = replace(plan, blockers=(*agents, "Device 7, which is reset with it, is in use."), agents=agents)
        operands.stubborn = True
        scrub = asyncio.ensure_future(scrubbed(operands.cluster))
        await operands.cluster.until(lambda: pauses.pause is not None)
        assert pauses.concerns(other, replace(plan, blockers=agents))
        assert not pauses.concerns(other, blocked)
        await scrub


@in_virtual_time
async def test_plugin_cannot_add_changes_to_a_pause_without_limit() -> None:
    async with monitored() as operands:
        cluster = operands.cluster
        operands.deaf = True
        job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        await cluster.until(lambda: cluster.node.pauses.pause is not None)
        assert cluster.node.pauses.pause is not None
        plan = PauseReport(OFFERS, cluster.node.pauses.pause.id, PauseState.PLANNED)
        changes = [LabelChange(f"label-{number}", "true", "false") for number in range(65)]
        await cluster.node.pauses.report(replace(plan, changes=tuple(changes[:64])))
        with pytest.raises(InvalidRequest, match="at most 64"):
            await cluster.node.pauses.report(replace(plan, changes=tuple(changes[64:])))
        assert cluster.ledger_store.agent_pause.pause is not None
        assert len(cluster.ledger_store.agent_pause.pause.changes) == 64
        await cluster.controller().scrubs.abandon()
        await job.wait()


@in_virtual_time
async def test_backend_that_could_not_pause_agents_is_offered_again_after_a_while() -> None:
    detaching = Detaching()
    detaching.failure = Refused("dcgmi cannot be started.")
    async with with_backend(detaching) as operands:
        assert (await scrubbed(operands.cluster)).outcome is Outcome.BLOCKED
        detaching.failure = None
        await operands.cluster.until(lambda: operands.cluster.record().hygiene is Hygiene.CLEAN, within=1800)
        assert detaching.calls == ["pause", "pause", "restore"]
